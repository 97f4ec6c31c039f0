package mpa

import (
	"encoding/binary"
	"errors"
)

// Sizes of the startup frames, in octets (RFC 5044 section 7.1.1, RFC 6581
// section 9).
const (
	HeaderLen      = 20  // a Request or Reply Frame without Private Data
	MaxPrivateData = 512 // limit of PD_Length
	EnhancedLen    = 4   // enhanced data at the front of the Private Data when S is set
	MaxFrameLen    = HeaderLen + MaxPrivateData
)

// NoNegotiation is the value of IRD or ORD that leaves this depth to the ULPs
// (RFC 6581 section 9.1). Every negotiated depth is smaller.
const NoNegotiation = 0x3FFF

// Highest revision that this package speaks (RFC 6581 section 6).
const MaxRev = 2

// RTR is a kind of ready-to-receive indication: what the initiator of a
// peer-to-peer connection sends first (RFC 6581 section 9.2).
type RTR uint8

// Kinds of RTR. Each is a bit, so that a set of them is their union.
const (
	RTRNone  RTR = 0
	RTRSend  RTR = 1 << 0 // flag B: zero-length Send
	RTRWrite RTR = 1 << 1 // flag C: zero-length RDMA Write
	RTRRead  RTR = 1 << 2 // flag D: zero-length RDMA Read
)

// String returns the name of the kind.
func (r RTR) String() string {
	switch r {
	case RTRNone:
		return "none"
	case RTRSend:
		return "send"
	case RTRWrite:
		return "write"
	case RTRRead:
		return "read"
	}
	return "invalid"
}

// RTRs is a set of kinds of RTR.
type RTRs uint8

// AllRTRs holds every kind.
const AllRTRs = RTRs(RTRSend | RTRWrite | RTRRead)

// Has reports whether r is in s.
func (s RTRs) Has(r RTR) bool { return r != RTRNone && s&RTRs(r) == RTRs(r) }

// prefer picks one kind of the set, RTRNone of an empty one. A Write costs the
// peer nothing, a Read takes a place in its IRRQ, and a Send is what the fewest
// peers support.
func (s RTRs) prefer() RTR {
	for _, r := range [...]RTR{RTRWrite, RTRRead, RTRSend} {
		if s.Has(r) {
			return r
		}
	}
	return RTRNone
}

// Errors of Decode and Append. ErrShort asks for more octets; the others mark
// a frame that is improperly formatted.
var (
	ErrShort        = errors.New("mpa: startup frame is not complete")
	ErrKey          = errors.New("mpa: not the key of a startup frame")
	ErrPDLength     = errors.New("mpa: private data longer than 512 octets")
	ErrEnhancedData = errors.New("mpa: private data too short for the enhanced data it must begin with")
	ErrDepth        = errors.New("mpa: IRD or ORD does not fit in 14 bits")
)

const (
	keyRequest = "MPA ID Req Frame"
	keyReply   = "MPA ID Rep Frame"
)

// Flags at offset 16. The low four bits are reserved: zero when sent, not
// looked at when received.
const (
	flagM = 0x80
	flagC = 0x40
	flagR = 0x20
	flagS = 0x10
)

// Control flags in the enhanced data: A and B above IRD, C and D above ORD
// (RFC 6581 section 9).
const (
	ctrlA     = 1 << 31
	ctrlB     = 1 << 30
	ctrlC     = 1 << 15
	ctrlD     = 1 << 14
	ctrlDepth = 0x3FFF
)

// Frame is an MPA Request or Reply Frame (RFC 5044 section 7.1.1, RFC 6581
// sections 6 and 9).
type Frame struct {
	Reply    bool // Reply Frame, not Request Frame
	Reject   bool // R. It has a meaning in a Reply only
	CRC      bool // C: the sender wants CRCs
	Markers  bool // M: the sender wants markers in what it receives
	Enhanced bool // S: the Private Data begins with IRD, ORD and the control flags
	Rev      uint8

	// What follows has a meaning if Enhanced is set.
	IRD, ORD uint16 // 14 bits each
	P2P      bool   // A
	RTR      RTRs   // B, C, D; empty if A is clear

	PrivateData []byte // the ULP's, without the enhanced data
}

