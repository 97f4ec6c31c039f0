package testenv

import (
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
)

func TestSeedIsSettable(t *testing.T) {
	for _, tt := range []struct {
		env  string
		want uint64
	}{{"", 1}, {"0x10", 16}} {
		t.Setenv("TEST_SEED", tt.env)
		if s := Seed(t); s != tt.want {
			t.Errorf("TEST_SEED=%s: seed %d", tt.env, s)
		}
	}
	if Rand(t).Uint64() != Rand(t).Uint64() {
		t.Error("one seed, two sequences")
	}
}

// recorder is a test that is told to skip or fail.
type recorder struct {
	testing.TB
	skipped, failed bool
	cleanups        []func()
}

func (r *recorder) Helper()               {}
func (r *recorder) Skipf(string, ...any)  { r.skipped = true }
func (r *recorder) Fatalf(string, ...any) { r.failed = true }
func (r *recorder) Errorf(string, ...any) { r.failed = true }
func (r *recorder) Cleanup(f func())      { r.cleanups = append(r.cleanups, f) }

func TestSkipFailsUnderCI(t *testing.T) {
	for _, ci := range []string{"", "true"} {
		t.Setenv("CI", ci)
		var r recorder
		// A real Fatalf would not come back to skip.
		if Skip(&r, "no"); r.failed != (ci != "") || !r.skipped {
			t.Errorf("CI=%q: skipped %v, failed %v", ci, r.skipped, r.failed)
		}
	}
}

func TestLeakIsFound(t *testing.T) {
	stop := make(chan struct{})
	defer close(stop)
	var r recorder
	NoGoroutineLeaks(&r)
	running := make(chan struct{})
	go func() { close(running); <-stop }()
	<-running
	defer func(d time.Duration) { patience = d }(patience)
	patience = 10 * time.Millisecond
	r.cleanups[0]()
	if !r.failed {
		t.Error("a leaked goroutine was not noticed")
	}
}

func TestVethIsUsableAndRemoved(t *testing.T) {
	NoGoroutineLeaks(t)
	var names []string
	t.Run("use", func(t *testing.T) {
		v := NewVeth(t, 1500)
		names = []string{v.A.NS.Name, v.B.NS.Name}
		for _, to := range []netip.Addr{v.B.Addr4, v.B.Addr6} {
			c, err := v.A.Dial(t.Context(), v.B.Listen(t, to).Addr().String())
			if err != nil {
				t.Errorf("%v: %v", to, err)
				continue
			}
			c.Close()
		}
		if out, err := v.A.NS.Command("cat", "/proc/net/dev").Output(); err != nil || !strings.Contains(string(out), v.A.Name) {
			t.Errorf("a command in the namespace: %v, %s", err, out)
		}
	})
	for _, n := range names {
		if _, err := os.Stat("/run/netns/" + n); err == nil {
			t.Errorf("%s is left behind", n)
		}
	}
}

func TestLeftoversAreRemoved(t *testing.T) {
	RequireRoot(t)
	// No process has this id: it is above the kernel's limit.
	name := prefix + "4194305-1a"
	newNamespace(&recorder{TB: t}, name)
	removeLeftovers()
	if _, err := os.Stat("/run/netns/" + name); err == nil {
		t.Error("a namespace of a process that is gone is still there")
		_ = netns.DeleteNamed(name)
	}
}

// TestPort checks that listeners can use a port of Port, and that the kernel assigns it to none.
func TestPort(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		if l, err := net.Listen("tcp", net.JoinHostPort(addr, "0")); err != nil {
			t.Logf("this host has no %s: %v", addr, err)
			continue
		} else {
			l.Close()
		}
		at := net.JoinHostPort(addr, strconv.Itoa(Port(t, addr)))
		for range 2 { // again after it was closed
			l, err := net.Listen("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			c, err := net.Dial("tcp", at)
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			l.Close()
		}
	}
}
