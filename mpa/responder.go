package mpa

import "github.com/iwarpd/iwarpd/internal/clock"

// handleRequest is the responder's: s.peer is a frame that is properly
// formatted. behind says that octets follow it.
func (s *Startup) handleRequest(now clock.Time, behind bool) error {
	f := &s.peer
	switch {
	case f.Reply:
		return s.malformed(ErrBothResponders)
	case f.Rev > s.cfg.Rev, f.Rev == 0 && !s.cfg.AllowRev0:
		return s.malformed(ErrRevision)
	case f.Enhanced && !s.cfg.Enhanced:
		// To an unenhanced responder the frame is malformed: it closes TCP and
		// the initiator may try again without (RFC 6581 section 10).
		return s.malformed(ErrNotEnhanced)
	case behind:
		return s.malformed(ErrTrailing)
	}
	f.Reject = false // not checked in a Request (RFC 5044 section 7.1.1)
	s.state = stateWaitULP
	s.arm(now, s.cfg.Decision, DecisionTimeout)
	s.event = Event{Kind: EventRequest, Frame: *f}
	return nil
}

// Accept answers the Request: Full Operation begins. ird and ord are the ULP's
// depths; a negative one stands for the Config's. The ULP's ORD is lowered to
// the initiator's IRD; Result has what came out. It fails with ErrState when no
// request waits, ErrDepth or ErrPrivateData; then the request goes on waiting.
func (s *Startup) Accept(now clock.Time, privateData []byte, ird, ord int) error {
	if ird < 0 {
		ird = s.cfg.IRD
	}
	if ord < 0 {
		ord = s.cfg.ORD
	}
	if !validDepth(ird) || !validDepth(ord) {
		return ErrDepth
	}
	r, err := s.reply(privateData)
	if err != nil {
		return err
	}
	f := &s.peer
	p := Params{
		CRC:         r.CRC,
		SendMarkers: f.Markers,
		RecvMarkers: r.Markers,
		Rev:         r.Rev,
		Enhanced:    r.Enhanced,
		IRD:         ird,
		ORD:         ord,
	}
	if r.Enhanced {
		p.RTR = r.RTR.prefer()
		if p.RTR == RTRRead {
			p.IRD = max(p.IRD, 1) // the RTR needs a place (RFC 6581 section 9.1)
		}
		if f.IRD != NoNegotiation {
			p.ORD = min(p.ORD, int(f.IRD))
		}
		r.IRD = offer(p.IRD, s.cfg.ManualIRD || f.ORD == NoNegotiation)
		r.ORD = offer(p.ORD, s.cfg.ManualORD || f.IRD == NoNegotiation)
	}
	s.sent, s.params = r, p
	s.send()
	s.done(Event{Kind: EventAccepted, Frame: *f})
	return nil
}

// Reject answers the Request with a refusal. The enhanced data of the Reply hold
// the Config's IRD and ORD: what the ULP would have needed. The TCP connection
// stays open; it belongs to the ULP (RFC 5044 section 7.1.2, 2). It fails as
// Accept does.
func (s *Startup) Reject(now clock.Time, privateData []byte) error {
	r, err := s.reply(privateData)
	if err != nil {
		return err
	}
	r.Reject = true
	if r.Enhanced {
		r.IRD, r.ORD = offer(s.cfg.IRD, s.cfg.ManualIRD), offer(s.cfg.ORD, s.cfg.ManualORD)
	}
	s.sent = r
	s.send()
	s.done(Event{Kind: EventRejected, Frame: s.peer})
	return nil
}

// reply begins a Reply to the Request, all but R and the depths. It has the
// Request's revision and S, and C if either side wants it: some initiators take
// a Reply without C for a refusal of theirs.
func (s *Startup) reply(privateData []byte) (Frame, error) {
	f := &s.peer
	if s.initiator || s.state != stateWaitULP {
		return Frame{}, ErrState
	}
	if len(privateData) > s.cfg.maxPrivateData(f.Enhanced) {
		return Frame{}, s.cfg.tooMuch(privateData, f.Enhanced)
	}
	r := Frame{
		Reply:       true,
		CRC:         s.cfg.CRC || f.CRC || f.Rev == 0,
		Markers:     s.cfg.Markers || f.Rev == 0,
		Enhanced:    f.Enhanced,
		Rev:         f.Rev,
		PrivateData: privateData,
	}
	if f.P2P {
		// One kind, so that both sides know which: of those that the initiator
		// offers if possible, else what we could take (RFC 6581 section 9.2).
		kind := (f.RTR & s.cfg.rtrs()).prefer()
		if kind == RTRNone {
			kind = s.cfg.rtrs().prefer()
		}
		r.P2P, r.RTR = true, RTRs(kind)
	}
	return r, nil
}
