package peer

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC is the FPDU's CRC field over b (RFC 5044 section 4.4): the bytes of the
// digest go out lowest first.
func CRC(b []byte) [4]byte {
	c := crc32.Checksum(b, castagnoli)
	return [4]byte{byte(c), byte(c >> 8), byte(c >> 16), byte(c >> 24)}
}

// FPDU frames ulpdu without markers.
func FPDU(ulpdu []byte) []byte { return Seal(Body(ulpdu)) }

// Body is length, ulpdu and pad.
func Body(ulpdu []byte) []byte {
	b := be.AppendUint16(nil, uint16(len(ulpdu)))
	b = append(b, ulpdu...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// Seal appends the CRC of b.
func Seal(b []byte) []byte {
	c := CRC(b)
	return append(bytes.Clone(b), c[:]...)
}

// Marked frames ulpdu with markers, for an FPDU that begins at offset at of the
// half connection (RFC 5044 section 4.3): every 512 bytes a marker that says how
// far back the length field is. edit, if not nil, may change a marker: it gets its
// number within the FPDU and its bytes.
func Marked(at int, ulpdu []byte, edit func(i int, m []byte)) []byte {
	raw := Body(ulpdu)
	var b []byte
	marks, start := 0, 0
	put := func() {
		if (at+len(b))%512 != 0 {
			return
		}
		m := make([]byte, 4)
		if len(b) > 0 {
			be.PutUint16(m[2:], uint16(len(b)-start))
		} else {
			start = 4 // a marker in front of the length field is zero
		}
		if edit != nil {
			edit(marks, m)
		}
		marks++
		b = append(b, m...)
	}
	for ; len(raw) > 0; raw = raw[4:] {
		put()
		b = append(b, raw[:4]...)
	}
	put()
	c := CRC(b)
	return append(b, c[:]...)
}

// Frame is an MPA Request or Reply (RFC 5044 section 7.1.1).
type Frame struct {
	Key     string // KeyRequest or KeyReply
	Flags   byte
	Rev     byte
	PDLen   int // -1: that of Private
	Private []byte
}

// Keys and flags of a Frame.
const (
	KeyRequest = "MPA ID Req Frame"
	KeyReply   = "MPA ID Rep Frame"

	FlagMarkers  = 0x80
	FlagCRC      = 0x40
	FlagReject   = 0x20
	FlagEnhanced = 0x10
)

// Bytes returns the frame as it goes over the wire.
func (f Frame) Bytes() []byte {
	n := f.PDLen
	if n < 0 {
		n = len(f.Private)
	}
	b := append([]byte(f.Key), f.Flags, f.Rev)
	b = be.AppendUint16(b, uint16(n))
	return append(b, f.Private...)
}

// Enhanced is the front of enhanced private data (RFC 6581 section 9).
func Enhanced(a, b, c, d bool, ird, ord uint16) []byte {
	bit := func(on bool, v uint16) uint16 {
		if on {
			return v
		}
		return 0
	}
	x := be.AppendUint16(nil, ird|bit(a, 0x8000)|bit(b, 0x4000))
	return be.AppendUint16(x, ord|bit(c, 0x8000)|bit(d, 0x4000))
}

// ReadFrame takes a startup frame off the stream.
func (s *Stream) ReadFrame() (f Frame, err error) {
	if err := s.Need(20); err != nil {
		return f, err
	}
	if len(s.In) < 20 {
		return f, fmt.Errorf("peer: the stream ends after %d bytes of a startup frame", len(s.In))
	}
	n := int(be.Uint16(s.In[18:]))
	if err := s.Need(20 + n); err != nil {
		return f, err
	}
	if len(s.In) < 20+n {
		return f, errors.New("peer: the stream ends in private data")
	}
	f = Frame{string(s.In[:16]), s.In[16], s.In[17], n, bytes.Clone(s.In[20 : 20+n])}
	s.In = s.In[20+n:]
	return f, nil
}

// Reader takes FPDUs off a stream.
type Reader struct {
	S       *Stream
	CRC     bool
	Markers bool
	pos     int // in the half connection
}

// ErrEnd says that the stream ended between two FPDUs.
var ErrEnd = errors.New("peer: end of the stream")

// Next returns the next ULPDU. Each byte around it must be as RFC 5044 has it.
func (r *Reader) Next() ([]byte, error) {
	var raw, ulpdu []byte // the FPDU as it came, and without markers
	start := 0            // of the length field
	take := func(n int) error {
		if err := r.S.Need(n); err != nil {
			return err
		}
		if len(r.S.In) < n {
			if len(r.S.In) == 0 && len(raw) == 0 {
				return ErrEnd
			}
			return fmt.Errorf("peer: the stream ends inside of an FPDU, after %d bytes", len(raw)+len(r.S.In))
		}
		raw = append(raw, r.S.In[:n]...)
		r.S.In = r.S.In[n:]
		r.pos += n
		return nil
	}
	// mark takes a marker.
	mark := func() error {
		at, back := len(raw), len(raw)-start
		if err := take(4); err != nil {
			return err
		}
		if at == 0 {
			start = 4
		}
		if m := raw[at:]; m[0] != 0 || m[1] != 0 || int(be.Uint16(m[2:])) != back {
			return fmt.Errorf("peer: marker % x, %d bytes behind the length field", m, back)
		}
		return nil
	}
	// word takes the next four bytes that are no marker.
	word := func() ([]byte, error) {
		if r.Markers && r.pos%512 == 0 {
			if err := mark(); err != nil {
				return nil, err
			}
		}
		at := len(raw)
		if err := take(4); err != nil {
			return nil, err
		}
		return raw[at:], nil
	}
	w, err := word()
	if err != nil {
		return nil, err
	}
	n := int(be.Uint16(w))
	ulpdu = append(ulpdu, w[2:]...)
	for len(ulpdu) < n {
		if w, err = word(); err != nil {
			return nil, err
		}
		ulpdu = append(ulpdu, w...)
	}
	for _, p := range ulpdu[n:] {
		if p != 0 {
			return nil, errors.New("peer: pad is not zero")
		}
	}
	if r.Markers && r.pos%512 == 0 {
		if err := mark(); err != nil {
			return nil, err
		}
	}
	body := len(raw)
	if err := take(4); err != nil {
		return nil, err
	}
	if c := CRC(raw[:body]); r.CRC && !bytes.Equal(c[:], raw[body:]) {
		return nil, fmt.Errorf("peer: CRC % x, want % x", raw[body:], c)
	}
	return ulpdu[:n], nil
}
