package session

import (
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/mpa"
)

// HandleMessage processes a whole message of the peer: its stream, PPID, U bit and bytes, which are not retained. Messages are interpreted
// in DDP-SSN order.
func (m *Mux) HandleMessage(id uint16, ppid uint32, unordered bool, b []byte) {
	s := m.stream(id)
	if s == nil {
		m.stats.NoSession++
		return
	}
	if s.state == Ended {
		m.afterEnd(s, ppid, b)
		return
	}
	p := m.cfg.Profile
	switch {
	case !unordered:
		m.illegal(s, ErrOrdered, ppid, b)
		return
	case ppid != p.Segment() && ppid != p.Control():
		if other := Draft - p; ppid == other.Segment() || ppid == other.Control() {
			m.illegal(s, ErrProfile, ppid, b)
		} else {
			m.illegal(s, ErrPPID, ppid, b)
		}
		return
	case len(b) < HeaderLen || ppid == p.Control() && len(b) < controlHeader:
		m.illegal(s, ErrShort, ppid, b)
		return
	}
	d := be.Uint16(b) - s.next
	switch {
	case d == 0 && !s.waits() && m.ready(s, ppid, b):
		m.process(s, ppid, b)
		m.advance(s)
	case s.state == Idle:
		// Only the first message can arrive on a stream without a session: an Initiate is answered before anything follows it.
		m.first(s, ppid, b)
	case (s.state == Requested || s.state == Negotiating) && ppid == p.Segment():
		m.illegal(s, ErrEarlyData, ppid, b) // whatever precedes it
	case (s.state == Requested || s.state == Negotiating) && d > maxUnanswered:
		m.illegal(s, ErrSSN, ppid, b)
	case int(d) <= m.cfg.MaxAhead:
		m.keep(s, d, ppid, b)
	default:
		m.violation(s, ErrSSN)
	}
}

// maxUnanswered is how far control messages may run ahead of a missing one before the peer's Initiate is answered.
const maxUnanswered = 64

// maxNegotiates is how many Negotiates a peer may send before it requests a session. The draft allows one outstanding Negotiate and any
// number of rounds (section 3.6); the ULP sees each.
const maxNegotiates = 64

// first handles an out-of-order message on an idle stream. A Terminate of an older session is ignored.
func (m *Mux) first(s *stream, ppid uint32, b []byte) {
	if m.isTerminate(ppid, b) {
		m.stats.NoSession++
		return
	}
	m.violation(s, ErrSSN)
}

// keep stores an out-of-order message, or the next one if m is not ready for it. A DDP segment of an open session is placed now; anything else waits.
func (m *Mux) keep(s *stream, d uint16, ppid uint32, b []byte) {
	for len(s.ring) <= int(d) {
		m.widen(s)
	}
	a := &s.ring[int(s.next+d)&(len(s.ring)-1)]
	if a.kind != notCome {
		m.violation(s, ErrSSNTwice)
		return
	}
	a.ppid = ppid
	s.nahead++
	if d > 0 && s.state == Open && s.sink != nil && !s.sinkEnded && ppid == m.cfg.Profile.Segment() &&
		s.sink.HandleEarly(s.count+serial.Num(d), b[HeaderLen:]) {
		a.kind = aheadPlaced
		m.stats.Early++
		return
	}
	a.kind = aheadHeld
	a.b = m.hold(b)
	m.held += len(b)
	m.stats.Held++
}

// widen doubles the ring of out-of-order messages.
func (m *Mux) widen(s *stream) {
	r := make([]ahead, max(64, 2*len(s.ring)))
	for i := range s.ring {
		ssn := s.next + uint16(i)
		r[int(ssn)&(len(r)-1)] = s.ring[int(ssn)&(len(s.ring)-1)]
	}
	m.keepRing(s, r)
}

// waits reports whether the next message has come and could not be processed yet.
func (s *stream) waits() bool {
	return s.nahead > 0 && s.ring[int(s.next)&(len(s.ring)-1)].kind != notCome
}

