package dataplane

import (
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestFence checks that Fence waits until every worker has finished its current turn, so that no worker still uses
// what it looked up before and memory may be unmapped (RFC 5041 section 8.3.1).
func TestFence(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	e := s.hosts[0].e
	passed := false
	s.hosts[0].w.post(func(*worker) { passed = true })
	done := make(chan struct{})
	go func() {
		e.Fence()
		close(done)
	}()
	// The stack of the goroutine shows whether it waits.
	waits := func() bool {
		b := make([]byte, 1<<20)
		for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
			if head, calls, _ := strings.Cut(g, "\n"); strings.Contains(head, "[select") && strings.Contains(calls, "(*Engine).Fence") {
				return true
			}
		}
		return false
	}
	for !waits() {
		select {
		case <-done:
			t.Fatal("it does not wait for the worker")
		default:
			runtime.Gosched()
		}
	}
	for {
		select {
		case <-done:
			if !passed {
				t.Error("the worker has not passed")
			}
			return
		default:
			s.step()
		}
	}
}

// TestFenceAsleep checks that Fence does not wake a worker that sleeps, but waits for the commands that were posted to it.
func TestFenceAsleep(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	e := newEngine(t, Config{}, []Queue{{Link: a, CPU: -1}}, fixed{})
	w := e.workers[0]
	e.Start()
	const n = 100
	for range n {
		for !w.cmds.resting.Load() {
			runtime.Gosched()
		}
		e.Fence()
	}
	var ran int
	for i := range 5 {
		w.post(func(*worker) { ran++ })
		if e.Fence(); ran != i+1 {
			t.Fatal("it has not waited for a command")
		}
	}
	e.Stop()
	if w.stats.Sleeps > n/2 {
		t.Errorf("the worker slept %d times", w.stats.Sleeps)
	}
}

// A waitLink notes how many completions cq has whenever its worker waits.
type waitLink struct {
	link.Link
	cq        *shm.CQ
	published atomic.Uint64
}

func (l *waitLink) Wait(limit time.Duration, fd int) bool {
	l.published.Store(l.cq.Stats().Completions)
	return l.Link.Wait(limit, fd)
}

// TestFenceModerated checks that Fence does not take a worker that sleeps until a delayed wake-up for one that uses no memory:
// it would use a completion queue that has been freed.
func TestFenceModerated(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	cq, err := shm.CreateCQ(1, 16)
	if err != nil {
		t.Fatal(err)
	}
	defer cq.Close()
	asleep := &waitLink{Link: a, cq: cq}
	e := newEngine(t, Config{}, []Queue{{Link: asleep, CPU: -1}}, fixed{})
	client, err := shm.MapCQ(cq.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	w := e.workers[0]
	e.Start()
	defer e.Stop()
	cq.Moderate(16, time.Hour)
	client.Arm(false)
	w.post(func(w *worker) { w.complete(&QPBinding{SendCQ: cq}, &verbs.WC{}) })
	testenv.Until(t, "the worker sleeps after the completion", func() bool { return asleep.published.Load() != 0 })
	cq.Moderate(0, 0)
	e.Fence() // the worker takes the command in one turn, and has ended it when it takes the next one
	e.Fence()
	if n := cq.Stats().WakeUps; n != 1 {
		t.Errorf("%d wake-ups: the worker has not published the queue", n)
	}
}
