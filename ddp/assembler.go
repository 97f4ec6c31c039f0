package ddp

import (
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// MaxControl is the size in bytes of an Assembler's buffer: the largest control message has 52, and a peer may pad its Terminate with
// zeros.
const MaxControl = 64

// Assembler receives the messages of a queue whose buffers belong to the protocol itself (requests, Terminates, responses), one message at
// a time and in order. They are short, so a message is nearly always one segment, which is not copied.
type Assembler struct {
	next serial.Num
	size uint32
	got  uint32
	buf  [MaxControl]byte
}

// Init sets the buffer size of the queue in bytes, at most MaxControl. The first message is FirstMSN.
func (a *Assembler) Init(size int) {
	*a = Assembler{next: FirstMSN, size: uint32(min(size, MaxControl))}
}

// Accept processes a segment in order. When it completes a message, done is true and msg holds the message until the next call. Segments of
// a message must come in increasing order of MO, without gaps.
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
