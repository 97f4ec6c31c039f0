package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// TestKeepAliveSteps checks that keep-alive timers which are due at about the same time expire together, and none early.
func TestKeepAliveSteps(t *testing.T) {
	c := &Conn{}
	c.cfg.KeepAliveInterval = 8 * time.Second
	second := clock.Time(time.Second)
	for _, tt := range []struct{ at, want clock.Time }{
		{5 * second, 5 * second},
		{5*second + 1, 6 * second},
		{6*second - 1, 6 * second},
	} {
		if c.keepAliveAt(tt.at); c.deadlines[timerKeepAlive] != tt.want {
			t.Errorf("a timer for %d expires at %d, want %d", tt.at, c.deadlines[timerKeepAlive], tt.want)
		}
	}
	c.cfg.KeepAliveInterval = 1
	if c.keepAliveAt(7); c.deadlines[timerKeepAlive] != 7 {
		t.Errorf("with an interval of 1 ns a timer for 7 expires at %d", c.deadlines[timerKeepAlive])
	}
}
