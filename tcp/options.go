package tcp

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// Option kinds of the IANA registry.
const (
	kindEOL       = 0
	kindNOP       = 1
	kindMSS       = 2
	kindWScale    = 3
	kindSACKPerm  = 4
	kindSACK      = 5
	kindTimestamp = 8
)

const (
	timestampsLen = 12 // of the timestamps option with its padding
	maxSACK       = 4  // blocks that fit in the option space
	maxWScale     = 14 // RFC 7323 2.3

	// timestampsHead is the option header before the two values in most segments: the layout of RFC 7323 appendix A.
	timestampsHead = kindNOP<<24 | kindNOP<<16 | kindTimestamp<<8 | 10
)

// SACKBlock is the range [Start,End) of sequence numbers (RFC 2018 section 3).
type SACKBlock struct{ Start, End serial.Num }

// Options are the options that this TCP knows. All others are skipped.
type Options struct {
	MSS           uint16 // 0: absent
	WScale        uint8  // shift count, at most 14; valid if HasWScale is set
	HasWScale     bool
	SACKPermitted bool
	HasTimestamps bool
	Malformed     bool // the decoder stopped at an option of illegal length
	NSACK         uint8
	TSVal, TSEcr  uint32
	SACK          [maxSACK]SACKBlock
}

// decode reads options from b. It stops at an option of illegal length, because the next one cannot be found; the options before it are
// used (RFC 9293 MUST-7).
func (o *Options) decode(b []byte) {
	*o = Options{}
	if len(b) == timestampsLen && binary.BigEndian.Uint32(b) == timestampsHead {
		o.HasTimestamps = true
		o.TSVal = binary.BigEndian.Uint32(b[4:])
		o.TSEcr = binary.BigEndian.Uint32(b[8:])
		return
	}
	for len(b) > 0 {
		kind := b[0]
		if kind == kindEOL {
			return
		}
		if kind == kindNOP {
			b = b[1:]
			continue
		}
		if len(b) < 2 || b[1] < 2 || int(b[1]) > len(b) {
			o.Malformed = true
			return
		}
		v := b[2:b[1]]
		b = b[b[1]:]
		switch kind {
		case kindMSS:
			if len(v) == 2 {
				o.MSS = binary.BigEndian.Uint16(v)
			}
		case kindWScale:
			if len(v) == 1 {
				o.HasWScale = true
				o.WScale = min(v[0], maxWScale)
			}
		case kindSACKPerm:
			if len(v) == 0 {
				o.SACKPermitted = true
			}
		case kindTimestamp:
			if len(v) == 8 {
				o.HasTimestamps = true
				o.TSVal = binary.BigEndian.Uint32(v)
				o.TSEcr = binary.BigEndian.Uint32(v[4:])
			}
		case kindSACK:
			if len(v)%8 != 0 || len(v) > 8*maxSACK {
				break
			}
			o.NSACK = uint8(len(v) / 8)
			for i := range int(o.NSACK) {
				o.SACK[i].Start = serial.Num(binary.BigEndian.Uint32(v[8*i:]))
				o.SACK[i].End = serial.Num(binary.BigEndian.Uint32(v[8*i+4:]))
			}
		}
	}
}

// fixedLen is the padded length of everything but the SACK blocks.
func (o *Options) fixedLen() int {
	n := 0
	if o.MSS != 0 {
		n += 4
	}
	if o.HasTimestamps {
		n += timestampsLen
	} else if o.SACKPermitted {
		n += 4
	}
	if o.HasWScale {
		n += 4
	}
	return n
}

// sackFit returns the number of SACK blocks, up to n, that fit in room bytes.
func sackFit(n, room int) int {
	if room < 12 {
		return 0
	}
	return min(n, (room-4)/8)
}

// Len returns the padded length of the options in bytes: a multiple of 4, at most 40. SACK blocks that do not fit are left out.
func (o *Options) Len() int {
	n := o.fixedLen()
	if k := sackFit(int(o.NSACK), maxOptionLen-n); k > 0 {
		n += 4 + 8*k
	}
	return n
}

func (o *Options) put(b []byte) int {
	n := 0
	if o.MSS != 0 {
		b[0], b[1] = kindMSS, 4
		binary.BigEndian.PutUint16(b[2:], o.MSS)
		n += 4
	}
	switch {
	case o.HasTimestamps:
		binary.BigEndian.PutUint32(b[n:], timestampsHead)
		if o.SACKPermitted {
			b[n], b[n+1] = kindSACKPerm, 2
		}
		binary.BigEndian.PutUint32(b[n+4:], o.TSVal)
		binary.BigEndian.PutUint32(b[n+8:], o.TSEcr)
		n += timestampsLen
	case o.SACKPermitted:
		b[n], b[n+1], b[n+2], b[n+3] = kindNOP, kindNOP, kindSACKPerm, 2
		n += 4
	}
	if o.HasWScale {
		b[n], b[n+1], b[n+2], b[n+3] = kindNOP, kindWScale, 3, o.WScale
		n += 4
	}
	if k := sackFit(int(o.NSACK), maxOptionLen-n); k > 0 {
		b[n], b[n+1], b[n+2], b[n+3] = kindNOP, kindNOP, kindSACK, byte(2+8*k)
		n += 4
		for _, s := range o.SACK[:k] {
			binary.BigEndian.PutUint32(b[n:], uint32(s.Start))
			binary.BigEndian.PutUint32(b[n+4:], uint32(s.End))
			n += 8
		}
	}
	return n
}
