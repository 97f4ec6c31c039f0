package mpa

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// FPDU is an FPDU found by a Receiver.
type FPDU struct {
	// ULPDU is the payload, including markers within it. It is empty for an FPDU of length zero and for one with Placed set. It may alias
	// the bytes passed to the Receiver, and is valid until the next call of one of its Handle or Poll methods.
	ULPDU marked.Bytes
	// Seq is the sequence number of the first byte of ULPDU_Length. It identifies the FPDU: it is the same out of order and in order.
	Seq    serial.Num
	Placed bool // now in order, and placed before: see MarkPlaced
}

// Receiver finds the FPDUs of one half connection, in order in the stream and, if markers are in use, out of order. Init must be called
// before use.
//
// In order: pass the next bytes to HandleStream, then call PollFPDU until it returns false. Out of order: pass a segment to HandleEarly, then
// call PollEarly until it returns false, and MarkPlaced after each FPDU that was placed. If all were placed and EarlyWhole reports true, the
// segment's bytes need not be kept: when TCP's in-order point reaches them, call HandleSkipped instead of HandleStream, then PollFPDU.
// Segments that are kept are passed in order like any other; PollFPDU reports which of their FPDUs were placed.
type Receiver struct {
	layout
	crc bool
	err *term.Error // if set, nothing more is delivered

	next serial.Num // first byte of the next FPDU, its leading marker included
	in   []byte     // bytes fed and not consumed
	fed  int        // if not zero, the number of bytes fed whose CRC is in sum
	sum  uint32     // CRC32c of the bytes fed except the last crcLen
	gone int        // bytes skipped and not consumed
	buf  []byte     // reassembles an FPDU received in several pieces
	held int        // bytes of the next FPDU in buf
	skip int        // remaining bytes of an FPDU that was placed early

	early earlyState
}

// Init prepares r for a half connection whose first FPDU begins at start. If crc is false the CRC field is ignored. Buffers of an earlier
// use are kept.
func (r *Receiver) Init(crc, markers bool, start serial.Num) {
	*r = Receiver{
		layout: layout{markers: markers, start: start},
		crc:    crc,
		next:   start,
		buf:    r.buf[:0],
		early:  earlyState{placed: r.early.placed[:0]},
	}
}

// Held returns the number of buffered bytes of an incomplete FPDU.
func (r *Receiver) Held() int { return r.held }

// HandleStream takes the next bytes in order. They are kept by reference until PollFPDU returns false, which must happen before the next call
// of HandleStream or HandleSkipped.
func (r *Receiver) HandleStream(b []byte) { r.in, r.gone, r.fed = b, 0, 0 }

// HandleSummed is HandleStream with the CRC32c of b without its last four bytes; b has at least five bytes. If b is exactly one FPDU its
// CRC is not computed again.
func (r *Receiver) HandleSummed(b []byte, crc uint32) { r.in, r.gone, r.fed, r.sum = b, 0, len(b), crc }

// HandleSkipped reports that the next n bytes in order were placed early and not kept. Call PollFPDU afterwards as after HandleStream. n is
// greater than zero, at most a segment.
func (r *Receiver) HandleSkipped(n int) { r.in, r.gone, r.fed = nil, n, 0 }

// PollFPDU returns the next FPDU in order, with valid CRC and markers. It returns false when more bytes are needed, and an error once the
// stream is broken, after which it returns no FPDU. The errors are term.ErrMPACRC and term.ErrMPAMarker.
func (r *Receiver) PollFPDU(f *FPDU) (ok bool, err *term.Error) {
	for r.err == nil {
		if r.skip > 0 {
			if !r.skipPlaced() {
				return false, nil
			}
			*f = FPDU{Seq: r.lengthAt(r.next), Placed: true}
			r.next = r.early.pop().end()
			return true, nil
		}
		if len(r.in) == 0 && r.gone == 0 {
			return false, nil
		}
		if r.held == 0 {
			if p, ok := r.early.first(); ok && p.seq == r.next {
				r.skip = int(p.n)
				continue
			}
		}
		if r.gone > 0 {
			// The skipped bytes were FPDUs located by markers, but the length fields before them say that none begins here.
			r.fail(term.ErrMPAMarker)
			break
		}
		raw, ok := r.whole()
		if !ok {
			return false, nil
		}
		if !r.take(raw, f) {
			break
		}
		return true, nil
	}
	return false, r.err
}

func (r *Receiver) fail(err *term.Error) {
	r.err, r.in, r.gone, r.held, r.skip = err, nil, 0, 0, 0
}

// skipPlaced consumes bytes of an FPDU that was placed early and reports whether it has consumed all of them.
func (r *Receiver) skipPlaced() bool {
	n := min(r.skip, len(r.in))
	r.in = r.in[n:]
	r.skip -= n
	n = min(r.skip, r.gone)
	r.gone -= n
	r.skip -= n
	return r.skip == 0
}

