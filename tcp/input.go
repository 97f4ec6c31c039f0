package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// HandleSegment takes an arriving segment whose checksum is right and that
// belongs to this connection. The result says what becomes of its payload.
func (c *Conn) HandleSegment(now clock.Time, s *Segment) Input {
	c.stats.SegsIn++
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
	ackOK := false
	if s.Flags&ACK != 0 {
		if s.Ack != c.nxt {
			if s.Flags&RST == 0 {
				c.rstSeq, c.rstPending = s.Ack, true
			}
			return Input{}
		}
		ackOK = true
	}
	if s.Flags&RST != 0 {
		if ackOK {
			c.end(ErrRefused)
		}
		return Input{}
	}
	if s.Flags&SYN == 0 {
		return Input{}
	}
	c.takeSYN(now, &s.Header)
	c.lastRcv = now
	if c.cfg.wantECN() && c.synRetries == 0 {
		// RFC 3168 6.1.1: an answer has ECE without CWR, a SYN has both.
		if ackOK {
			c.ecnOK = s.Flags&(ECE|CWR) == ECE
		} else {
			c.ecnOK = s.Flags&(ECE|CWR) == ECE|CWR
		}
	}
	if !ackOK {
		// Simultaneous open.
		c.state = SynReceived
		c.synPending = true
		c.arm(timerRTO, now.Add(c.rto))
		return Input{}
	}
	c.una = s.Ack
	c.sampleHandshake(now)
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

// secondAck is how long an ACK is delayed once a second segment waits for it.
const secondAck = time.Millisecond

// handleSynchronized is RFC 9293 3.10.7.4, with RFC 5961 and RFC 7323 in it.
func (c *Conn) handleSynchronized(now clock.Time, s *Segment) Input {
	syn := s.Flags&SYN != 0
	if syn && c.state == TimeWait && s.Flags&(RST|ACK) == 0 && c.reusable(s) {
		c.end(nil)
		return Input{Action: Reopen}
	}
	if syn && c.state == SynReceived && s.Seq == c.irs && s.Flags&RST == 0 {
		if s.Flags&ACK == 0 {
			// The peer did not get our SYN-ACK.
			c.synPending = true
			return Input{}
		}
		if c.active && s.Ack == c.nxt {
			// The second half of a simultaneous open: the SYN itself has
			// been seen.
			t := *s
			t.Flags &^= SYN
			t.Seq++
			return c.handleSynchronized(now, &t)
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
		c.wnd = int(s.Window) << c.sndShift
		c.maxWnd = max(c.maxWnd, c.wnd)
		c.wl1, c.wl2 = s.Seq, s.Ack
		c.sampleHandshake(now)
		c.establish(now)
	} else if !c.handleAck(now, s) {
		return Input{}
	}
	if c.state == Closed {
		return Input{} // the ACK of our last FIN
	}
	c.lastRcv = now
	c.keepProbes = 0
	if c.tsOK && s.Opts.HasTimestamps && s.Seq.LessEq(c.lastAckSent) && (int32(s.Opts.TSVal-c.tsRecent) >= 0 || c.tsExpired(now)) {
		c.tsRecent, c.tsRecentAt = s.Opts.TSVal, now // RFC 7323 4.3 (2)
	}
	return c.text(now, s)
}

// acceptable is the test of RFC 9293 3.4 on the sequence number. The left edge is
// given away by nothing: a segment that is old in part is acceptable.
func (c *Conn) acceptable(s *Segment) bool {
	n := s.seqLen()
	wnd := uint32(max(0, c.rcvAdv.Sub(c.rcvNxt)))
	if n == 0 {
		return s.Seq == c.rcvNxt || s.Seq.In(c.rcvNxt, wnd)
	}
	if wnd == 0 {
		// The FIN that a peer puts behind the octets which filled the window
		// takes no room.
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
	if c.state == SynReceived {
		c.challenge(now)
		return
	}
	if c.state == TimeWait && s.Flags&FIN != 0 && s.Seq.Add(s.Len)+1 == c.rcvNxt {
		c.timeWait(now) // our last ACK was lost
		c.ackNow = true
		return
	}
	if s.Len > 0 && s.Seq.Less(c.rcvNxt) {
		// Retransmitted for nothing; the peer wants to know (RFC 2883).
		c.stats.DuplicateIn++
		c.noteDSACK(s.Seq, serial.Min(s.Seq.Add(s.Len), c.rcvNxt))
		c.ackNow = true
		// Such a segment may carry a new ACK.
		c.lateAck(now, s)
		return
	}
	if s.Len > 0 || s.Flags&FIN != 0 {
		// A probe of a closed window, or a FIN sent again.
		if s.Flags&ACK != 0 && c.state != TimeWait {
			c.lateAck(now, s)
		}
		if c.state == Closed {
			return
		}
		c.ackNow = true
		return
	}
	// A segment without text: it may be half of an endless exchange of ACKs,
	// or a keep-alive.
	if s.Flags&SYN == 0 {
		c.lateAck(now, s)
		if c.state == Closed {
			return
		}
	}
	c.challenge(now)
}

// lateAck takes the ACK of a segment that is itself of no use. Only one that
// lies just before the window is trusted so far (RFC 9293 3.10.7.4: with a zero
// window valid ACKs are still to be accepted).
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

// checkTimestamp is PAWS (RFC 7323 5). It reports whether to go on with the
// segment.
func (c *Conn) checkTimestamp(now clock.Time, s *Segment) bool {
	if s.Flags&RST != 0 {
		return true
	}
	if !s.Opts.HasTimestamps {
		// RFC 7323 3.2: dropped silently.
		c.stats.PAWSDropped++
		return false
	}
	if int32(s.Opts.TSVal-c.tsRecent) >= 0 || c.tsExpired(now) {
		return true
	}
	c.stats.PAWSDropped++
	if s.Len > 0 && s.Seq.Add(s.Len).LessEq(c.rcvNxt) {
		c.noteDSACK(s.Seq, s.Seq.Add(s.Len))
	}
	c.challenge(now)
	return false
}

// tsExpired reports whether TS.Recent is too old to compare with (RFC 7323 5.5).
func (c *Conn) tsExpired(now clock.Time) bool { return now.Sub(c.tsRecentAt) > 24*24*time.Hour }

// reusable reports whether a SYN in TIME-WAIT is surely of a new connection
// (RFC 9293 3.6.1 MAY-2, RFC 6191).
func (c *Conn) reusable(s *Segment) bool {
	if c.tsOK && s.Opts.HasTimestamps {
		if d := int32(s.Opts.TSVal - c.tsRecent); d != 0 {
			return d > 0
		}
	}
	return c.rcvNxt.Less(s.Seq)
}

// handleRST is RFC 9293 3.10.7.4 second, RFC 5961 3.2. The segment is in the
// window.
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

// Challenge ACKs in any second, of one connection. The limit is kept for each
// connection, so that it tells nothing of others.
const challengeLimit = 10

// challenge answers with an ACK, within the rate of RFC 5961 section 7.
func (c *Conn) challenge(now clock.Time) {
	if now.Sub(c.challengeWindow) >= time.Second {
		c.challengeWindow = now
		c.challenges = 0
	}
	if c.challenges >= challengeLimit {
		return
	}
	c.challenges++
	c.stats.ChallengeAcks++
	c.ackNow = true
}

// text is the part of RFC 9293 3.10.7.4 that handles the segment's text and its
// FIN. The segment overlaps the window.
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
			c.ackNow = true // past the FIN: nonsense
		}
		return in
	}
	seq, n, off := s.Seq, s.Len, 0
	fin := s.Flags&FIN != 0
	if d := c.rcvNxt.Sub(seq); d > 0 {
		if n > 0 {
			c.noteDSACK(seq, serial.Min(seq.Add(n), c.rcvNxt))
		}
		if d > n {
			d = n
		}
		seq, n, off = seq.Add(d), n-d, off+d
		c.ackNow = true
	}
	if d := seq.Add(n).Sub(c.rcvAdv); d > 0 {
		n -= d
		fin = false
		c.ackNow = true
		if n < 0 {
			return in
		}
	}
	if fin && !c.finSeen {
		c.finSeen, c.finSeq = true, seq.Add(n)
	}
	// What counts as a full segment: the peer's may have become smaller, and
	// small ones do not count.
	full := max(min(c.rcvLast, s.Len), min(c.mss, ipv4DefaultMSS))
	c.rcvMSS, c.rcvLast = max(c.rcvMSS, s.Len), s.Len
	c.rcvMean += s.Len - c.rcvMean/16
	if n > 0 {
		if seq == c.rcvNxt {
			in = Input{Deliver, seq, off, n}
			c.deliver(n)
			c.unacked += n
		} else {
			in = c.hold(seq, n, off, s.Buf)
		}
		if !c.ackPending {
			c.ackPending = true
			c.arm(timerDelayedAck, now.Add(c.cfg.DelayedAck))
		} else if at := now.Add(secondAck); at < c.deadlines[timerDelayedAck] {
			// With two or more segments out the peer's loss probe does not allow
			// for a delayed ACK (RFC 8985 7.2), however small they are.
			c.arm(timerDelayedAck, at)
		}
		if c.unacked >= 2*full || c.quickAcks > 0 {
			c.dueAck()
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

// dueAck makes an ACK of what is delivered due. If another is due already, because
// several segments came in one burst, that one is not replaced by it.
func (c *Conn) dueAck() {
	if c.ackNow && c.lastAckSent.Less(c.ackPoint) && c.ackPoint.Less(c.rcvNxt) {
		c.earlyAck(c.ackPoint)
	}
	c.ackNow = true
	c.ackPoint = c.rcvNxt
	c.unacked = 0
}

// maxEarlyAcks is how many ACKs of one burst of segments leave beside the last. A
// peer with a small window loses a round trip or more when its only ACK is lost;
// in a long burst the last one says enough.
const maxEarlyAcks = 3

// earlyAck has an ACK leave ahead of the one that is due.
func (c *Conn) earlyAck(ack serial.Num) {
	if c.earlyAcks.len() < maxEarlyAcks {
		c.earlyAcks.push(earlyAck{ack: ack, ece: c.ceSeen})
	}
}

// deliver moves the in-order point over n octets and over what is held behind
// them.
func (c *Conn) deliver(n int) {
	start := c.rcvNxt
	c.rcvNxt = c.rcvNxt.Add(n)
	if len(c.reasm.s) > 0 {
		c.rcvNxt = c.reasm.advance(c.rcvNxt)
		c.ackNow = true // a gap is filled, in whole or in part (RFC 5681 4.2)
	}
	c.stats.OctetsIn += uint64(c.rcvNxt - start)
	if c.finSeen && c.finSeq.Less(c.rcvNxt) {
		c.finSeen = false // octets lie beyond that FIN: it was none of the peer's
	}
}

// hold keeps octets ahead of the in-order point, if there is room and use.
func (c *Conn) hold(seq serial.Num, n, off int, buf Buf) Input {
	c.stats.OutOfOrderIn++
	switch {
	case !c.sackOK:
		c.dupAcksOwed++
	case c.ackNow:
		c.earlyAck(c.rcvNxt)
	}
	c.ackNow = true
	if c.finSeen && c.finSeq.Less(seq.Add(n)) {
		return Input{}
	}
	h, ok := c.reasm.insert(heldSeg{seq: seq, len: int32(n), off: int32(off), buf: buf}, c.cfg.MaxHeld)
	if !ok {
		if c.reasm.has(seq, n) {
			c.stats.DuplicateIn++
			c.noteDSACK(seq, seq.Add(n))
		} else {
			c.stats.HeldDropped++
		}
		return Input{}
	}
	return Input{Hold, h.seq, int(h.off), int(h.len)}
}

// maxEarlyDSACKs is how many ACKs of one burst leave for their D-SACK alone. A peer
// that is told of each duplicate can take a needless reduction back.
const maxEarlyDSACKs = 16

// noteDSACK has the next ACK report a duplicate (RFC 2883 4): together with the one
// before, if that waits yet and is its neighbour.
func (c *Conn) noteDSACK(start, end serial.Num) {
	if c.sackOK {
		switch d := &c.dsack; {
		case !c.dsackPending:
			*d = SACKBlock{start, end}
		case start.LessEq(d.End) && d.Start.LessEq(end):
			d.Start, d.End = serial.Min(d.Start, start), serial.Max(d.End, end)
		default:
			if c.earlyAcks.len() < maxEarlyDSACKs {
				c.earlyAcks.push(earlyAck{ack: c.rcvNxt, ece: c.ceSeen, dsack: *d})
			}
			*d = SACKBlock{start, end}
		}
		c.dsackPending = true
	}
	c.quickAcks = max(c.quickAcks, 2)
}

// handleFIN is RFC 9293 3.10.7.4 eighth: the FIN is the next in order.
func (c *Conn) handleFIN(now clock.Time) {
	c.rcvNxt++
	c.rcvAdv = serial.Max(c.rcvAdv, c.rcvNxt)
	c.reasm.drop()
	c.ackNow = true
	c.events |= evPeerClosed
	switch c.state {
	case Established:
		c.state = CloseWait
	case FinWait1:
		c.state = Closing // our FIN is not acknowledged, else it were FIN-WAIT-2
	case FinWait2:
		c.timeWait(now)
	}
}

// SetBacklog says how many octets were delivered and are not yet consumed by the
// application. They lessen the window that is offered.
func (c *Conn) SetBacklog(n int) {
	if n == c.backlog {
		return
	}
	c.backlog = n
	if c.state != Established && c.state != FinWait1 && c.state != FinWait2 {
		return
	}
	// An update is worth an ACK when the peer may be short of window
	// (RFC 9293 3.8.6.2.2).
	have := c.rcvAdv.Sub(c.rcvNxt)
	limit := c.rcvLimit()
	more := limit - n - have
	if have < limit/2 && more >= min(limit/2, 2*max(c.rcvMSS, c.mss)) {
		c.ackNow = true
	}
}

// SetMayHold says how many segments this connection could hold out of order now,
// those that it holds included, where many share the frames for that. The window
// that is offered next is no larger than what they take; what was offered before
// stands.
func (c *Conn) SetMayHold(n int) { c.mayHold = n }

// noteCE keeps account of congestion marks on what arrives (RFC 3168 6.1.3, RFC
// 8257 3.2).
func (c *Conn) noteCE(s *Segment) {
	marked := s.ECN&3 == ce
	if marked {
		c.stats.CEIn++
	}
	if c.cfg.CongestionControl == DCTCP {
		if marked != c.ceSeen {
			if c.ackPending {
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
