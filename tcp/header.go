package tcp

import (
	"encoding/binary"
	"errors"

	"github.com/iwarpd/iwarpd/internal/serial"
)

const (
	headerLen    = 20
	maxOptionLen = 40

	// MaxHeaderLen is the longest TCP header, in bytes.
	MaxHeaderLen = headerLen + maxOptionLen
)

// Errors that Header.Decode returns.
var (
	ErrShortHeader = errors.New("tcp: segment shorter than its header")
	ErrDataOffset  = errors.New("tcp: data offset below five words")
)

// Header is a TCP header with its options (RFC 9293 3.1).
type Header struct {
	SrcPort, DstPort uint16
	Seq, Ack         serial.Num
	Flags            Flags
	Window, Urgent   uint16
	Opts             Options
}

// Decode parses the header at the start of b, which holds a segment or at least its whole header, and returns the header's length. It
// does not verify the checksum.
func (h *Header) Decode(b []byte) (n int, err error) {
	if len(b) < headerLen {
		return 0, ErrShortHeader
	}
	n = int(b[12]>>4) * 4
	if n < headerLen {
		return 0, ErrDataOffset
	}
	if n > len(b) {
		return 0, ErrShortHeader
	}
	h.SrcPort = binary.BigEndian.Uint16(b[0:])
	h.DstPort = binary.BigEndian.Uint16(b[2:])
	h.Seq = serial.Num(binary.BigEndian.Uint32(b[4:]))
	h.Ack = serial.Num(binary.BigEndian.Uint32(b[8:]))
	h.Flags = Flags(b[13])
	h.Window = binary.BigEndian.Uint16(b[14:])
	h.Urgent = binary.BigEndian.Uint16(b[18:])
	h.Opts.decode(b[headerLen:n])
	return n, nil
}

// Len returns the length in bytes of the header that Put writes: 20 to 60, a multiple of 4.
func (h *Header) Len() int { return headerLen + h.Opts.Len() }

// Put writes the header, with a zero checksum, to b, which must hold Len bytes, and returns its length.
func (h *Header) Put(b []byte) int {
	n := headerLen + h.Opts.put(b[headerLen:])
	// The stores are as wide as the loads of the checksum code that follows, so that store forwarding works.
	be := binary.BigEndian
	be.PutUint64(b[0:], uint64(h.SrcPort)<<48|uint64(h.DstPort)<<32|uint64(h.Seq))
	be.PutUint64(b[8:], uint64(h.Ack)<<32|uint64(n/4)<<28|uint64(h.Flags)<<16|uint64(h.Window))
	be.PutUint32(b[16:], uint32(h.Urgent))
	return n
}

// Reset returns the RST that answers a segment with payload bytes of data for which there is no connection (RFC 9293 3.10.7.1). It reports
// false for a RST, which is never answered.
func Reset(h *Header, payload int) (Header, bool) {
	if h.Flags&RST != 0 {
		return Header{}, false
	}
	r := Header{SrcPort: h.DstPort, DstPort: h.SrcPort, Flags: RST}
	if h.Flags&ACK != 0 {
		r.Seq = h.Ack
		return r, true
	}
	s := Segment{Header: Header{Flags: h.Flags}, Len: payload}
	r.Flags |= ACK
	r.Ack = h.Seq.Add(s.seqLen())
	return r, true
}
