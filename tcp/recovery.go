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

// recoveryState is the state of loss recovery.
type recoveryState struct {
	useSACK         bool      // the peer reports out-of-order data with SACK
	plainDups       int       // duplicate ACKs that lack an expected SACK block
	lastDSACK       SACKBlock // last D-SACK from the peer
	dupAcks         int       // duplicate ACKs of a peer without SACK
	ca              caState
	recoverPoint    serial.Num // RecoveryPoint of RFC 6675
	recoverSet      bool       // recoverPoint is that of a reduction in progress, or of a time-out, and una has not passed it
	lossUna         serial.Num // una at the last time-out
	frto            frtoStep
	frtoHigh        serial.Num
	initialWindow   int
	forceRetransmit bool

	prr                 rateReduction
	undo                undoState
	tlp                 tailProbe
	rack                rackState
	roundEnd            serial.Num // end of the current round trip
	limited, limitedNow bool       // the window was fully used in the last round, and in this one
	reduced             bool
	reducedAt           serial.Num // nxt at the last reduction. ECN echoes count again, and reduced is cleared, once una has passed it: only then may the CWR sent there have arrived.
}

// rateReduction is proportional rate reduction (RFC 6937).
type rateReduction struct {
	delivered, out int // bytes since the reduction began: that have arrived, that were sent
	flight         int // bytes outstanding when it began: RecoverFS
}

// quota returns how many bytes may be sent now to lower pipe to ssthresh at the pace at which data arrives, or to keep it there: section
// 3, the variant bounded by slow start (PRR-SSRB). The ACK has reported delivered bytes; good if it has also advanced una, and
// found no new loss.
func (r *rateReduction) quota(delivered, pipe int, w *window, good bool) int {
	r.delivered += delivered
	if pipe > w.ssthresh {
		n := (int64(r.delivered)*int64(w.ssthresh) + int64(r.flight) - 1) / int64(r.flight)
		return max(int(n)-r.out, 0)
	}
	limit := r.delivered - r.out
	if good {
		limit = max(limit, delivered) + w.mss
	}
	return max(min(w.ssthresh-pipe, max(limit, delivered)), 0)
}

// undoState is what is needed to revert a reduction whose retransmissions were needless.
type undoState struct {
	set            bool
	from, to       serial.Num // range outstanding when the reduction began
	cwnd, ssthresh int        // before it
	retrans        int        // bytes retransmitted and not yet reported as duplicates by a D-SACK
	ts             uint32     // TSval of the first retransmission
	tsValid        bool
}

// save saves the window before a reduction. [from, to) is outstanding.
func (u *undoState) save(w *window, from, to serial.Num) {
	u.set = true
	u.from, u.to = from, to
	u.cwnd, u.ssthresh = w.cwnd, w.ssthresh
}

// recount starts counting the bytes of retransmissions that may prove needless. Retransmissions already in flight
// are included: a D-SACK for one of those must not be taken as evidence about later ones.
func (u *undoState) recount(q *sendq, o *options) {
	u.retrans = 0
	u.tsValid = false
	for p := q.oldest; p != noPos; p = q.at(p).next {
		if s := q.at(p); s.retrans > 0 {
			u.count(int(s.len), o.tsAt(s.sent))
		}
	}
}

// count counts a retransmission of n bytes with the timestamp ts.
func (u *undoState) count(n int, ts uint32) {
	u.retrans += n
	if !u.tsValid {
		u.ts, u.tsValid = ts, true
	}
}

// duplicate counts a D-SACK.
func (u *undoState) duplicate(b SACKBlock) {
	if u.set && u.retrans > 0 && u.from.LessEq(b.Start) && b.End.LessEq(u.to) {
		u.retrans = max(0, u.retrans-b.End.Sub(b.Start))
	}
}

// needless reports whether the ACK a shows that nothing was lost: D-SACKs have reported every retransmission as a duplicate, or a timestamp
// shows that the ACK answers the original transmission (RFC 3522).
func (u *undoState) needless(a *ackState, ca caState) bool {
	if !u.set || !u.tsValid {
		return false
	}
	return a.dsack && u.retrans == 0 || a.acked > 0 && a.answersBefore(u.ts) && ca >= caRecovery
}

