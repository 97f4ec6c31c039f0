// Package rpc implements the message layer of ONC RPC (RFC 5531): calls and replies, their XDR,
// dispatch to programs, a cache of replies for duplicate requests, and the TCP and UDP transports.
// Large data items of a message are kept separate, so that a transport such as package rpcrdma can
// move them on their own.
package rpc

import (
	"encoding/binary"
	"errors"
	"io"
)

// Item is a data item that is kept separate from its message: the bytes that a length word counts,
// without padding.
type Item struct {
	Pos  int // offset in Body after the length word; -1: the next eligible place
	Data []byte
}

// Msg is an RPC message without record marks.
type Msg struct {
	Body  []byte // without items and their padding
	Items []Item // in order
}

// Len returns the bytes of the whole message.
func (m *Msg) Len() int {
	n := len(m.Body)
	for _, it := range m.Items {
		n += Pad(len(it.Data))
	}
	return n
}

// AppendFlat appends the whole message, including its items.
func (m *Msg) AppendFlat(b []byte) []byte {
	at := 0
	for _, it := range m.Items {
		b = append(b, m.Body[at:it.Pos]...)
		b = appendPadded(b, it.Data)
		at = it.Pos
	}
	return append(b, m.Body[at:]...)
}

// Pad returns n rounded up to the unit of XDR, which is four bytes.
func Pad(n int) int { return (n + 3) &^ 3 }

func appendPadded(b, data []byte) []byte {
	b = append(b, data...)
	return append(b, 0, 0, 0)[:len(b)+(-len(data)&3)]
}

// Writer builds a message.
type Writer struct{ Msg }

// U32 appends a word.
func (w *Writer) U32(v ...uint32) {
	for _, x := range v {
		w.Body = binary.BigEndian.AppendUint32(w.Body, x)
	}
}

// U64 appends a hyper.
func (w *Writer) U64(v uint64) { w.Body = binary.BigEndian.AppendUint64(w.Body, v) }

// Opaque appends a length, bytes and padding.
func (w *Writer) Opaque(b []byte) {
	w.U32(uint32(len(b)))
	w.Body = appendPadded(w.Body, b)
}

// String is Opaque.
func (w *Writer) String(s string) { w.Opaque([]byte(s)) }

// Item appends an opaque without copying its bytes, which must not change until the message has
// been sent. The program's binding must make it DDP-eligible.
func (w *Writer) Item(b []byte) {
	w.U32(uint32(len(b)))
	if len(b) > 0 {
		w.Items = append(w.Items, Item{len(w.Body), b})
	}
}

// ErrXDR means that a message is malformed.
var ErrXDR = errors.New("rpc: message cannot be parsed")

// Reader reads a message. After an error it returns zeros; see Err.
type Reader struct {
	m   Msg
	off int // in m.Body
	in  int // in the item that Read is in
	bad bool
}

// NewReader returns a Reader at the start of m.
func NewReader(m Msg) *Reader { return &Reader{m: m} }

// Err returns ErrXDR if something could not be read.
func (r *Reader) Err() error {
	if r.bad {
		return ErrXDR
	}
	return nil
}

// Left returns how many bytes are left, items and padding included.
func (r *Reader) Left() int {
	n := len(r.m.Body) - r.off - r.in
	for _, it := range r.m.Items {
		n += Pad(len(it.Data))
	}
	return n
}

// next returns n bytes of the body, or nil if it is too short.
func (r *Reader) next(n int) []byte {
	end := len(r.m.Body)
	if len(r.m.Items) > 0 && r.m.Items[0].Pos >= 0 {
		end = min(end, r.m.Items[0].Pos)
	}
	if r.bad || r.in > 0 || n < 0 || n > end-r.off {
		r.bad = true
		return nil
	}
	b := r.m.Body[r.off : r.off+n]
	r.off += n
	return b
}

// U32 reads a word.
func (r *Reader) U32() uint32 {
	if b := r.next(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// U64 reads a hyper.
func (r *Reader) U64() uint64 {
	if b := r.next(8); b != nil {
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// Fixed reads n bytes and their padding.
func (r *Reader) Fixed(n int) []byte {
	if n < 0 || n > 1<<30 {
		r.bad = true
		return nil
	}
	b := r.next(Pad(n))
	if b == nil {
		return nil
	}
	return b[:n]
}

// Opaque reads an opaque of at most limit bytes, from the body or an item. The bytes are not
// copied.
func (r *Reader) Opaque(limit int) []byte {
	n := r.U32()
	if r.bad || uint64(n) > uint64(limit) {
		r.bad = true
		return nil
	}
	if len(r.m.Items) > 0 && r.m.Items[0].Pos == r.off {
		it := r.m.Items[0]
		r.m.Items = r.m.Items[1:]
		// A chunk of version 1 may include the padding (RFC 8166 section 3.4.5.2).
		if len(it.Data) != int(n) && len(it.Data) != Pad(int(n)) {
			r.bad = true
			return nil
		}
		return it.Data[:n]
	}
	return r.Fixed(int(n))
}

// Result reads an opaque of a reply that the program's binding makes DDP-eligible. Its bytes may be
// in the next item.
func (r *Reader) Result(limit int) []byte {
	if len(r.m.Items) > 0 && r.m.Items[0].Pos < 0 {
		it := r.m.Items[0]
		r.m.Items = r.m.Items[1:]
		if len(it.Data) > 0 {
			if n := r.U32(); r.bad || int(n) != len(it.Data) || int(n) > limit {
				r.bad = true
				return nil
			}
			return it.Data
		}
	}
	return r.Opaque(limit)
}

// String reads a string of at most limit bytes.
func (r *Reader) String(limit int) string { return string(r.Opaque(limit)) }

// Read reads the whole message, with items and padding in place, for decoders that do not know
// about items.
func (r *Reader) Read(p []byte) (n int, err error) {
	for n < len(p) {
		if len(r.m.Items) > 0 && r.m.Items[0].Pos == r.off {
			d := r.m.Items[0].Data
			if r.in < len(d) {
				k := copy(p[n:], d[r.in:])
				n, r.in = n+k, r.in+k
				continue
			}
			k := min(Pad(len(d))-r.in, len(p)-n)
			clear(p[n : n+k])
			n, r.in = n+k, r.in+k
			if r.in == Pad(len(d)) {
				r.m.Items, r.in = r.m.Items[1:], 0
			}
			continue
		}
		end := len(r.m.Body)
		if len(r.m.Items) > 0 && r.m.Items[0].Pos >= 0 {
			end = r.m.Items[0].Pos
		}
		k := copy(p[n:], r.m.Body[r.off:end])
		if k == 0 {
			break
		}
		n, r.off = n+k, r.off+k
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

// Close implements io.Closer. It does nothing.
func (r *Reader) Close() error { return nil }

// Place inserts items into body at the given positions of the whole message, which must be
// ascending multiples of 4. It returns false if a position is outside of the message.
func Place(body []byte, items []Item, pos []uint32) (Msg, bool) {
	moved := uint64(0)
	for i := range items {
		p := uint64(pos[i])
		if p < moved || p-moved > uint64(len(body)) || i > 0 && p-moved < uint64(items[i-1].Pos) {
			return Msg{}, false
		}
		items[i].Pos = int(p - moved)
		moved += uint64(Pad(len(items[i].Data)))
	}
	return Msg{body, items}, true
}
