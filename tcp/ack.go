package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// ackState collects what one ACK acknowledges.
type ackState struct {
	now       clock.Time
	fack      serial.Num // highest sequence number known to have arrived before this ACK
	acked     int        // bytes cumulatively acknowledged
	delivered int        // bytes newly known to have arrived
	segs      int        // segments cumulatively acknowledged
	rtt       time.Duration
	lastRTT   time.Duration
	sackRTT   time.Duration // RTT sample from a selectively acknowledged segment
	resent    clock.Time    // time of the last retransmission acknowledged
	echoRTT   time.Duration // RTT sample of it, from its echoed timestamp
	retrans   bool          // a retransmitted segment was acknowledged
	original  bool          // a segment sent before the time-out, and not retransmitted, has arrived
	newSACK   bool
	rackSet   bool
	rackOrder uint32 // order of the last sent segment among those that have arrived
	dsack     bool
	dup       bool // a duplicate ACK by RFC 5681
	plain     bool // nothing but the same ACK again, without a SACK block
	ece       bool
	tsEcr     uint32 // timestamp that the ACK echoes, or 0
}

// answersBefore reports whether a timestamp shows that the ACK answers a segment sent before one with the timestamp ts.
func (a *ackState) answersBefore(ts uint32) bool { return a.tsEcr != 0 && int32(a.tsEcr-ts) < 0 }

// handleAck is the fifth step of RFC 9293 3.10.7.4. It reports whether processing of the segment continues.
func (c *Conn) handleAck(now clock.Time, s *Segment) bool {
	ack := s.Ack
	if c.nxt.Less(ack) || ack.Less(c.una) && ack.Less(c.una.Add(-c.maxWnd)) {
		c.challenge(now) // RFC 5961 5.2
		return false
	}
	var a ackState
	a.now, a.fack = now, c.rack.fack
	a.ece = c.ecnOK && s.Flags&ECE != 0
	if c.tsOK && s.Opts.HasTimestamps {
		a.tsEcr = s.Opts.TSEcr
	}
	if ack.Less(c.una) {
		// The ACK is old, but its SACK blocks may be new.
		if c.sackOK && s.Opts.NSACK > 0 && c.q.outstanding() {
			c.takeSACK(&a, s)
			c.recover(&a)
		}
		return true
	}
	wnd := int(s.Window) << c.sndShift
	outstanding := c.q.outstanding()
	if ack == c.una && s.Len == 0 && s.Flags&(SYN|FIN) == 0 && wnd == c.wnd {
		a.dup, a.plain = outstanding, s.Opts.NSACK == 0
		if a.dup {
			c.stats.DupAcksIn++
		}
	}
	a.acked = ack.Sub(c.una)
	if c.sackOK && s.Opts.NSACK > 0 {
		c.takeSACK(&a, s)
	}
	if a.acked > 0 {
		c.takeAck(&a, ack)
	}
	// A window belongs to its ACK: with an old one a new ACK would seem to allow more. So the window of a retransmission, which
	// has an old sequence number, counts if its ACK is new.
	if a.acked > 0 || c.wl1.Less(s.Seq) || c.wl1 == s.Seq && c.wl2.LessEq(ack) {
		c.setWindow(now, wnd)
		c.wl1, c.wl2 = s.Seq, ack
	}
	if a.acked > 0 {
		c.rto, c.backoff = max(c.rto, min(c.currentRTO(), initialRTO)), 0 // until something is timed (RFC 6298 5.5)
	}
	if a.acked > 0 || a.newSACK {
		if r := a.roundTrip(); r > 0 {
			c.sampleRTT(now, r)
		}
	}
	if outstanding || a.acked > 0 || a.dsack {
		c.recover(&a)
	} else if a.plain { // perhaps a tail probe was not needed, and the peer has no D-SACK
		c.tlpAck(&a)
	}
	if a.plain && c.lossUna.Less(c.una) && c.q.next-c.q.head <= 1 {
		c.tooShort() // no segment is missing: what timed out has arrived twice, and the peer has no D-SACK
	}
	if a.acked > 0 {
		c.progress = now
		c.softError = false
		c.restartRTO(now)
		if c.q.empty() {
			c.stop(timerUser)
		} else {
			c.armUser(now)
		}
	} else if a.newSACK {
		c.scheduleTLP(now)
	}
	c.armPersist(now)
	if c.q.empty() && c.finQueued && c.una == c.pushNxt {
		c.finAcked(now)
	}
	return c.state != Closed
}

// setWindow updates the peer's window.
func (c *Conn) setWindow(now clock.Time, wnd int) {
	if wnd > 0 && c.wnd == 0 {
		c.endPersist(now)
		c.progress = now
		c.PathChanged(now) // time-outs while the peer had no room say nothing about later
	}
	c.wnd = wnd
	c.maxWnd = max(c.maxWnd, wnd)
}

// finAcked is called when all data and our FIN are acknowledged.
func (c *Conn) finAcked(now clock.Time) {
	switch c.state {
	case FinWait1:
		c.state = FinWait2
		if c.cfg.FinWait2 > 0 {
			c.arm(timerTimeWait, now.Add(c.cfg.FinWait2))
		}
	case Closing:
		c.timeWait(now)
	case LastAck:
		c.end(nil)
	}
}

