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

// Highest revision that this package speaks (RFC 6581 section 6).
const MaxRev = 2

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

// Frame is an MPA Request or Reply Frame (RFC 5044 section 7.1.1, RFC 6581
// sections 6 and 9).
type Frame struct {
	Reply    bool // Reply Frame, not Request Frame
	Reject   bool // R. It has a meaning in a Reply only
	CRC      bool // C: the sender wants CRCs
	Markers  bool // M: the sender wants markers in what it receives
	Enhanced bool // S: the Private Data begins with IRD, ORD and the control flags
	Rev      uint8

	EnhancedData // of the sender, if Enhanced is set

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

// Data returns the enhanced data, nil if there are none.
func (f *Frame) Data() *EnhancedData {
	if !f.Enhanced {
		return nil
	}
	return &f.EnhancedData
}

// setData makes d the enhanced data; nil: there are none.
func (f *Frame) setData(d *EnhancedData) {
	if f.Enhanced = d != nil; f.Enhanced {
		f.EnhancedData = *d
	}
}

// Append adds the frame's bytes to dst. It fails with ErrPDLength or ErrDepth,
// and then returns dst as it was.
func (f *Frame) Append(dst []byte) ([]byte, error) {
	pd := f.Len() - HeaderLen
	if pd > MaxPrivateData {
		return dst, ErrPDLength
	}
	if f.Enhanced {
		if err := f.EnhancedData.Validate(); err != nil {
			return dst, err
		}
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
		dst = f.EnhancedData.Append(dst)
	}
	return append(dst, f.PrivateData...), nil
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
		_ = f.EnhancedData.Decode(f.PrivateData) // there are enough bytes
		f.PrivateData = f.PrivateData[EnhancedLen:]
	}
	return f, n, nil
}
