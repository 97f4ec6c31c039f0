package verbs

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestRsockets checks rsockets. The modes are those of testdata/rsocket.c.
func TestRsockets(t *testing.T) { rsockets(t, plain) }

func TestSanitizedRsockets(t *testing.T) { rsockets(t, sanitized) }

func rsockets(t *testing.T, v *variant) {
	_, b := newHosts(t, v)
	program := v.program(t, "rsocket")
	for _, mode := range []string{
		"refused", "looped", "interrupted", "half", "errors", "woken", "flags", "sizes", "polled", "many", "limited", "gone",
		"canceled", "closed", "forked", "killed", "exited", "unclosed", "strange", "hostile", "iomaps", "alike", "attended",
	} {
		t.Run(mode, func(t *testing.T) {
			b.start(t, program+" "+mode+" "+b.end.Addr4.String(), "IWARPD_VERBS_LOG=1").Succeed()
		})
	}
}

// TestRsocketsBetween checks rsockets over IPv6 between two daemons, which have no objects left.
func TestRsocketsBetween(t *testing.T) {
	a, b := newHosts(t, plain)
	program := compile(t, "rsocket")
	for _, mode := range []string{"half", "bulk", "threads", "crowded", "hundreds"} {
		t.Run(mode, func(t *testing.T) {
			b.start(t, program+" "+mode+" "+a.end.Addr6.String(), "IWARPD_SOCKET="+b.socket+","+a.socket).Succeed()
		})
	}
	for _, h := range []*host{a, b} {
		testenv.Until(t, "the daemon has no objects left", func() bool {
			s := h.status(t)
			return s.Mrs == 0 && s.Qps == 0 && s.Listens == 0
		})
	}
}

// TestSanitizedRsocketThreads makes threads use the same sockets, with the sanitizer that finds data races.
func TestSanitizedRsocketThreads(t *testing.T) {
	_, b := newHosts(t, threaded)
	program := threaded.program(t, "rsocket")
	for _, mode := range []string{"half", "woken", "canceled", "threads", "crowded"} {
		t.Run(mode, func(t *testing.T) {
			b.start(t, program+" "+mode+" "+b.end.Addr4.String()).Succeed()
		})
	}
}

// TestSanitizedRsocketModel makes random calls of rsockets over a model of verbs: nothing is lost, out of order, or waits without a
// wake-up, and an end that does not keep to the protocol does its peer no harm.
func TestSanitizedRsocketModel(t *testing.T) {
	requireSources(t)
	sources, err := filepath.Glob(filepath.Join(source, "rs_*.c"))
	if err != nil {
		t.Fatal(err)
	}
	options := append(strings.Fields(sanitized.cflags+" -Dpoll=model_poll -Dsched_yield=model_yield -Dclock_gettime=model_clock"), sources...)
	if out, err := exec.Command(compile(t, "rsmodel", options...), fmt.Sprint(testenv.Seed(t)), "150").CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestRsocketRestart checks that the connections of a daemon that ends do so with an error, and that a listener on every
// address goes on when there is a daemon again.
func TestRsocketRestart(t *testing.T) {
	_, b := newHosts(t, plain)
	p := b.start(t, compile(t, "rsocket")+" restarted "+b.end.Addr4.String())
	p.Expect("ready\n")
	b.daemon.Signal(syscall.SIGKILL)
	<-b.daemon.Done
	b.launch(t, b.end.Name)
	p.Succeed()
}
