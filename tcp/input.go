package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// HandleSegment processes an arriving segment of this connection whose checksum is correct. The result says what to do with its payload.
func (c *Conn) HandleSegment(now clock.Time, s *Segment) Input {
	c.stats.SegsIn++
	if c.armed(timerRTO) && now.Sub(c.deadlines[timerRTO]) >= stopTime {
		c.resumed(now)
	}
	if s.Opts.Malformed {
		c.stats.BadOptions++
	}
	switch c.state {
	case Closed:
		return Input{}
	case SynSent:
		return c.handleSynSent(now, s)
	}
	return c.handleSynchronized(now, s)
}

// handleSynSent is RFC 9293 3.10.7.3.
func (c *Conn) handleSynSent(now clock.Time, s *Segment) Input {
	ack := s.Flags&ACK != 0
	if ack && s.Ack != c.nxt {
		if s.Flags&RST == 0 {
			c.rstSeq, c.rstPending = s.Ack, true
		}
		return Input{}
	}
	if s.Flags&RST != 0 {
		if ack {
			c.end(ErrRefused)
		}
		return Input{}
	}
	if s.Flags&SYN == 0 {
		return Input{}
	}
	c.takeSYN(now, &s.Header)
	c.lastRcv = now
	if c.cfg.requestsECN() {
		// RFC 3168 6.1.1: a SYN-ACK has ECE without CWR, a SYN has both.
		if ack {
			c.ecnOK = s.Flags&(ECE|CWR) == ECE
		} else {
			c.ecnOK = s.Flags&(ECE|CWR) == ECE|CWR
		}
	}
	if !ack {
		// Simultaneous open.
		c.state = SynReceived
		c.synPending = true
		c.arm(timerRTO, now.Add(c.rto))
		return Input{}
	}
	c.una = s.Ack
	c.establish(now)
	c.ackNow = true
	if s.Len > 0 || s.Flags&FIN != 0 {
		t := *s
		t.Flags &^= SYN
		t.Seq++
		return c.text(now, &t)
	}
	return Input{}
}

// secondAck is the longest delay of an ACK for two or more segments.
const secondAck = time.Millisecond

// handleSynchronized is RFC 9293 3.10.7.4 with the checks of RFC 5961 and RFC 7323.
func (c *Conn) handleSynchronized(now clock.Time, s *Segment) Input {
	syn := s.Flags&SYN != 0
	if syn && c.state == TimeWait && s.Flags&(RST|ACK) == 0 && c.reusable(s, c.rcvNxt) {
		c.end(nil)
		return Input{Action: Reopen}
	}
	wnd := int(s.Window) << c.sndShift
	if syn && c.state == SynReceived && s.Seq == c.irs && s.Flags&RST == 0 {
		if s.Flags&ACK == 0 {
			// The peer did not receive our SYN-ACK.
			c.takeTimestamp(now, s, c.lastAckSent)
			c.synPending = true
			return Input{}
		}
		if c.active && s.Ack == c.nxt {
			// The second half of a simultaneous open: the SYN itself has already been processed. Its window is not scaled.
			t := *s
			t.Flags &^= SYN
			t.Seq++
			s, syn, wnd = &t, false, int(s.Window)
		}
	}
	if c.tsOK && !c.checkTimestamp(now, s) {
		return Input{}
	}
	if !c.acceptable(s) {
		c.unacceptable(now, s)
		return Input{}
	}
	if s.Flags&RST != 0 {
		c.handleRST(now, s)
		return Input{}
	}
	if syn {
		// RFC 5961 4.2; in SYN-RECEIVED too.
		c.challenge(now)
		return Input{}
	}
	if s.Flags&ACK == 0 {
		return Input{}
	}
	if c.state == SynReceived {
		if s.Ack != c.nxt {
			c.rstSeq, c.rstPending = s.Ack, true
			return Input{}
		}
		c.una = s.Ack
		c.wnd = wnd
		c.maxWnd = max(c.maxWnd, c.wnd)
		c.wl1, c.wl2 = s.Seq, s.Ack
		c.establish(now)
	} else if !c.handleAck(now, s) {
		return Input{}
	}
	if c.state == Closed {
		return Input{} // the ACK of our last FIN
	}
	c.lastRcv = now
	c.keepProbes = 0
	c.takeTimestamp(now, s, c.lastAckSent)
	return c.text(now, s)
}

