package dataplane

import (
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestSilentWorker checks that a worker that does not turn is named.
func TestSilentWorker(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	e := newEngine(t, Config{}, []Queue{{Link: a, CPU: -1}}, nil)
	conns, silent := e.QueryConns(nil) // it was not started
	if len(conns) != 0 || !slices.Equal(silent, []int{0}) {
		t.Errorf("%d connections, silent %v; want 0", len(conns), silent)
	}
	for _, w := range e.workers {
		w.closeFDs()
	}
}

// TestSilentWorkers checks that several workers that do not turn take no more time than one.
func TestSilentWorkers(t *testing.T) {
	var queues []Queue
	for range 8 {
		l, _ := newPipe(t, link.PipeConfig{})
		queues = append(queues, Queue{Link: l, CPU: -1})
	}
	e, err := New(Config{}, queues, nil)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if _, silent := e.Stats(); len(silent) != len(queues) { // it was not started
		t.Errorf("silent: %v", silent)
	}
	if took := time.Since(start); took > 4*time.Second {
		t.Errorf("it took %v", took)
	}
	for _, w := range e.workers {
		w.closeFDs()
	}
}

// TestSilentStats checks that the counters of a worker that does not turn stay, in their place.
func TestSilentStats(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	b, _ := newPipe(t, link.PipeConfig{})
	e := newEngine(t, Config{}, []Queue{{Link: a, CPU: -1}, {Link: b, CPU: -1}}, nil)
	e.Start()
	defer e.Stop()
	var before []Stats
	testenv.Until(t, "both workers answer", func() bool {
		var silent []int
		before, silent = e.Stats()
		return len(silent) == 0
	})
	resume := make(chan struct{})
	defer close(resume) // before Stop
	e.workers[0].post(func(*worker) { <-resume })
	var all []Stats
	testenv.Until(t, "only worker 0 is silent", func() bool {
		var silent []int
		all, silent = e.Stats()
		return slices.Equal(silent, []int{0})
	})
	if all[0].Turns != before[0].Turns || all[1].Turns <= before[1].Turns {
		t.Errorf("turns %d and %d, before %d and %d", all[0].Turns, all[1].Turns, before[0].Turns, before[1].Turns)
	}
}
