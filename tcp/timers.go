package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

const (
	timerRTO        = iota // RFC 6298; also for SYN and SYN-ACK
	timerTLP               // RFC 8985 7
	timerRACK              // RFC 8985 6.3: the reordering window
	timerPersist           // RFC 9293 3.8.6.1, and sender's silly window override
	timerDelayedAck        // RFC 9293 3.8.6.3
	timerKeepAlive         // RFC 9293 3.8.4
	timerUser              // RFC 9293 3.9.1.8
	timerTimeWait          // also FIN-WAIT-2
	timerPace              // the burst limit
	timerPMTU              // raises a lowered path MTU again
	numTimers
)

// stopTime is how late a timer must be to show that this host was stopped, and received nothing.
const stopTime = time.Second

// resumed is called when this host goes on after it was stopped, as a paused container or virtual machine is. What the peer has sent
// meanwhile may be lost. So the limits after which the peer is given up begin again, nothing that was in flight is timed,
// and the window does not grow for that time.
func (c *Conn) resumed(now clock.Time) {
	c.since, c.progress, c.lastRcv = now, now, now
	c.cc.idle(now)
	if c.armed(timerUser) {
		c.armUser(now)
	}
	if c.state == FinWait2 && c.armed(timerTimeWait) {
		c.arm(timerTimeWait, now.Add(c.cfg.FinWait2))
	}
}

// timers holds when each timer is due; 0: it is stopped.
type timers struct{ deadlines [numTimers]clock.Time }

func (t *timers) arm(id int, at clock.Time) { t.deadlines[id] = at }

func (t *timers) stop(id int) { t.deadlines[id] = 0 }

func (t *timers) armed(id int) bool { return t.deadlines[id] != 0 }

// Deadline returns when HandleTimeout is due, or zero for never. Any call may change it.
func (t *timers) Deadline() clock.Time {
	var d clock.Time
	for _, at := range t.deadlines {
		d = clock.Earliest(d, at)
	}
	return d
}

// TimeoutsInARow returns how many times in a row the retransmission timer has expired without progress or, if nothing is in flight, how
// many keep-alive probes in a row were not answered.
func (c *Conn) TimeoutsInARow() int { return max(int(c.backoff), c.keepProbes) }

// HandleTimeout runs the timers that are due at now.
func (c *Conn) HandleTimeout(now clock.Time) {
	if at := c.Deadline(); at != 0 && now.Sub(at) >= stopTime {
		c.resumed(now)
	}
	for t := range numTimers {
		if !c.deadlines[t].Due(now) {
			continue
		}
		// A probe replaces a time-out that is due at the same time (RFC 8985 7.2).
		if t == timerRTO && c.deadlines[timerTLP].Due(now) {
			continue
		}
		c.deadlines[t] = 0
		switch t {
		case timerRTO:
			if c.state == SynSent || c.state == SynReceived {
				c.synTimeout(now)
			} else {
				c.retransmitTimeout(now)
			}
		case timerTLP:
			c.tailTimeout(now)
		case timerRACK:
			c.reorderTimeout(now)
		case timerPersist:
			c.persistTimeout(now)
		case timerDelayedAck:
			c.ackNow = true
		case timerKeepAlive:
			c.keepAliveTimeout(now)
		case timerUser:
			c.giveUp()
		case timerTimeWait:
			if c.state == FinWait2 {
				c.giveUp()
			} else {
				c.end(nil)
			}
		case timerPace:
		case timerPMTU:
			c.raiseMTU(now)
		}
	}
}

// giveUp ends a connection that does not get through (R2 of RFC 9293 3.8.3).
func (c *Conn) giveUp() {
	if c.state != SynSent {
		c.finalReset()
	}
	if c.softError {
		c.end(ErrUnreachable) // SHLD-25: report the reason
		return
	}
	c.end(ErrTimeout)
}

// endR2 returns when R2 is over unless there is progress until then.
func (c *Conn) endR2() clock.Time {
	// A peer that keeps its window closed but answers is alive (MUST-37).
	since := c.progress
	if c.wnd == 0 {
		since = max(since, c.lastRcv)
	}
	return since.Add(c.cfg.DataTimeout)
}

func (c *Conn) armUser(now clock.Time) {
	if c.cfg.UserTimeout > 0 {
		c.arm(timerUser, now.Add(c.cfg.UserTimeout))
	}
}

