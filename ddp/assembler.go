package ddp

import (
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// MaxControl is the size in octets of an Assembler's buffer: the largest
// control message has 52, and a peer may pad its Terminate with zeros.
const MaxControl = 64

// Assembler receives the messages of a queue whose buffers belong to the
// protocol itself, one message at a time and in order: requests, Terminates,
// responses. They are short, so nearly always a message is one segment and is
// not copied.
type Assembler struct {
	next serial.Num
	size uint32
	got  uint32
	buf  [MaxControl]byte
}

// Init makes the buffers of the queue size octets long, MaxControl at most. The
// first message is FirstMSN.
func (a *Assembler) Init(size int) {
	*a = Assembler{next: FirstMSN, size: uint32(min(size, MaxControl))}
}

// Next returns the MSN of the message that is awaited.
func (a *Assembler) Next() serial.Num { return a.next }

// Accept takes a segment in order. When it completes a message, msg holds that
// message until the next call and done is true. Segments of one message must
// come in increasing order of MO, without a gap.
func (a *Assembler) Accept(h *Untagged, payload []byte) (msg []byte, done bool, err *term.Error) {
	if h.MSN != a.next {
		return nil, false, term.ErrMSNRange
	}
	if h.MO != a.got {
		return nil, false, term.ErrInvalidMO
	}
	if uint64(len(payload)) > uint64(a.size-a.got) {
		return nil, false, term.ErrTooLong
	}
	if h.Last && a.got == 0 {
		a.next++
		return payload, true, nil
	}
	n := copy(a.buf[a.got:], payload)
	a.got += uint32(n)
	if !h.Last {
		return nil, false, nil
	}
	msg = a.buf[:a.got]
	a.got = 0
	a.next++
	return msg, true, nil
}
