package mpa

import (
	"encoding/binary"
	"errors"
)

// Sizes of the startup frames, in bytes (RFC 5044 section 7.1.1, RFC 6581
// section 9).
const (
	HeaderLen      = 20  // a Request or Reply Frame without Private Data
	MaxPrivateData = 512 // limit of PD_Length
	EnhancedLen    = 4   // enhanced data at the front of the Private Data when S is set
	maxFrameLen    = HeaderLen + MaxPrivateData
)

// MaxRev is the highest revision supported (RFC 6581 section 6).
const MaxRev = 2

// Errors of Decode and Append. ErrShort means that more bytes are needed; the others mean an improperly formatted frame.
var (
	ErrShort        = errors.New("mpa: startup frame is not complete")
	ErrKey          = errors.New("mpa: not the key of a startup frame")
	ErrPDLength     = errors.New("mpa: private data longer than 512 bytes")
	ErrEnhancedData = errors.New("mpa: private data too short for the enhanced data it must begin with")
	ErrDepth        = errors.New("mpa: IRD or ORD does not fit in 14 bits")
)

const (
	keyRequest = "MPA ID Req Frame"
	keyReply   = "MPA ID Rep Frame"
)

// Flags at offset 16. The low four bits are reserved: sent as zero and ignored on receipt.
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
	Reject   bool // R; meaningful in a Reply only
	CRC      bool // C: the sender wants CRCs
	Markers  bool // M: the sender wants to receive markers
	Enhanced bool // S: the Private Data begins with IRD, ORD and the control flags
	Rev      uint8

	EnhancedData // the sender's; valid if Enhanced is set

	PrivateData []byte // the ULP's, without the enhanced data
}

// Len returns the size of the frame in bytes.
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

// setData sets the enhanced data to d, or to none if d is nil.
func (f *Frame) setData(d *EnhancedData) {
	if f.Enhanced = d != nil; f.Enhanced {
		f.EnhancedData = *d
	}
}

// Append appends the frame to dst. On error, ErrPDLength or ErrDepth, it returns dst unchanged.
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

// Decode reads a startup frame from the front of b and returns its length n; f.PrivateData aliases b. It decodes any revision. Below
// revision 2 the S flag is a reserved bit. A wrong key is detected at its first wrong byte. On error f is the zero Frame. Decode never
// panics and never allocates.
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
		_ = f.EnhancedData.Decode(f.PrivateData) // cannot fail: there are enough bytes
		f.PrivateData = f.PrivateData[EnhancedLen:]
	}
	return f, n, nil
}