// pipe estimates the bytes in the network (RFC 6675 section 4). For a peer without SACK each duplicate ACK stands for one segment that has
// arrived.
func (s *sender) pipe() int {
	if s.dupAcks == 0 {
		return s.q.inFlight
	}
	return max(0, s.q.inFlight-s.dupAcks*s.w.mss)
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
		c.undo.duplicate(c.lastDSACK)
		if c.q.sackedSegs == 0 && c.q.lostSegs == 0 { // on a lossy path the ACK was perhaps lost
			c.tooShort()
		}
	}
	c.tlpAck(a)
	c.watchSACK(a)
	if c.useSACK {
		if a.acked > 0 || a.newSACK {
			found = c.rackDetect(a.now)
		}
	} else {
		found = c.countDupAcks(a)
	}
	if c.undo.needless(a, c.ca) {
		c.revert()
	}

	if c.ca == caLoss {
		c.detectSpurious(a)
	}
	if c.ca != caOpen && c.recoverPoint.LessEq(c.una) {
		c.endRecovery()
	}
	if found {
		c.lossFound(a)
	}
	c.clearPassed(c.una, c.dsackFrom())
	if a.ece && c.ca == caOpen && !c.reduced {
		c.stats.ECNReductions++
		c.undo.set = false // a D-SACK for an earlier loss would take back this reduction too
		c.enterCWR(a.now, true)
	}
	if a.acked > 0 {
		round := c.roundEnd.LessEq(c.una)
		if round {
			c.roundEnd = c.nxt
			c.limited, c.limitedNow = c.limitedNow, false
		}
		g := &c.sample // an argument of an interface method would escape to the heap
		*g = ackSample{now: a.now, acked: acked, rtt: a.lastRTT, srtt: c.srtt, ece: a.ece,
			round: round, limited: c.limited || c.limitedNow}
		c.cc.seen(&c.w, g)
		if (c.ca == caOpen && c.q.lostSegs == 0 || c.ca == caLoss && c.frto == frtoOff) && g.limited {
			c.cc.grow(&c.w, g)
		}
	}
	if c.ca == caRecovery || c.ca == caCWR {
		c.reduceRate(a, found)
	}
}

// clearPassed clears marks that una has passed: sequence numbers compare wrongly after another 2 GiB. A D-SACK reports
// nothing older than oldest.
func (r *recoveryState) clearPassed(una, oldest serial.Num) {
	if r.reduced && r.reducedAt.Less(una) {
		r.reduced = false
	}
	if r.recoverSet && r.ca == caOpen && r.recoverPoint.Less(una) {
		r.recoverSet = false
	}
	if r.rack.dsackSet && r.rack.dsackRound.LessEq(una) {
		r.rack.dsackSet = false
	}
	if r.undo.set && r.undo.to.Less(oldest) {
		r.undo.set = false
	}
}

// watchSACK detects a peer that agreed to SACK but sends duplicate ACKs without blocks, as some do after they have closed their side. The
// peer is treated as one without SACK until it sends a block.
func (c *Conn) watchSACK(a *ackState) {
	switch {
	case a.acked > 0 || a.newSACK:
		c.plainDups = 0
	case c.useSACK && a.plain && c.q.sackedSegs == 0:
		if c.plainDups++; c.plainDups >= dupThresh {
			c.useSACK = false
			c.q.divide()
			c.dupAcks = c.plainDups - 1 // this ACK is counted next
			c.plainDups = 0
			c.stop(timerTLP)
			c.stop(timerRACK)
			c.tlp = tailProbe{}
		}
	}
	if c.useSACK {
		c.dupAcks = 0
	}
}

