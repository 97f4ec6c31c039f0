package ddp

import (
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Buffer is an untagged buffer: it takes one message.
type Buffer struct {
	ID   uint32 // the owner's name for it
	Size uint32 // octets it can take

	got uint64 // octets that arrived in order
}

// Queue tracks one untagged queue at the sink (RFC 5041 sections 5.3, 7.1): the
// MSN whose turn it is, and the buffers of it and of those after it that the
// owner has supplied. Several messages may be open at once, as segments that
// come early are checked against the buffer of their own MSN; they are
// accepted, and messages delivered, strictly in order.
type Queue struct {
	bufs []Buffer // by MSN, modulo its length, a power of two
	head serial.Num
	tail serial.Num
}

// Init gives the queue room for window buffers, rounded up to a power of two,
// and none yet. The first message is FirstMSN.
func (q *Queue) Init(window int) {
	n := 1
	for n < window {
		n <<= 1
	}
	*q = Queue{bufs: make([]Buffer, n), head: FirstMSN, tail: FirstMSN}
}

// Head returns the MSN of the message to be delivered next.
func (q *Queue) Head() serial.Num { return q.head }

// Tail returns the first MSN that has no buffer yet.
func (q *Queue) Tail() serial.Num { return q.tail }

// InWindow reports whether msn has a buffer or could be given one.
func (q *Queue) InWindow(msn serial.Num) bool { return msn.In(q.head, uint32(len(q.bufs))) }

// Supply gives the message Tail a buffer. Tail must be InWindow.
func (q *Queue) Supply(id, size uint32) {
	q.bufs[int(q.tail)&(len(q.bufs)-1)] = Buffer{ID: id, Size: size}
	q.tail++
}

// Skip uses up the MSN of a message that takes no buffer. The queue must hold
// no buffers.
func (q *Queue) Skip() {
	q.head++
	q.tail++
}

// Check validates the place of a segment with n octets of payload (RFC 5041
// section 7.1, untagged checks 2 to 5) and returns its message's buffer. It
// changes nothing, so it may be asked about a segment that comes early.
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

// Accept takes a segment whose turn has come and whose payload is placed. The
// message must be Head: a source transmits messages in order (RFC 5041 section
// 5.3). With the last segment it checks that the octets that came add up to the
// message, so that nothing is delivered with a hole.
func (q *Queue) Accept(h *Untagged, n int) *term.Error {
	if h.MSN != q.head {
		return term.ErrMSNRange
	}
	b := &q.bufs[int(h.MSN)&(len(q.bufs)-1)]
	b.got += uint64(n)
	if h.Last && b.got != uint64(h.MO)+uint64(n) {
		return term.ErrInvalidMO
	}
	return nil
}

// Pop takes the oldest buffer off the queue: its message is delivered, or the
// owner takes it back. ok is false when there is none.
func (q *Queue) Pop() (b Buffer, ok bool) {
	if q.head == q.tail {
		return Buffer{}, false
	}
	b = q.bufs[int(q.head)&(len(q.bufs)-1)]
	q.head++
	return b, true
}
