package tcp

import (
	"fmt"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/impair"
)

// TestSimLongPath sends a record each round trip over a path that is longer than the time-out, from the beginning or all at once. A few
// records time out, until the time-out suits the path.
func TestSimLongPath(t *testing.T) {
	const records = 30
	for _, rtt := range []time.Duration{1500 * time.Millisecond, 2500 * time.Millisecond, 5 * time.Second, 12 * time.Second} {
		for _, opts := range []string{"timestamps", "SACK", "neither"} {
			for _, rises := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/%s/rises %v", rtt, opts, rises), func(t *testing.T) {
					cfg := DefaultConfig()
					cfg.NoTimestamps, cfg.NoSACK = opts != "timestamps", opts == "neither"
					most := uint64(10)
					if opts == "neither" {
						most = 12 // only a later segment's ACKs tell
					}
					a, b := newSimHost(0, cfg, 0, 2), newSimHost(1, cfg, 0, 2)
					a.noClose = true
					b.closeAt = 100 * records
					w := simWire{Config: impair.Config{Delay: rtt / 2}}
					now := w
					if rises {
						now.Delay = 10 * time.Millisecond
					}
					s := newSim(t, a, b, now, now, 2, false)
					s.dial(1500)
					sent := 0
					s.step = func() {
						if a.c.state != Established || !a.c.q.empty() || sent == records {
							return
						}
						if sent++; sent == 3 && rises {
							for i := range s.wire {
								s.wire[i].d = impair.NewDecider(w.Config)
							}
						}
						a.total += 100
						a.noClose = a.total < b.closeAt
					}
					s.run(time.Hour)
					s.finish()
					if n := a.c.stats.RetransRTO; n > most {
						t.Errorf("%d time-outs for %d records, want at most %d", n, records, most)
					}
				})
			}
		}
	}
}
