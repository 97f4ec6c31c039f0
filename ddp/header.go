package ddp

import (
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// Tagged is the decoded header of a tagged segment (RFC 5041 section 4.2).
type Tagged struct {
	Last bool   // the last segment of its message
	ULP  uint8  // RsvdULP: opaque to DDP, the control byte of RDMAP
	STag uint32 // identifies the buffer at the sink
	TO   uint64 // tagged offset of the first byte of the payload
}

// Decode reads h from the front of seg; payload aliases seg. On error, ErrShort or term.ErrTaggedVersion, h is unchanged. The caller checks
// the T bit. Decode never panics and never allocates.
func (h *Tagged) Decode(seg []byte) (payload []byte, err error) {
	if len(seg) < TaggedLen {
		return nil, ErrShort
	}
	if seg[0]&ctrlVersion != version {
		return nil, term.ErrTaggedVersion
	}
	h.Last, h.ULP = seg[0]&ctrlLast != 0, seg[1]
	h.STag, h.TO = be.Uint32(seg[2:]), be.Uint64(seg[6:])
	return seg[TaggedLen:], nil
}

// Append appends the TaggedLen bytes of h to dst.
func (h *Tagged) Append(dst []byte) []byte {
	dst = append(dst, control(ctrlTagged, h.Last), h.ULP)
	dst = be.AppendUint32(dst, h.STag)
	return be.AppendUint64(dst, h.TO)
}

// Untagged is the decoded header of an untagged segment (RFC 5041 section 4.3).
type Untagged struct {
	Last bool       // the last segment of its message
	ULP  uint8      // RsvdULP, first byte: the control byte of RDMAP
	Inv  uint32     // RsvdULP, the other four: RDMAP's Invalidate STag, or 0
	QN   uint32     // queue number
	MSN  serial.Num // message sequence number, from FirstMSN in each queue
	MO   uint32     // message offset of the first byte of the payload
}

// Decode reads h from the front of seg; payload aliases seg. On error, ErrShort or term.ErrUntaggedVersion, h is unchanged. The caller
// checks the T bit. Decode never panics and never allocates.
func (h *Untagged) Decode(seg []byte) (payload []byte, err error) {
	if len(seg) < UntaggedLen {
		return nil, ErrShort
	}
	if seg[0]&ctrlVersion != version {
		return nil, term.ErrUntaggedVersion
	}
	h.Last, h.ULP = seg[0]&ctrlLast != 0, seg[1]
	h.Inv, h.QN = be.Uint32(seg[2:]), be.Uint32(seg[6:])
	h.MSN, h.MO = serial.Num(be.Uint32(seg[10:])), be.Uint32(seg[14:])
	return seg[UntaggedLen:], nil
}

// Append appends the UntaggedLen bytes of h to dst.
func (h *Untagged) Append(dst []byte) []byte {
	dst = append(dst, control(0, h.Last), h.ULP)
	dst = be.AppendUint32(dst, h.Inv)
	dst = be.AppendUint32(dst, h.QN)
	dst = be.AppendUint32(dst, uint32(h.MSN))
	return be.AppendUint32(dst, h.MO)
}

// Advance turns hdr, the header of a segment with n bytes of payload that is not the last of its message, into that of the next segment
// with as many.
func Advance(hdr []byte, n int) {
	if IsTagged(hdr) {
		be.PutUint64(hdr[6:], be.Uint64(hdr[6:])+uint64(n))
	} else {
		be.PutUint32(hdr[14:], be.Uint32(hdr[14:])+uint32(n))
	}
}

func control(c byte, last bool) byte {
	if last {
		c |= ctrlLast
	}
	return c | version
}
