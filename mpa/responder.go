package mpa

import "github.com/iwarpd/iwarpd/internal/clock"

// handleRequest processes the Request s.peer, which is properly formatted. behind reports whether bytes follow it.
func (s *Startup) handleRequest(now clock.Time, behind bool) error {
	f := &s.peer
	switch {
	case f.Reply:
		return s.malformed(ErrBothResponders)
	case f.Rev > s.cfg.Rev, f.Rev == 0:
		return s.malformed(ErrRevision)
	case f.Enhanced && !s.cfg.Enhanced:
		// An unenhanced responder treats the frame as malformed: it closes TCP, and the initiator may try again without enhanced setup (RFC
		// 6581 section 10).
		return s.malformed(ErrNotEnhanced)
	case behind:
		return s.malformed(ErrTrailing)
	}
	f.Reject = false // not checked in a Request (RFC 5044 section 7.1.1)
	s.neg.HandleRequest(f.Data())
	s.state = stateWaitULP
	s.arm(now, s.cfg.Decision, DecisionTimeout)
	s.event = Event{Kind: EventRequest, Frame: *f}
	return nil
}

// Accept accepts the Request and starts Full Operation. ird and ord are the ULP's depths, as for Negotiation.Accept; Result returns the
// outcome. Accept fails with ErrState if no request is pending, ErrDepth or ErrPrivateData; the request then stays pending.
func (s *Startup) Accept(privateData []byte, ird, ord int) error {
	r, err := s.reply(privateData)
	if err != nil {
		return err
	}
	d, err := s.neg.Accept(ird, ord)
	if err != nil {
		return err
	}
	r.setData(d)
	s.params = Params{CRC: r.CRC, SendMarkers: s.peer.Markers, RecvMarkers: r.Markers, Rev: r.Rev}
	s.neg.Apply(&s.params)
	s.answer(r, EventAccepted)
	return nil
}

// Reject rejects the Request. The enhanced data of the Reply hold the Config's IRD and ORD, which the ULP would have needed. The TCP
// connection stays open and belongs to the ULP (RFC 5044 section 7.1.2, 2). It fails as Accept does.
func (s *Startup) Reject(privateData []byte) error {
	r, err := s.reply(privateData)
	if err != nil {
		return err
	}
	r.Reject = true
	r.setData(s.neg.Reject())
	s.answer(r, EventRejected)
	return nil
}

// answer sends the Reply.
func (s *Startup) answer(r Frame, kind EventKind) {
	s.sent = r
	s.send()
	s.done(Event{Kind: kind, Frame: s.peer})
}

// reply builds a Reply to the Request, except R and the enhanced data. It has the Request's revision, and C if either side wants CRCs: some
// initiators take a Reply without C as a refusal of their own.
func (s *Startup) reply(privateData []byte) (Frame, error) {
	f := &s.peer
	if s.initiator || s.state != stateWaitULP {
		return Frame{}, ErrState
	}
	if len(privateData) > maxPrivateData(f.Enhanced) {
		return Frame{}, tooMuch(privateData, f.Enhanced)
	}
	return Frame{
		Reply:       true,
		CRC:         s.cfg.CRC || f.CRC,
		Markers:     s.cfg.Markers,
		Rev:         f.Rev,
		PrivateData: privateData,
	}, nil
}
