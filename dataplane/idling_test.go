package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// TestIdling checks that an idle worker first yields, then keeps its CPU for half of the time if it awaits an answer,
// or as long as a client may respond, then yields again, and sleeps at the end.
func TestIdling(t *testing.T) {
	const spin = 50 * time.Microsecond
	for _, c := range []struct {
		name   string
		spin   time.Duration
		awaits bool
		busy   time.Duration
		near   bool
		want   []pause // after 0, 10, 20, 30, 40 and 50 us
	}{
		{"it awaits an answer", spin, true, 0, false, []pause{yieldPause, noPause, noPause, yieldPause, yieldPause, sleepPause}},
		{"it awaits nothing", spin, false, 0, false, []pause{yieldPause, yieldPause, yieldPause, yieldPause, yieldPause, sleepPause}},
		{"a client may respond", spin, false, 15 * time.Microsecond, false, []pause{yieldPause, noPause, yieldPause, yieldPause, yieldPause, sleepPause}},
		{"a client may respond within the host", spin, false, 15 * time.Microsecond, true, []pause{noPause, noPause, yieldPause, yieldPause, yieldPause, sleepPause}},
		{"it does not spin", 0, true, 0, false, []pause{sleepPause}},
	} {
		t.Run(c.name, func(t *testing.T) {
			const start = clock.Time(1)
			var i idling
			for n, want := range c.want {
				now := start.Add(time.Duration(n) * 10 * time.Microsecond)
				if got := i.next(now, c.spin, c.awaits, &response{start.Add(c.busy), c.near}); got != want {
					t.Errorf("after %v: %v, want %v", now.Sub(start), got, want)
				}
			}
		})
	}
}