// armPersist starts the persist timer if the peer's window blocks everything queued and nothing is in flight.
func (c *Conn) armPersist(now clock.Time) {
	if c.q.outstanding() || !c.q.hasUnsent() || c.state < Established || c.fits(c.q.at(c.q.next)) {
		c.endPersist(now)
		return
	}
	if !c.armed(timerPersist) && !c.probePending {
		if c.blockedAt == 0 {
			c.blockedAt = now
			c.progress = now
			if !c.armed(timerUser) {
				c.armUser(now)
			}
		}
		c.arm(timerPersist, min(now.Add(c.persistInterval()), c.endR2())) // the last interval ends with R2
	}
}

// endPersist stops the persist timer: the peer's window no longer blocks anything.
func (c *Conn) endPersist(now clock.Time) {
	c.stop(timerPersist)
	c.persistBackoff = 0
	c.probePending = false
	if c.blockedAt != 0 {
		c.stats.ZeroWindow += now.Sub(c.blockedAt)
		c.blockedAt = 0
	}
}

// persistInterval returns the RTO with back-off (RFC 9293 MUST-36 and SHLD-29, 30). For a window that is open but small it is the override
// time of 3.8.6.2.1.
func (c *Conn) persistInterval() time.Duration {
	if c.wnd > 0 && c.persistBackoff == 0 {
		return min(c.rto, 500*time.Millisecond)
	}
	return c.backedOff(c.persistBackoff)
}

func (c *Conn) persistTimeout(now clock.Time) {
	if c.q.outstanding() || !c.q.hasUnsent() {
		return
	}
	if c.endR2() <= now {
		c.giveUp()
		return
	}
	s := c.q.single(c.q.next)
	room := c.edge().Sub(s.seq)
	if room > 0 && room < int(s.len) {
		// The override time has passed: send the part that fits.
		c.q.cut(c.q.next, int32(room))
		return
	}
	if c.fits(s) {
		return
	}
	c.probePending = true
	if c.persistBackoff < 32 {
		c.persistBackoff++
	}
	c.arm(timerPersist, min(now.Add(c.persistInterval()), c.endR2()))
}

// keepAliveAt arms the timer for the first multiple of an eighth of the interval that is not before at. So the
// probes of thousands of idle connections, due at about the same time, do not each wake the worker.
func (c *Conn) keepAliveAt(at clock.Time) {
	step := clock.Time(max(c.cfg.KeepAliveInterval/8, 1))
	c.arm(timerKeepAlive, (at+step-1)/step*step)
}

func (c *Conn) keepAliveTimeout(now clock.Time) {
	if c.state < Established || c.state == TimeWait {
		return
	}
	quiet := now.Sub(c.lastRcv)
	if quiet < c.cfg.KeepAliveIdle || !c.q.empty() {
		// A segment has arrived, or data in flight acts as a probe.
		c.keepProbes = 0
		c.keepAliveAt(now.Add(max(c.cfg.KeepAliveIdle-quiet, c.cfg.KeepAliveInterval)))
		return
	}
	if c.keepProbes >= c.cfg.KeepAliveCount {
		c.giveUp()
		return
	}
	c.keepProbes++
	c.keepPending = true
	c.keepAliveAt(now.Add(c.cfg.KeepAliveInterval))
}

// reuseAfter is how long a connection stays in TIME-WAIT at least before MayFollow reports true.
const reuseAfter = time.Second

// MayFollow reports whether c is in TIME-WAIT and an active open of the same flow with initial sequence number iss may replace it: both
// sides can distinguish old segments from new ones by timestamps (RFC 6191, RFC 7323 section 5.8), whose clock continues, and by sequence
// numbers. The caller aborts c first, so that no segment can revive it or end the new connection (RFC 1337).
func (c *Conn) MayFollow(now clock.Time, iss serial.Num) bool {
	return c.state == TimeWait && c.tsOK && c.nxt.Less(iss) && c.deadlines[timerTimeWait].Sub(now) <= c.cfg.TimeWait-reuseAfter
}

// timeWait enters TIME-WAIT, or restarts its timer.
func (c *Conn) timeWait(now clock.Time) {
	c.state = TimeWait
	for t := range numTimers {
		if t != timerDelayedAck {
			c.stop(t)
		}
	}
	c.q.s, c.q.sorted = nil, nil // nothing more is queued, and there may be many connections in TIME-WAIT
	c.arm(timerTimeWait, now.Add(c.cfg.TimeWait))
}
