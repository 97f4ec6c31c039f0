package session

import (
	"encoding/binary"
	"errors"
	"iter"
	"slices"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// incoming2 processes a message of a version 2 call.
func (s *Session) incoming2(h *wire.Header, body []byte) {
	if s.skips(h) {
		return
	}
	if f, ok := s.reverse(h); !ok {
		s.asm = assembly{}
		s.sendError(h.XID, 2, f)
		return
	}
	if h.Type == wire.CallMiddle {
		s.middle(h, body)
		return
	}
	if f, ok := s.check(h); !ok {
		s.asm = assembly{}
		s.sendError(h.XID, 2, f)
		return
	}
	c := s.newCall(h)
	if h.Type == wire.CallInline {
		var ok bool
		if c.Body, ok = s.whole(body); !ok {
			return
		}
		if !CheckBody(c.XID, c.Body) {
			s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadXDR})
			return
		}
	}
	s.deliver(c)
}

func (s *Session) newCall(h *wire.Header) *Call {
	c := &Call{XID: h.XID, Ext: slices.Clone(h.Call), Reads: slices.Clone(h.Reads), Writes: cloneChunks(h.Writes), Reply: slices.Clone(h.Reply)}
	for g := range c.Segments() {
		if g.Handle == h.InvHandle && s.cfg.Invalidate != InvalidateNone {
			c.Inv = h.InvHandle
		}
	}
	return c
}

// deliver passes a call to the caller. The call holds as many credits as the messages that its body filled, at most a quarter
// of the window: otherwise a peer could make us hold a window of calls of Limits.Message bytes.
func (s *Session) deliver(c *Call) {
	c.credits = min(1+len(c.Body)/int(s.cfg.Props.RecvSize), max(s.cfg.Window/4, 1))
	s.busy += c.credits
	for g := range c.Segments() {
		s.named[g.Handle]++
	}
	s.stats.CallsIn++
	s.event(Event{Kind: EventCall, XID: c.XID, Call: c})
}

// CheckBody reports whether b starts like a call with that XID. The body of a Call with Ext must be
// checked after it has been read; if the check fails, answer with Fail and ErrBadXDR.
func CheckBody(xid uint32, b []byte) bool {
	return len(b) >= 8 && binary.BigEndian.Uint32(b) == xid && binary.BigEndian.Uint32(b[4:]) == rpcCall
}

// reverse checks a call in the reverse direction against the supported level.
func (s *Session) reverse(h *wire.Header) (wire.Failure, bool) {
	if s.cfg.Server {
		return wire.Failure{}, true
	}
	level := s.cfg.Props.Reverse
	switch {
	case level == wire.ReverseNone, level == wire.ReverseSimple && h.Type == wire.CallMiddle:
		return wire.Failure{Code: wire.ErrInvalHType}, false
	case level == wire.ReverseGeneral:
	case h.Type == wire.CallExternal || len(h.Reads) > 0:
		return wire.Failure{Code: wire.ErrReadChunks}, false
	case len(h.Writes) > 0:
		return wire.Failure{Code: wire.ErrWriteChunks}, false
	case h.Reply != nil:
		return wire.Failure{Code: wire.ErrReplyResource}, false
	}
	return wire.Failure{}, true
}

// check validates the chunk lists of a call and applies our limits.
func (s *Session) check(h *wire.Header) (wire.Failure, bool) {
	l := &s.cfg.Limits
	bad := wire.Failure{Code: wire.ErrBadXDR}
	if h.Type == wire.CallExternal {
		var n uint64
		for _, r := range h.Call {
			if r.Position != 0 {
				return bad, false
			}
			n += uint64(r.Length)
		}
		if n < 8 {
			return bad, false
		}
		if len(h.Call) > l.Segments {
			return wire.Failure{Code: wire.ErrSegments, Max: uint32(l.Segments)}, false
		}
		if n > uint64(l.Message) {
			return wire.Failure{Code: wire.ErrSystem}, false
		}
	}
	chunks, segs := 0, 0
	var n uint64
	var at uint32
	for _, r := range h.Reads {
		if r.Position%4 != 0 || r.Position == 0 || r.Position < at {
			return bad, false
		}
		if r.Position != at {
			chunks, segs, n, at = chunks+1, 0, 0, r.Position
		}
		segs++
		n += uint64(r.Length)
		if chunks > l.ReadChunks || n > l.Chunk {
			return wire.Failure{Code: wire.ErrReadChunks, Max: uint32(l.ReadChunks)}, false
		}
		if segs > l.Segments {
			return wire.Failure{Code: wire.ErrSegments, Max: uint32(l.Segments)}, false
		}
	}
	if len(h.Writes) > l.WriteChunks {
		// Report an error only if there is no way to do without them (draft section 7.3.2).
		if l.WriteChunks == 0 && s.version == 2 && s.cfg.Continue < 2 {
			return wire.Failure{Code: wire.ErrReplyResource}, false
		}
		return wire.Failure{Code: wire.ErrWriteChunks, Max: uint32(l.WriteChunks)}, false
	}
	for _, c := range h.Writes {
		if len(c) > l.Segments {
			return wire.Failure{Code: wire.ErrSegments, Max: uint32(l.Segments)}, false
		}
	}
	if len(h.Reply) > l.Segments {
		return wire.Failure{Code: wire.ErrSegments, Max: uint32(l.Segments)}, false
	}
	// A work request for memory that extends past the end of the address space would fail and
	// end the connection.
	for g := range wire.Segments(h.Call, h.Reads, h.Writes, h.Reply) {
		if g.Offset+uint64(g.Length) < g.Offset {
			return wire.Failure{Code: wire.ErrSystem}, false
		}
	}
	return wire.Failure{}, true
}

