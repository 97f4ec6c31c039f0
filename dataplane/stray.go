package dataplane

import (
	"slices"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
)

// A connection stays with the worker that it began with, but its frames may come
// to another's queue: ICMP errors come from a router and are spread by its
// address, and the NIC may spread flows otherwise from one moment to the next (by
// ethtool -X or -L, or when the peer is encapsulated). Such a stray is copied to the
// worker that has the connection, over a ring for each pair of workers that is made
// when the first one has to pass.

// strays is what a worker has of such rings.
type strays struct {
	in      []atomic.Pointer[handoff.Ring] // by the worker that sends; made there
	pending atomic.Bool                    // something is in one of them

	out   []*handoff.Ring // by the worker that receives
	sent  []*worker       // those given something in this burst
	link  link.Frame
	frame rxFrame
}

func (s *strays) init(workers int) {
	s.in, s.out = make([]atomic.Pointer[handoff.Ring], workers), make([]*handoff.Ring, workers)
	s.sent = make([]*worker, 0, workers)
}

// stray copies f, which belongs to k and not to this worker, to the worker that has k.
// It reports whether that has been dealt with.
func (w *worker) stray(k handoff.Key, f *rxFrame) bool {
	owner := w.e.dir.Find(&k)
	if owner == nil {
		return false
	}
	if owner == w || f.moved {
		if k.Tag != 0 {
			return false // the first address of that peer may be another's
		}
		w.stats.RxWrongQueueDropped++ // the connection is moving between workers
		return true
	}
	s := &w.strays
	w.stats.RxWrongQueue++
	switch limit := w.link.MTU() + link.HeaderRoom; { // no ring has buffers for more
	case f.whole:
		w.e.deliverWhole(owner, f.Pieces[0], true)
		return true
	case f.Len() > limit:
		w.e.deliverWhole(owner, gathered(f.Frame), true)
		return true
	}
	r := s.out[owner.id]
	if r == nil {
		r = handoff.NewRing(w.link.MTU() + link.HeaderRoom)
		s.out[owner.id] = r
		owner.strays.in[w.id].Store(r)
	}
	if !r.Send(f.Frame) {
		w.stats.RxWrongQueueDropped++
	} else if !slices.Contains(s.sent, owner) {
		s.sent = append(s.sent, owner)
	}
	return true
}

// wakeOwners wakes the workers that this burst had frames for.
func (w *worker) wakeOwners() {
	for _, o := range w.strays.sent {
		o.strays.pending.Store(true)
		if o.cmds.sleeping.Load() {
			o.cmds.alarm.Ring()
		}
	}
	w.strays.sent = w.strays.sent[:0]
}

// pollStrays takes the frames that others had for this worker.
func (w *worker) pollStrays() int {
	s := &w.strays
	s.pending.Store(false)
	n := 0
	for i := range s.in {
		r := s.in[i].Load()
		if r == nil {
			continue
		}
		for k := 0; w.fromWorker(r); k++ {
			n++
			if k == rxBudget {
				s.pending.Store(true)
				break
			}
		}
	}
	return n
}

// fromWorker takes a frame of r, if there is one, and gives it back unless a connection
// holds it. When the turn faults over it, the others are still there for the next.
func (w *worker) fromWorker(r *handoff.Ring) bool {
	s := &w.strays
	if !r.Receive(&s.link) {
		return false
	}
	f := &s.frame
	f.reset(&s.link)
	f.ring, f.moved = r, true
	done := false
	defer func() {
		r.Release() // unless it is kept
		if !done {
			s.pending.Store(true)
		}
	}()
	w.frame(f)
	done = true
	return true
}
