package kerneltcp

import (
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestInterrupted stops one program, or takes the wire down, for half a minute during transfers in both directions.
// They must continue and end gracefully.
func TestInterrupted(t *testing.T) {
	if !full() {
		t.Skip("takes a minute: KERNELTCP=full")
	}
	const pause = 30 * time.Second
	stopped := func(p *proc) {
		_ = p.cmd.Process.Signal(syscall.SIGSTOP)
		time.Sleep(pause)
		_ = p.cmd.Process.Signal(syscall.SIGCONT)
	}
	for _, tc := range []struct {
		name string
		do   func(t *testing.T, x *testenv.Wire, theirs, ours *proc)
	}{
		{"the kernel's program is stopped", func(_ *testing.T, _ *testenv.Wire, theirs, _ *proc) { stopped(theirs) }},
		{"ours is stopped", func(_ *testing.T, _ *testenv.Wire, _, ours *proc) { stopped(ours) }},
		{"the wire is down", func(t *testing.T, x *testenv.Wire, _, _ *proc) {
			set := func(do func(netlink.Link) error) {
				if err := x.Mid.Do(func() error {
					l, err := netlink.LinkByName(x.MidA)
					if err != nil {
						return err
					}
					return do(l)
				}); err != nil {
					t.Error(err)
				}
			}
			set(netlink.LinkSetDown)
			time.Sleep(pause)
			set(netlink.LinkSetUp)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			x := testenv.NewWire(t, 1500)
			x.Impair(t, "-both", "delay=5ms")
			clean(t, []*testenv.Namespace{x.B.NS}, func() uint64 {
				s, c, err := runWhile(t, place{end: &x.B, stack: "kernel"}, place{end: &x.A, stack: "ours"}, "both", "both", false, func(s, c *proc) {
					before := counters(t, x.B.NS)["Tcp:InSegs"]
					const under = 5000 // segments, none of them of a handshake
					for end := time.Now().Add(time.Minute); counters(t, x.B.NS)["Tcp:InSegs"]-before < under; time.Sleep(10 * time.Millisecond) {
						if time.Now().After(end) {
							t.Error("the transfers have not begun after a minute")
							return
						}
					}
					tc.do(t, x, s, c)
				}, "-conns", "4", "-for", "45s", "-queue", "65536")
				if err != nil {
					t.Fatal(err)
				}
				check(t, s, c)
				t.Logf("%.1f s, %.0f MB/s to the kernel, %.0f to us", s.Seconds, s.MBps, c.MBps)
				return c.Engine[0].TxRetransmits
			})
		})
	}
}
