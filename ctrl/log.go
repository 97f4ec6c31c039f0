package ctrl

import (
	"sync"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// logLimit limits log messages about frequent events to one per logEvery.
type logLimit struct{ next clock.Time }

const logEvery = 10 * time.Second

func (s *logLimit) now(t clock.Time) bool {
	if t < s.next {
		return false
	}
	s.next = t.Add(logEvery)
	return true
}

// A tally counts a frequent event for a log message at most once per logEvery. It is safe for concurrent use.
type tally struct {
	mu sync.Mutex // acquired last; guards the rest
	logLimit
	n uint64 // since the last message
}

// add counts an event. It also returns whether a message is due, which stands for n events.
func (t *tally) add(now clock.Time) (n uint64, due bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n++
	n, due = t.n, t.now(now)
	if due {
		t.n = 0
	}
	return n, due
}
