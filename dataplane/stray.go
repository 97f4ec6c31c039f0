package dataplane

import (
	"hash/maphash"
	"slices"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/ring"
)

// A connection stays with the worker that it began with, but its frames may come
// to another's queue: ICMP errors come from a router and are spread by its
// address, and the NIC may spread flows otherwise from one moment to the next (by
// ethtool -X or -L, or when the peer is encapsulated). Such a stray is copied to the
// worker that has the connection, over a ring for each pair of workers that is made
// when the first one has to pass.

// strayMemory is what the frames of such a ring take, in octets, and strayLeast how
// many there are at least.
const (
	strayMemory = 4 << 20
	strayLeast  = 64
)

// flowKey names what a flow is to the workers.
type flowKey struct {
	flow pkt.Flow
	sctp bool   // in UDP too
	tag  uint32 // SCTP: from a further address of a peer, with this verification tag; 0: from the first
}

// directory says which worker has a connection or an association. Workers read
// and change it without locks: a bucket is replaced whole.
type directory struct {
	seed    maphash.Seed
	buckets [1 << 14]atomic.Pointer[[]dirEntry]
}

type dirEntry struct {
	key flowKey
	w   *worker
}

func newDirectory() *directory { return &directory{seed: maphash.MakeSeed()} }

func (d *directory) bucket(k *flowKey) *atomic.Pointer[[]dirEntry] {
	return &d.buckets[maphash.Comparable(d.seed, *k)%uint64(len(d.buckets))]
}

// find returns the worker that has k, or nil.
func (d *directory) find(k *flowKey) *worker {
	if b := d.bucket(k).Load(); b != nil {
		for i := range *b {
			if e := &(*b)[i]; e.key == *k {
				return e.w
			}
		}
	}
	return nil
}

// put enters k as w's, unless it is another's.
func (d *directory) put(k flowKey, w *worker) {
	d.change(&k, func(b []dirEntry, at int) []dirEntry {
		if at >= 0 {
			return nil
		}
		return append(slices.Clip(b), dirEntry{k, w})
	})
}

// move makes k to's if it is from's: at no time is it nobody's.
func (d *directory) move(k flowKey, from, to *worker) {
	d.change(&k, func(b []dirEntry, at int) []dirEntry {
		if at < 0 || b[at].w != from {
			return nil
		}
		b = slices.Clone(b)
		b[at].w = to
		return b
	})
}

// remove takes k out if it is w's.
func (d *directory) remove(k flowKey, w *worker) {
	d.change(&k, func(b []dirEntry, at int) []dirEntry {
		if at < 0 || b[at].w != w {
			return nil
		}
		return slices.Delete(slices.Clone(b), at, at+1)
	})
}

// change replaces the bucket of k by what f makes of it without changing it; at is
// where k stands, or -1. Nothing changes when f returns nil.
func (d *directory) change(k *flowKey, f func(b []dirEntry, at int) []dirEntry) {
	p := d.bucket(k)
	for {
		old := p.Load()
		var b []dirEntry
		if old != nil {
			b = *old
		}
		b = f(b, slices.IndexFunc(b, func(e dirEntry) bool { return e.key == *k }))
		if b == nil || p.CompareAndSwap(old, &b) {
			return
		}
	}
}

// claim makes a flow of this worker known to the others; unclaim takes that back.
func (w *worker) claim(flow pkt.Flow, sctp bool) {
	if w.e.dir != nil {
		w.e.dir.put(flowKey{flow: flow, sctp: sctp}, w)
	}
}

func (w *worker) unclaim(flow pkt.Flow, sctp bool) {
	if w.e.dir != nil {
		w.e.dir.remove(flowKey{flow: flow, sctp: sctp}, w)
	}
}

// elsewhere reports whether another worker has such a flow.
func (w *worker) elsewhere(flow pkt.Flow, sctp bool) bool {
	if w.e.dir == nil {
		return false
	}
	owner := w.e.dir.find(&flowKey{flow: flow, sctp: sctp})
	return owner != nil && owner != w
}

// strayRing carries frames from one worker to another, and their buffers back.
type strayRing struct {
	size int // octets of a buffer
	mem  []byte
	lens []uint32 // by buffer
	full []uint32 // buffers with frames
	back []uint32 // buffers that are free again

	_                  [64]byte
	fullProd, backCons atomic.Uint32 // written by the sender
	put                ring.Producer
	take               ring.Consumer
	free               []uint32

	_                  [64]byte
	fullCons, backProd atomic.Uint32 // written by the receiver
	get                ring.Consumer
	give               ring.Producer
	hand               uint32 // in hand, if busy
	busy               bool
	kept               int // buffers held by connections
}

