package link

import "github.com/iwarpd/iwarpd/internal/cache"

// ahead is the number of bytes of the next slot that are prefetched while a slot is filled.
const ahead = 1536 + 128

// Pool is a LIFO allocator of the TX slots of an arena, because the bytes of the slot freed
// last are still in the cache. It also tracks which slots are posted. It is for implementations
// of Link.
type Pool struct {
	arena  []byte
	size   int
	free   []Slot
	row    bool // a slot was taken since the last one was freed, so that a burst is being composed
	posted []bool
}

// NewPool divides an arena into slots of size bytes each.
func NewPool(arena []byte, size int) Pool {
	n := len(arena) / size
	p := Pool{arena: arena, size: size, free: make([]Slot, n), posted: make([]bool, n)}
	for i := range p.free {
		p.free[i] = Slot(n - 1 - i)
	}
	return p
}

// Alloc is Link.Alloc.
func (p *Pool) Alloc() (Slot, bool) {
	n := len(p.free)
	if n == 0 {
		return NoSlot, false
	}
	s := p.free[n-1]
	p.free = p.free[:n-1]
	if p.row && n > 1 { // a single small frame would wait for the lines of a slot that it does not use
		b := p.Bytes(p.free[n-2])
		cache.FetchForWriting(b[:min(len(b), ahead)])
	}
	p.row = true
	return s, true
}

// Free is Link.Free. Freeing a slot that is posted or already free is a bug of the worker,
// which would corrupt another frame much later, so it panics.
func (p *Pool) Free(s Slot) {
	if p.posted[s] {
		panic("link: Free of a posted slot")
	}
	if len(p.free) == cap(p.free) {
		panic("link: slot freed twice")
	}
	p.free = append(p.free, s)
	p.row = false
}

// FreeSlots is Link.FreeSlots.
func (p *Pool) FreeSlots() int { return len(p.free) }

// Slots is Link.Slots.
func (p *Pool) Slots() int { return len(p.posted) }

// SlotSize is Link.SlotSize.
func (p *Pool) SlotSize() int { return p.size }

// Bytes is Link.Bytes.
func (p *Pool) Bytes(s Slot) []byte {
	off := int(s) * p.size
	return p.arena[off : off+p.size : off+p.size]
}

// Posted reports whether a slot is posted.
func (p *Pool) Posted(s Slot) bool { return p.posted[s] }

// SetPosted records whether a slot is posted.
func (p *Pool) SetPosted(s Slot, posted bool) { p.posted[s] = posted }