// acceptable is the sequence number test of RFC 9293 3.4. A segment that is only partly old is acceptable too.
func (c *rcvSpace) acceptable(s *Segment) bool {
	n := s.seqLen()
	wnd := uint32(max(0, c.rcvAdv.Sub(c.rcvNxt)))
	if n == 0 {
		return s.Seq == c.rcvNxt || s.Seq.In(c.rcvNxt, wnd)
	}
	if wnd == 0 {
		// A FIN after bytes that filled the window needs no room.
		return s.Seq == c.rcvNxt && s.Len == 0 && s.Flags&FIN != 0
	}
	return s.Seq.In(c.rcvNxt, wnd) || s.Seq.Add(n-1).In(c.rcvNxt, wnd) ||
		s.Seq.Less(c.rcvNxt) && c.rcvAdv.LessEq(s.Seq.Add(n-1))
}

// unacceptable answers a segment outside of the window with an ACK.
func (c *Conn) unacceptable(now clock.Time, s *Segment) {
	if s.Flags&RST != 0 {
		return
	}
	if c.state == SynReceived || s.Flags&SYN != 0 { // RFC 5961 4.2
		c.challenge(now)
		return
	}
	if c.state == TimeWait && s.Flags&FIN != 0 && s.Seq.Add(s.Len)+1 == c.rcvNxt {
		c.timeWait(now) // our last ACK was lost
		c.ackNow = true
		return
	}
	if s.Len > 0 && s.Seq.Less(c.rcvNxt) {
		// A needless retransmission: report it with a D-SACK (RFC 2883).
		c.stats.DuplicateIn++
		c.noteDSACK(s.Seq, serial.Min(s.Seq.Add(s.Len), c.rcvNxt))
	}
	c.lateAck(now, s) // it may carry a new ACK
	switch {
	case c.state == Closed:
	case s.Len > 0 || s.Flags&FIN != 0: // or a window probe, or a retransmitted FIN
		c.ackNow = true
	default: // a keep-alive, or part of an endless exchange of ACKs
		c.challenge(now)
	}
}

// lateAck processes the ACK field of a segment that is otherwise useless. It trusts only a segment just before the window (RFC 9293
// 3.10.7.4: with a zero window valid ACKs must still be accepted).
func (c *Conn) lateAck(now clock.Time, s *Segment) {
	if s.Flags&(ACK|RST|SYN) != ACK || c.state < Established {
		return
	}
	if c.nxt.Less(s.Ack) || s.Ack.Less(c.una) || !s.Seq.In(c.rcvNxt.Add(-c.rcvMax-1), uint32(2*c.rcvMax+2)) {
		return
	}
	c.lastRcv = now
	c.handleAck(now, s)
}

// checkTimestamp is PAWS (RFC 7323 5). It reports whether processing of the segment continues.
func (c *Conn) checkTimestamp(now clock.Time, s *Segment) bool {
	if s.Flags&RST != 0 || s.Flags&SYN != 0 && !s.Opts.HasTimestamps {
		return true // a SYN is challenged in any case (RFC 5961 4.2): its sender may have restarted with other options
	}
	if !s.Opts.HasTimestamps {
		// RFC 7323 3.2: dropped silently.
		c.stats.PAWSDropped++
		return false
	}
	if !c.tsOld(now, s.Opts.TSVal) {
		return true
	}
	c.stats.PAWSDropped++
	if s.Len > 0 && s.Seq.Add(s.Len).LessEq(c.rcvNxt) {
		c.noteDSACK(s.Seq, s.Seq.Add(s.Len))
	}
	c.challenge(now)
	return false
}

