package ddp

import "github.com/iwarpd/iwarpd/internal/serial"

// Segmenter divides one message at a time into segments of at most the MULPDU (RFC 5041 section 5.2), in increasing order of offset, with
// the Last flag on the final one. An empty message is one segment. The MULPDU may change between segments. The zero value has no message.
type Segmenter struct {
	active bool
	tagged bool
	ulp    uint8
	a, b   uint32 // tagged: STag; untagged: Invalidate STag, QN
	to     uint64 // tagged: TO of the message's first byte
	msn    serial.Num
	length uint32
	off    uint32
}

// StartTagged begins a tagged message of n bytes.
func (s *Segmenter) StartTagged(ulp uint8, stag uint32, to uint64, n uint32) {
	*s = Segmenter{active: true, tagged: true, ulp: ulp, a: stag, to: to, length: n}
}

// StartUntagged begins an untagged message of n bytes.
func (s *Segmenter) StartUntagged(ulp uint8, inv, qn uint32, msn serial.Num, n uint32) {
	*s = Segmenter{active: true, ulp: ulp, a: inv, b: qn, msn: msn, length: n}
}

// Active reports whether the message has segments left.
func (s *Segmenter) Active() bool { return s.active }

// Left returns the number of bytes of the message that are not yet in a segment.
func (s *Segmenter) Left() uint32 { return s.length - s.off }

// Next appends the header of the next segment to dst. Its payload is the n bytes of the message at offset off. last is true for the final
// segment, after which the Segmenter has no message. mulpdu includes header and payload and must be at least MinMULPDU; Next must be called
// only while Active.
func (s *Segmenter) Next(dst []byte, mulpdu int) (hdr []byte, off uint32, n int, last bool) {
	h := UntaggedLen
	if s.tagged {
		h = TaggedLen
	}
	off = s.off
	left := s.length - off
	room := max(mulpdu, MinMULPDU) - h
	last = uint64(left) <= uint64(room)
	if last {
		n = int(left)
		s.active = false
	} else {
		n = room
	}
	s.off = off + uint32(n)
	if s.tagged {
		t := Tagged{Last: last, ULP: s.ulp, STag: s.a, TO: s.to + uint64(off)}
		return t.Append(dst), off, n, last
	}
	u := Untagged{Last: last, ULP: s.ulp, Inv: s.a, QN: s.b, MSN: s.msn, MO: off}
	return u.Append(dst), off, n, last
}

// More returns how many segments with n bytes of payload follow, up to most, before the final segment.
func (s *Segmenter) More(n, most int) int {
	left := int64(s.Left()) - 1
	if !s.active || left < int64(n) || most < 0 {
		return 0
	}
	return int(min(left/int64(n), int64(most)))
}

// Skip continues the message n bytes later. The caller has built the headers of the segments that carry these bytes.
func (s *Segmenter) Skip(n int) { s.off += uint32(n) }

// Cancel drops the rest of the message.
func (s *Segmenter) Cancel() { s.active = false }