// takeAck removes cumulatively acknowledged segments from the send queue.
func (c *Conn) takeAck(a *ackState, ack serial.Num) {
	c.una = ack
	for c.q.outstanding() {
		s := c.q.at(c.q.head)
		if ack.Less(s.end()) {
			if s.run() {
				if part := c.q.popPart(ack); part.len > 0 {
					c.news(a, &part)
					a.timed(&part)
					a.segs += part.segs()
				}
			}
			break
		}
		if s.state != sacked {
			c.news(a, s)
			if s.retrans == 0 {
				a.timed(s)
			}
		}
		if s.retrans != 0 {
			a.retrans = true
			if s.sent >= a.resent {
				a.resent, a.echoRTT = s.sent, 0
				if a.tsEcr != 0 && a.tsEcr == c.tsAt(s.sent) {
					a.echoRTT = a.now.Sub(s.sent)
				}
			}
		}
		a.segs += s.segs()
		c.release(s)
		c.q.pop()
	}
	if !c.q.outstanding() && c.q.hasUnsent() && c.q.at(c.q.next).seq.Less(ack) {
		c.stats.BytesOut += uint64(c.takeProbe(ack))
	}
}

// timed takes the round-trip time of s, which was sent once.
func (a *ackState) timed(s *seg) {
	a.lastRTT = a.now.Sub(s.sent)
	if a.rtt == 0 {
		a.rtt = a.lastRTT
	}
}

// takeProbe removes from the unsent data a byte or FIN that reached the peer as a window probe, and returns the number of bytes. Sending
// it again would be useless: the ACK for it would carry no news.
func (c *sndSpace) takeProbe(ack serial.Num) int {
	s := c.q.at(c.q.next)
	n := min(ack.Sub(s.seq), int(s.len))
	s.seq, s.off, s.len = s.seq.Add(n), s.off+int32(n), s.len-int32(n)
	c.q.unsent -= n
	if s.len == 0 && s.end().LessEq(ack) {
		c.release(s)
		c.q.head++
		c.q.next++
	}
	return n
}

// news records what the arrival of s, or of the first part of a run, says about the path.
func (c *Conn) news(a *ackState, s *seg) {
	a.delivered += int(s.len)
	if c.useSACK && s.retrans == 0 && s.end().Less(a.fack) {
		c.rack.reordering = true // RFC 8985 6.2 step 3
	}
	if s.retrans == 0 && s.seq.Less(c.frtoHigh) {
		a.original = true
	}
	c.proven = max(c.proven, s.first())
	c.rack.update(a, s, &c.options)
}

// takeSACK marks the segments that the SACK blocks of s cover (RFC 2018, RFC 2883).
func (c *Conn) takeSACK(a *ackState, s *Segment) {
	o := &s.Opts
	n := int(o.NSACK)
	c.stats.SACKIn += uint64(n)
	first := 0
	b := o.SACK[0]
	if b.Start.Less(b.End) && (b.End.LessEq(s.Ack) ||
		n > 1 && o.SACK[1].Start.LessEq(b.Start) && b.End.LessEq(o.SACK[1].End)) {
		// RFC 2883 4: the first block reports a duplicate.
		first = 1
		// Ignore a D-SACK for data older than anything that may be outstanding. A sender with segmentation offload repeats the same D-SACK
		// in every segment, so count it once.
		if c.dsackFrom().LessEq(b.Start) && b.End.LessEq(c.nxt) && b != c.lastDSACK {
			a.dsack, c.lastDSACK = true, b
			c.stats.DSACKIn++
		}
	}
	for _, b := range o.SACK[first:n] {
		if !b.Start.Less(b.End) || b.Start.Less(s.Ack) || c.nxt.Less(b.End) || b.End.LessEq(c.una) {
			continue
		}
		c.q.divide()
		c.markSACKed(a, b)
	}
}

// dsackFrom returns the sequence number of the oldest data that a D-SACK may report.
func (c *sndSpace) dsackFrom() serial.Num { return c.una.Add(-max(c.maxWnd, 1<<16)) }

// markSACKed marks the segments that b covers.
func (c *Conn) markSACKed(a *ackState, b SACKBlock) {
	for p := c.q.skip(c.q.find(b.Start)); p != c.q.next; p = c.q.skip(p + 1) {
		s := c.q.at(p)
		if b.End.Less(s.end()) {
			return
		}
		c.useSACK = true
		c.news(a, s)
		if s.retrans == 0 && s.sent >= c.expiredAt {
			// Use the latest segment: ACKs that reported the others may have been lost, as those before a time-out were.
			if d := a.now.Sub(s.sent); a.sackRTT == 0 || d < a.sackRTT {
				a.sackRTT = d
			}
		}
		c.q.markSACKed(p)
		a.newSACK = true
	}
}

// roundTrip returns the sample that the ACK gives to the RTT estimator, or 0 (RFC 6298, RFC 7323 4). When an ACK fills a
// hole, the data after the hole may have arrived long ago, so it gives no sample. Retransmissions are timed only if the
// timestamp shows that the ACK answers the last one that it acknowledges (Karn's algorithm): the echo of an earlier
// transmission would make a lost ACK look like a long path. The same holds for data selectively acknowledged together with a
// retransmission.
func (a *ackState) roundTrip() time.Duration {
	switch {
	case a.rtt > 0 && !a.retrans:
		return a.rtt
	case a.echoRTT > 0:
		return a.echoRTT
	case !a.retrans:
		return a.sackRTT
	}
	return 0
}
