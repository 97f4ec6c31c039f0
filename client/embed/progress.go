package embed

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/shm"
	"github.com/iwarpd/iwarpd/dataplane"
)

// progress drives engines from the application's goroutines, one at a time.
type progress struct {
	mu      sync.Mutex
	engines []*dataplane.Engine

	turns  atomic.Uint64
	active atomic.Bool   // the keeper watches for the application's last turn
	kick   chan struct{} // tells the keeper to start
	stop   chan struct{} // closed with the last engine
}

func newProgress() *progress {
	return &progress{kick: make(chan struct{}, 1)}
}

func (p *progress) add(e *dataplane.Engine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = append(p.engines, e)
	if p.stop == nil {
		p.stop = make(chan struct{})
		go p.keep(p.stop)
	}
}

func (p *progress) remove(e *dataplane.Engine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = slices.DeleteFunc(p.engines, func(o *dataplane.Engine) bool { return o == e })
	if len(p.engines) == 0 && p.stop != nil {
		close(p.stop)
		p.stop = nil
	}
}

// turn drives each engine once and returns how much work there was.
func (p *progress) turn() (work int) {
	if !p.mu.TryLock() {
		return 0
	}
	for _, e := range p.engines {
		work += e.Turn()
	}
	p.turns.Add(1)
	p.mu.Unlock()
	if !p.active.Load() && p.active.CompareAndSwap(false, true) {
		p.kick <- struct{}{}
	}
	return work
}

// handOver is how long the application must not have driven the engines before
// their own goroutines are woken to go on.
const handOver = time.Millisecond

// keep wakes the engines when the application has stopped driving them: a turn
// of the application's tells clients and commanders that somebody is awake, so
// nobody else would wake them.
func (p *progress) keep(stop <-chan struct{}) {
	tick := time.NewTimer(time.Hour)
	defer tick.Stop()
	for {
		select {
		case <-p.kick:
		case <-stop:
			return
		}
		for last := uint64(0); ; {
			tick.Reset(handOver)
			select {
			case <-tick.C:
			case <-stop:
				return
			}
			now := p.turns.Load()
			if now == last {
				break
			}
			last = now
		}
		p.active.Store(false)
		p.mu.Lock()
		for _, e := range p.engines {
			shm.Wake(e.WakeFD(0))
		}
		p.mu.Unlock()
	}
}
