// Package wire implements the transport headers of RPC-over-RDMA version 2
// (draft-ietf-nfsv4-rpcrdma-version-two-07) and version 1 (RFC 8166), and the private data of
// connections (RFC 8797).
//
// Decode accepts any bytes and returns a header or one of the errors below. It allocates in
// proportion to the input, and reuses the memory of the Header. The package holds no connection
// state.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
)

// Versions of the protocol.
const (
	Version1 = 1
	Version2 = 2
)

// PrefixSize is the length of the four words that start every header, in
// bytes (draft sections 6.2.1 and 8.3; section 7 miscounts them as 20).
const PrefixSize = 16

// minSize1 is the length of the shortest version 1 message that is not an
// error (RFC 8166 section 4.5).
const minSize1 = 28

// Type is the fourth word of a header: version 2's header type or version 1's
// procedure. The two sets share one number, 4, and its meaning.
type Type uint32

// Header types of version 2 (draft section 6.1).
const (
	Error          Type = 4
	Grant          Type = 5
	ConnPropMiddle Type = 6
	ConnPropFinal  Type = 7
	CallExternal   Type = 8
	CallMiddle     Type = 9
	CallInline     Type = 10
	ReplyExternal  Type = 11
	ReplyMiddle    Type = 12
	ReplyInline    Type = 13
)

// Procedures of version 1 (RFC 8166 section 4.1).
const (
	Msg1   Type = 0
	NoMsg1 Type = 1
	MsgP1  Type = 2
	Done1  Type = 3
	Error1 Type = 4
)

// layout says which parts a header has after its prefix. They are in the order of the constants.
type layout uint16

const (
	hasFailure layout = 1 << iota
	hasProps
	hasRemaining
	hasInv
	hasCall
	hasReads
	hasWrites
	hasReply // only after hasWrites
	hasWord  // at least one word of the RPC message must follow
)

var layouts1 = map[Type]layout{
	Msg1: hasReads | hasWrites | hasReply, NoMsg1: hasReads | hasWrites | hasReply, MsgP1: 0, Done1: 0, Error1: hasFailure,
}

var layouts2 = map[Type]layout{
	Error: hasFailure, Grant: 0, ConnPropMiddle: hasProps, ConnPropFinal: hasProps,
	CallExternal:  hasInv | hasCall | hasReads | hasWrites | hasReply,
	CallMiddle:    hasRemaining | hasWord,
	CallInline:    hasInv | hasReads | hasWrites | hasReply | hasWord,
	ReplyExternal: hasWrites | hasReply,
	ReplyMiddle:   hasRemaining | hasWord,
	ReplyInline:   hasWrites | hasWord,
}

// layoutOf returns the layout of a type. The errors of other versions are like those of version 2.
func layoutOf(vers uint32, t Type) (l layout, ok bool) {
	of := layouts2
	if vers == Version1 {
		of = layouts1
	}
	l, ok = of[t]
	return l, ok
}

// ErrCode is the reason in an Error header.
type ErrCode uint32

// Errors of version 2 (draft section 8.4). Code 2 of version 1 is ErrChunk1.
const (
	ErrVers          ErrCode = 1
	ErrBadXDR        ErrCode = 2
	ErrBadPropVal    ErrCode = 3
	ErrInvalHType    ErrCode = 4
	ErrInvalCont     ErrCode = 5
	ErrReadChunks    ErrCode = 6
	ErrWriteChunks   ErrCode = 7
	ErrSegments      ErrCode = 8
	ErrWriteResource ErrCode = 9
	ErrReplyResource ErrCode = 10
	ErrVersMismatch  ErrCode = 11
	ErrSystem        ErrCode = 100

	ErrChunk1 ErrCode = 2
)

var errNames = map[ErrCode]string{
	ErrVers: "VERS", ErrBadXDR: "BAD_XDR", ErrBadPropVal: "BAD_PROPVAL", ErrInvalHType: "INVAL_HTYPE", ErrInvalCont: "INVAL_CONT",
	ErrReadChunks: "READ_CHUNKS", ErrWriteChunks: "WRITE_CHUNKS", ErrSegments: "SEGMENTS", ErrWriteResource: "WRITE_RESOURCE",
	ErrReplyResource: "REPLY_RESOURCE", ErrVersMismatch: "VERS_MISMATCH", ErrSystem: "SYSTEM",
}

func (c ErrCode) String() string {
	if s, ok := errNames[c]; ok {
		return s
	}
	return fmt.Sprintf("error %d", uint32(c))
}

// Known reports whether version 2 defines c.
func (c ErrCode) Known() bool { _, ok := errNames[c]; return ok }

