package wheel

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
		var w Wheel[int]
		now := clock.Time(rng.Int64N(int64(time.Hour)))
		timers := make([]Timer[int], 50)
		want := make(map[int]clock.Time)
		w.Init(now, func(c int) {
			at, ok := want[c]
			if !ok {
				t.Fatalf("timer %d fired, but is not armed", c)
			}
			if at > now {
				t.Fatalf("timer %d fired %v early", c, at.Sub(now))
			}
			delete(want, c)
		})
		for i := range timers {
			timers[i].Owner = i
		}
		spans := []time.Duration{time.Millisecond, 100 * time.Millisecond, 10 * time.Second, time.Hour}
		for range 3000 {
			tm := &timers[rng.IntN(len(timers))]
			switch rng.IntN(4) {
			case 0, 1:
				at := now.Add(time.Duration(rng.Int64N(int64(spans[rng.IntN(len(spans))]))) + 1)
				if old, ok := want[tm.Owner]; !ok || at < old {
					want[tm.Owner] = at
				}
				w.Arm(tm, at)
			case 2:
				w.Stop(tm)
				delete(want, tm.Owner)
			case 3:
				next := w.Next()
				for c, at := range want {
					if next == 0 || next > at.Add(tickLen) {
						t.Fatalf("next() = %d; timer %d is due at %d", next, c, at)
					}
				}
				now = now.Add(time.Duration(rng.Int64N(int64(spans[rng.IntN(len(spans))]))))
				w.Expire(now)
				for c, at := range want {
					if at.Add(tickLen) <= now {
						t.Fatalf("timer %d, due at %d, has not fired at %d", c, at, now)
					}
				}
			}
		}
	}
}

// TestFewWakeUps sleeps until Next each time, as a worker does: a timer causes one wake-up for each level, and
// one more for each time that the wheel goes around before it is due.
func TestFewWakeUps(t *testing.T) {
	rng := rand.New(rand.NewPCG(testenv.Seed(t), 2))
	for range 1000 {
		var w Wheel[int]
		fired := false
		now := clock.Time(rng.Int64N(int64(time.Hour)))
		w.Init(now, func(int) { fired = true })
		at := now.Add(time.Duration(rng.Int64N(int64(10*time.Millisecond) << rng.IntN(20))))
		w.Arm(new(Timer[int]), at)
		for n := at.Sub(now)/(30*time.Minute) + wheelLevels; !fired; n-- {
			next := w.Next()
			if next <= now || n == 0 {
				t.Fatalf("at %d the next expiry of a timer for %d is %d", now, at, next)
			}
			now = next
			if n := w.Expire(now); n == 1 != fired {
				t.Fatalf("%d have fired", n)
			}
		}
		if now < at || w.Len() != 0 {
			t.Fatalf("a timer for %d fired at %d; %d left", at, now, w.Len())
		}
	}
}
