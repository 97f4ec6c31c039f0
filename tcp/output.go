package tcp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// PollTransmit returns the next segment to send: retransmissions first, then new records, then an ACK that is due and that none of these
// carried. The caller may stop at any time; pending segments are kept. It must drain PollTransmit after EventClosed too: the last segment
// may be a RST.
func (c *Conn) PollTransmit(now clock.Time, o *Out) bool {
	if c.rstPending {
		c.sendRST(o)
		return true
	}
	switch c.state {
	case Closed:
		return false
	case SynSent, SynReceived:
		if c.synPending {
			c.sendSYN(now, o)
			return true
		}
		if c.state == SynReceived && c.ackNow {
			c.sendAck(now, o)
			return true
		}
		return false
	}
	if c.earlyAcks.len() > 0 {
		c.sendEarlyAck(now, o)
		return true
	}
	if c.state != TimeWait && c.sendSegment(now, o) {
		return true
	}
	if c.ackNow || c.dupAcksOwed > 0 {
		c.sendAck(now, o)
		return true
	}
	return false
}

// PollFollowing returns in o the segment after the one in o, which PollTransmit or PollFollowing has just returned, if both are new data and
// their headers differ only in the sequence number, as in a burst. Otherwise it returns false, and PollTransmit returns what is next.
func (c *Conn) PollFollowing(now clock.Time, o *Out) bool {
	p := c.q.next
	if o.Flags != ACK|PSH || o.Retransmit || o.Opts.NSACK > 0 || p == c.q.tail || c.q.lostSegs > 0 || c.tlp.step == tailDue || c.probePending ||
		c.earlyAcks.len() > 0 || c.dsack != (SACKBlock{}) || len(c.reasm.s) > 0 {
		return false
	}
	s := c.fitRun(p)
	if s.fin || s.seq != o.Seq.Add(o.Len) || !c.fits(s) || !c.allowed(int(s.len)) || c.paced(now, int(s.len)) {
		return false
	}
	o.Buf, o.Off, o.Len, o.Size, o.Seq = s.buf, int(s.off), int(s.len), s.first(), s.seq
	c.stats.SegsOut += uint64(s.segs())
	c.inTransit(now, p)
	c.scheduleTLP(now)
	return true
}

func (c *Conn) sendRST(o *Out) {
	c.rstPending = false
	*o = Out{Buf: NoBuf}
	o.SrcPort, o.DstPort = c.flow.LocalPort, c.flow.RemotePort
	o.Seq = c.rstSeq
	o.Flags = RST
	if c.rstFinal {
		o.Flags |= ACK
		o.Ack = c.rcvNxt
	}
	c.stats.SegsOut++
}

// sendSYN builds the SYN of SYN-SENT or the SYN-ACK of SYN-RECEIVED.
func (c *Conn) sendSYN(now clock.Time, o *Out) {
	c.synPending = false
	*o = Out{Buf: NoBuf, Retransmit: c.synRetries > 0}
	o.SrcPort, o.DstPort = c.flow.LocalPort, c.flow.RemotePort
	o.Seq = c.iss
	o.Flags = SYN
	o.Window = uint16(min(c.rcvMax, 0xffff))
	o.Opts.MSS = uint16(c.offeredMSS())
	open := c.state == SynSent
	o.Opts.SACKPermitted = !c.cfg.NoSACK && (open || c.sackOK)
	if o.Opts.HasWScale = !c.cfg.NoWindowScale && (open || c.wsOK); o.Opts.HasWScale {
		o.Opts.WScale = c.rcvShift
	}
	if o.Opts.HasTimestamps = !c.cfg.NoTimestamps && (open || c.tsOK); o.Opts.HasTimestamps {
		o.Opts.TSVal = c.tsAt(now)
	}
	if open {
		if c.cfg.requestsECN() && c.synRetries == 0 {
			o.Flags |= ECE | CWR // RFC 3168 6.1.1; a path may drop such SYNs
		}
	} else {
		o.Flags |= ACK
		o.Ack = c.rcvNxt
		o.Opts.TSEcr = c.tsRecent
		if c.ecnOK {
			o.Flags |= ECE
			if c.active {
				o.Flags |= CWR // simultaneous open: the peer has not seen our SYN before
			}
		}
	}
	c.synCopies++
	c.synSent = now
	c.stats.SegsOut++
	if o.Retransmit {
		c.stats.Retransmits++
		c.stats.RetransRTO++
	}
}

