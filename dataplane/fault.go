package dataplane

import (
	"fmt"
	"sync/atomic"
)

// touched says whose clients' memory is being accessed.
type touched struct {
	current *stream
	source  *stream       // stream whose client's memory is being copied to that of current, or nil
	began   atomic.Uint64 // Engine.invalidations at the start of the turn, or resting
	waits   bool          // an invalidation waits for the turn of another worker
}

// survive recovers from a fault in a client's memory; other panics continue, as they are bugs
// of ours. It must be deferred.
func (w *worker) survive() {
	if w.current == nil {
		return
	}
	r := recover()
	if r == nil {
		return
	}
	s := w.touched.at(r)
	if s == nil {
		panic(r) // with the stack of the first panic, which is not unwound yet
	}
	w.fault(s, r)
}

// at returns the stream whose client's memory has the address of r, a panic. It returns nil if r is no memory fault, or
// one elsewhere.
func (t *touched) at(r any) *stream {
	f, ok := r.(interface{ Addr() uintptr }) // as the runtime's panics of debug.SetPanicOnFault
	if !ok {
		return nil
	}
	for _, s := range []*stream{t.source, t.current} {
		if s != nil && s.qp != nil && s.qp.Client.Memory.Has(f.Addr()) {
			return s
		}
	}
	return nil
}

// fault ends the client in whose memory the worker faulted. The turn was interrupted; its frame
// has been released, and the next turn continues with the following frames.
func (w *worker) fault(s *stream, reason any) {
	w.current, w.source = nil, nil
	w.began.Store(resting)
	w.stats.Faults++
	w.freeRecord()
	b := s.qp
	s.dropQP(w)
	s.lane.llp.fault(w)
	s.abort(w, fmt.Errorf("dataplane: fault in client memory: %v", reason))
	if b != nil && b.Client != nil {
		w.failing.add(w.client(b.Client), s)
		if b.Client.OnFault != nil {
			b.Client.OnFault()
		}
	}
	// Lanes that the interrupted turn was pumping stay marked. The others that have work are in the scheduler.
	if w.pumping != nil {
		for _, l := range w.pumping {
			w.mark(l)
		}
		clear(w.pumping)
		w.pumping, w.dirtyNext = nil, w.pumping[:0]
	}
	if w.socks != nil {
		w.socks.recheck()
	}
}

// failing are the streams of clients whose memory has faulted, which end with them: a client may have many, and each
// would fault.
type failing []*stream

// failBudget is how many of them a turn resets.
const failBudget = 16

// add adds the streams of a client except s, which has faulted. They ignore their peers from now on.
func (f *failing) add(cl *client, s *stream) {
	if cl == nil || cl.failed {
		return
	}
	cl.failed = true
	for _, o := range cl.streams {
		if o != nil && o != s {
			o.health = max(o.health, deaf)
			*f = append(*f, o)
		}
	}
}

// poll resets some of them.
func (f *failing) poll(w *worker) int {
	if len(*f) == 0 {
		return 0
	}
	some := (*f)[:min(failBudget, len(*f))]
	for _, s := range some {
		if !s.closed() {
			s.abort(w, errFaulted)
		}
	}
	clear(some)
	if *f = (*f)[len(some):]; len(*f) == 0 {
		*f = nil
	}
	return len(some)
}
