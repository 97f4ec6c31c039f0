package tcp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// caState is the state of congestion avoidance.
type caState uint8

const (
	caOpen     caState = iota
	caCWR              // lowering the window for an ECN echo
	caRecovery         // fast recovery (RFC 6675, RFC 6937)
	caLoss             // after a time-out
)

// recoveryState is the totals of the scoreboard and the state of loss recovery.
type recoveryState struct {
	inFlight      int // bytes of segments in flight
	lostBytes     int
	lostSegs      int
	lostHint      uint64 // no segment before this position is lost
	sackedSegs    int
	useSACK       bool      // the peer reports out-of-order data with SACK
	plainDups     int       // duplicate ACKs that lack an expected SACK block
	lastDSACK     SACKBlock // last D-SACK from the peer
	dupAcks       int       // duplicate ACKs of a peer without SACK
	ca            caState
	recoverPoint  serial.Num // RecoveryPoint of RFC 6675
	everRecovered bool       // recoverPoint is that of a reduction in progress, or of a time-out, and una has not passed it
	lossUna       serial.Num // una at the last time-out
	frto          frtoStep
	frtoHigh      serial.Num
	initialWindow int

	// Proportional rate reduction, RFC 6937.
	prrDelivered, prrOut, recoverFS int
	forceRetransmit                 bool

	// State of undo, tail loss probe, RACK and the round trip.
	undoSet                  bool
	undoFrom, undoTo         serial.Num // range outstanding when the reduction began
	undoRetrans              int        // bytes retransmitted and not yet reported as duplicates by a D-SACK
	priorCwnd, priorSsthresh int
	tlpEnd                   serial.Num
	tlpPending, tlpActive    bool
	tlpRetrans               bool
	rack                     rackState
	order                    uint32     // transmission counter, copied to each segment sent
	roundEnd                 serial.Num // end of the current round trip
	limited, limitedNow      bool       // the window was fully used in the last round, and in this one
	reduced                  bool
	reducedAt                serial.Num // nxt at the last reduction. ECN echoes count again, and reduced is cleared, once una has passed it: only then may the CWR sent there have arrived.
}

// pipe estimates the bytes in the network (RFC 6675 section 4). For a peer without SACK each duplicate ACK stands for one segment that has
// arrived.
func (c *Conn) pipe() int {
	if c.dupAcks == 0 {
		return c.inFlight
	}
	return max(0, c.inFlight-c.dupAcks*c.w.mss)
}

// markLost marks the segment at p, which is in flight, as lost.
func (c *Conn) markLost(p uint64) {
	s := c.q.at(p)
	c.q.unlink(p)
	s.state = lost
	c.inFlight -= int(s.len)
	c.lostBytes += int(s.len)
	c.lostSegs++
	c.lostHint = min(c.lostHint, p)
}

// recover updates loss recovery and the congestion window for one ACK.
func (c *Conn) recover(a *ackState) {
	found, acked := false, a.acked
	if c.ca == caLoss { // much of it may have arrived long ago (RFC 5681 (2))
		if acked = a.delivered; !c.useSACK {
			acked = min(acked, c.w.mss)
		}
	}
	if a.dsack {
		c.rack.noteDSACK(c.una, c.nxt)
		if c.undoSet && c.undoRetrans > 0 && c.undoFrom.LessEq(c.lastDSACK.Start) && c.lastDSACK.End.LessEq(c.undoTo) {
			c.undoRetrans = max(0, c.undoRetrans-c.lastDSACK.End.Sub(c.lastDSACK.Start))
		}
	}
	c.tlpAck(a)
	c.watchSACK(a)
	if c.useSACK {
		if a.advanced || a.newSACK {
			found = c.rackDetect(a.now)
		}
	} else {
		found = c.countDupAcks(a)
	}
	c.tryUndo(a)

	if c.ca == caLoss {
		c.detectSpurious(a)
	}
	if c.ca != caOpen && c.recoverPoint.LessEq(c.una) {
		c.endRecovery()
	}
	if found {
		c.lossFound(a)
	}
	// Clear marks that una has passed: sequence numbers compare wrongly after another 2 GiB.
	if c.reduced && c.reducedAt.Less(c.una) {
		c.reduced = false
	}
	if c.everRecovered && c.ca == caOpen && c.recoverPoint.Less(c.una) {
		c.everRecovered = false
	}
	if c.rack.dsackSet && c.rack.dsackRound.LessEq(c.una) {
		c.rack.dsackSet = false
	}
	if c.undoSet && c.undoTo.Less(c.dsackFrom()) {
		c.undoSet = false
	}
	if a.ece && c.ca == caOpen && !c.reduced {
		c.stats.ECNReductions++
		c.undoSet = false // a D-SACK for an earlier loss would take back this reduction too
		c.enterCWR(a.now, true)
	}
	if a.advanced && a.acked > 0 {
		round := c.roundEnd.LessEq(c.una)
		if round {
			c.roundEnd = c.nxt
			c.limited, c.limitedNow = c.limitedNow, false
		}
		g := &c.sample // an argument of an interface method would escape to the heap
		*g = ackSample{now: a.now, acked: acked, rtt: a.lastRTT, srtt: c.srtt, ece: a.ece,
			round: round, limited: c.limited || c.limitedNow}
		c.cc.seen(&c.w, g)
		if (c.ca == caOpen && c.lostSegs == 0 || c.ca == caLoss && c.frto == frtoOff) && g.limited {
			c.cc.grow(&c.w, g)
		}
	}
	if c.ca == caRecovery || c.ca == caCWR {
		c.reduceRate(a, found)
	}
}