// tsAt returns the timestamp clock: one tick per millisecond (RFC 7323 5.4).
func (o *options) tsAt(t clock.Time) uint32 { return uint32(uint64(t)/1e6) + o.tsOff }

// header fills in the fields common to all segments after the handshake, and notes that the segment carries an ACK. SACK blocks are added
// as far as a full segment leaves room for them.
func (c *Conn) header(now clock.Time, o *Out, payload int) {
	o.SrcPort, o.DstPort = c.flow.LocalPort, c.flow.RemotePort
	o.Flags = ACK
	o.Ack = c.rcvNxt
	o.Window = c.window()
	if c.tsOK {
		o.Opts.HasTimestamps = true
		o.Opts.TSVal = c.tsAt(now)
		o.Opts.TSEcr = c.tsRecent
	}
	due := false // the ACK stays due if it has no room for a SACK block
	if c.sackOK && (c.dsack != (SACKBlock{}) || len(c.reasm.s) > 0) {
		room := min(maxOptionLen-o.Opts.fixedLen(), c.mss-payload)
		if k := sackFit(maxSACK, room); k > 0 {
			c.putSACK(&o.Opts, k)
		} else {
			due = true
		}
	}
	if c.ecnOK && c.ceSeen {
		o.Flags |= ECE
	}
	c.ackNow = c.ackNow && due
	c.unacked = 0
	c.stop(timerDelayedAck)
	c.lastAckSent = c.rcvNxt
	c.stats.SegsOut++
}

func (c *Conn) putSACK(o *Options, k int) {
	n := 0
	if c.dsack != (SACKBlock{}) {
		o.SACK[0], c.dsack = c.dsack, SACKBlock{}
		n = 1
		c.stats.DSACKOut++
	}
	n += c.reasm.blocks(o.SACK[n:k])
	o.NSACK = uint8(n)
	c.stats.SACKOut += uint64(n)
}

// leastHeld is the minimum window offered, in segments. Segments in order need not be held, and a closed window would stall the connection
// until the peer probes it.
const leastHeld = 16

// rcvLimit returns the largest window worth offering now: what the frames that may be held can store, if segments stay as long as recently.
// It is at least two segments of the largest size: a peer with a long segment would otherwise wait and then send part of it (RFC 9293
// 3.8.6.2.1).
func (c *Conn) rcvLimit() int {
	held := min(max(c.mayHold, leastHeld), c.cfg.MaxHeld)
	return min(c.rcvMax, max(held*max(c.rcvMean/16, minMSS), 2*c.offeredMSS()))
}

// window returns the window to offer. Its right edge never moves left (RFC 9293 SHLD-14), and moves right by at least one segment or half
// of the largest window (MUST-39, 3.8.6.2.2).
func (c *Conn) window() uint16 {
	have := c.rcvAdv.Sub(c.rcvNxt)
	limit := c.rcvLimit()
	want := max(0, limit-c.backlog)
	if want-have < min(limit/2, max(c.rcvMSS, c.mss)) && want < limit {
		want = have
	}
	v := want >> c.rcvShift
	if v<<c.rcvShift < have {
		v = (have + 1<<c.rcvShift - 1) >> c.rcvShift
	}
	v = min(v, 0xffff)
	c.rcvAdv = serial.Max(c.rcvAdv, c.rcvNxt.Add(v<<c.rcvShift))
	return uint16(v)
}

// sendEarlyAck builds the oldest of the ACKs that precede that of the current state.
func (c *Conn) sendEarlyAck(now clock.Time, o *Out) {
	e, _ := c.earlyAcks.pop()
	dups, dsack := c.dupAcksOwed, c.dsack
	c.dsack = e.dsack
	c.sendAck(now, o)
	c.ackNow, c.dupAcksOwed, c.dsack = true, dups, dsack
	o.Ack = e.ack
	o.Window = uint16(min(int(o.Window)+c.rcvNxt.Sub(e.ack)>>c.rcvShift, 0xffff)) // the same right edge
	o.Flags &^= ECE
	if e.ece {
		o.Flags |= ECE
	}
}

// sendAck builds a segment without payload.
func (c *Conn) sendAck(now clock.Time, o *Out) {
	*o = Out{Buf: NoBuf}
	dups := c.dupAcksOwed
	c.header(now, o, 0)
	c.ackNow = false
	c.dupAcksOwed = max(0, dups-1)
	o.Seq = c.bareSeq()
	c.stats.AcksOut++
}

