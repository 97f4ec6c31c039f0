package mpa

import "github.com/iwarpd/iwarpd/internal/term"

// handleReply processes the Reply s.peer, which is properly formatted. Bytes after it are left in the stream. A responder must wait for our
// first FPDU before it sends one (RFC 5044 section 7.1.2, 4), so that the initiator can prepare; a responder that does not wait is
// accepted, whether its FPDU comes with the Reply or later.
func (s *Startup) handleReply() error {
	f, cfg := &s.peer, &s.cfg
	switch {
	case !f.Reply:
		return s.malformed(ErrBothInitiators)
	case f.Rev != s.sent.Rev, f.Enhanced != s.sent.Enhanced && !f.Reject:
		return s.wrongReply()
	case f.Reject:
		// TCP stays open for the ULP, so bytes after the frame belong to the ULP.
		e := &Error{Cause: ErrRejected}
		if s.sent.Markers && bare(f) {
			// soft-iWARP refuses markers this way, without a reason.
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

// wrongReply ends the startup because the Reply does not match the Request. One cause is a revision-1 peer that answers a Request it does
// not understand.
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

// bare reports whether a rejection carries no information.
func bare(f *Frame) bool {
	return len(f.PrivateData) == 0 && f.IRD == 0 && f.ORD == 0 && !f.P2P
}