// Segments returns all segments of c.
func (c *Call) Segments() iter.Seq[wire.Segment] {
	return wire.Segments(c.Ext, c.Reads, c.Writes, c.Reply)
}

// receive1 processes a message of version 1.
func (s *Session) receive1(h *wire.Header, err error, body []byte) {
	switch {
	case h.Type == wire.Error1:
		if err != nil || s.pending[h.XID] == nil {
			s.stats.Discarded++
			return
		}
		s.fail(h.XID, &FailureError{wire.Failure{Code: v1Code(h.Failure.Code), Low: h.Failure.Low, High: h.Failure.High}})
		return
	case err == nil && h.Type == wire.Done1:
		s.stats.Discarded++
		return
	}
	// Calls and replies have the same headers. The message type distinguishes them or, if the
	// message is in a chunk, the kind of chunk.
	reply := len(body) >= 8 && binary.BigEndian.Uint32(body[4:]) == rpcReply
	if h.Type == wire.NoMsg1 && err == nil {
		reply = len(h.Reads) == 0 && s.pending[h.XID] != nil
	}
	if err != nil && errors.Is(err, wire.ErrXDR) && !s.cfg.Server {
		s.fail(h.XID, ErrProtocol)
		return
	}
	if reply {
		if h.Type == wire.MsgP1 { // RFC 8166 section 4.6.1
			s.stats.Discarded++
			return
		}
		if err != nil || len(h.Reads) > 0 {
			s.fail(h.XID, ErrProtocol)
			return
		}
		// A grant of 0 would block the connection. Treat it as 1, as other implementations
		// do.
		s.grant1 = int(max(min(h.Credit, 1<<20), 1))
		s.finish(h, append([]byte(nil), body...), h.Type == wire.NoMsg1)
		return
	}
	if !s.cfg.Server && s.cfg.Props.Reverse == wire.ReverseNone {
		s.stats.Discarded++
		return
	}
	if err != nil || h.Type == wire.MsgP1 {
		s.sendError(h.XID, 1, wire.Failure{Code: wire.ErrChunk1})
		return
	}
	if !s.cfg.Server && s.cfg.Props.Reverse != wire.ReverseGeneral && len(h.Reads)+len(h.Writes)+len(h.Reply) > 0 {
		s.sendError(h.XID, 1, wire.Failure{Code: wire.ErrChunk1}) // RFC 8167 section 5.3
		return
	}
	if !s.call1(h, body) {
		s.sendError(h.XID, 1, wire.Failure{Code: wire.ErrChunk1})
	}
}

// call1 processes a version 1 call. It returns false if the call was answered by ERR_CHUNK.
func (s *Session) call1(h *wire.Header, body []byte) bool {
	n := 0
	for n < len(h.Reads) && h.Reads[n].Position == 0 {
		n++
	}
	h.Call, h.Reads = append(h.Call[:0], h.Reads[:n]...), h.Reads[n:]
	as := *h
	as.Type = wire.CallInline
	if h.Type == wire.NoMsg1 {
		as.Type = wire.CallExternal
	} else if n > 0 {
		return false
	}
	if _, ok := s.check(&as); !ok {
		return false
	}
	if s.busy >= 2*s.cfg.Window {
		return false // more calls than were granted
	}
	c := s.newCall(&as)
	if as.Type == wire.CallInline {
		c.Body = append([]byte(nil), body...)
		if !CheckBody(c.XID, c.Body) {
			return false
		}
	}
	if s.cfg.Invalidate == InvalidateAny {
		c.Inv = c.only()
	}
	s.deliver(c)
	return true
}

// only returns the handle that all segments of c share, or 0. A requester of version 1 does not say
// which STag to invalidate, so with several handles the choice could be wrong.
func (c *Call) only() (handle uint32) {
	for g := range c.Segments() {
		if handle != 0 && g.Handle != handle {
			return 0
		}
		handle = g.Handle
	}
	return handle
}

// v1Code converts an error code of version 1 to version 2.
func v1Code(c wire.ErrCode) wire.ErrCode {
	if c == wire.ErrChunk1 {
		return wire.ErrBadXDR
	}
	return c
}