// watchSACK detects a peer that agreed to SACK but sends duplicate ACKs without blocks, as some do after they have closed their side. The
// peer is treated as one without SACK until it sends a block.
func (c *Conn) watchSACK(a *ackState) {
	switch {
	case a.advanced || a.newSACK:
		c.plainDups = 0
	case c.useSACK && a.plain && c.sackedSegs == 0:
		if c.plainDups++; c.plainDups >= dupThresh {
			c.useSACK = false
			c.q.divide()
			c.dupAcks = c.plainDups - 1 // this ACK is counted next
			c.plainDups = 0
			c.stop(timerTLP)
			c.stop(timerRACK)
			c.tlpPending, c.tlpActive = false, false
		}
	}
	if c.useSACK {
		c.dupAcks = 0
	}
}

// countDupAcks is RFC 6582, for a peer without SACK. It reports whether it found a new loss.
func (c *Conn) countDupAcks(a *ackState) bool {
	if a.advanced {
		if c.ca == caRecovery && c.una.Less(c.recoverPoint) {
			// A partial ACK: the next segment is lost too.
			c.dupAcks = max(0, c.dupAcks-max(a.segs-1, 0))
			if c.q.head != c.q.next && c.q.at(c.q.head).state == inFlight {
				c.markLost(c.q.head)
				return true
			}
			return false
		}
		c.dupAcks = 0
		return false
	}
	if !a.dup || c.ca == caLoss {
		return false
	}
	if c.dupAcks < int(c.q.next-c.q.head) {
		c.dupAcks++
	}
	if c.dupAcks >= dupThresh && c.ca < caRecovery && (!c.everRecovered || c.recoverPoint.Less(c.una)) &&
		c.q.at(c.q.head).state == inFlight {
		c.markLost(c.q.head)
		return true
	}
	return false
}

// lossFound enters fast recovery, unless it is already active.
func (c *Conn) lossFound(a *ackState) {
	if c.ca >= caRecovery {
		return
	}
	c.stats.Recoveries++
	if c.ca != caCWR {
		c.saveUndo()
		c.countRetrans()
		c.beginReduction(a.now, false)
	}
	c.ca = caRecovery
	c.recoverPoint = c.nxt
	c.everRecovered = true
	c.forceRetransmit = true
	c.tlpActive = false
	c.stop(timerTLP)
}

// saveUndo saves the window and threshold that undo restores.
func (c *Conn) saveUndo() {
	c.priorCwnd, c.priorSsthresh = c.w.cwnd, c.w.ssthresh
	if c.ca == caRecovery {
		// The loss that began this recovery is real, so undo may only revert the further reduction. The window is on its way to ssthresh.
		c.priorCwnd = c.w.ssthresh
	}
	c.undoSet = true
	c.undoFrom, c.undoTo = c.una, c.nxt
}

// countRetrans starts counting the bytes of retransmissions that may prove needless. Retransmissions already in flight
// are included: a D-SACK for one of those must not be taken as evidence about later ones.
func (c *Conn) countRetrans() {
	c.undoRetrans = 0
	c.tsSentValid = false
	for p := c.q.oldest; p != noPos; p = c.q.at(p).next {
		s := c.q.at(p)
		if s.retrans == 0 {
			continue
		}
		c.undoRetrans += int(s.len)
		if !c.tsSentValid {
			c.tsSent, c.tsSentValid = c.tsAt(s.sent), true
		}
	}
}

func (c *Conn) beginReduction(now clock.Time, ecn bool) {
	c.cwrPending = c.ecnOK // RFC 3168 6.1.2: for a reduction of any cause
	flight := c.nxt.Sub(c.una)
	c.w.ssthresh = c.cc.reduce(&c.w, now, min(flight, c.w.cwnd), ecn)
	c.reduced, c.reducedAt = true, c.nxt
	c.prrDelivered, c.prrOut = 0, 0
	c.recoverFS = max(flight, 1)
}