// bareSeq returns the sequence number of a segment without text: SND.NXT, but not beyond the peer's window, where a probe of that window may
// be. The peer would take neither an ACK nor a RST from there (RFC 9293 3.10.7.4); if it reads only once its own data is acknowledged, its
// window would stay closed. The end of an open window may move back by what its scale rounds off, although the peer has all up to
// SND.NXT; it would not take what is before that.
func (c *Conn) bareSeq() serial.Num {
	end := c.edge()
	if c.state < Established || c.nxt.LessEq(end) || c.wnd > 0 && c.nxt.Sub(end) < 1<<c.sndShift {
		return c.nxt
	}
	return end
}

// sendSegment builds the next segment with payload or FIN, or a probe.
func (c *Conn) sendSegment(now clock.Time, o *Out) bool {
	if c.q.lostSegs > 0 && c.frto != frtoNewData {
		if p := c.q.firstLost(); c.allowed(int(c.q.at(p).len)) || c.forceRetransmit {
			if !c.paced(now, int(c.q.at(p).len)) {
				c.forceRetransmit = false
				c.transmit(now, o, p, true)
				if c.ca == caLoss {
					c.stats.RetransRTO++
				} else {
					c.stats.RetransFast++
				}
				return true
			}
			return c.sendProbe(now, o)
		}
	}
	if c.tlp.step == tailDue {
		c.tlp.step = tailNone
		if c.q.outstanding() && c.ca <= caCWR && c.q.at(c.q.next-1).state == inFlight {
			c.sendTailProbe(now, o)
			return true
		}
	}
	if p := c.q.next; p != c.q.tail && (c.q.lostSegs == 0 || c.frto == frtoNewData) {
		c.restartAfterIdle(now)
		s := c.fitRun(p)
		c.fitWindow(s)
		s = c.q.at(p)
		if c.fits(s) && c.allowed(int(s.len)) {
			if !c.paced(now, int(s.len)) {
				c.transmit(now, o, p, false)
				return true
			}
		} else if !c.fits(s) {
			c.armPersist(now)
		}
	}
	return c.sendProbe(now, o)
}

// allowed reports whether the congestion window has room for n more bytes.
func (s *sender) allowed(n int) bool {
	pipe := s.pipe()
	return pipe+n <= s.w.cwnd || pipe == 0
}

// fitRun returns the segment at p, the next to be sent. It splits a run so that the burst and the windows have room for what it returns,
// which is one segment at least.
func (c *Conn) fitRun(p uint64) *seg {
	s := c.q.at(p)
	if !s.run() {
		return s
	}
	unit := int(s.unit)
	room := min(c.burst*unit, c.edge().Sub(s.seq), c.w.cwnd-c.pipe())
	if c.cfg.MaxBurst > 0 && c.srtt != 0 {
		room = min(room, c.bucket)
	}
	if n := max(room/unit, 1) * unit; n < int(s.len) {
		c.q.cut(p, int32(n))
	}
	return c.q.at(p)
}

// fits reports whether the peer's window has room for the unsent segment s, or the first one of a run.
func (c *sndSpace) fits(s *seg) bool {
	edge := c.edge()
	if s.fin && s.len == 0 {
		return s.seq.LessEq(edge) // a FIN may be at the right edge
	}
	return s.seq.Add(s.first()).LessEq(edge)
}

// fitWindow splits the unsent segment s if it is longer than a window that is at least half of the largest seen and nothing is in flight
// whose ACK could widen it (RFC 9293 3.8.6.2.1 (3)).
func (c *sndSpace) fitWindow(s *seg) {
	if c.q.outstanding() || c.fits(s) {
		return
	}
	room := c.edge().Sub(s.seq)
	if room > 0 && room < int(s.len) && 2*room >= c.maxWnd {
		c.q.cut(c.q.next, int32(room))
	}
}

