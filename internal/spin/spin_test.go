package spin

import (
	"testing"
	"time"
)

// TestLimit checks that the limit grows, up to a bound, with short sleeps and is the least after a long one.
func TestLimit(t *testing.T) {
	const least = 50 * time.Microsecond
	l := Limit{Least: least}
	for i, want := range []time.Duration{least, 2 * least, 4 * least, 4 * least} {
		if got := l.Now(); got != want {
			t.Errorf("after %d short sleeps: %v, want %v", i, got, want)
		}
		l.Slept(2 * least)
	}
	if l.Slept(time.Second); l.Now() != least {
		t.Errorf("after a long sleep: %v", l.Now())
	}
}
