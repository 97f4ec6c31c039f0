package mpa

import "github.com/iwarpd/iwarpd/internal/term"

// handleReply is the initiator's: s.peer is a frame that is properly formatted.
// behind says that octets follow it.
func (s *Startup) handleReply(behind bool) error {
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
		s.done(Event{Kind: EventRejected, Frame: *f, Err: e})
		return nil
	case behind:
		// The responder may send nothing before it has our first FPDU
		// (RFC 5044 section 7.1.2, 4).
		return s.malformed(ErrTrailing)
	}
	s.params = Params{
		CRC:         cfg.CRC || f.CRC,
		SendMarkers: f.Markers,
		RecvMarkers: cfg.Markers,
		Rev:         f.Rev,
		Enhanced:    f.Enhanced,
		IRD:         cfg.IRD,
		ORD:         cfg.ORD,
		Initiator:   true,
	}
	if f.Enhanced {
		if e := s.takeEnhanced(f); e != nil {
			return s.failed(e)
		}
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

// takeEnhanced works out depths and RTR of an accepting Reply (RFC 6581 sections
// 9.1 and 9.2).
func (s *Startup) takeEnhanced(f *Frame) *Error {
	p, cfg := &s.params, &s.cfg
	if f.IRD != NoNegotiation {
		p.ORD = min(p.ORD, int(f.IRD))
	}
	if need := int(f.ORD); need > p.IRD && need != NoNegotiation && !cfg.ManualIRD {
		if need > cfg.MaxIRD {
			return &Error{Cause: ErrIRD, Term: term.ErrMPAIRD, Terminate: true}
		}
		p.IRD = need
	}
	if !s.sent.P2P {
		return nil // whatever the Reply says of RTRs, we asked for none
	}
	// A Reply without A has no RTR either: the connection models do not match,
	// which is the same error.
	kinds := f.RTR & cfg.rtrs()
	if f.IRD == 0 {
		kinds &^= RTRs(RTRRead) // it would overrun the peer's IRRQ
	}
	if p.RTR = kinds.prefer(); p.RTR == RTRNone {
		return &Error{Cause: ErrRTR, Term: term.ErrMPARTR, Terminate: true}
	}
	return nil
}
