package mpa

import "github.com/iwarpd/iwarpd/internal/term"

// handleReply is the initiator's: s.peer is a frame that is properly formatted.
// Bytes that follow it are left alone. A responder has to wait for our first FPDU
// before it sends one (RFC 5044 section 7.1.2, 4), so that the initiator can
// prepare; one that does not is taken, whether its FPDU comes with the Reply or
// later.
func (s *Startup) handleReply() error {
	f, cfg := &s.peer, &s.cfg
	switch {
	case !f.Reply:
		return s.malformed(ErrBothInitiators)
	case f.Rev != s.sent.Rev, f.Enhanced != s.sent.Enhanced && !f.Reject:
		return s.wrongReply()
	case f.Reject:
		// TCP stays open for the ULP, so octets behind the frame are its.
		e := &Error{Cause: ErrRejected}
		if s.sent.Markers && bare(f) {
			// soft-iWARP refuses markers so, without a word of explanation.
			e.Retry = s.allow(RetryNoMarkers)
		}
		s.neg.HandleReject(f.Data())
		s.done(Event{Kind: EventRejected, Frame: *f, Err: e})
		return nil
	}
	s.params = Params{
		CRC:         cfg.CRC || f.CRC,
		SendMarkers: f.Markers,
		RecvMarkers: cfg.Markers,
		Rev:         f.Rev,
		Initiator:   true,
	}
	err := s.neg.HandleAccept(f.Data())
	s.neg.Apply(&s.params)
	if err != nil {
		return s.failed(err)
	}
	s.done(Event{Kind: EventAccepted, Frame: *f})
	return nil
}

// wrongReply ends the startup by a Reply of another kind than the Request: of a
// revision-1 peer that answers what it does not understand, for one.
func (s *Startup) wrongReply() error {
	e := &Error{Cause: ErrRevision, Term: term.ErrMPAFrame}
	if s.peer.Rev == s.sent.Rev {
		e.Cause = ErrNotEnhanced
	}
	if s.sent.Rev > 1 && s.peer.Rev <= s.sent.Rev {
		e.Retry = s.allow(RetryRev1)
	}
	return s.failed(e)
}

// bare reports whether a rejection says nothing at all.
func bare(f *Frame) bool {
	return len(f.PrivateData) == 0 && f.IRD == 0 && f.ORD == 0 && !f.P2P
}
