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
	if h.Vers == Version1 {
		switch h.Type {
		case Msg1, NoMsg1:
			b = appendReads(b, h.Reads)
			b = appendWrites(b, h.Writes)
			b = appendReply(b, h.Reply)
		case Error1:
			b = be.AppendUint32(b, uint32(h.Failure.Code))
			if h.Failure.Code == ErrVers {
				b = be.AppendUint32(be.AppendUint32(b, h.Failure.Low), h.Failure.High)
			}
		}
		return b
	}
	switch h.Type {
	case Error:
		f := &h.Failure
		b = be.AppendUint32(b, uint32(f.Code))
		switch f.Code {
		case ErrVers:
			b = be.AppendUint32(be.AppendUint32(b, f.Low), f.High)
		case ErrReadChunks, ErrWriteChunks, ErrSegments:
			b = be.AppendUint32(b, f.Max)
		case ErrWriteResource:
			b = be.AppendUint32(be.AppendUint32(b, f.Index), f.Needed)
		case ErrReplyResource:
			b = be.AppendUint32(b, f.Needed)
		}
	case ConnPropMiddle, ConnPropFinal:
		b = be.AppendUint32(b, uint32(len(h.Props)))
		for _, p := range h.Props {
			b = be.AppendUint32(b, p.ID)
			b = appendOpaque(b, p.Data)
		}
	case CallExternal:
		b = be.AppendUint32(b, h.InvHandle)
		b = appendReads(b, h.Call)
		b = appendReads(b, h.Reads)
		b = appendWrites(b, h.Writes)
		b = appendReply(b, h.Reply)
	case CallInline:
		b = be.AppendUint32(b, h.InvHandle)
		b = appendReads(b, h.Reads)
		b = appendWrites(b, h.Writes)
		b = appendReply(b, h.Reply)
	case CallMiddle, ReplyMiddle:
		b = be.AppendUint32(b, h.Remaining)
	case ReplyExternal:
		b = appendWrites(b, h.Writes)
		b = appendReply(b, h.Reply)
	case ReplyInline:
		b = appendWrites(b, h.Writes)
	}
	return b
}

// Len returns how many bytes Append appends.
func (h *Header) Len() int {
	n := PrefixSize
	if h.Vers == Version1 {
		switch h.Type {
		case Msg1, NoMsg1:
			n += readsLen(h.Reads) + writesLen(h.Writes) + replyLen(h.Reply)
		case Error1:
			n += 4
			if h.Failure.Code == ErrVers {
				n += 8
			}
		}
		return n
	}
	switch h.Type {
	case Error:
		n += 4
		switch h.Failure.Code {
		case ErrVers, ErrWriteResource:
			n += 8
		case ErrReadChunks, ErrWriteChunks, ErrSegments, ErrReplyResource:
			n += 4
		}
	case ConnPropMiddle, ConnPropFinal:
		n += 4
		for _, p := range h.Props {
			n += 8 + (len(p.Data)+3)&^3
		}
	case CallExternal:
		n += 4 + readsLen(h.Call) + readsLen(h.Reads) + writesLen(h.Writes) + replyLen(h.Reply)
	case CallInline:
		n += 4 + readsLen(h.Reads) + writesLen(h.Writes) + replyLen(h.Reply)
	case CallMiddle, ReplyMiddle:
		n += 4
	case ReplyExternal:
		n += writesLen(h.Writes) + replyLen(h.Reply)
	case ReplyInline:
		n += writesLen(h.Writes)
	}
	return n
}

func readsLen(l []ReadSegment) int { return 24*len(l) + 4 }

func writesLen(l []Chunk) int {
	n := 4
	for _, c := range l {
		n += 8 + 16*len(c)
	}
	return n
}

func replyLen(c Chunk) int {
	if c == nil {
		return 4
	}
	return 8 + 16*len(c)
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

func appendWrites(b []byte, l []Chunk) []byte {
	for _, c := range l {
		b = appendChunk(b, c)
	}
	return be.AppendUint32(b, 0)
}

func appendReply(b []byte, c Chunk) []byte {
	if c == nil {
		return be.AppendUint32(b, 0)
	}
	return appendChunk(b, c)
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