// countDupAcks is RFC 6582, for a peer without SACK. It reports whether it found a new loss.
func (s *sender) countDupAcks(a *ackState) bool {
	if a.acked > 0 {
		if s.ca == caRecovery && s.una.Less(s.recoverPoint) {
			// A partial ACK: the next segment is lost too.
			s.dupAcks = max(0, s.dupAcks-max(a.segs-1, 0))
			if s.q.outstanding() && s.q.at(s.q.head).state == inFlight {
				s.q.markLost(s.q.head)
				return true
			}
			return false
		}
		s.dupAcks = 0
		return false
	}
	if !a.dup || s.ca == caLoss {
		return false
	}
	if s.dupAcks < int(s.q.next-s.q.head) {
		s.dupAcks++
	}
	if s.dupAcks >= dupThresh && s.ca < caRecovery && (!s.recoverSet || s.recoverPoint.Less(s.una)) &&
		s.q.at(s.q.head).state == inFlight {
		s.q.markLost(s.q.head)
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
		c.undo.save(&c.w, c.una, c.nxt)
		c.undo.recount(&c.q, &c.options)
		c.beginReduction(a.now, false)
	}
	c.ca = caRecovery
	c.recoverPoint = c.nxt
	c.recoverSet = true
	c.forceRetransmit = true
	c.tlp.step = tailNone
	c.stop(timerTLP)
}

func (c *Conn) beginReduction(now clock.Time, ecn bool) {
	c.cwrPending = c.ecnOK // RFC 3168 6.1.2: for a reduction of any cause
	flight := c.nxt.Sub(c.una)
	c.w.ssthresh = c.cc.reduce(&c.w, now, min(flight, c.w.cwnd), ecn)
	c.reduced, c.reducedAt = true, c.nxt
	c.prr = rateReduction{flight: max(flight, 1)}
}

// enterCWR reduces the window over one round trip.
func (c *Conn) enterCWR(now clock.Time, ecn bool) {
	c.beginReduction(now, ecn)
	c.ca = caCWR
	c.recoverPoint = c.nxt
	c.recoverSet = true
}

// reduceRate sets the window while it is being reduced.
func (s *sender) reduceRate(a *ackState, newLoss bool) {
	pipe := s.pipe()
	n := s.prr.quota(a.delivered, pipe, &s.w, a.acked > 0 && !newLoss)
	if s.forceRetransmit {
		n = max(n, s.w.mss)
	}
	s.w.cwnd = max(pipe+n, s.w.mss)
}

// endRecovery ends a recovery: everything outstanding at its start is acknowledged.
func (s *sender) endRecovery() {
	if s.ca != caLoss {
		s.w.cwnd = max(s.w.ssthresh, s.w.mss)
		s.recoverSet = false
	}
	if s.ca == caRecovery || s.ca == caLoss {
		s.rack.recovered()
	}
	s.open()
}

// open ends whatever has reduced the window.
func (r *recoveryState) open() {
	r.ca, r.frto, r.forceRetransmit, r.dupAcks = caOpen, frtoOff, false, 0
}

// revert takes back a reduction: it restores the window and marks lost segments as in flight again.
func (c *Conn) revert() {
	c.stats.Undos++
	if c.ca == caLoss {
		c.stats.SpuriousRTO++
		c.tooShort()
	}
	c.undo.set = false
	c.undo.tsValid = false
	c.q.unmarkLost()
	c.w.cwnd = max(c.w.cwnd, c.undo.cwnd)
	c.w.ssthresh = max(c.w.ssthresh, c.undo.ssthresh)
	c.cc.undo(&c.w)
	c.limited, c.limitedNow = false, false // only the reduced window was fully used
	c.open()
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
		c.recoverSet = false // one segment was sent again, so that duplicate ACKs of more are for a loss
		c.revert()
	case c.frto == frtoTimedOut && a.acked > 0 && c.una.Less(c.recoverPoint):
		// If there is no new data, F-RTO ends.
		if c.q.hasUnsent() && c.fits(c.q.at(c.q.next)) {
			c.frto = frtoNewData
			c.w.cwnd = c.pipe() + 2*c.w.mss
		} else {
			c.frto = frtoOff
		}
	case a.acked > 0 || a.dup || a.newSACK:
		// Step 3a: the loss is real.
		c.frto = frtoOff
	}
}