// newStrayRing makes a ring for frames of at most size octets.
func newStrayRing(size int) *strayRing {
	size = (size + 63) &^ 63
	n := strayLeast
	for 2*n*size <= strayMemory {
		n *= 2
	}
	r := &strayRing{size: size, mem: make([]byte, n*size), lens: make([]uint32, n), full: make([]uint32, n), back: make([]uint32, n)}
	for i := n - 1; i >= 0; i-- {
		r.free = append(r.free, uint32(i))
	}
	r.put, r.get = ring.NewProducer(&r.fullProd, &r.fullCons, uint32(n)), ring.NewConsumer(&r.fullProd, &r.fullCons, uint32(n))
	r.give, r.take = ring.NewProducer(&r.backProd, &r.backCons, uint32(n)), ring.NewConsumer(&r.backProd, &r.backCons, uint32(n))
	return r
}

// send copies a frame into the ring. It reports whether there was room.
func (r *strayRing) send(f *link.Frame) bool {
	if len(r.free) == 0 {
		first, n := r.take.Peek(uint32(len(r.back)))
		for i := range n {
			r.free = append(r.free, r.back[r.take.Mask(first+i)])
		}
		r.take.Release(n)
	}
	top := len(r.free) - 1
	if top < 0 || f.Len() > r.size {
		return false
	}
	at, n := r.put.Reserve(1)
	if n == 0 {
		return false
	}
	i := r.free[top]
	r.free = r.free[:top]
	b := r.mem[int(i)*r.size : int(i+1)*r.size]
	used := 0
	for _, p := range f.Pieces[:f.N] {
		used += copy(b[used:], p)
	}
	r.lens[i] = uint32(used)
	r.full[r.put.Mask(at)] = i
	r.put.Submit()
	return true
}

// receive takes the next frame, which is in hand until release or keep.
func (r *strayRing) receive(f *link.Frame) bool {
	at, n := r.get.Peek(1)
	if n == 0 {
		return false
	}
	i := r.full[r.get.Mask(at)]
	r.get.Release(1)
	r.hand, r.busy = i, true
	f.N, f.IDs[0] = 1, uint64(i)
	f.Pieces[0] = r.mem[int(i)*r.size:][:r.lens[i]:r.lens[i]]
	return true
}

// release gives back the frame in hand, if there is one.
func (r *strayRing) release() {
	if r.busy {
		r.busy = false
		r.giveBack(r.hand)
	}
}

// mayKeep reports whether the frame in hand may be kept. Half of the buffers pass
// frames whatever happens: among them is the one that fills the gap.
func (r *strayRing) mayKeep() bool { return r.kept < len(r.full)/2 }

// keep leaves the frame in hand with a connection, until unkeep.
func (r *strayRing) keep() {
	r.busy = false
	r.kept++
}

func (r *strayRing) unkeep(f *link.Frame) {
	r.kept--
	r.giveBack(uint32(f.IDs[0]))
}

func (r *strayRing) giveBack(i uint32) {
	at, _ := r.give.Reserve(1) // there are no more buffers than places
	r.back[r.give.Mask(at)] = i
	r.give.Submit()
}

// strays is what a worker has of such rings.
type strays struct {
	in      []atomic.Pointer[strayRing] // by the worker that sends; made there
	pending atomic.Bool                 // something is in one of them

	out   []*strayRing // by the worker that receives
	sent  []*worker    // those given something in this burst
	from  *strayRing   // of the frame in hand; nil: the link
	frame link.Frame
}

func (s *strays) init(workers int) {
	s.in, s.out = make([]atomic.Pointer[strayRing], workers), make([]*strayRing, workers)
	s.sent = make([]*worker, 0, workers)
}

// stray copies f, whose flow is none of this worker's, to the worker that has it. It
// reports whether that has been dealt with.
func (w *worker) stray(flow pkt.Flow, sctp bool, f *link.Frame) bool {
	if w.e.dir == nil {
		return false
	}
	return w.strayTo(w.e.dir.find(&flowKey{flow: flow, sctp: sctp}), f)
}

// strayTo is stray with the worker that has the flow, or nil.
func (w *worker) strayTo(owner *worker, f *link.Frame) bool {
	if owner == nil {
		return false
	}
	s := &w.strays
	if owner == w || s.from != nil || w.handed {
		w.stats.RxStraysLost++ // the connection is moving between workers
		return true
	}
	if w.whole {
		w.handWhole(owner, f.Pieces[0])
		return true
	}
	r := s.out[owner.id]
	if r == nil {
		r = newStrayRing(w.link.MTU() + link.HeaderRoom)
		s.out[owner.id] = r
		owner.strays.in[w.id].Store(r)
	}
	w.stats.RxStrays++
	if !r.send(f) {
		w.stats.RxStraysLost++
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
		r.release() // a fault may have left it
		s.from = r
		for k := 0; r.receive(&s.frame); k++ {
			n++
			w.frame(&s.frame)
			r.release() // unless a connection keeps it
			if k == rxBudget {
				s.pending.Store(true)
				break
			}
		}
		s.from = nil
	}
	return n
}

// strayFault goes on after a fault in client memory over a frame of another worker.
func (w *worker) strayFault() {
	w.strays.from = nil
	w.strays.pending.Store(true)
}
