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
	runs             bool   // some segment may be a run
	order            uint32 // transmission counter, copied to each segment sent
	lostHint         uint64 // no segment before this position is lost

	unsent, inFlight, lostBytes int // bytes of the segments in these states
	lostSegs, sackedSegs        int
}

func (q *sendq) init() { *q = sendq{s: q.s, sorted: q.sorted, head: 1, next: 1, tail: 1} }

// empty reports whether the queue has no segment.
func (q *sendq) empty() bool { return q.head == q.tail }

// outstanding reports whether a sent segment is not acknowledged.
func (q *sendq) outstanding() bool { return q.head != q.next }

// hasUnsent reports whether a segment is still to be sent for the first time.
func (q *sendq) hasUnsent() bool { return q.next != q.tail }

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

// markSent records that the segment at p is being sent at now: the next unsent one, or one again.
func (q *sendq) markSent(now clock.Time, p uint64) {
	s := q.at(p)
	switch s.state {
	case unsent:
		q.next++
		q.unsent -= int(s.len)
		q.inFlight += int(s.len)
	case lost:
		q.lostSegs--
		q.lostBytes -= int(s.len)
		q.inFlight += int(s.len)
	case inFlight:
		q.unlink(p)
	}
	s.state = inFlight
	q.order += uint32(s.segs())
	s.sent, s.order = now, q.order
	q.link(p)
}

// markLost marks the segment at p, which is in flight, as lost.
func (q *sendq) markLost(p uint64) {
	s := q.at(p)
	q.unlink(p)
	s.state = lost
	q.inFlight -= int(s.len)
	q.lostBytes += int(s.len)
	q.lostSegs++
	q.lostHint = min(q.lostHint, p)
}

// markOld marks as lost the first segment and those that were sent at or before at, as far as they are in flight.
func (q *sendq) markOld(at clock.Time) {
	for p := q.head; p != q.next; p++ {
		if s := q.at(p); s.state == inFlight && (p == q.head || s.sent <= at) {
			q.markLost(p)
		}
	}
}

// unmarkLost marks all lost segments as in flight again.
func (q *sendq) unmarkLost() {
	for p := q.head; q.lostSegs > 0 && p != q.next; p++ {
		s := q.at(p)
		if s.state != lost {
			continue
		}
		s.state = inFlight
		q.lostSegs--
		q.lostBytes -= int(s.len)
		q.inFlight += int(s.len)
	}
	q.relink()
}

// firstLost returns the position of the first lost segment; there is one.
func (q *sendq) firstLost() uint64 {
	p := max(q.lostHint, q.head)
	for q.at(p).state != lost {
		p++
	}
	q.lostHint = p
	return p
}

// markSACKed marks the segment at p, which is in flight or lost, as held by the peer.
func (q *sendq) markSACKed(p uint64) {
	s := q.at(p)
	q.arrived(p, s)
	s.state = sacked
	q.sackedSegs++
}

// renege forgets selective acknowledgements, because the peer has dropped that data (RFC 2018 section 8): a peer that still held the
// segment at the head of the queue would have acknowledged it cumulatively.
func (q *sendq) renege() {
	for p := q.head; p != q.next; p++ {
		s := q.at(p)
		if s.state == sacked {
			s.state = lost
			s.next = noPos
			q.sackedSegs--
			q.lostSegs++
			q.lostBytes += int(s.len)
		}
	}
	q.lostHint = q.head
}

// pop removes the first segment, which is acknowledged.
func (q *sendq) pop() {
	q.arrived(q.head, q.at(q.head))
	q.head++
}

// popPart removes from the run at the head of the queue, within which ack lies, the segments before ack, and returns them; there may be none.
func (q *sendq) popPart(ack serial.Num) seg {
	s := q.at(q.head)
	part := *s
	part.len = max(int32(ack.Sub(s.seq))/s.unit*s.unit, 0)
	s.seq, s.off, s.len = s.seq.Add(int(part.len)), s.off+part.len, s.len-part.len
	part.order -= uint32(s.segs())
	q.inFlight -= int(part.len)
	return part
}

// arrived takes the segment at p, of which the peer has reported that it arrived, off the totals.
func (q *sendq) arrived(p uint64, s *seg) {
	switch s.state {
	case inFlight:
		q.unlink(p)
		q.inFlight -= int(s.len)
	case lost:
		q.lostSegs--
		q.lostBytes -= int(s.len)
	case sacked:
		q.sackedSegs--
	}
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
	q.lostHint = q.head
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
	q.lostSegs, q.sackedSegs = 0, 0
	for p := q.head; p != q.next; p++ {
		switch q.at(p).state {
		case lost:
			q.lostSegs++
		case sacked:
			q.sackedSegs++
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
