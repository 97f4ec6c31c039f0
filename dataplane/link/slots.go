package link

// slots is a LIFO allocator of TX slots in one arena. The slot freed last is
// the one whose memory is still in the cache.
type slots struct {
	arena  []byte
	size   int
	free   []Slot
	posted []bool
}

func newSlots(n, size int) slots {
	s := slots{arena: make([]byte, n*size), size: size, free: make([]Slot, n), posted: make([]bool, n)}
	for i := range s.free {
		s.free[i] = Slot(n - 1 - i)
	}
	return s
}

// Alloc is Link.Alloc.
func (s *slots) Alloc() (Slot, bool) {
	n := len(s.free)
	if n == 0 {
		return NoSlot, false
	}
	slot := s.free[n-1]
	s.free = s.free[:n-1]
	return slot, true
}

// Free is Link.Free. To free a posted slot is a bug of the worker that would
// corrupt another frame much later, so it stops here.
func (s *slots) Free(slot Slot) {
	if s.posted[slot] {
		panic("link: Free of a posted slot")
	}
	if len(s.free) == cap(s.free) {
		panic("link: slot freed twice")
	}
	s.free = append(s.free, slot)
}

// FreeSlots is Link.FreeSlots.
func (s *slots) FreeSlots() int { return len(s.free) }

// Slots is Link.Slots.
func (s *slots) Slots() int { return len(s.posted) }

// SlotSize is Link.SlotSize.
func (s *slots) SlotSize() int { return s.size }

// Bytes is Link.Bytes.
func (s *slots) Bytes(slot Slot) []byte {
	off := int(slot) * s.size
	return s.arena[off : off+s.size : off+s.size]
}

// txFrame is a posted frame.
type txFrame struct {
	slot   Slot
	off, n int
}

// txQueue are the posted frames of a link whose Flush finishes with them at
// once, and the slots that wait to be reaped.
type txQueue struct {
	slots
	queued []txFrame // posted, not flushed
	done   []Slot    // flushed, not reaped
	max    int       // longest frame
}

func newTxQueue(n, size, ring, maxFrame int) txQueue {
	return txQueue{slots: newSlots(n, size), queued: make([]txFrame, 0, ring), done: make([]Slot, 0, n), max: maxFrame}
}

// post queues a frame. It reports whether there was room, and whether the frame
// can be sent at all.
func (q *txQueue) post(s Slot, off, n int) (queued, valid bool) {
	if q.posted[s] {
		return false, true
	}
	if off < 0 || n < 14 || n > q.max || off > q.size-n {
		q.posted[s] = true
		q.done = append(q.done, s)
		return true, false
	}
	if len(q.queued) == cap(q.queued) {
		return false, true
	}
	q.posted[s] = true
	q.queued = append(q.queued, txFrame{s, off, n})
	return true, true
}

// finish marks the first n queued frames as ready to be reaped.
func (q *txQueue) finish(n int) {
	for _, f := range q.queued[:n] {
		q.done = append(q.done, f.slot)
	}
	m := copy(q.queued, q.queued[n:])
	q.queued = q.queued[:m]
}

// octets returns the octets of a queued frame.
func (q *txQueue) octets(f *txFrame) []byte {
	off := int(f.slot)*q.size + f.off
	return q.arena[off : off+f.n]
}

// Reap is Link.Reap.
func (q *txQueue) Reap(done []Slot) int {
	n := copy(done, q.done)
	for _, s := range done[:n] {
		q.posted[s] = false
	}
	m := copy(q.done, q.done[n:])
	q.done = q.done[:m]
	return n
}
