package peer

import "bytes"

// Opcodes (RFC 5040 figure 4, RFC 7306 figure 2).
const (
	Write          = 0x0
	ReadRequest    = 0x1
	ReadResponse   = 0x2
	Send           = 0x3
	SendInv        = 0x4
	SendSE         = 0x5
	SendSEInv      = 0x6
	Terminate      = 0x7
	Imm            = 0x8
	ImmSE          = 0x9
	AtomicRequest  = 0xa
	AtomicResponse = 0xb
)

// Bytes of the control fields that are right.
const (
	ddpVersion   = 0x01
	ddpTagged    = 0x80
	ddpLast      = 0x40
	rdmapVersion = 0x40
)

// Tagged is a tagged segment (RFC 5041 section 4.2).
func Tagged(opcode byte, last bool, stag uint32, to uint64, payload []byte) []byte {
	c := byte(ddpTagged | ddpVersion)
	if last {
		c |= ddpLast
	}
	b := be.AppendUint32([]byte{c, rdmapVersion | opcode}, stag)
	return append(be.AppendUint64(b, to), payload...)
}

// Untagged is an untagged segment (RFC 5041 section 4.3).
func Untagged(opcode byte, last bool, inv, qn, msn, mo uint32, payload []byte) []byte {
	c := byte(ddpVersion)
	if last {
		c |= ddpLast
	}
	b := be.AppendUint32([]byte{c, rdmapVersion | opcode}, inv)
	b = be.AppendUint32(be.AppendUint32(be.AppendUint32(b, qn), msn), mo)
	return append(b, payload...)
}

// SendMsg is a Send of one segment.
func SendMsg(msn uint32, payload []byte) []byte { return Untagged(Send, true, 0, 0, msn, 0, payload) }

// ReadReq is a Read Request's header (RFC 5040 section 4.4).
type ReadReq struct {
	Sink   uint32
	SinkTO uint64
	Size   uint32
	Src    uint32
	SrcTO  uint64
}

// Bytes returns the header.
func (r ReadReq) Bytes() []byte {
	b := be.AppendUint32(nil, r.Sink)
	b = be.AppendUint64(b, r.SinkTO)
	b = be.AppendUint32(b, r.Size)
	b = be.AppendUint32(b, r.Src)
	return be.AppendUint64(b, r.SrcTO)
}

// Msg is the whole request.
func (r ReadReq) Msg(msn uint32) []byte {
	return Untagged(ReadRequest, true, 0, 1, msn, 0, r.Bytes())
}

// DecodeReadReq reads a Read Request's segment.
func DecodeReadReq(ulpdu []byte) (r ReadReq, ok bool) {
	if len(ulpdu) != 18+28 || ulpdu[1] != rdmapVersion|ReadRequest {
		return r, false
	}
	b := ulpdu[18:]
	return ReadReq{be.Uint32(b), be.Uint64(b[4:]), be.Uint32(b[12:]), be.Uint32(b[16:]), be.Uint64(b[20:])}, true
}

// Atomic is an Atomic Request's header (RFC 7306 section 5.2.1).
type Atomic struct {
	Op                       byte // 0 FetchAdd, 2 CmpSwap
	ID, STag                 uint32
	TO                       uint64
	Data, Mask, Cmp, CmpMask uint64
}

// Bytes returns the header.
func (a Atomic) Bytes() []byte {
	b := be.AppendUint32([]byte{0, 0, 0, a.Op}, a.ID)
	b = be.AppendUint32(b, a.STag)
	for _, v := range []uint64{a.TO, a.Data, a.Mask, a.Cmp, a.CmpMask} {
		b = be.AppendUint64(b, v)
	}
	return b
}

// Msg is the whole request.
func (a Atomic) Msg(msn uint32) []byte {
	return Untagged(AtomicRequest, true, 0, 1, msn, 0, a.Bytes())
}

// AtomicResp is an Atomic Response (RFC 7306 section 5.2.2).
func AtomicResp(msn, id uint32, old uint64) []byte {
	return Untagged(AtomicResponse, true, 0, 3, msn, 0, be.AppendUint64(be.AppendUint32(nil, id), old))
}

// Term is the whole Terminate Message that reports an error (RFC 5040 section
// 4.8): with the DDP header of the guilty segment unless that is nil, and with
// its Read Request header if rdma is set.
func Term(layer, typ, code byte, guilty []byte, rdma bool) []byte {
	return Untagged(Terminate, true, 0, 2, 1, 0, TermHeader(layer, typ, code, guilty, rdma))
}

// TermHeader is the payload of Term.
func TermHeader(layer, typ, code byte, guilty []byte, rdma bool) []byte {
	b := []byte{layer<<4 | typ, code, 0, 0}
	if guilty == nil {
		return b
	}
	n := 18
	if guilty[0]&ddpTagged != 0 {
		n = 14
	}
	b[2] = 0xc0
	b = be.AppendUint16(b, uint16(len(guilty)))
	b = append(b, guilty[:n]...)
	if rdma {
		b[2] |= 0x20
		b = append(b, guilty[18:18+28]...)
	}
	return b
}

// With returns a copy of b in which the byte at off is v.
func With(b []byte, off int, v byte) []byte {
	b = bytes.Clone(b)
	b[off] = v
	return b
}
