package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/histogram"
)

// rttState is the estimator of RFC 6298.
type rttState struct {
	srtt, rttvar time.Duration
	rto          time.Duration // without back-off
	backoff      uint8         // doublings (5.5)
	expired      time.Duration // longest time-out since the last sample or lengthening of rto
	expiredAt    clock.Time    // of the last time-out
	since        clock.Time    // when this host was last found to have been stopped
	maxRTO       time.Duration
	samples      *histogram.Histogram // or nil
}

const (
	initialRTO = time.Second            // RFC 6298 (2.1)
	minRTO     = 200 * time.Millisecond // as in Linux; RFC 6298 (2.4) recommends 1 s
)

// sampleRTT is RFC 6298 (2.2) and (2.3). A segment that was in flight while this host was stopped says nothing about the path.
func (e *rttState) sampleRTT(now clock.Time, r time.Duration) {
	if now.Add(-r) < e.since {
		return
	}
	if e.srtt == 0 {
		e.srtt, e.rttvar = r, r/2
	} else {
		e.rttvar += ((e.srtt - r).Abs() - e.rttvar) / 4
		e.srtt += (r - e.srtt) / 8
	}
	e.rto = min(e.srtt+max(4*e.rttvar, minRTO), e.maxRTO)
	e.expired = 0
	e.samples.Add(r)
}

// backOff doubles the time-out (5.5).
func (e *rttState) backOff() {
	e.backoff = min(e.backoff+1, 32)
	e.expired = max(e.expired, e.currentRTO())
}

// tooShort is called when a time-out proves needless. It doubles the RTO once for a time-out, but not beyond that: as long as the RTO is
// shorter than the path each segment is sent twice, and Karn's algorithm times none.
func (e *rttState) tooShort() {
	e.rto = max(e.rto, min(2*e.rto, e.expired))
	e.expired = 0
}

// currentRTO returns the time-out with back-off (5.5).
func (e *rttState) currentRTO() time.Duration { return e.backedOff(e.backoff) }

// backedOff returns the time-out doubled so often, up to MaxRTO.
func (e *rttState) backedOff(times uint8) time.Duration {
	d := e.rto
	for range times {
		if d *= 2; d >= e.maxRTO {
			return e.maxRTO
		}
	}
	return d
}

// restartRTO is RFC 6298 (5.2) and (5.3), after an ACK of new data.
func (c *Conn) restartRTO(now clock.Time) {
	c.stop(timerTLP)
	if !c.q.outstanding() {
		c.stop(timerRTO)
		c.stop(timerRACK)
		return
	}
	c.arm(timerRTO, now.Add(c.currentRTO()))
	c.scheduleTLP(now)
}

// PathChanged reports that packets take another path from now on, or one that is back, such as a new next hop. A retransmission or a window
// probe that waits for a backed-off timer leaves at once: time-outs of before say nothing about this path.
func (c *Conn) PathChanged(now clock.Time) {
	if c.backoff > 0 && c.armed(timerRTO) {
		c.backoff = 0
		c.arm(timerRTO, now)
	}
	if c.persistBackoff > 0 && c.armed(timerPersist) {
		c.persistBackoff = 0
		c.arm(timerPersist, now)
	}
}

// synTimeout retransmits the SYN or SYN-ACK, or ends the connection.
func (c *Conn) synTimeout(now clock.Time) {
	if now.Sub(c.progress) >= c.cfg.SynTimeout {
		c.giveUp()
		return
	}
	c.synRetries++
	c.backOff()
	c.synPending = true
	// The last interval ends at the limit of SynTimeout.
	at := now.Add(c.currentRTO())
	c.arm(timerRTO, max(min(at, c.progress.Add(c.cfg.SynTimeout)), now+1))
}

// retransmitTimeout is RFC 6298 (5.4) to (5.7). RFC 8985 6.3 selects the lost segments; RFC 5682 detects a spurious time-out.
func (c *Conn) retransmitTimeout(now clock.Time) {
	if !c.q.outstanding() {
		return
	}
	if c.endR2() <= now {
		c.giveUp()
		return
	}
	c.stats.Timeouts++
	c.q.divide()
	c.backOff()
	c.expiredAt = now
	c.blackHole(now)
	c.stop(timerTLP)
	c.stop(timerRACK)
	c.tlp = tailProbe{}

	head := c.q.at(c.q.head)
	again := c.ca == caLoss && c.una.LessEq(c.lossUna)
	if !again {
		c.undo.save(&c.w, c.una, c.nxt)
		if c.ca == caRecovery {
			// The loss that began this recovery is real, so undo may only revert the further reduction. The window is on its way to ssthresh.
			c.undo.cwnd = c.w.ssthresh
		}
		c.beginReduction(now, false)
	}
	// RFC 5682 2.1 (1): not if the same segment times out again.
	c.frto = frtoOff
	c.frtoHigh = c.una
	if !again && head.retrans == 0 {
		c.frto = frtoTimedOut
		c.frtoHigh = c.nxt
	}
	c.ca = caLoss
	c.lossUna = c.una
	c.recoverPoint, c.recoverSet = c.nxt, true
	c.dupAcks = 0
	if head.state == sacked {
		c.q.renege()
	}
	// RACK_mark_losses_on_RTO of RFC 8985 6.3. Without SACK every segment is marked lost.
	since := now
	if c.useSACK {
		since = now.Add(-c.rack.rtt - c.reorderWindow())
	}
	c.q.markOld(since)
	if !again {
		c.undo.recount(&c.q, &c.options)
	}
	c.w.cwnd = c.pipe() + c.w.mss
	c.arm(timerRTO, min(now.Add(c.currentRTO()), c.endR2())) // the last interval ends with R2
}
