package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// rttState is the estimator of RFC 6298.
type rttState struct {
	srtt, rttvar time.Duration
	rto          time.Duration // without back-off
	backoff      uint8         // doublings (5.5)
}

const (
	initialRTO = time.Second            // RFC 6298 (2.1)
	minRTO     = 200 * time.Millisecond // as in Linux; RFC 6298 (2.4) recommends 1 s
)

// sampleRTT is RFC 6298 (2.2) and (2.3).
func (c *Conn) sampleRTT(r time.Duration) {
	r = max(r, 1)
	if c.srtt == 0 {
		c.srtt, c.rttvar = r, r/2
	} else {
		d := c.srtt - r
		if d < 0 {
			d = -d
		}
		c.rttvar += (d - c.rttvar) / 4
		c.srtt += (r - c.srtt) / 8
	}
	c.rto = min(c.srtt+max(4*c.rttvar, minRTO), c.cfg.MaxRTO)
	c.cfg.RTT.Add(r)
}

// sampleHandshake takes an RTT sample from a SYN that was sent only once (Karn's algorithm).
func (c *Conn) sampleHandshake(now clock.Time) {
	if c.synCopies != 1 {
		return
	}
	r := max(now.Sub(c.synSent), 1)
	c.sampleRTT(r)
	c.rack.minRTT, c.rack.minRTTAt = r, now
}

// currentRTO returns the time-out with back-off (5.5).
func (c *Conn) currentRTO() time.Duration { return c.backOff(c.rto, c.backoff) }

// backOff doubles d so often, up to MaxRTO.
func (c *Conn) backOff(d time.Duration, times uint8) time.Duration {
	for range times {
		if d *= 2; d >= c.cfg.MaxRTO {
			return c.cfg.MaxRTO
		}
	}
	return d
}

// restartRTO is RFC 6298 (5.2) and (5.3), after an ACK of new data.
func (c *Conn) restartRTO(now clock.Time) {
	c.stop(timerTLP)
	if c.q.head == c.q.next {
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
	c.backoff = min(c.backoff+1, 32)
	c.synPending = true
	// The last interval ends at the limit of SynTimeout.
	at := now.Add(c.currentRTO())
	c.arm(timerRTO, max(min(at, c.progress.Add(c.cfg.SynTimeout)), now+1))
}

// retransmitTimeout is RFC 6298 (5.4) to (5.7). RFC 8985 6.3 selects the lost segments; RFC 5682 detects a spurious time-out.
func (c *Conn) retransmitTimeout(now clock.Time) {
	if c.q.head == c.q.next {
		return
	}
	if c.stuck(now) {
		c.giveUp()
		return
	}
	c.stats.Timeouts++
	c.q.divide()
	if c.backoff < 32 {
		c.backoff++
	}
	c.blackHole(now)
	c.stop(timerTLP)
	c.stop(timerRACK)
	c.tlpPending, c.tlpActive = false, false

	head := c.q.at(c.q.head)
	again := c.ca == caLoss && c.una.LessEq(c.lossUna)
	if !again {
		c.saveUndo()
		c.w.ssthresh = c.cc.reduce(&c.w, now, min(c.w.cwnd, c.nxt.Sub(c.una)), false)
		c.cwrPending = c.ecnOK
		c.reduced, c.reducedAt = true, c.nxt
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
	c.recoverPoint, c.everRecovered = c.nxt, true
	c.dupAcks = 0
	if head.state == sacked {
		c.renege()
	}
	c.markLostOnTimeout(now)
	if !again {
		c.countRetrans()
	}
	c.w.cwnd = c.pipe() + c.w.mss
	c.arm(timerRTO, min(now.Add(c.currentRTO()), c.endR2())) // the last interval ends with R2
}

// markLostOnTimeout is RACK_mark_losses_on_RTO of RFC 8985 6.3. Without SACK every segment is marked lost.
func (c *Conn) markLostOnTimeout(now clock.Time) {
	reo := c.reorderWindow()
	for p := c.q.head; p != c.q.next; p++ {
		s := c.q.at(p)
		if s.state != inFlight {
			continue
		}
		if p == c.q.head || !c.useSACK || s.sent.Add(c.rack.rtt+reo).Sub(now) <= 0 {
			c.markLost(p)
		}
	}
}

// renege forgets selective acknowledgements, because the peer has dropped that data (RFC 2018 section 8): a peer that still held the
// segment at the head of the queue would have acknowledged it cumulatively.
func (c *Conn) renege() {
	for p := c.q.head; p != c.q.next; p++ {
		s := c.q.at(p)
		if s.state == sacked {
			s.state = lost
			s.next = noPos
			c.sackedSegs--
			c.lostSegs++
			c.lostBytes += int(s.len)
		}
	}
	c.lostHint = c.q.head
}
