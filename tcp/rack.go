package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// rackState is the state of RFC 8985 5.2 and 5.3.
type rackState struct {
	sent       clock.Time // RACK.xmit_ts
	order      uint32     // breaks ties of sent; takes the place of RACK.end_seq
	fack       serial.Num // RACK.fack
	rtt        time.Duration
	minRTT     time.Duration
	minRTTAt   clock.Time
	reordering bool
	mult       int // RACK.reo_wnd_mult
	persist    int
	dsackRound serial.Num
	dsackSet   bool
}

// tailProbe is the state of the tail loss probe (RFC 8985 7.1).
type tailProbe struct {
	step tailStep
	end  serial.Num // TLP.end_seq, once it was sent
}

type tailStep uint8

const (
	tailNone    tailStep = iota
	tailDue              // it must be sent
	tailNew              // it was sent, with new data, and its effect is not known
	tailRetrans          // the same, with data sent before: TLP.is_retrans
)

// sent reports whether the probe was sent, and its effect is not known.
func (p *tailProbe) sent() bool { return p.step >= tailNew }

const (
	dupThresh      = 3                      // RFC 5681
	minRTTWindow   = 5 * time.Minute        // interval over which the minimum round-trip time is taken
	tlpMaxAckDelay = 200 * time.Millisecond // TLP.max_ack_delay
	tlpGranularity = 10 * time.Millisecond  // two ticks of a kernel clock: hosts, and even more so guests, are sometimes a few ms late
	reoWndPersist  = 16
)

// update is steps 1 and 2 of RFC 8985 6.2 for one segment that has arrived.
func (r *rackState) update(a *ackState, s *seg, o *options) {
	rtt := a.now.Sub(s.sent)
	if s.retrans != 0 {
		// The ACK answers the original transmission, so it says nothing about the retransmission.
		if a.answersBefore(o.tsAt(s.sent)) {
			return
		}
		if rtt < r.minRTT {
			return
		}
	} else if r.minRTT == 0 || rtt < r.minRTT || a.now.Sub(r.minRTTAt) > minRTTWindow {
		r.minRTT, r.minRTTAt = max(rtt, 1), a.now
	}
	if !a.rackSet || int32(s.order-a.rackOrder) > 0 {
		a.rackSet, a.rackOrder, r.rtt = true, s.order, rtt
	}
	if r.sent == 0 || int32(s.order-r.order) > 0 {
		r.sent, r.order = s.sent, s.order
	}
	if r.fack.Less(s.end()) {
		r.fack = s.end()
	}
}

// reorderWindow is step 4 of RFC 8985 6.2.
func (s *sender) reorderWindow() time.Duration {
	r := &s.rack
	if !r.reordering && (s.ca >= caRecovery || s.q.sackedSegs >= dupThresh) {
		return 0
	}
	return min(time.Duration(r.mult)*r.minRTT/4, s.srtt)
}

// noteDSACK widens the reordering window once per round trip (RFC 8985 6.2 step 4).
func (r *rackState) noteDSACK(una, nxt serial.Num) {
	if r.dsackSet && una.Less(r.dsackRound) {
		return
	}
	r.dsackRound, r.dsackSet = nxt, true
	r.mult = min(r.mult+1, 1<<10)
	r.persist = reoWndPersist
}

// recovered is called at the end of a recovery.
func (r *rackState) recovered() {
	if r.persist > 0 {
		if r.persist--; r.persist == 0 {
			r.mult = 1
		}
	}
}

// rackDetect is step 5 of RFC 8985 6.2. It reports whether it marked any segment lost, and arms the timer for when all that may become
// lost soon are. The RFC takes the time of the last one, but to find that would cost each ACK a walk over all of them; it was sent no
// later than rack.sent.
func (c *Conn) rackDetect(now clock.Time) bool {
	c.stop(timerRACK)
	if c.rack.sent == 0 {
		return false
	}
	reo := c.reorderWindow()
	found := false
	for p := c.q.oldest; p != noPos; {
		s := c.q.at(p)
		if int32(s.order-c.rack.order) >= 0 {
			break
		}
		if s.sent.Add(c.rack.rtt+reo) > now {
			c.arm(timerRACK, c.rack.sent.Add(c.rack.rtt+reo))
			break
		}
		if c.q.runs { // a lost segment is no run
			c.q.divide()
			p = c.q.oldest
			continue
		}
		next := s.next
		c.q.markLost(p)
		found = true
		p = next
	}
	return found
}

// reorderTimeout handles the end of a segment's reordering window.
func (c *Conn) reorderTimeout(now clock.Time) {
	if !c.useSACK || !c.q.outstanding() {
		return
	}
	if c.rackDetect(now) {
		a := ackState{now: now}
		c.lossFound(&a)
		if c.ca == caRecovery {
			c.reduceRate(&a, true)
		}
	}
}

// scheduleTLP is RFC 8985 7.2.
func (c *Conn) scheduleTLP(now clock.Time) {
	c.stop(timerTLP)
	if !c.useSACK || c.ca > caCWR || c.q.sackedSegs != 0 || c.tlp.sent() || !c.q.outstanding() || c.state < Established {
		return
	}
	pto := time.Second
	if c.srtt > 0 {
		pto = max(2*c.srtt, tlpGranularity)
		// The peer may delay its ACK until a second full segment arrives.
		if c.q.inFlight < 2*c.w.mss {
			pto += tlpMaxAckDelay
		}
	}
	at := now.Add(pto)
	if rto := c.deadlines[timerRTO]; rto != 0 && rto < at {
		at = rto
	}
	c.arm(timerTLP, at)
}

// tailTimeout is RFC 8985 7.3: PollTransmit returns the probe itself.
func (c *Conn) tailTimeout(now clock.Time) {
	if !c.q.outstanding() || c.ca > caCWR || c.tlp.sent() {
		return
	}
	c.tlp.step = tailDue
	c.arm(timerRTO, now.Add(c.currentRTO()))
}

// tlpAck is RFC 8985 7.4.2: it decides whether the probe repaired a real loss.
func (c *Conn) tlpAck(a *ackState) {
	if !c.tlp.sent() || c.una.Less(c.tlp.end) {
		return
	}
	switch {
	case c.tlp.step == tailNew, a.dsack:
	case c.una == c.tlp.end && !a.plain:
		return // a D-SACK may still follow; later ACKs decide
	case c.una == c.tlp.end:
		// A duplicate ACK caused by the probe: nothing was lost.
	case c.ca == caOpen:
		// The probe repaired a loss, which is one congestion event.
		c.undo.save(&c.w, c.una, c.nxt)
		c.undo.recount(&c.q, &c.options)
		c.enterCWR(a.now, false)
	}
	c.tlp.step = tailNone
}
