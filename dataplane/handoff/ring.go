package handoff

import (
	"sync/atomic"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/ring"
)

// ringMemory is the memory for the frames of a Ring, in bytes, and leastFrames the minimum
// number of frames.
const (
	ringMemory  = 4 << 20
	leastFrames = 64
)

// Ring passes frames from one worker to another, and returns their buffers.
type Ring struct {
	size int // bytes of a buffer
	mem  []byte
	lens []uint32 // by buffer
	full []uint32 // buffers with frames
	back []uint32 // free buffers

	_                  [64]byte
	fullProd, backCons atomic.Uint32 // written by the sender
	put                ring.Producer
	take               ring.Consumer
	free               []uint32

	_                  [64]byte
	fullCons, backProd atomic.Uint32 // written by the receiver
	get                ring.Consumer
	give               ring.Producer
	hand               uint32 // current frame, if busy is set
	busy               bool
	kept               int // held by connections
}

// NewRing returns a ring for frames of at most size bytes.
func NewRing(size int) *Ring {
	size = (size + 63) &^ 63
	n := leastFrames
	for 2*n*size <= ringMemory {
		n *= 2
	}
	r := &Ring{size: size, mem: make([]byte, n*size), lens: make([]uint32, n), full: make([]uint32, n), back: make([]uint32, n)}
	for i := n - 1; i >= 0; i-- {
		r.free = append(r.free, uint32(i))
	}
	r.put, r.get = ring.NewProducer(&r.fullProd, &r.fullCons, uint32(n)), ring.NewConsumer(&r.fullProd, &r.fullCons, uint32(n))
	r.give, r.take = ring.NewProducer(&r.backProd, &r.backCons, uint32(n)), ring.NewConsumer(&r.backProd, &r.backCons, uint32(n))
	return r
}

// Send copies a frame into the ring. It returns false if the ring is full.
func (r *Ring) Send(f *link.Frame) bool {
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
	at, _ := r.put.Reserve(1) // a place exists for every buffer
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

// Receive returns the next frame, which is the current one until Release or Keep.
func (r *Ring) Receive(f *link.Frame) bool {
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

// Release returns the current frame's buffer, if there is one.
func (r *Ring) Release() {
	if r.busy {
		r.busy = false
		r.giveBack(r.hand)
	}
}

// MayKeep reports whether the current frame may be kept. Half of the buffers are reserved for
// passing frames, so that the one that fills the gap can always arrive.
func (r *Ring) MayKeep() bool { return r.kept < len(r.full)/2 }

// Keep lets a connection hold the current frame until Unkeep.
func (r *Ring) Keep() {
	r.busy = false
	r.kept++
}

func (r *Ring) Unkeep(f *link.Frame) {
	r.kept--
	r.giveBack(uint32(f.IDs[0]))
}

func (r *Ring) giveBack(i uint32) {
	at, _ := r.give.Reserve(1)
	r.back[r.give.Mask(at)] = i
	r.give.Submit()
}

// Len returns the number of buffers that are kept, that the sender can use, and in total.
// Neither side may be active.
func (r *Ring) Len() (kept, free, all int) {
	_, n := r.take.Peek(uint32(len(r.back)))
	return r.kept, len(r.free) + int(n), len(r.full)
}