// Segment names memory of the requester (draft section 4.4.1).
type Segment struct {
	Handle uint32 // the STag
	Length uint32 // bytes; 0: an empty segment
	Offset uint64 // tagged offset
}

// ReadSegment is a piece of a Read chunk: those with the same Position are one
// chunk, whose bytes stand at Position of the unreduced message.
type ReadSegment struct {
	Position uint32
	Segment
}

// Chunk is a Write or Reply chunk. Where a chunk is optional, nil means that it is absent. A chunk
// without segments is empty.
type Chunk []Segment

// Len returns the bytes of all segments.
func (c Chunk) Len() uint64 {
	var n uint64
	for i := range c {
		n += uint64(c[i].Length)
	}
	return n
}

// Segments returns all segments of the chunks of a call.
func Segments(call, reads []ReadSegment, writes []Chunk, reply Chunk) iter.Seq[Segment] {
	return func(yield func(Segment) bool) {
		for _, l := range [][]ReadSegment{call, reads} {
			for _, r := range l {
				if !yield(r.Segment) {
					return
				}
			}
		}
		more := func(c Chunk) bool {
			for _, s := range c {
				if !yield(s) {
					return false
				}
			}
			return true
		}
		for _, c := range writes {
			if !more(c) {
				return
			}
		}
		more(reply)
	}
}

// Failure is the body of an Error header. Which fields count depends on Code:
//
//	ErrVers                       Low, High: the versions that are supported
//	ErrReadChunks, ErrWriteChunks Max: chunks that can be dealt with
//	ErrSegments                   Max: segments of a chunk
//	ErrWriteResource              Index of the Write chunk from 1, 0: unknown; Needed: bytes
//	ErrReplyResource              Needed: bytes
type Failure struct {
	Code          ErrCode
	Low, High     uint32
	Max           uint32
	Index, Needed uint32
}

// words returns the fields that count, in their order.
func (f *Failure) words() [2]*uint32 {
	switch f.Code {
	case ErrVers:
		return [2]*uint32{&f.Low, &f.High}
	case ErrReadChunks, ErrWriteChunks, ErrSegments:
		return [2]*uint32{&f.Max}
	case ErrWriteResource:
		return [2]*uint32{&f.Index, &f.Needed}
	case ErrReplyResource:
		return [2]*uint32{&f.Needed}
	}
	return [2]*uint32{}
}

// Prop is a transport property as it is sent (draft section 5.1).
type Prop struct {
	ID   uint32
	Data []byte // no bytes: the property's default
}

// Header is a transport header of either version. Vers and Type determine which fields are used;
// Decode zeroes all others.
type Header struct {
	XID, Vers, Credit uint32
	Type              Type

	Failure   Failure       // Error
	Props     []Prop        // ConnPropMiddle, ConnPropFinal; Data lies in the decoded bytes
	Remaining uint32        // CallMiddle, ReplyMiddle
	InvHandle uint32        // CallInline, CallExternal
	Call      []ReadSegment // CallExternal
	Reads     []ReadSegment // CallInline, CallExternal; version 1
	Writes    []Chunk       // all but the middle ones
	Reply     Chunk         // CallInline, CallExternal, ReplyExternal; version 1; nil: none

	segs   []Segment // memory of Writes and Reply
	counts []int
}

// Errors of Decode. The prefix is valid with all of them except ErrShort.
var (
	// ErrShort means that the message must be discarded: not even its XID is valid (draft
	// section 7, RFC 8166 section 4.5).
	ErrShort = errors.New("rpcrdma: message is too short")
	// ErrVersion means that the version is neither 1 nor 2.
	ErrVersion = errors.New("rpcrdma: version is not supported")
	// ErrType means that the version does not define the header type.
	ErrType = errors.New("rpcrdma: header type is not defined")
	// ErrXDR means that the header is truncated or is not valid XDR.
	ErrXDR = errors.New("rpcrdma: header cannot be parsed")
	// ErrPropVal means that the value of a property extends past the message.
	ErrPropVal = errors.New("rpcrdma: property cannot be parsed")
	// ErrUnknownCode means that an Error header has an undefined code. It must be discarded
	// (draft section 7).
	ErrUnknownCode = errors.New("rpcrdma: error code is not defined")
)