// Len returns the size of the frame in octets.
func (f *Frame) Len() int {
	n := HeaderLen + len(f.PrivateData)
	if f.Enhanced {
		n += EnhancedLen
	}
	return n
}

// Append adds the frame's octets to dst. It fails with ErrPDLength or ErrDepth,
// and then returns dst as it was.
func (f *Frame) Append(dst []byte) ([]byte, error) {
	pd := f.Len() - HeaderLen
	if pd > MaxPrivateData {
		return dst, ErrPDLength
	}
	if f.Enhanced && (f.IRD > ctrlDepth || f.ORD > ctrlDepth) {
		return dst, ErrDepth
	}
	key, flags := keyRequest, byte(0)
	if f.Reply {
		key = keyReply
	}
	for _, b := range [...]struct {
		on  bool
		bit byte
	}{{f.Markers, flagM}, {f.CRC, flagC}, {f.Reject, flagR}, {f.Enhanced, flagS}} {
		if b.on {
			flags |= b.bit
		}
	}
	dst = append(dst, key...)
	dst = append(dst, flags, f.Rev)
	dst = binary.BigEndian.AppendUint16(dst, uint16(pd))
	if f.Enhanced {
		dst = binary.BigEndian.AppendUint32(dst, f.enhanced())
	}
	return append(dst, f.PrivateData...), nil
}

func (f *Frame) enhanced() uint32 {
	w := uint32(f.IRD)<<16 | uint32(f.ORD)
	if !f.P2P { // then B, C and D are zero too (RFC 6581 section 9.2)
		return w
	}
	w |= ctrlA
	if f.RTR.Has(RTRSend) {
		w |= ctrlB
	}
	if f.RTR.Has(RTRWrite) {
		w |= ctrlC
	}
	if f.RTR.Has(RTRRead) {
		w |= ctrlD
	}
	return w
}

// Decode reads a startup frame from the front of b, of which it takes n
// octets; f.PrivateData aliases b. Any revision is decoded; the S flag has no
// meaning below revision 2, where it was a reserved bit. A wrong key is found
// at its first wrong octet. On error f is the zero Frame. Decode never panics
// and never allocates.
func Decode(b []byte) (f Frame, n int, err error) {
	k := min(len(b), len(keyRequest))
	switch string(b[:k]) {
	case keyRequest[:k], keyReply[:k]:
	default:
		return Frame{}, 0, ErrKey
	}
	if len(b) < HeaderLen {
		return Frame{}, 0, ErrShort
	}
	pd := int(binary.BigEndian.Uint16(b[18:]))
	if pd > MaxPrivateData {
		return Frame{}, 0, ErrPDLength
	}
	f = Frame{
		Reply:   string(b[:16]) == keyReply,
		Reject:  b[16]&flagR != 0,
		CRC:     b[16]&flagC != 0,
		Markers: b[16]&flagM != 0,
		Rev:     b[17],
	}
	f.Enhanced = b[16]&flagS != 0 && f.Rev >= 2
	if f.Enhanced && pd < EnhancedLen {
		return Frame{}, 0, ErrEnhancedData
	}
	n = HeaderLen + pd
	if len(b) < n {
		return Frame{}, 0, ErrShort
	}
	f.PrivateData = b[HeaderLen:n:n]
	if f.Enhanced {
		f.setEnhanced(binary.BigEndian.Uint32(f.PrivateData))
		f.PrivateData = f.PrivateData[EnhancedLen:]
	}
	return f, n, nil
}

func (f *Frame) setEnhanced(w uint32) {
	f.IRD, f.ORD = uint16(w>>16)&ctrlDepth, uint16(w)&ctrlDepth
	if w&ctrlA == 0 {
		return // B, C and D are ignored (RFC 6581 section 9.2)
	}
	f.P2P = true
	if w&ctrlB != 0 {
		f.RTR |= RTRs(RTRSend)
	}
	if w&ctrlC != 0 {
		f.RTR |= RTRs(RTRWrite)
	}
	if w&ctrlD != 0 {
		f.RTR |= RTRs(RTRRead)
	}
}
