package link

// txFrame is a posted frame.
type txFrame struct {
	slot   Slot
	off, n int
}

// txQueue holds the posted frames of a link whose Flush completes them at once, and the slots
// to be reaped.
type txQueue struct {
	Pool
	queued []txFrame // posted, not flushed
	done   []Slot    // flushed, not reaped
	max    int       // longest frame
}

func newTxQueue(n, size, ring, maxFrame int) txQueue {
	return txQueue{
		Pool:   NewPool(make([]byte, n*size), size),
		queued: make([]txFrame, 0, ring), done: make([]Slot, 0, n), max: maxFrame,
	}
}

// ValidFrame reports whether bytes [off,off+n) of a slot of size bytes can be
// a frame of at most limit bytes.
func ValidFrame(off, n, size, limit int) bool {
	return off >= 0 && n >= 14 && n <= limit && n <= size && off <= size-n
}

// post is Link.Post. A frame that can never be sent is counted, and its slot reaped.
func (q *txQueue) post(s Slot, off, n int, stats *Stats) bool {
	valid := ValidFrame(off, n, q.SlotSize(), q.max)
	if q.Posted(s) || valid && len(q.queued) == cap(q.queued) {
		stats.TxRingFull++
		return false
	}
	q.SetPosted(s, true)
	if valid {
		q.queued = append(q.queued, txFrame{s, off, n})
	} else {
		stats.TxInvalid++
		q.done = append(q.done, s)
	}
	return true
}

// finish marks the first n queued frames as ready to be reaped.
func (q *txQueue) finish(n int) {
	for _, f := range q.queued[:n] {
		q.done = append(q.done, f.slot)
	}
	m := copy(q.queued, q.queued[n:])
	q.queued = q.queued[:m]
}

// frameBytes returns the bytes of a queued frame.
func (q *txQueue) frameBytes(f *txFrame) []byte { return q.Bytes(f.slot)[f.off : f.off+f.n] }

// Reap is Link.Reap.
func (q *txQueue) Reap(done []Slot) int {
	n := copy(done, q.done)
	for _, s := range done[:n] {
		q.SetPosted(s, false)
	}
	m := copy(q.done, q.done[n:])
	q.done = q.done[:m]
	return n
}
