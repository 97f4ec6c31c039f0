package mpa

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// maxPlaced is the number of FPDUs that a Receiver can record as placed out of order. At 1448 bytes each that is 1.4 MiB of stream, in 8
// KiB of memory.
const maxPlaced = 1024

// span is the range of an FPDU in the stream, its leading marker included.
type span struct {
	seq serial.Num
	n   uint32
}

func (s span) end() serial.Num { return s.seq + serial.Num(s.n) }

// earlyState is what a Receiver knows about the stream beyond the in-order point.
type earlyState struct {
	placed []span // FPDUs placed, ascending, from index head; capacity maxPlaced
	head   int
	edge   serial.Num // end of the last FPDU found, where the next one begins
	edged  bool

	// The current segment.
	seq    serial.Num
	in     []byte // nil: nothing more can be found
	at     int    // bytes of in processed
	known  bool   // an FPDU begins at in[at]
	mark   int    // index in in of the last marker that located it; that FPDU extends beyond the marker
	missed bool   // some bytes belong to no FPDU that was found
	found  span   // last FPDU returned by PollEarly; n is 0 once it is marked
}

// first returns the first FPDU that was placed.
func (e *earlyState) first() (s span, ok bool) {
	if e.head == len(e.placed) {
		return span{}, false
	}
	return e.placed[e.head], true
}

// pop removes and returns the first FPDU.
func (e *earlyState) pop() span {
	s := e.placed[e.head]
	e.head++
	if e.head == len(e.placed) {
		e.placed, e.head = e.placed[:0], 0
	}
	return s
}

// count returns the number of recorded FPDUs.
func (e *earlyState) count() int { return len(e.placed) - e.head }

// search returns the index of the first span that ends after seq.
func (e *earlyState) search(seq serial.Num) int {
	lo, hi := e.head, len(e.placed)
	for lo < hi {
		mid := int(uint(lo+hi) / 2)
		if seq.Less(e.placed[mid].end()) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	return lo
}

// insert records s, which overlaps no other span. There must be room for it.
func (e *earlyState) insert(s span) {
	if e.placed == nil {
		e.placed = make([]span, 0, maxPlaced)
	}
	if len(e.placed) == cap(e.placed) {
		n := copy(e.placed, e.placed[e.head:])
		e.placed, e.head = e.placed[:n], 0
	}
	i := e.search(s.seq)
	e.placed = append(e.placed, span{})
	copy(e.placed[i+1:], e.placed[i:])
	e.placed[i] = s
}

// HandleEarly passes in a segment that is beyond the in-order point; b begins at seq and is kept by reference until PollEarly returns false.
// Without markers no FPDU can be found in it.
func (r *Receiver) HandleEarly(seq serial.Num, b []byte) {
	e := &r.early
	e.seq, e.in, e.at, e.found = seq, b, 0, span{}
	e.missed = false
	if r.err != nil || !r.markers || seq.Less(r.next+serial.Num(r.held)) {
		e.in, e.missed = nil, true
		return
	}
	// The end of a known FPDU is the start of the next one (RFC 5044 section 6, 3). Data that only looks like an FPDU is not accepted.
	e.known, e.mark = e.edged && e.edge == seq, -1
	if i := e.search(seq - 1); i < len(e.placed) && e.placed[i].seq.LessEq(seq) {
		// The placed FPDU ends at seq, begins there, or continues in this segment.
		p := e.placed[i]
		e.known = true
		if p.seq != seq {
			e.at = min(p.end().Sub(seq), len(b))
		}
	}
}

// PollEarly returns the next FPDU that is complete in the segment, has a valid CRC, agrees with its markers, and was not placed before. It
// returns false when there is none, or when no more placed FPDUs can be recorded.
func (r *Receiver) PollEarly(f *FPDU) bool {
	e := &r.early
	for e.in != nil {
		if !e.known && !r.locate() {
			break
		}
		rest := e.in[e.at:]
		if len(rest) == 0 {
			break
		}
		seq := e.seq + serial.Num(e.at)
		i := e.search(seq)
		if i < len(e.placed) && e.placed[i].seq == seq {
			e.pass(e.placed[i])
			continue
		}
		n := r.header(seq, rest)
		if n == 0 || n > len(rest) || e.at+n <= e.mark {
			break
		}
		raw := rest[:n:n]
		s := span{seq, uint32(n)}
		if i < len(e.placed) && e.placed[i].seq.Less(s.end()) {
			break // they contradict each other: the in-order check decides
		}
		if r.crc && !crcValid(raw) {
			break
		}
		ulpdu, ok := r.strip(seq, raw)
		if !ok {
			break
		}
		if e.count() == maxPlaced {
			break
		}
		e.pass(s)
		e.found = s
		*f = FPDU{ULPDU: ulpdu, Seq: r.lengthAt(seq)}
		return true
	}
	e.missed = e.missed || e.at < len(e.in)
	e.in = nil
	return false
}

// pass advances past an FPDU; the next one begins there.
func (e *earlyState) pass(s span) {
	e.at = min(e.at+int(s.n), len(e.in))
	e.edge, e.edged = s.end(), true
	e.known = true
}

// locate uses the markers of the current segment to find the first FPDU that begins in it.
func (r *Receiver) locate() bool {
	e := &r.early
	for i := e.at + r.toMarker(e.seq+serial.Num(e.at)); i+markerLen <= len(e.in); i += markerEvery {
		back := int(binary.BigEndian.Uint16(e.in[i+2:]) &^ 3)
		at := i - back
		if back != 0 && r.toMarker(e.seq+serial.Num(at)-markerLen) == 0 {
			at -= markerLen // the marker before ULPDU_Length belongs to the FPDU
		}
		if at >= e.at {
			e.missed = e.missed || at > e.at
			e.at, e.known, e.mark = at, true, i
			return true
		}
	}
	return false
}

// EarlyWhole reports, once PollEarly has returned false, whether every byte of the segment belongs to an FPDU that PollEarly returned or
// that was placed before.
func (r *Receiver) EarlyWhole() bool { return r.early.in == nil && !r.early.missed }

// MarkPlaced records that the FPDU last returned by PollEarly was placed: seq is its Seq. PollFPDU later
// returns it in order with Placed set.
func (r *Receiver) MarkPlaced(seq serial.Num) {
	e := &r.early
	if e.found.n == 0 || r.lengthAt(e.found.seq) != seq {
		panic("mpa: MarkPlaced of an FPDU that PollEarly did not give last")
	}
	e.insert(e.found)
	e.found = span{}
}
