package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
)

// TestRest checks that the goroutine of a driven engine takes over when the application calls Rest, and that another
// Turn ends that. The clock stands still, so that it does not take over because of the time.
func TestRest(t *testing.T) {
	a, b, err := link.NewPipe(link.PipeConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	defer a.Close()
	e, err := New(Config{Inline: true, Now: func() clock.Time { return clock.Time(time.Hour) }}, []Queue{{Link: a, CPU: -1}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	e.Start()
	defer e.Stop()
	w := e.workers[0]
	until := func(what string, ok func() bool) {
		for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	for range 3 {
		until("the engine's goroutine does not run it", w.cmds.sleeping.Load)
		until("the application cannot drive the engine", func() bool {
			e.Turn()
			return !w.cmds.sleeping.Load()
		})
		e.Rest()
	}
}