// ready reports whether the next message, b, can be processed now: DDP segments of an open session wait for a sink, and the sink may wait
// too.
func (m *Mux) ready(s *stream, ppid uint32, b []byte) bool {
	if s.state != Open || ppid != m.cfg.Profile.Segment() {
		return true
	}
	return s.sink != nil && (s.sinkEnded || !s.sink.Waits(b[HeaderLen:]))
}

// advance processes held messages that are now in order.
func (m *Mux) advance(s *stream) {
	for s.nahead > 0 && s.state != Ended {
		a := &s.ring[int(s.next)&(len(s.ring)-1)]
		if a.kind == notCome || a.kind == aheadHeld && !m.ready(s, a.ppid, a.b) {
			return
		}
		s.nahead--
		if a.kind == aheadPlaced {
			*a = ahead{}
			key := s.count
			s.next++
			s.count++
			m.stats.Delivered++
			if !s.sinkEnded && s.sink.DeliverEarly(key) != nil {
				s.sinkEnded = true
			}
			continue
		}
		h := *a
		*a = ahead{}
		m.held -= len(h.b)
		m.process(s, h.ppid, h.b)
		m.recycle(h.b)
	}
}

// process handles the next message in order, for which m is ready.
func (m *Mux) process(s *stream, ppid uint32, b []byte) {
	s.next++
	s.count++
	if ppid == m.cfg.Profile.Control() {
		m.handleControl(s, b)
		return
	}
	switch s.state {
	case Open:
		m.stats.Delivered++
		if !s.sinkEnded && s.sink.HandleULPDU(b[HeaderLen:]) != nil {
			s.sinkEnded = true
		}
	case Requested, Initiating:
		m.violation(s, ErrEarlyData)
	default:
		m.violation(s, ErrNoSession)
	}
}

// handleControl handles a control message in order (RFC 5043 6.2 to 6.4; draft 3.2 to 3.5).
func (m *Mux) handleControl(s *stream, b []byte) {
	fn, set, err := m.decodeControl(b)
	if err != nil {
		m.violation(s, err)
		return
	}
	switch enhanced := set.Enhanced != nil; fn {
	case fnNegotiate:
		m.negotiated(s, set)
	case fnInitiate:
		m.requested(s, set)
	case fnAccept, fnReject:
		switch {
		case s.state == Open || s.state == Requested:
			m.violation(s, ErrAgain)
		case s.state != Initiating:
			m.violation(s, ErrNoInitiate)
		case fn == fnAccept && enhanced != s.enhanced || enhanced && !s.enhanced:
			m.violation(s, ErrKind)
		case fn == fnAccept:
			m.opened(s, set)
		default:
			m.refused(s, set)
		}
	case fnTerminate:
		m.terminated(s)
	}
}

// decodeControl returns the function of a session control message and its data.
func (m *Mux) decodeControl(b []byte) (function, *Setup, *Error) {
	fn, enhanced, ok := m.cfg.Profile.decodeFunction(be.Uint16(b[2:]))
	private := b[controlHeader:]
	switch {
	case !ok:
		return 0, nil, ErrFunction
	case enhanced && m.cfg.NoEnhanced:
		return 0, nil, ErrEnhanced
	case fn == fnTerminate && len(private) > 0:
		return 0, nil, ErrTermData
	case len(private) > MaxPrivate && m.cfg.Profile != Draft:
		return 0, nil, ErrPrivate
	case enhanced && len(private) < mpa.EnhancedLen:
		return 0, nil, ErrShort
	}
	set := &Setup{}
	if enhanced {
		set.Enhanced = &mpa.EnhancedData{}
		_ = set.Enhanced.Decode(private) // cannot fail: there are enough bytes
		private = private[mpa.EnhancedLen:]
	}
	set.Private = append([]byte{}, private...)
	return fn, set, nil
}

