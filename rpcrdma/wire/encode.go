package wire

import "encoding/binary"

var be = binary.BigEndian

// Append appends the header in the format given by Vers and Type. Fields that do not apply to the
// type are ignored.
func (h *Header) Append(b []byte) []byte {
	b = be.AppendUint32(b, h.XID)
	b = be.AppendUint32(b, h.Vers)
	b = be.AppendUint32(b, h.Credit)
	b = be.AppendUint32(b, uint32(h.Type))
	l, _ := layoutOf(h.Vers, h.Type)
	if l&hasFailure != 0 {
		b = be.AppendUint32(b, uint32(h.Failure.Code))
		for _, p := range h.Failure.words() {
			if p != nil {
				b = be.AppendUint32(b, *p)
			}
		}
	}
	if l&hasProps != 0 {
		b = be.AppendUint32(b, uint32(len(h.Props)))
		for _, p := range h.Props {
			b = be.AppendUint32(b, p.ID)
			b = appendOpaque(b, p.Data)
		}
	}
	if l&hasRemaining != 0 {
		b = be.AppendUint32(b, h.Remaining)
	}
	if l&hasInv != 0 {
		b = be.AppendUint32(b, h.InvHandle)
	}
	if l&hasCall != 0 {
		b = appendReads(b, h.Call)
	}
	if l&hasReads != 0 {
		b = appendReads(b, h.Reads)
	}
	if l&hasWrites != 0 {
		for _, c := range h.Writes {
			b = appendChunk(b, c)
		}
		b = be.AppendUint32(b, 0)
	}
	if l&hasReply != 0 {
		if h.Reply != nil {
			return appendChunk(b, h.Reply)
		}
		b = be.AppendUint32(b, 0)
	}
	return b
}

// Len returns how many bytes Append appends.
func (h *Header) Len() int {
	var b [512]byte
	return len(h.Append(b[:0]))
}

func appendOpaque(b, data []byte) []byte {
	b = be.AppendUint32(b, uint32(len(data)))
	b = append(b, data...)
	return append(b, 0, 0, 0)[:len(b)+(-len(data)&3)]
}

func appendReads(b []byte, l []ReadSegment) []byte {
	for i := range l {
		b = be.AppendUint32(be.AppendUint32(b, 1), l[i].Position)
		b = appendSegment(b, &l[i].Segment)
	}
	return be.AppendUint32(b, 0)
}

func appendChunk(b []byte, c Chunk) []byte {
	b = be.AppendUint32(be.AppendUint32(b, 1), uint32(len(c)))
	for i := range c {
		b = appendSegment(b, &c[i])
	}
	return b
}

func appendSegment(b []byte, s *Segment) []byte {
	b = be.AppendUint32(be.AppendUint32(b, s.Handle), s.Length)
	return be.AppendUint64(b, s.Offset)
}
