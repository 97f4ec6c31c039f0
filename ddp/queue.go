package ddp

import (
	"slices"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Buffer is an untagged buffer for one message.
type Buffer struct {
	ID   uint32 // identifies it to the owner
	Size uint32 // capacity in bytes
}

// span is the range [from,to) of a message.
type span struct{ from, to uint64 }

// maxSpans is how many ranges of a message may be received before the bytes that precede them. No known peer needs one.
const maxSpans = 8

// Queue tracks one untagged queue at the sink (RFC 5041 sections 5.3, 7.1): the next MSN, and the buffers that the owner has supplied for
// it and later ones. Several messages may be open at once, because early segments are checked against the buffer of their own MSN; segments
// are accepted, and messages delivered, strictly in order.
type Queue struct {
	bufs []Buffer // indexed by MSN modulo its length, a power of two
	head serial.Num
	tail serial.Num

	// The message Head: its bytes [0,got) have been received, and the ranges ahead.
	got   uint64
	ahead []span
}

// Init makes room for window buffers, rounded up to a power of two. The first message is FirstMSN.
func (q *Queue) Init(window int) {
	n := 1
	for n < window {
		n <<= 1
	}
	*q = Queue{bufs: make([]Buffer, n), head: FirstMSN, tail: FirstMSN}
}

// Head returns the MSN of the next message to be delivered.
func (q *Queue) Head() serial.Num { return q.head }

// Tail returns the first MSN without a buffer.
func (q *Queue) Tail() serial.Num { return q.tail }

// InWindow reports whether msn has a buffer or may be given one.
func (q *Queue) InWindow(msn serial.Num) bool { return msn.In(q.head, uint32(len(q.bufs))) }

// Supply provides the buffer of message Tail, which must be InWindow.
func (q *Queue) Supply(id, size uint32) {
	q.bufs[int(q.tail)&(len(q.bufs)-1)] = Buffer{ID: id, Size: size}
	q.tail++
}

// Skip consumes the MSN of a message that takes no buffer. The queue must hold no buffers.
func (q *Queue) Skip() {
	q.head++
	q.tail++
}

// Check validates a segment with n bytes of payload (RFC 5041 section 7.1, untagged checks 2 to 5) and returns the buffer of its message.
// It changes no state, so it may be called for an early segment.
func (q *Queue) Check(h *Untagged, n int) (Buffer, *term.Error) {
	if !q.InWindow(h.MSN) {
		return Buffer{}, term.ErrMSNRange
	}
	if !h.MSN.Less(q.tail) {
		return Buffer{}, term.ErrNoBuffer
	}
	b := q.bufs[int(h.MSN)&(len(q.bufs)-1)]
	if n == 0 {
		return b, nil
	}
	if h.MO > b.Size {
		return b, term.ErrInvalidMO
	}
	if uint64(n) > uint64(b.Size-h.MO) {
		return b, term.ErrTooLong
	}
	return b, nil
}

// Accept processes the next segment in order, whose payload is placed. Its message must be Head, because a source transmits messages in
// order (RFC 5041 section 5.3). With the last segment it checks that all bytes before it have been received, so that no message is
// delivered with a gap. A segment that overlaps another one is an error.
func (q *Queue) Accept(h *Untagged, n int) *term.Error {
	if h.MSN != q.head {
		return term.ErrMSNRange
	}
	s := span{uint64(h.MO), uint64(h.MO) + uint64(n)}
	if n > 0 && !q.cover(s) || h.Last && (q.got != s.to || len(q.ahead) > 0) {
		return term.ErrInvalidMO
	}
	return nil
}

// cover adds s, which is not empty, to what has been received of the message Head. It reports whether s overlaps nothing and can be
// recorded.
func (q *Queue) cover(s span) bool {
	if s.from < q.got || slices.ContainsFunc(q.ahead, func(o span) bool { return s.from < o.to && o.from < s.to }) {
		return false
	}
	if s.from > q.got {
		q.ahead = append(q.ahead, s)
		return len(q.ahead) <= maxSpans
	}
	q.got = s.to
	for i := q.next(); i >= 0; i = q.next() {
		q.got = q.ahead[i].to
		q.ahead = slices.Delete(q.ahead, i, i+1)
	}
	return true
}

// next returns the index of the range ahead that begins at got, or -1.
func (q *Queue) next() int {
	return slices.IndexFunc(q.ahead, func(s span) bool { return s.from == q.got })
}

// Pop removes the oldest buffer from the queue, because its message is delivered or the owner takes it back. ok is false if there is none.
func (q *Queue) Pop() (b Buffer, ok bool) {
	if q.head == q.tail {
		return Buffer{}, false
	}
	b = q.bufs[int(q.head)&(len(q.bufs)-1)]
	q.head++
	q.got, q.ahead = 0, q.ahead[:0]
	return b, true
}