// lengthAt returns the position of ULPDU_Length of an FPDU that begins at seq.
func (l *layout) lengthAt(seq serial.Num) serial.Num {
	if l.markers && l.toMarker(seq) == 0 {
		return seq + markerLen
	}
	return seq
}

// header returns the size in the stream of an FPDU that begins at seq with the bytes b, or zero if b is too short to determine it.
func (l *layout) header(seq serial.Num, b []byte) int {
	at := int(l.lengthAt(seq) - seq)
	if len(b) < at+lengthLen {
		return 0
	}
	return l.rawLen(seq, bodyLen(int(binary.BigEndian.Uint16(b[at:]))))
}

// whole returns the next FPDU as it is in the stream, once it is complete. Otherwise it moves the available part to the reassembly buffer.
func (r *Receiver) whole() (raw []byte, ok bool) {
	if r.held == 0 {
		if n := r.header(r.next, r.in); n != 0 && n <= len(r.in) {
			if n != r.fed {
				r.fed = 0
			}
			raw, r.in = r.in[:n], r.in[n:]
			return raw, true
		}
	}
	r.fed = 0
	const most = markerLen + lengthLen
	n := r.header(r.next, r.buf[:r.held])
	if n == 0 {
		r.gather(min(most-r.held, len(r.in)))
		if n = r.header(r.next, r.buf[:r.held]); n == 0 {
			return nil, false
		}
	}
	// An FPDU has at least eight bytes, so the first six belong to it.
	r.gather(min(n-r.held, len(r.in)))
	if r.held < n {
		return nil, false
	}
	r.held = 0
	return r.buf[:n], true
}

// gather moves n bytes of the input to the buffer. The buffer grows with the bytes received, not with the length that a header announces.
func (r *Receiver) gather(n int) {
	r.buf = grow(r.buf, r.held, r.held+n)
	copy(r.buf[r.held:], r.in[:n])
	r.held += n
	r.in = r.in[n:]
}

// grow returns b with a length of at least n, preserving the first keep bytes.
func grow(b []byte, keep, n int) []byte {
	if n <= cap(b) {
		return b[:cap(b)]
	}
	size := max(2048, 2*cap(b))
	for size < n {
		size *= 2
	}
	nb := make([]byte, min(size, max(n, maxFPDU)))
	copy(nb, b[:keep])
	return nb
}

// take checks the next FPDU, as it is in the stream, and returns its contents in f.
func (r *Receiver) take(raw []byte, f *FPDU) bool {
	if r.crc && (r.fed == 0 && !crcValid(raw) || r.fed != 0 && r.sum != trailer(raw)) {
		r.fail(term.ErrMPACRC)
		return false
	}
	end := r.next + serial.Num(len(raw))
	if p, ok := r.early.first(); ok && p.seq.Less(end) {
		// A marker said that an FPDU begins inside of this one.
		r.fail(term.ErrMPAMarker)
		return false
	}
	*f = FPDU{Seq: r.lengthAt(r.next)}
	ok := true
	if f.ULPDU, ok = r.strip(r.next, raw); !ok {
		r.fail(term.ErrMPAMarker)
		return false
	}
	r.next = end
	return true
}

// crcValid reports whether the CRC at the end of raw matches the bytes before it, markers included (RFC 5044 section 4.4).
func crcValid(raw []byte) bool {
	return crc32c.Update(0, raw[:len(raw)-crcLen]) == trailer(raw)
}

// trailer returns the CRC at the end of raw.
func trailer(raw []byte) uint32 { return binary.LittleEndian.Uint32(raw[len(raw)-crcLen:]) }

// strip checks the markers of the FPDU raw, which begins at seq, and returns its ULPDU.
func (r *Receiver) strip(seq serial.Num, raw []byte) (ulpdu marked.Bytes, ok bool) {
	at := 0 // offset of ULPDU_Length
	next := noMarker
	if r.markers {
		// The low two bits of a marker's pointer (RFC 5044 section 4.2) and its reserved half are ignored.
		wrong := uint16(0)
		next = r.toMarker(seq)
		if next == 0 {
			wrong = binary.BigEndian.Uint16(raw[2:])
			at, next = markerLen, markerEvery
		}
		for i := next; i+markerLen <= len(raw); i += markerEvery {
			wrong |= binary.BigEndian.Uint16(raw[i+2:i+markerLen]) ^ uint16(i-at)
		}
		if wrong&^3 != 0 {
			return ulpdu, false
		}
	}
	n := int(binary.BigEndian.Uint16(raw[at:]))
	from := at + lengthLen
	if next >= from+n { // at most one marker, after the ULPDU
		return marked.Bytes{B: raw[from : from+n : from+n]}, true
	}
	first := next - from
	return marked.Bytes{B: raw[from:][:n+markerLen*marked.Among(n, first)], First: first}, true
}