// transmit builds the segment at position p.
func (c *Conn) transmit(now clock.Time, o *Out, p uint64, again bool) {
	s := c.q.at(p)
	if !again && !c.q.outstanding() {
		c.progress = now // R2 starts with the first byte sent
		if !c.armed(timerUser) {
			c.armUser(now)
		}
	}
	*o = Out{Buf: s.buf, Off: int(s.off), Len: int(s.len), Size: s.first(), Retransmit: again}
	c.header(now, o, o.Size)
	c.stats.SegsOut += uint64(s.segs() - 1)
	o.Seq = s.seq
	if s.len > 0 {
		o.Flags |= PSH
	} else {
		o.Buf = NoBuf
	}
	if s.fin {
		o.Flags |= FIN
	}
	if again {
		if s.retrans < 255 {
			s.retrans++
		}
		if c.undo.set {
			c.undo.count(int(s.len), c.tsAt(now))
		}
		c.stats.Retransmits++
		c.stats.RetransBytes += uint64(s.len)
	} else {
		// Not on retransmissions (RFC 3168 6.1.5). A SYN without ECN leaves it to the receiving half (6.1.1).
		if c.ecnOK && s.len > 0 && (!c.active || c.synRetries == 0) {
			o.ECN = ect0
			if c.cwrPending {
				o.Flags |= CWR
				c.cwrPending = false
			}
		}
	}
	c.inTransit(now, p)
	if !c.armed(timerRTO) {
		c.arm(timerRTO, now.Add(c.currentRTO()))
	}
	if !again {
		c.scheduleTLP(now)
	}
}

// inTransit records that the segment at p is being sent.
func (c *Conn) inTransit(now clock.Time, p uint64) {
	s := c.q.at(p)
	if s.state == unsent {
		c.stats.BytesOut += uint64(s.len)
		c.nxt = serial.Max(c.nxt, s.end())
	}
	c.q.markSent(now, p)
	if c.w.cwnd-c.pipe() < c.w.mss {
		c.limitedNow = true
	}
	c.prr.out += int(s.len)
	c.bucket -= int(s.len)
	c.lastSend = now
}

// sendTailProbe sends the probe of RFC 8985 7.3: new data if the peer's window allows any, else the last segment again.
func (c *Conn) sendTailProbe(now clock.Time, o *Out) {
	c.q.divide()
	if p := c.q.next; p != c.q.tail && c.fits(c.q.at(p)) {
		c.tlp.step = tailNew
		c.transmit(now, o, p, false)
	} else {
		c.tlp.step = tailRetrans
		c.stats.RetransTLP++
		c.transmit(now, o, c.q.next-1, true)
	}
	c.tlp.end = c.nxt
	c.stop(timerTLP)
}

// sendProbe builds a window probe or a keep-alive.
func (c *Conn) sendProbe(now clock.Time, o *Out) bool {
	switch {
	case c.probePending:
		c.probePending = false
		if c.q.outstanding() || !c.q.hasUnsent() || c.fits(c.q.at(c.q.next)) {
			return false
		}
		// One byte beyond the window (RFC 9293 MUST-36), or the FIN if nothing else is queued.
		s := c.q.single(c.q.next)
		*o = Out{Buf: s.buf, Off: int(s.off), Len: min(1, int(s.len)), Size: 1}
		c.header(now, o, 1)
		o.Seq = s.seq
		if s.len == 0 {
			o.Flags |= FIN
		}
		c.nxt = serial.Max(c.nxt, s.seq+1)
		c.stats.WindowProbes++
		return true
	case c.keepPending:
		c.keepPending = false
		*o = Out{Buf: NoBuf}
		c.header(now, o, 0)
		o.Seq = c.una - 1 // RFC 9293 3.8.4
		return true
	}
	return false
}

// restartAfterIdle lowers a window that was not used for longer than an RTO (RFC 5681 4.1). Slow start restores most of it (RFC 2861 3.1).
func (s *sender) restartAfterIdle(now clock.Time) {
	if s.q.outstanding() || now.Sub(s.lastSend) <= s.rto {
		return
	}
	s.cc.idle(now)
	s.w.ssthresh = max(s.w.ssthresh, s.w.cwnd/4*3)
	s.w.cwnd = min(s.w.cwnd, max(s.initialWindow, 2*s.w.mss))
	s.limited, s.limitedNow = false, false
}

// paced reports whether a segment of n bytes must wait because a burst of the maximum length has just left.
func (c *Conn) paced(now clock.Time, n int) bool {
	full := c.cfg.MaxBurst * c.w.mss
	if full <= 0 || c.srtt == 0 || c.bucket >= n {
		return false
	}
	d := c.wait(now, n, full, &c.w, c.srtt)
	if d == 0 {
		c.stop(timerPace)
		return false
	}
	c.arm(timerPace, now.Add(d))
	return true
}
