package dataplane

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestWheelModel arms, moves and stops timers at random and compares what fires
// with a plain list: no timer fires early, none fires more than a tick late, and
// next never lies behind the first of them.
func TestWheelModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(testenv.Seed(t), 1))
	for range 20 {
		var w wheel
		now := clock.Time(rng.Int64N(int64(time.Hour)))
		w.init(now)
		timers := make([]timer, 50)
		want := make(map[*conn]clock.Time)
		for i := range timers {
			timers[i].conn = &conn{id: ConnID(i)}
		}
		spans := []time.Duration{time.Millisecond, 100 * time.Millisecond, 10 * time.Second, time.Hour}
		for range 3000 {
			tm := &timers[rng.IntN(len(timers))]
			switch rng.IntN(4) {
			case 0, 1:
				at := now.Add(time.Duration(rng.Int64N(int64(spans[rng.IntN(len(spans))]))) + 1)
				if old, ok := want[tm.conn]; !ok || at < old {
					want[tm.conn] = at
				}
				w.arm(tm, at)
			case 2:
				w.stop(tm)
				delete(want, tm.conn)
			case 3:
				next := w.next()
				for c, at := range want {
					if next == 0 || next > at.Add(wheelTick) {
						t.Fatalf("next() = %d; timer %d is due at %d", next, c.id, at)
					}
				}
				now = now.Add(time.Duration(rng.Int64N(int64(spans[rng.IntN(len(spans))]))))
				w.expire(now, func(c *conn) {
					at, ok := want[c]
					if !ok {
						t.Fatalf("timer %d fired, but is not armed", c.id)
					}
					if at > now {
						t.Fatalf("timer %d fired %v early", c.id, at.Sub(now))
					}
					delete(want, c)
				})
				for c, at := range want {
					if at.Add(wheelTick) <= now {
						t.Fatalf("timer %d, due at %d, has not fired at %d", c.id, at, now)
					}
				}
			}
		}
	}
}