// takeTimestamp is RFC 7323 4.3 (2): it stores the timestamp to be echoed.
func (o *options) takeTimestamp(now clock.Time, s *Segment, lastAckSent serial.Num) {
	if o.tsOK && s.Opts.HasTimestamps && s.Seq.LessEq(lastAckSent) && !o.tsOld(now, s.Opts.TSVal) {
		o.tsRecent, o.tsRecentAt = s.Opts.TSVal, now
	}
}

// tsOld reports whether the timestamp v is older than TS.Recent, unless that is too old to compare with (RFC 7323 5.5).
func (o *options) tsOld(now clock.Time, v uint32) bool {
	return int32(v-o.tsRecent) < 0 && now.Sub(o.tsRecentAt) <= 24*24*time.Hour
}

// reusable reports whether a SYN that arrives in TIME-WAIT certainly belongs to a new connection (RFC 9293 3.6.1 MAY-2, RFC 6191). The old
// one ended before next.
func (o *options) reusable(s *Segment, next serial.Num) bool {
	if o.tsOK && s.Opts.HasTimestamps {
		if d := int32(s.Opts.TSVal - o.tsRecent); d != 0 {
			return d > 0
		}
	}
	return next.Less(s.Seq)
}

// handleRST is RFC 9293 3.10.7.4 second and RFC 5961 3.2. The segment is in the window.
func (c *Conn) handleRST(now clock.Time, s *Segment) {
	if s.Seq != c.rcvNxt {
		c.challenge(now)
		return
	}
	switch c.state {
	case SynReceived:
		c.end(ErrRefused)
	case Closing, LastAck, TimeWait:
		c.end(nil)
	default:
		c.end(ErrReset)
	}
}

// challenge sends a challenge ACK, within the rate limit.
func (c *Conn) challenge(now clock.Time) {
	if c.mayChallenge(now) {
		c.stats.ChallengeAcks++
		c.ackNow = true
	}
}

// text processes the text and the FIN of a segment that overlaps the window (RFC 9293 3.10.7.4).
func (c *Conn) text(now clock.Time, s *Segment) (in Input) {
	if c.ecnOK && s.Len > 0 {
		c.noteCE(s)
	}
	if s.Len == 0 && s.Flags&FIN == 0 {
		return in
	}
	switch c.state {
	case Established, FinWait1, FinWait2:
	default:
		if s.Len > 0 && c.state != TimeWait {
			c.ackNow = true // data after the peer's FIN: ignore it
		}
		return in
	}
	seq, n, off, fin := c.trim(s)
	if n < 0 {
		return in
	}
	if fin && (!c.finSeen || seq == c.rcvNxt) { // in order it is the peer's, whatever came before
		c.finSeen, c.finSeq = true, seq.Add(n)
	}
	// A segment longer than the MSS that we offered is a super-frame: several segments that a kernel has left as one packet.
	one := min(s.Len, c.offeredMSS())
	full := c.fullSize(one, c.mss)
	if n > 0 {
		wait := c.cfg.DelayedAck
		if c.armed(timerDelayedAck) {
			// With two or more segments outstanding the peer's loss probe does not allow for a delayed ACK (RFC 8985 7.2), however small
			// they are.
			wait = secondAck
		}
		if seq == c.rcvNxt {
			in = Input{Deliver, seq, off, n}
			c.deliver(n)
			c.unacked += n
		} else {
			in = c.hold(seq, n, off, s.Buf)
			if !c.ackGap(in) {
				wait = min(secondAck, c.srtt/delaysPerRTT)
			}
		}
		c.arm(timerDelayedAck, clock.Earliest(c.deadlines[timerDelayedAck], now.Add(wait)))
		if c.unacked >= 2*full || one < s.Len || c.quickAcks > 0 {
			c.dueAck(c.rcvNxt, s.Len > (longSuper-1)*one)
		}
		if c.quickAcks > 0 {
			c.quickAcks--
		}
		if c.state == FinWait2 && c.cfg.FinWait2 > 0 {
			c.arm(timerTimeWait, now.Add(c.cfg.FinWait2))
		}
	} else if fin && seq != c.rcvNxt {
		c.ackNow = true
	}
	if c.finSeen && c.finSeq == c.rcvNxt {
		c.handleFIN(now)
	}
	return in
}

