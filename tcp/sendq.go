package tcp

import (
	"slices"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// segState is the state of a segment on the scoreboard.
type segState uint8

const (
	unsent   segState = iota
	inFlight          // sent, and not known to have arrived or been lost
	lost              // considered lost, to be retransmitted
	sacked            // held by the peer out of order
)

// seg is a segment in the send queue: a record, a piece of one, or the FIN. As long as it is unsent, or in flight for the first time and
// nothing is known to be lost, it may also be a run: several segments of unit bytes each.
type seg struct {
	sent       clock.Time // time of the last transmission
	prev, next uint64     // neighbours in order of transmission, if in flight; next is used by skip if sacked
	seq        serial.Num
	buf        Buf
	off, len   int32
	unit       int32  // bytes of the record, or of each segment of a run
	order      uint32 // of transmission, of the last segment: a counter that wraps, finer than sent
	state      segState
	retrans    uint8 // number of retransmissions, saturating
	last       bool  // last piece of buf: the record is released with it
	fin        bool
}

func (s *seg) end() serial.Num {
	e := s.seq + serial.Num(s.len)
	if s.fin {
		e++
	}
	return e
}

func (s *seg) run() bool { return s.len > s.unit }

// first returns the length of the first segment of s.
func (s *seg) first() int { return int(min(s.len, s.unit)) }

// segs returns the number of segments of s.
func (s *seg) segs() int {
	if s.run() {
		return int(s.len / s.unit)
	}
	return 1
}

// noPos is an invalid position. Positions start at 1.
const noPos = 0

// sendq is the send queue and scoreboard: segments in order of sequence number, of which [head,next) are sent and [next,tail) are not.
// Positions do not change, except that positions of unsent segments shift when one is split. The segments in flight are also linked in the
// order of their last transmission, as RACK needs them (RFC 8985 section 6.2).
type sendq struct {
	s                []seg // length is a power of two
	head, next, tail uint64
	oldest, newest   uint64 // ends of the list in transmission order
	sorted           []uint64
	runs             bool // some segment may be a run
}

func (q *sendq) init() {
	q.head, q.next, q.tail = 1, 1, 1
	q.oldest, q.newest = noPos, noPos
	q.runs = false
}

func (q *sendq) at(p uint64) *seg { return &q.s[p&uint64(len(q.s)-1)] }

func (q *sendq) push(s seg) { *q.add() = s }

// add appends an empty segment, whose fields the caller sets in place: copying fields just written with wider loads would stall the
// processor.
func (q *sendq) add() *seg {
	if int(q.tail-q.head) == len(q.s) {
		q.grow()
	}
	s := q.at(q.tail)
	*s = seg{}
	q.tail++
	return s
}

func (q *sendq) grow() {
	old := *q
	q.s = make([]seg, max(16, 2*len(q.s)))
	for p := q.head; p != q.tail; p++ {
		*q.at(p) = *old.at(p)
	}
}

// link appends p to the list in transmission order.
func (q *sendq) link(p uint64) {
	s := q.at(p)
	s.prev, s.next = q.newest, noPos
	if q.newest != noPos {
		q.at(q.newest).next = p
	} else {
		q.oldest = p
	}
	q.newest = p
}

// relink makes the list again, of all segments in flight. The peer influences their order, so the time must not depend much on it; most
// often they are in order, or in a few ordered parts, which a stable sort merges.
func (q *sendq) relink() {
	q.sorted = q.sorted[:0]
	for p := q.head; p != q.next; p++ {
		if q.at(p).state == inFlight {
			q.sorted = append(q.sorted, p)
		}
	}
	slices.SortStableFunc(q.sorted, func(a, b uint64) int { return int(int32(q.at(a).order - q.at(b).order)) })
	q.oldest, q.newest = noPos, noPos
	for _, p := range q.sorted {
		q.link(p)
	}
}

// unlink removes p from the list in transmission order.
func (q *sendq) unlink(p uint64) {
	s := q.at(p)
	if s.prev != noPos {
		q.at(s.prev).next = s.next
	} else {
		q.oldest = s.next
	}
	if s.next != noPos {
		q.at(s.next).prev = s.prev
	} else {
		q.newest = s.prev
	}
	s.prev, s.next = noPos, noPos
}

// find returns the position of the first sent segment that starts at or after n.
func (q *sendq) find(n serial.Num) uint64 {
	lo, hi := q.head, q.next
	for lo < hi {
		m := lo + (hi-lo)/2
		if q.at(m).seq.Less(n) {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

// skip returns the first position from p on whose segment is not SACKed, and makes the next search from there shorter: a peer may
// report the same segments in every ACK.
func (q *sendq) skip(p uint64) uint64 {
	to := p
	for to != q.next && q.at(to).state == sacked {
		to = max(to+1, q.at(to).next)
	}
	for p != to {
		s := q.at(p)
		p, s.next = max(p+1, s.next), to
	}
	return to
}

// cut splits the unsent segment at p so that its first part has n bytes.
func (q *sendq) cut(p uint64, n int32) {
	q.push(seg{})
	for i := q.tail - 1; i > p; i-- {
		*q.at(i) = *q.at(i - 1)
	}
	a, b := q.at(p), q.at(p+1)
	a.len, a.last, a.fin = n, false, false
	b.seq = b.seq.Add(int(n))
	b.off += n
	b.len -= n
}

// single returns the segment at p, which is unsent. Of a run it splits off the first segment.
func (q *sendq) single(p uint64) *seg {
	if s := q.at(p); s.run() {
		q.cut(p, s.unit)
	}
	return q.at(p)
}

// divide splits all runs into their segments, each with its own place in the order of transmission.
func (q *sendq) divide() {
	if !q.runs {
		return
	}
	q.runs = false
	n := 0
	for p := q.head; p != q.tail; p++ {
		n += q.at(p).segs()
	}
	for n > len(q.s) {
		q.grow()
	}
	tail := q.head + uint64(n)
	to, next := tail, tail
	for p := q.tail; p != q.head; { // backwards, since positions grow
		p--
		s := *q.at(p)
		s.prev, s.next = noPos, noPos
		for left := s.segs(); left > 1; left-- {
			a := s
			a.off += s.len - s.unit
			a.seq, a.len = s.seq.Add(int(s.len-s.unit)), s.unit
			to--
			*q.at(to) = a
			s.len -= s.unit
			s.order--
			s.last = false
		}
		to--
		*q.at(to) = s
		if p == q.next {
			next = to
		}
	}
	q.next, q.tail = next, tail
	q.relink()
}

// recut splits every segment longer than mss and keeps its state. It allocates, and is called only when the MSS shrinks.
func (q *sendq) recut(mss int32) {
	q.divide()
	old := *q
	n := uint64(0)
	for p := q.head; p != q.tail; p++ {
		n += pieces(old.at(p).len, mss)
	}
	if n == q.tail-q.head {
		return
	}
	size := uint64(max(16, len(q.s)))
	for size < n {
		size *= 2
	}
	q.s = make([]seg, size)
	first := make([]uint64, 0, old.tail-old.head+1) // new position of each old one
	q.tail = q.head
	q.next = q.head
	q.oldest, q.newest = noPos, noPos
	for p := old.head; p != old.tail; p++ {
		first = append(first, q.tail)
		s := *old.at(p)
		s.prev, s.next = noPos, noPos
		for s.len > mss {
			a := s
			a.len, a.last, a.fin = mss, false, false
			q.push(a)
			s.seq = s.seq.Add(int(mss))
			s.off += mss
			s.len -= mss
		}
		q.push(s)
		if p < old.next {
			q.next = q.tail
		}
	}
	first = append(first, q.tail)
	for p := old.oldest; p != noPos; p = old.at(p).next {
		for i := first[p-old.head]; i != first[p-old.head+1]; i++ {
			q.link(i)
		}
	}
}

func pieces(n, mss int32) uint64 {
	if n <= mss {
		return 1
	}
	return uint64((n + mss - 1) / mss)
}
