package verbs

import (
	"syscall"
	"testing"
)

// rsocketModes are those of testdata/rsocket.c that need nothing but the program.
var rsocketModes = []string{
	"refused", "looped", "interrupted", "half", "errors", "woken", "flags", "sizes", "bulk", "threads", "polled", "many", "limited", "gone", "canceled", "closed", "forked", "killed", "exited", "unclosed", "strange", "hostile", "iomaps", "thousand",
}

// TestRsockets checks rsockets of programs that use one daemon, or two and IPv6, with the sanitizers.
func TestRsockets(t *testing.T) {
	a, b := newHosts(t, sanitized)
	program := sanitizer(t) + compile(t, "rsocket")
	for _, mode := range rsocketModes {
		t.Run(mode, func(t *testing.T) {
			b.start(t, program+" "+mode+" "+b.end.Addr4.String(), "IWARPD_VERBS_LOG=1", "ROUNDS=1000").Succeed()
		})
		t.Run(mode+" of two daemons", func(t *testing.T) {
			b.start(t, program+" "+mode+" "+a.end.Addr6.String(), "IWARPD_SOCKET="+b.socket+","+a.socket, "ROUNDS=1000").Succeed()
		})
	}
	for _, h := range []*host{a, b} {
		if s := h.status(t); s.Mrs != 0 || s.Qps != 0 || s.Listens != 0 {
			t.Errorf("the daemon has objects left: %v", s)
		}
	}
}

// TestRsocketRaces makes threads use the same sockets, with the sanitizer that finds data races.
func TestRsocketRaces(t *testing.T) {
	_, b := newHosts(t, threaded)
	program := "setarch --addr-no-randomize " + compile(t, "rsocket", races)
	for _, mode := range []string{"half", "woken", "threads"} {
		t.Run(mode, func(t *testing.T) {
			b.start(t, program+" "+mode+" "+b.end.Addr4.String(), "ROUNDS=1000").Succeed()
		})
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