// trim returns what of s is in the window: the n bytes at off of its payload, which start at seq, and whether its FIN is. If n is negative
// nothing is.
func (c *Conn) trim(s *Segment) (seq serial.Num, n, off int, fin bool) {
	seq, n, fin = s.Seq, s.Len, s.Flags&FIN != 0
	if d := c.rcvNxt.Sub(seq); d > 0 {
		if n > 0 {
			c.noteDSACK(seq, serial.Min(seq.Add(n), c.rcvNxt))
		}
		seq, n, off = c.rcvNxt, n-d, d
		c.ackNow = true
	}
	if d := seq.Add(n).Sub(c.rcvAdv); d > 0 {
		n, fin = n-d, false
		c.ackNow = true
	}
	return seq, n, off, fin
}

// fullSize estimates the peer's full segment size from that of another segment. It may have become smaller, and small segments must not
// lower the estimate. mss is the largest segment of this side.
func (c *rcvSpace) fullSize(n, mss int) int {
	full := max(min(c.rcvLast, n), min(mss, ipv4DefaultMSS))
	c.rcvMSS, c.rcvLast = max(c.rcvMSS, n), n
	c.rcvMean += n - c.rcvMean/16
	return full
}

// longSuper is how many segments a long super-frame has. The window of its sender is not small, so that one ACK may acknowledge several of
// a burst: the loss of an ACK would not stop it.
const longSuper = 16

// dueAck makes an ACK of all before next due. If several segments of one burst make ACKs due, an earlier ACK is not replaced by a later
// one, unless that is for a long super-frame.
func (a *owedAcks) dueAck(next serial.Num, long bool) {
	if !long && a.ackNow && a.lastAckSent.Less(a.ackPoint) && a.ackPoint.Less(next) {
		a.earlyAck(a.ackPoint)
	}
	a.ackNow = true
	a.ackPoint = next
	a.unacked = 0
}

// maxEarlyAcks is how many extra ACKs one burst of segments may cause. A peer with a small window loses a round trip or more if its only
// ACK is lost; for a long burst the last ACK is enough.
const maxEarlyAcks = 3

// earlyAck queues an ACK to be sent before the one that is due.
func (a *owedAcks) earlyAck(ack serial.Num) {
	if a.earlyAcks.len() < maxEarlyAcks {
		a.earlyAcks.push(earlyAck{ack: ack, ece: a.ceSeen})
	}
}

// deliver advances rcvNxt by n bytes and over held data that is now in order.
func (c *Conn) deliver(n int) {
	start := c.rcvNxt
	c.rcvNxt = c.rcvNxt.Add(n)
	c.beyondGap = 0
	if len(c.reasm.s) > 0 {
		c.rcvNxt = c.reasm.advance(c.rcvNxt)
		c.ackNow = true // a gap is filled, entirely or in part (RFC 5681 4.2)
	}
	c.stats.BytesIn += uint64(c.rcvNxt - start)
	if c.finSeen && c.finSeq.Less(c.rcvNxt) {
		c.finSeen = false // data lies beyond that FIN, so the peer did not send it
	}
}

// hold keeps out-of-order data if there is room and it is new.
func (c *Conn) hold(seq serial.Num, n, off int, buf Buf) Input {
	c.stats.OutOfOrderIn++
	if c.finSeen && c.finSeq.Less(seq.Add(n)) {
		return Input{}
	}
	h, ok := c.reasm.insert(heldSeg{seq: seq, len: int32(n), off: int32(off), buf: buf}, c.cfg.MaxHeld)
	if !ok {
		if c.reasm.has(seq, n) {
			c.stats.DuplicateIn++
			c.noteDSACK(seq, seq.Add(n))
			c.reasm.note(&heldSeg{seq: seq, len: int32(n)}) // its block is reported next (RFC 2018 section 4, RFC 2883 4 (3))
		} else {
			c.stats.HeldDropped++
		}
		return Input{}
	}
	return Input{Hold, h.seq, int(h.off), int(h.len)}
}

const (
	sackSegments = 16 // segments out of order for which one ACK may do
	delaysPerRTT = 20 // the longest delay of that ACK is this part of the RTT
)

