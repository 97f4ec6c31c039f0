package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/impair"
)

// TestSimLeastWindow checks that the window has room for a full segment even if few segments may be held, by MaxHeld or
// since other connections hold nearly all frames, and segments have been short for long. The peer would otherwise wait,
// and send single bytes as window probes.
func TestSimLeastWindow(t *testing.T) {
	const short, total = 200_000, 1_000_000
	for i, mtu := range []int{1500, 9000, 1500, 9000} {
		cfg := DefaultConfig()
		cfg.RcvWindow = 65535
		if i >= 2 {
			cfg.MaxHeld = 3
		}
		a, b := newSimHost(0, cfg, total, 1), newSimHost(1, cfg, 0, 1)
		w := simWire{Config: impair.Config{Delay: time.Millisecond}, mtu: mtu}
		s := newSim(t, a, b, w, w, 1, false)
		a.maxRec = 40
		s.step = func() {
			if b.c != nil {
				b.c.SetMayHold(1)
			}
			if a.pushed > short {
				a.maxRec = 0
			}
		}
		s.dial(mtu)
		s.run(60 * time.Second)
		s.finish()
		if d := a.c.Stats().ZeroWindow; d != 0 {
			t.Errorf("MTU %d, MaxHeld %d: segments waited %v for the peer's window", mtu, cfg.MaxHeld, d)
		}
	}
}
