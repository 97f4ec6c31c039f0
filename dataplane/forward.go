package dataplane

import (
	"slices"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
)

// A connection stays on the worker where it started, but its frames may arrive on another
// worker's queue: ICMP errors are distributed by the router's address, and the NIC may
// change its distribution of flows (by ethtool -X or -L, or when the peer is encapsulated).
// Such frames are copied to the worker of the connection, over a ring per pair of workers
// that is created when it is first needed.

// forwarding holds the rings between a worker and the others.
type forwarding struct {
	in      []atomic.Pointer[handoff.Ring] // indexed by the sending worker, which creates them
	pending atomic.Bool                    // a ring may have frames

	out   []*handoff.Ring // indexed by the receiving worker
	sent  []*worker       // workers that got frames in this burst
	link  link.Frame
	frame rxFrame
}

func (s *forwarding) init(workers int) {
	s.in, s.out = make([]atomic.Pointer[handoff.Ring], workers), make([]*handoff.Ring, workers)
	s.sent = make([]*worker, 0, workers)
}

// forward copies f, which belongs to k, to the worker that owns k. It returns true if the frame
// needs no further handling here.
func (w *worker) forward(k handoff.Key, f *rxFrame) bool {
	owner := w.e.dir.Find(&k)
	if owner == nil {
		return false
	}
	if owner == w || f.moved {
		if k.Tag != 0 {
			return false // the first address may belong to another peer
		}
		w.stats.RxWrongQueueDropped++ // the connection is being moved between workers
		return true
	}
	s := &w.forwarding
	w.stats.RxWrongQueue++
	limit := w.link.MTU() + link.HeaderRoom // size of the buffers of rings
	switch {
	case f.whole:
		w.dev.frags.deliver(owner, f.Pieces[0], true)
		return true
	case f.Len() > limit:
		w.dev.frags.deliver(owner, gathered(f.Frame), true)
		return true
	}
	r := s.out[owner.id]
	if r == nil {
		r = handoff.NewRing(limit)
		s.out[owner.id] = r
		owner.forwarding.in[w.id].Store(r)
	}
	if !r.Send(f.Frame) {
		w.stats.RxWrongQueueDropped++
	} else if !slices.Contains(s.sent, owner) {
		s.sent = append(s.sent, owner)
	}
	return true
}

// wakeOwners wakes the workers that got frames in this burst.
func (w *worker) wakeOwners() {
	for _, o := range w.forwarding.sent {
		o.forwarding.pending.Store(true)
		o.cmds.wake()
	}
	w.forwarding.sent = w.forwarding.sent[:0]
}

// pollForwarded processes the frames that other workers forwarded to this one.
func (w *worker) pollForwarded() int {
	s := &w.forwarding
	s.pending.Store(false)
	n := 0
	for i := range s.in {
		r := s.in[i].Load()
		if r == nil {
			continue
		}
		for k := 0; ; k++ {
			if k > rxBudget || w.enough() {
				s.pending.Store(true)
				break
			}
			if !w.fromWorker(r) {
				break
			}
			n++
		}
	}
	return n
}

// fromWorker processes a frame of r, if there is one, and releases it unless a connection holds
// it. If the turn faults, the other frames remain for the next turn.
func (w *worker) fromWorker(r *handoff.Ring) bool {
	s := &w.forwarding
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
