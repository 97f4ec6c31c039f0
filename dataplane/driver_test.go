package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestRest checks that the goroutine of a driven engine takes over when the application calls Rest, and that another
// Turn ends that. The clock stands still, so that it does not take over because of the time.
func TestRest(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	e := newEngine(t, Config{Inline: true, Now: func() clock.Time { return clock.Time(time.Hour) }}, []Queue{{Link: a, CPU: -1}}, nil)
	e.Start()
	defer e.Stop()
	w := e.workers[0]
	for range 3 {
		testenv.Until(t, "the engine's goroutine runs it", w.cmds.sleeping.Load)
		testenv.Until(t, "the application drives the engine", func() bool {
			e.Turn()
			return !w.cmds.sleeping.Load()
		})
		e.Rest()
	}
}