// negotiated handles a Negotiate of the peer.
func (m *Mux) negotiated(s *stream, set *Setup) {
	s.negotiates++
	switch {
	case s.state != Idle && s.state != Negotiating && s.state != Initiating:
		m.violation(s, ErrNegotiate)
		return
	case s.negotiates > maxNegotiates:
		m.violation(s, ErrNegotiates)
		return
	case s.state != Initiating: // otherwise it crossed our Initiate (draft 3.2)
		s.state = Negotiating
	}
	m.event(s, EventNegotiate, set, nil)
}

// requested handles an Initiate of the peer.
func (m *Mux) requested(s *stream, set *Setup) {
	switch {
	case s.state == Initiating && m.cfg.Profile == Draft:
		m.opened(s, set) // active/active
	case s.state == Initiating:
		m.violation(s, ErrCollision)
	case s.state != Idle && s.state != Negotiating:
		m.violation(s, ErrAgain)
	case m.pending >= m.cfg.Pending:
		// Refused without asking the ULP (RFC 5043 6.4).
		m.stats.Rejected++
		m.terminate(s)
		s.gotTerm = true
	default:
		s.enhanced = set.Enhanced != nil
		m.pending++
		s.state = Requested
		m.event(s, EventRequest, set, nil)
	}
}

// opened handles the acceptance of our Initiate.
func (m *Mux) opened(s *stream, set *Setup) {
	if s.canceled {
		m.terminate(s)
		return
	}
	s.state = Open
	m.stats.Sessions++
	m.event(s, EventOpen, set, nil)
}

// refused ends a session that was never opened.
func (m *Mux) refused(s *stream, set *Setup) {
	m.stats.Rejected++
	m.over(s)
	s.gotTerm = true
	m.event(s, EventRejected, set, nil)
	m.settle(s)
}

// terminated handles the peer's Terminate.
func (m *Mux) terminated(s *stream) {
	switch s.state {
	case Idle:
		// There is no session to end. Do not answer, so that two Terminates cannot loop.
		m.stats.NoSession++
		m.begin(s)
		return
	case Initiating:
		m.refused(s, nil)
		return
	case Requested:
		m.pending--
	}
	m.stats.Terminated++
	s.gotTerm = true
	m.event(s, EventTerminated, nil, nil)
	// Send our Terminate, so that both sides know when the stream is free.
	m.terminate(s)
}

// illegal ends the session because of a message that was not processed in order.
func (m *Mux) illegal(s *stream, err *Error, ppid uint32, b []byte) {
	m.violation(s, err)
	m.came(s, ppid, b)
	m.pass(s)
}

// violation ends the session with a Terminate (RFC 5043 6.1). The association continues.
func (m *Mux) violation(s *stream, err *Error) {
	m.stats.Violations++
	switch s.state {
	case Requested:
		m.pending--
	case Idle:
		s.gotTerm = true // there is no session for the peer to end
	}
	m.event(s, EventFailed, nil, err)
	m.terminate(s)
}

// afterEnd handles a message on a stream whose session has ended here. Most are late messages of that session. Its Terminate means that no
// more follow. An Initiate (in the draft also a Negotiate) with the first DDP-SSN starts the next session: the peer sends it only when
// nothing of the last one is outstanding (RFC 5043 6.6).
func (m *Mux) afterEnd(s *stream, ppid uint32, b []byte) {
	m.stats.AfterEnd++
	p := m.cfg.Profile
	if ppid == p.Control() && len(b) >= controlHeader && be.Uint16(b) == p.firstSSN() {
		if fn, _, ok := p.decodeFunction(be.Uint16(b[2:])); ok && (fn == fnInitiate || fn == fnNegotiate) {
			m.stats.AfterEnd--
			m.begin(s)
			m.event(s, EventIdle, nil, nil)
			m.HandleMessage(s.id, ppid, true, b)
			return
		}
	}
	m.came(s, ppid, b)
	m.pass(s)
	m.settle(s)
}
