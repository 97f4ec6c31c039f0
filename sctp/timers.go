package sctp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// timer identifies a timer of an association.
type timer uint8

const (
	timerInit     timer = iota // T1-init and T1-cookie (RFC 9260 4)
	timerGuard                 // T5-shutdown-guard (9.2)
	timerShutdown              // T2-shutdown (9.2)
	timerSack                  // delayed SACK (6.2)
	timerPersist               // probe of a closed window (6.1 A)
	numTimers
)

// timers holds when each timer of an association is due, and other times.
type timers struct {
	deadlines [numTimers]clock.Time // 0: stopped
	verifyAt  clock.Time            // when the next path may be verified (RFC 9260 5.4)
	late      bool                  // the timer that runs is so late that this host must have been stopped
	since     clock.Time            // when this host was last found to have been stopped
}

// stopTime is how late a timer must be to show that this host was stopped, as a paused container or virtual machine is,
// and received nothing. Time-outs are 1 s and more, so a shorter stop changes little.
const stopTime = 2 * time.Second

// noteStop looks whether the timer that is due at the given time is late.
func (s *timers) noteStop(now, due clock.Time) {
	if s.late = due != 0 && now.Sub(due) >= stopTime; s.late {
		s.since = now
	}
}

// pathTimer identifies a timer of a path.
type pathTimer uint8

const (
	timerT3        pathTimer = iota // T3-rtx (RFC 9260 6.3)
	timerHeartbeat                  // the next HEARTBEAT, or the time-out of the last one (8.3)
	timerMTU                        // start of a search, or time-out of the outstanding probe (RFC 8899)
	numPathTimers
)

func (p *path) arm(t pathTimer, at clock.Time) { p.deadlines[t] = at }

func (p *path) stop(t pathTimer) { p.deadlines[t] = 0 }

func (p *path) armed(t pathTimer) bool { return p.deadlines[t] != 0 }

func (s *timers) arm(t timer, at clock.Time) { s.deadlines[t] = at }

func (s *timers) stop(ts ...timer) {
	for _, t := range ts {
		s.deadlines[t] = 0
	}
}

func (s *timers) armed(t timer) bool { return s.deadlines[t] != 0 }

// Deadline returns when HandleTimeout is due, or 0 for never.
func (a *Assoc) Deadline() clock.Time {
	var d clock.Time
	for _, t := range a.deadlines {
		d = clock.Earliest(d, t)
	}
	for i := range a.paths {
		for _, t := range a.paths[i].deadlines {
			d = clock.Earliest(d, t)
		}
	}
	return d
}

// HandleTimeout runs the timers that are due.
func (a *Assoc) HandleTimeout(now clock.Time) {
	if a.state == Closed {
		return
	}
	for t := range numTimers {
		if !a.deadlines[t].Due(now) {
			continue
		}
		a.noteStop(now, a.deadlines[t])
		a.stop(t)
		switch t {
		case timerInit:
			a.initTimeout(now)
		case timerGuard:
			if a.late {
				a.guard(now)
			} else {
				a.abort(causeUserAbort, nil, ErrTimeout)
			}
		case timerShutdown:
			a.paths[a.primary].backOff()
			if !a.failed(a.primary, true) {
				a.sendShutdown(now)
			}
		case timerSack:
			a.rcv.sackNow = true
		case timerPersist:
			a.probe = true
		}
	}
	for i := range a.paths {
		p := &a.paths[i]
		for t := range numPathTimers {
			if a.state == Closed || !p.deadlines[t].Due(now) {
				continue
			}
			a.noteStop(now, p.deadlines[t])
			p.stop(t)
			switch t {
			case timerT3:
				a.retransmitTimeout(now, i)
			case timerHeartbeat:
				a.heartbeatDue(now, i)
			case timerMTU:
				a.mtuDue(now, i)
			}
		}
	}
}

// PathChanged reports that packets on path i take another way from now on, or one that is back, such as a new next hop. What waits for a
// backed-off timer, also a probe of a closed window, is sent at once: time-outs of before say nothing about this way.
func (a *Assoc) PathChanged(now clock.Time, i int) {
	p := &a.paths[i]
	if a.initRetries > 0 {
		a.sendSetup()
		return
	}
	rto := p.rto
	if a.setRTO(p); p.rto < rto && i == a.primary {
		if a.armed(timerShutdown) {
			a.sendShutdown(now)
		}
		if a.armed(timerPersist) {
			a.stop(timerPersist)
			a.probe = true
		}
	}
	if p.errors == 0 && !a.starved {
		return
	}
	p.stop(timerT3)
	a.loseFlight(i)
}

// initTimeout is T1-init and T1-cookie (RFC 9260 4, 5.1).
func (a *Assoc) initTimeout(now clock.Time) {
	if a.initRetries >= maxInit && !a.late {
		a.end(ErrTimeout)
		return
	}
	a.initRetries++
	p := &a.paths[0]
	p.backOff()
	a.sendSetup()
	a.arm(timerInit, now.Add(p.rto))
}

// sendSetup sends INIT or COOKIE ECHO again.
func (a *Assoc) sendSetup() {
	switch a.state {
	case CookieWait:
		a.want |= wantInit
	case CookieEchoed:
		a.want |= wantCookieEcho
	}
}

// tryShutdown takes the next step of a shutdown when everything is acknowledged.
func (a *Assoc) tryShutdown(now clock.Time) {
	if a.first != a.last {
		return
	}
	switch a.state {
	case ShutdownPending:
		a.state = ShutdownSent
		a.sendShutdown(now)
	case ShutdownReceived:
		a.state = ShutdownAckSent
		a.sendShutdown(now)
	}
}