// enterCWR reduces the window over one round trip.
func (c *Conn) enterCWR(now clock.Time, ecn bool) {
	c.beginReduction(now, ecn)
	c.ca = caCWR
	c.recoverPoint = c.nxt
	c.everRecovered = true
}

// reduceRate is RFC 6937 section 3, the variant bounded by slow start (PRR-SSRB).
func (c *Conn) reduceRate(a *ackState, newLoss bool) {
	c.prrDelivered += a.delivered
	pipe := c.pipe()
	var n int
	if pipe > c.w.ssthresh {
		n = int((int64(c.prrDelivered)*int64(c.w.ssthresh)+int64(c.recoverFS)-1)/int64(c.recoverFS)) - c.prrOut
	} else {
		limit := c.prrDelivered - c.prrOut
		if a.advanced && !newLoss {
			limit = max(limit, a.delivered) + c.w.mss
		}
		n = min(c.w.ssthresh-pipe, max(limit, a.delivered))
	}
	n = max(n, 0)
	if c.forceRetransmit {
		n = max(n, c.w.mss)
	}
	c.w.cwnd = max(pipe+n, c.w.mss)
}

// endRecovery ends a recovery: everything outstanding at its start is acknowledged.
func (c *Conn) endRecovery() {
	if c.ca != caLoss {
		c.w.cwnd = max(c.w.ssthresh, c.w.mss)
		c.everRecovered = false
	}
	if c.ca == caRecovery || c.ca == caLoss {
		c.rack.recovered()
	}
	c.ca = caOpen
	c.frto = frtoOff
	c.forceRetransmit = false
	c.dupAcks = 0
}

// tryUndo reverts a reduction if D-SACKs report every retransmission as a duplicate, or a timestamp shows that the ACK answers the original
// transmission (RFC 3522).
func (c *Conn) tryUndo(a *ackState) {
	if !c.undoSet || c.ca == caOpen && !a.dsack {
		return
	}
	early := a.advanced && a.hasTS && c.tsSentValid && int32(a.tsEcr-c.tsSent) < 0 && c.ca >= caRecovery
	all := a.dsack && c.undoRetrans == 0 && c.tsSentValid
	if !early && !all {
		return
	}
	if c.ca == caLoss {
		c.stats.SpuriousRTO++
	}
	c.undo()
}

// undo restores the window and marks lost segments as in flight again.
func (c *Conn) undo() {
	c.stats.Undos++
	c.undoSet = false
	c.tsSentValid = false
	for p := c.q.head; c.lostSegs > 0 && p != c.q.next; p++ {
		s := c.q.at(p)
		if s.state != lost {
			continue
		}
		s.state = inFlight
		c.lostSegs--
		c.lostBytes -= int(s.len)
		c.inFlight += int(s.len)
	}
	c.q.relink()
	c.w.cwnd = max(c.w.cwnd, c.priorCwnd)
	c.w.ssthresh = max(c.w.ssthresh, c.priorSsthresh)
	c.cc.undo(&c.w)
	c.limited, c.limitedNow = false, false // only the reduced window was fully used
	c.ca = caOpen
	c.frto = frtoOff
	c.forceRetransmit = false
	c.dupAcks = 0
	c.backoff = 0
}

// frtoStep is the step of F-RTO (RFC 5682 3.1) after a time-out.
type frtoStep uint8

const (
	frtoOff      frtoStep = iota
	frtoTimedOut          // step 1: the first segment was retransmitted
	frtoNewData           // step 2b: new data was sent, to test the path
)

// detectSpurious is F-RTO (RFC 5682 3.1, SACK version), which detects a spurious time-out.
func (c *Conn) detectSpurious(a *ackState) {
	switch {
	case c.frto == frtoOff:
	case a.original && (c.useSACK || !a.retrans):
		// A segment sent before the time-out, and not retransmitted, has arrived. Without SACK, the ACK of the retransmission is the first
		// that can report it, however long ago it arrived (RFC 5682 2.1, 2).
		c.stats.SpuriousRTO++
		c.everRecovered = false // one segment was sent again, so that duplicate ACKs of more are for a loss
		c.undo()
	case c.frto == frtoTimedOut && a.advanced && c.una.Less(c.recoverPoint):
		// If there is no new data, F-RTO ends.
		if c.q.next != c.q.tail && c.fits(c.q.at(c.q.next)) {
			c.frto = frtoNewData
			c.w.cwnd = c.pipe() + 2*c.w.mss
		} else {
			c.frto = frtoOff
		}
	case a.advanced || a.dup || a.newSACK:
		// Step 3a: the loss is real.
		c.frto = frtoOff
	}
}
