package embed

import (
	"slices"
	"sync"

	"github.com/iwarpd/iwarpd/dataplane"
)

// progress drives engines from the application's goroutines, one at a time. While no goroutine
// does, each engine's own goroutine drives it.
type progress struct {
	mu      sync.Mutex
	engines []*dataplane.Engine
}

func (p *progress) add(e *dataplane.Engine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = append(p.engines, e)
}

func (p *progress) remove(e *dataplane.Engine) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.engines = slices.DeleteFunc(p.engines, func(o *dataplane.Engine) bool { return o == e })
}

// Turn drives each engine once and returns how much work there was.
func (p *progress) Turn() (work int) {
	if !p.mu.TryLock() {
		return 0
	}
	defer p.mu.Unlock()
	for _, e := range p.engines {
		work += e.Turn()
	}
	return work
}

// Rest lets each engine's own goroutine drive it.
func (p *progress) Rest() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.engines {
		e.Rest()
	}
}