func (a *Assoc) sendShutdown(now clock.Time) {
	if a.state == ShutdownSent {
		a.want |= wantShutdown
	} else {
		a.want |= wantShutdownAck
	}
	a.arm(timerShutdown, now.Add(a.paths[a.primary].rto))
}

// handleShutdown is RFC 9260 9.2.
func (a *Assoc) handleShutdown(now clock.Time, c *Chunk) {
	if len(c.Body) != 4 {
		a.abort(causeProtocol, nil, ErrProtocol)
		return
	}
	cum := serial.Num(be.Uint32(c.Body))
	switch a.state {
	case Established, ShutdownPending:
		a.state = ShutdownReceived
		a.guard(now)
		a.events |= 1 << EventShutdown
		a.shutdownAcks(now, cum)
	case ShutdownReceived:
		a.shutdownAcks(now, cum)
	case ShutdownSent:
		a.state = ShutdownAckSent
		a.sendShutdown(now)
	case ShutdownAckSent:
		a.sendShutdown(now)
	}
}

// armHeartbeat starts a heartbeat period on path i (RFC 9260 8.3).
func (a *Assoc) armHeartbeat(now clock.Time, i int) {
	p := &a.paths[i]
	p.beat = beatIdle
	p.used = false
	a.nextHeartbeat(now, i)
}

// nextHeartbeat schedules the next HEARTBEAT on path i, one period after from.
func (a *Assoc) nextHeartbeat(from clock.Time, i int) {
	p := &a.paths[i]
	if a.cfg.Heartbeat < 0 {
		p.stop(timerHeartbeat)
		return
	}
	// Jitter of half the RTO either way, unpredictable to the peer.
	m, _ := draw(&a.key, &a.flow, from, uint32(i)<<8|0x80000000)
	jitter := time.Duration(m%1024)*p.rto/1024 - p.rto/2
	p.arm(timerHeartbeat, from.Add(max(a.cfg.Heartbeat+p.rto+jitter, time.Millisecond)))
}

// heartbeatDue sends a HEARTBEAT on an idle path, or counts an unanswered one and schedules the next, with a backed-off RTO. On an
// unconfirmed path HEARTBEATs are one RTO apart (5.4).
func (a *Assoc) heartbeatDue(now clock.Time, i int) {
	p := &a.paths[i]
	if a.state < Established || a.state == ShutdownSent || a.state == ShutdownAckSent {
		a.armHeartbeat(now, i)
		return
	}
	if p.beat == beatSent {
		p.beat = beatLate
		p.backOff()
		if a.failed(i, i == a.primary) {
			return
		}
		if p.confirmed || !p.active {
			if a.nextHeartbeat(p.hbAt, i); p.armed(timerHeartbeat) {
				p.arm(timerHeartbeat, max(p.deadlines[timerHeartbeat], now.Add(time.Millisecond)))
			}
			return
		}
	} else if p.used && p.confirmed {
		a.armHeartbeat(now, i)
		return
	}
	if !p.confirmed { // HB.Max.Burst of 1 in an RTO (5.4)
		if now < a.verifyAt {
			p.arm(timerHeartbeat, a.verifyAt)
			return
		}
		a.verifyAt = now.Add(a.paths[a.primary].rto)
	}
	p.beat, p.hbAt = beatDue, now
	p.arm(timerHeartbeat, now.Add(p.rto))
	p.hbNonce = a.newNonce(now)
	a.stats.Heartbeats++
}

// newNonce returns a nonce, never 0, that identifies the answer to a HEARTBEAT.
func (a *Assoc) newNonce(now clock.Time) uint64 {
	a.salt++
	t, s := draw(&a.key, &a.flow, now, a.salt)
	return uint64(t)<<32 | uint64(s)
}

// heartbeat builds the packet; the ACK returns path, time and nonce.
func (a *Assoc) heartbeat(h *Header, i int, at clock.Time, nonce uint64) []byte {
	b, begin := beginChunk(h.Append(a.head[:0]), ChunkHeartbeat, 0)
	b = be.AppendUint16(b, uint16(paramHeartbeatInfo))
	b = be.AppendUint16(b, 4+20)
	b = be.AppendUint32(b, uint32(i))
	b = be.AppendUint64(b, uint64(at))
	b = be.AppendUint64(b, nonce)
	return endChunk(b, begin)
}

// heartbeatAck processes the answer, even a late one, to the last HEARTBEAT or to the last MTU probe.
func (a *Assoc) heartbeatAck(now clock.Time, b []byte) {
	var p param
	if len(b) == 0 {
		return
	}
	if _, err := nextParam(b, &p); err != nil || p.Type != paramHeartbeatInfo || len(p.Body) != 20 {
		return
	}
	i := be.Uint32(p.Body)
	if i >= uint32(len(a.paths)) {
		return
	}
	pa, nonce := &a.paths[i], be.Uint64(p.Body[12:])
	switch {
	case pa.beat != beatIdle && nonce == pa.hbNonce:
		pa.confirmed = true
		if pa.hbAt != 0 {
			a.sample(now, pa, pa.hbAt)
		}
		a.alive(int(i))
		a.armHeartbeat(now, int(i))
	case pa.pmtu.size != 0 && nonce == pa.pmtu.nonce:
		a.mtuProbed(now, int(i))
	}
}