// Decode parses the header at the start of b into h, reusing its memory, and returns the length of
// the header. The RPC message follows it. h.Props refers to b.
func (h *Header) Decode(b []byte) (n int, err error) {
	*h = Header{Props: h.Props[:0], Call: h.Call[:0], Reads: h.Reads[:0], Writes: h.Writes[:0], segs: h.segs[:0], counts: h.counts[:0]}
	if len(b) < PrefixSize {
		return 0, ErrShort
	}
	h.XID, h.Vers, h.Credit = binary.BigEndian.Uint32(b), binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[8:])
	h.Type = Type(binary.BigEndian.Uint32(b[12:]))
	d := decoder{b: b, off: PrefixSize}
	if h.Vers != Version1 && h.Vers != Version2 {
		// Of other versions only errors are understood: all versions have their first words
		// in common.
		return PrefixSize, ErrVersion
	}
	if h.Vers == Version1 && len(b) < minSize1 && (h.Type != Error1 || len(b) < PrefixSize+4) {
		return 0, ErrShort
	}
	if err = h.decode(&d); err == nil && d.bad {
		err = ErrXDR
	}
	return d.off, err
}

func (h *Header) decode(d *decoder) error {
	l, ok := layoutOf(h.Vers, h.Type)
	if !ok {
		return ErrType
	}
	if l&hasFailure != 0 {
		f := &h.Failure
		if f.Code = ErrCode(d.u32()); !d.bad && (!f.Code.Known() || h.Vers == Version1 && f.Code > ErrChunk1) {
			return ErrUnknownCode
		}
		for _, p := range f.words() {
			if p != nil {
				*p = d.u32()
			}
		}
	}
	if l&hasProps != 0 {
		if err := h.decodeProps(d); err != nil {
			return err
		}
	}
	if l&hasRemaining != 0 {
		h.Remaining = d.u32()
	}
	if l&hasInv != 0 {
		h.InvHandle = d.u32()
	}
	if l&hasCall != 0 {
		h.Call = d.reads(h.Call)
	}
	if l&hasReads != 0 {
		h.Reads = d.reads(h.Reads)
	}
	if l&hasWrites != 0 {
		h.lists(d, l&hasReply != 0)
	}
	if l&hasWord != 0 && len(d.b)-d.off < 4 {
		d.bad = true
	}
	return nil
}

func (h *Header) decodeProps(d *decoder) error {
	n := d.u32()
	for range n {
		if len(d.b)-d.off < 8 {
			d.bad = true
			return nil
		}
		p := Prop{ID: d.u32()}
		size := d.u32()
		if (uint64(size)+3)&^3 > uint64(len(d.b)-d.off) {
			return ErrPropVal
		}
		p.Data = d.b[d.off : d.off+int(size)]
		d.off += int(size+3) &^ 3
		h.Props = append(h.Props, p)
	}
	return nil
}

// lists parses a Write list and, if reply is set, an optional Reply chunk.
func (h *Header) lists(d *decoder, reply bool) {
	for d.more() {
		h.chunk(d)
	}
	has := reply && d.more()
	if has {
		h.chunk(d)
	}
	if d.bad {
		return
	}
	segs := h.segs
	for i, n := range h.counts {
		c := Chunk(segs[:n:n])
		segs = segs[n:]
		if has && i == len(h.counts)-1 {
			h.Reply = c
		} else {
			h.Writes = append(h.Writes, c)
		}
	}
}

func (h *Header) chunk(d *decoder) {
	n := d.u32()
	if d.bad || uint64(n)*16 > uint64(len(d.b)-d.off) {
		d.bad = true
		return
	}
	if h.segs == nil {
		h.segs = []Segment{} // an empty Reply chunk is not nil
	}
	for range n {
		h.segs = append(h.segs, d.segment())
	}
	h.counts = append(h.counts, int(n))
}

// decoder reads XDR. After an error it returns only zeros.
type decoder struct {
	b   []byte
	off int
	bad bool
}

func (d *decoder) u32() uint32 {
	if d.bad || len(d.b)-d.off < 4 {
		d.bad = true
		return 0
	}
	v := binary.BigEndian.Uint32(d.b[d.off:])
	d.off += 4
	return v
}

// more reads the discriminator of optional data.
func (d *decoder) more() bool {
	v := d.u32()
	if v > 1 {
		d.bad = true
	}
	return v == 1 && !d.bad
}

func (d *decoder) segment() Segment {
	s := Segment{Handle: d.u32(), Length: d.u32()}
	s.Offset = uint64(d.u32()) << 32
	s.Offset |= uint64(d.u32())
	return s
}

func (d *decoder) reads(l []ReadSegment) []ReadSegment {
	for d.more() {
		r := ReadSegment{Position: d.u32(), Segment: d.segment()}
		if d.bad {
			break
		}
		l = append(l, r)
	}
	return l
}