// ackGap makes an ACK due that tells the peer of data out of order, or reports false if the ACK may wait. RFC 5681 4.2 wants it at once, so
// that the peer soon recovers. From the ACKs for the first three segments the peer concludes that data is lost (RFC 6675); later it needs to
// know at once of a new gap, but not of each segment after it.
func (c *Conn) ackGap(in Input) bool {
	c.beyondGap++
	if c.sackOK && in.Action == Hold && c.beyondGap > dupThresh && c.beyondGap%sackSegments != 0 && in.Seq != c.reasm.recent[0].Start {
		return false
	}
	switch {
	case !c.sackOK:
		c.dupAcksOwed++
	case c.ackNow:
		c.earlyAck(c.rcvNxt)
	}
	c.ackNow = true
	return true
}

// maxEarlyDSACKs is how many ACKs of one burst may be sent only for their D-SACK. A peer that learns of each duplicate can undo a needless
// reduction.
const maxEarlyDSACKs = 16

// noteDSACK makes the next ACK report a duplicate (RFC 2883 4). A pending D-SACK is extended if the new range is adjacent to it.
func (c *Conn) noteDSACK(start, end serial.Num) {
	if c.sackOK {
		switch d := &c.dsack; {
		case *d == (SACKBlock{}):
			*d = SACKBlock{start, end}
		case start.LessEq(d.End) && d.Start.LessEq(end):
			d.Start, d.End = serial.Min(d.Start, start), serial.Max(d.End, end)
		default:
			if c.earlyAcks.len() < maxEarlyDSACKs {
				c.earlyAcks.push(earlyAck{ack: c.rcvNxt, ece: c.ceSeen, dsack: *d})
			}
			*d = SACKBlock{start, end}
		}
	}
	c.quickAcks = max(c.quickAcks, 2)
}

// handleFIN is RFC 9293 3.10.7.4 eighth: the FIN is next in order.
func (c *Conn) handleFIN(now clock.Time) {
	c.rcvNxt++
	c.rcvAdv = serial.Max(c.rcvAdv, c.rcvNxt)
	c.reasm.drop()
	c.ackNow = true
	c.events |= 1 << EventPeerClosed
	switch c.state {
	case Established:
		c.state = CloseWait
	case FinWait1:
		c.state = Closing // our FIN is not acknowledged, or the state would be FIN-WAIT-2
	case FinWait2:
		c.timeWait(now)
	}
}

// SetBacklog sets how many delivered bytes the application has not consumed yet. They reduce the offered window.
func (c *Conn) SetBacklog(n int) {
	if n == c.backlog {
		return
	}
	c.backlog = n
	if c.state != Established && c.state != FinWait1 && c.state != FinWait2 {
		return
	}
	// A window update is worth an ACK if the peer may be short of window (RFC 9293 3.8.6.2.2).
	have := c.rcvAdv.Sub(c.rcvNxt)
	limit := c.rcvLimit()
	more := limit - n - have
	if have < limit/2 && more >= min(limit/2, 2*max(c.rcvMSS, c.mss)) {
		c.ackNow = true
	}
}

// SetMayHold sets how many segments this connection may hold out of order, including those already held, when connections share the frames.
// It limits the next window offered; a window already offered stays valid.
func (c *rcvSpace) SetMayHold(n int) { c.mayHold = n }

// noteCE tracks congestion marks of arriving segments (RFC 3168 6.1.3, RFC 8257 3.2).
func (c *Conn) noteCE(s *Segment) {
	marked := s.ECN&3 == ce
	if marked {
		c.stats.CEIn++
	}
	if c.cfg.CongestionControl == DCTCP {
		if marked != c.ceSeen {
			if c.lastAckSent != c.rcvNxt {
				c.earlyAcks.push(earlyAck{ack: c.rcvNxt, ece: c.ceSeen})
			}
			c.ceSeen = marked
			c.ackNow = true
		}
		return
	}
	if s.Flags&CWR != 0 {
		c.ceSeen = false
	}
	if marked {
		c.ceSeen = true
		c.ackNow = true
	}
}
