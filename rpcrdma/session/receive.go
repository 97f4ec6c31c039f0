package session

import (
	"encoding/binary"
	"errors"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// RPC message types (RFC 5531 section 9).
const (
	rpcCall  = 0
	rpcReply = 1
)

// HandleMessage takes the bytes of one Send of the peer's. They may be used again
// when it returns.
func (s *Session) HandleMessage(b []byte) {
	if s.closed {
		return
	}
	s.received++
	s.stats.Received++
	h := &s.hdr
	n, err := h.Decode(b)
	if errors.Is(err, wire.ErrShort) {
		s.stats.Discarded++
		return
	}
	if errors.Is(err, wire.ErrVersion) {
		s.badVersion(h)
		return
	}
	if s.version == 0 && !s.negotiate(h, err) {
		return
	}
	if int(h.Vers) != s.version {
		s.mismatch(h)
		return
	}
	if s.version == 1 {
		s.receive1(h, err, b[n:])
		return
	}
	s.receive2(h, err, b, n)
}

// badVersion answers a version that does not exist here.
func (s *Session) badVersion(h *wire.Header) {
	if h.Type == wire.Error { // in any version: never answered
		s.stats.Discarded++
		return
	}
	if s.version == 2 {
		s.sendError(h.XID, h.Vers, wire.Failure{Code: wire.ErrVersMismatch})
		return
	}
	s.sendError(h.XID, h.Vers, wire.Failure{Code: wire.ErrVers, Low: uint32(s.cfg.MinVersion), High: uint32(s.cfg.Version)})
}

// mismatch answers a version that is not that of the connection (draft section
// 7.1.2; RFC 8166 section 4.5.1 knows only ERR_VERS).
func (s *Session) mismatch(h *wire.Header) {
	switch {
	case h.Type == wire.Error || !s.cfg.Server:
		s.stats.Discarded++
	case s.version == 2:
		s.sendError(h.XID, h.Vers, wire.Failure{Code: wire.ErrVersMismatch})
	default:
		s.sendError(h.XID, h.Vers, wire.Failure{Code: wire.ErrVers, Low: 1, High: 1})
	}
}

// negotiate settles the version by the first message of the peer's. False: it
// is dealt with.
func (s *Session) negotiate(h *wire.Header, err error) bool {
	if s.cfg.Server {
		if int(h.Vers) > s.cfg.Version || int(h.Vers) < s.cfg.MinVersion {
			s.badVersion(h)
			return false
		}
		if h.Type == wire.Error {
			s.stats.Discarded++
			return false
		}
		s.version = int(h.Vers)
		if s.version == 2 {
			s.limit = h.Credit
			s.sendProps()
		}
		s.becomeReady()
		return true
	}
	if h.Type == wire.Error && h.Failure.Code == wire.ErrVers && err == nil {
		f := h.Failure
		if f.Low <= 1 && f.High >= 1 && s.cfg.MinVersion <= 1 {
			// The error is version 1's or version 2's: both have the same bytes here.
			s.version, s.ctrl, s.limit = 1, nil, 0
			s.becomeReady()
		} else {
			s.close(errors.Join(ErrVersion, &FailureError{f}))
		}
		return false
	}
	if int(h.Vers) != s.cfg.Version {
		s.stats.Discarded++
		return false
	}
	s.version = int(h.Vers)
	s.limit = h.Credit
	if !s.auth.on {
		s.becomeReady()
	}
	return true
}

func (s *Session) receive2(h *wire.Header, err error, b []byte, n int) {
	// One message more than was granted is a Grant's, or that of a peer that reads
	// the rule by its letter. What goes beyond could be without end.
	if int32(s.received-s.told) > 1 {
		s.close(ErrProtocol)
		return
	}
	s.limit = h.Credit // "in the most recently received message": it may fall
	if h.Type != wire.Grant {
		s.payload = true
	}
	body := b[min(n, len(b)):]
	switch {
	case errors.Is(err, wire.ErrUnknownCode):
		s.stats.Discarded++
		return
	case errors.Is(err, wire.ErrType):
		s.interrupted(h)
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrInvalHType})
		return
	case errors.Is(err, wire.ErrPropVal):
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadPropVal})
		return
	case err != nil:
		s.badXDR(h)
		return
	}
	// A Grant and an Error may stand between the pieces of a continued message:
	// who waits for credits there must get them.
	switch h.Type {
	case wire.Grant:
		return
	case wire.Error:
		s.failure(h)
		return
	}
	if s.propsIn == phaseMiddle && h.Type != wire.ConnPropMiddle && h.Type != wire.ConnPropFinal {
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrInvalCont})
		return
	}
	if s.interrupted(h) {
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrInvalCont})
		return
	}
	switch h.Type {
	case wire.ConnPropMiddle, wire.ConnPropFinal:
		s.properties(h)
	case wire.CallMiddle, wire.CallInline, wire.CallExternal:
		if s.auth.on && !s.auth.done {
			s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrSystem})
			return
		}
		s.incoming2(h, body)
	case wire.ReplyMiddle:
		if !s.asm.active && s.pending[h.XID] == nil || s.asm.skips(h) {
			s.stats.Discarded++
			return
		}
		s.middle(h, body, true)
	case wire.ReplyInline, wire.ReplyExternal:
		s.reply2(h, body)
	}
}

// badXDR answers a header that cannot be parsed. A reply is not answered: its
// call is over.
func (s *Session) badXDR(h *wire.Header) {
	switch h.Type {
	case wire.Error, wire.Grant:
		s.stats.Discarded++
	case wire.ReplyExternal, wire.ReplyMiddle, wire.ReplyInline:
		s.interrupted(h)
		s.asm.drop(h.XID)
		s.fail(h.XID, ErrProtocol)
	default:
		s.interrupted(h)
		s.asm.drop(h.XID)
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadXDR})
	}
}

// interrupted ends the continued message that is being received if h does not
// go on with it, and reports whether it does not (draft sections 6.3.6 and
// 6.3.9).
func (s *Session) interrupted(h *wire.Header) bool {
	a := &s.asm
	if !a.active {
		return false
	}
	if a.xid == h.XID && (!a.reply && (h.Type == wire.CallMiddle || h.Type == wire.CallInline) ||
		a.reply && (h.Type == wire.ReplyMiddle || h.Type == wire.ReplyInline)) {
		return false
	}
	if a.xid != h.XID { // the one that was broken off is answered too: its caller waits
		s.broken(a.xid)
	} else {
		a.active, a.buf = false, nil
		if a.reply {
			s.fail(a.xid, ErrProtocol)
		}
	}
	return true
}

// broken gives the assembly up and tells the peer.
func (s *Session) broken(xid uint32) {
	a := &s.asm
	a.active, a.buf = false, nil
	s.sendError(xid, 2, wire.Failure{Code: wire.ErrInvalCont})
	if a.reply {
		s.fail(xid, ErrProtocol)
	}
	a.poison, a.poisonXID = true, xid
	a.poisonType = wire.CallInline
	if a.reply {
		a.poisonType = wire.ReplyInline
	}
}

// drop forgets a continued message.
func (a *assembly) drop(xid uint32) {
	if a.active && a.xid == xid {
		a.active, a.buf = false, nil
	}
}

// skips reports whether h is part of a continued message that failed, whose
// rest is discarded (draft section 7.1.4).
func (a *assembly) skips(h *wire.Header) bool {
	if !a.poison || h.XID != a.poisonXID || h.Type != a.poisonType && h.Type != a.poisonType-1 {
		return false
	}
	if h.Type == a.poisonType {
		a.poison = false
	}
	return true
}

// middle takes a piece that is not the last.
func (s *Session) middle(h *wire.Header, body []byte, reply bool) {
	a := &s.asm
	if !a.active {
		if len(body) >= 4 && binary.BigEndian.Uint32(body) != h.XID {
			if reply {
				s.fail(h.XID, ErrProtocol)
			} else {
				s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadXDR})
			}
			return
		}
		// rdma_remaining counts what follows this piece, or this piece too: the draft
		// can be read both ways, and what follows tells.
		*a = assembly{active: true, reply: reply, xid: h.XID, poison: a.poison, poisonXID: a.poisonXID, poisonType: a.poisonType}
		a.total = [2]int{len(body) + int(h.Remaining), int(h.Remaining)}
		a.ok = [2]bool{h.Remaining > 0, int64(h.Remaining) > int64(len(body))}
	} else {
		a.ok[0] = a.ok[0] && h.Remaining > 0 && len(a.buf)+len(body)+int(h.Remaining) == a.total[0]
		a.ok[1] = a.ok[1] && len(a.buf)+int(h.Remaining) == a.total[1]
	}
	if !a.ok[0] && !a.ok[1] || len(a.buf)+len(body) > s.cfg.Limits.Message || a.least() > s.cfg.Limits.Message {
		s.broken(h.XID)
		return
	}
	if a.buf == nil {
		a.buf = make([]byte, 0, min(a.least(), s.cfg.Limits.Message))
	}
	a.buf = append(a.buf, body...)
}

// least is the shortest that the whole message can be, in bytes.
func (a *assembly) least() int {
	if a.ok[1] {
		return a.total[1]
	}
	return a.total[0]
}

// whole adds the last piece. ok false: the message was broken, or is not one.
func (s *Session) whole(h *wire.Header, body []byte) (msg []byte, ok bool) {
	a := &s.asm
	if !a.active {
		return append([]byte(nil), body...), true
	}
	n := len(a.buf) + len(body)
	if !(a.ok[0] && n == a.total[0] || a.ok[1] && n == a.total[1]) {
		s.broken(h.XID)
		a.poison = false
		return nil, false
	}
	msg = append(a.buf, body...)
	a.active, a.buf = false, nil
	return msg, true
}

// properties takes CONNPROP messages.
func (s *Session) properties(h *wire.Header) {
	if s.propsIn == phaseFinal {
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrInvalCont})
		return
	}
	auth, err := s.peer.Apply(h.Props)
	if err != nil {
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadPropVal})
		return
	}
	s.propsIn = phaseMiddle
	if h.Type == wire.ConnPropFinal {
		s.propsIn = phaseFinal
	}
	if !s.auth.on {
		return
	}
	for _, m := range auth {
		if s.auth.done && s.propsSent == phaseFinal {
			break
		}
		out, done, err := s.cfg.Auth.Step(m)
		if err != nil {
			s.close(errors.Join(ErrAuth, err))
			return
		}
		s.auth.done = done
		if len(out) > 0 || done {
			s.queueProps(nil, out, done)
		}
	}
	switch {
	case s.propsIn != phaseFinal:
	case !s.auth.done:
		s.close(ErrAuth)
	default:
		if s.propsSent != phaseFinal {
			s.queueProps(nil, nil, true)
		}
		s.becomeReady()
	}
}

// failure takes an Error of the peer's.
func (s *Session) failure(h *wire.Header) {
	f := h.Failure
	switch f.Code {
	case wire.ErrReadChunks:
		s.maxRead = int(min(f.Max, 1<<20))
	case wire.ErrWriteChunks:
		s.maxWrite = int(min(f.Max, 1<<20))
	case wire.ErrSegments:
		s.maxSegs = int(min(f.Max, 1<<20))
	case wire.ErrInvalHType:
		// What it does not take is not sent again (draft section 7.1.3). A call that
		// was inline alone tells nothing: all must take that.
		if p := s.pending[h.XID]; p != nil {
			s.refused |= p.types &^ (1 << wire.CallInline)
		}
	case wire.ErrVers:
		// Nothing of this version may be sent any more (draft section 7.1.1), and the
		// version of a connection does not change.
		if f.Low > 2 || f.High < 2 {
			defer s.close(ErrVersion)
		}
	}
	if s.pending[h.XID] == nil {
		s.stats.Discarded++
		return
	}
	// What is queued of a continued call is of no use any more.
	if len(s.queue) > 0 && s.queue[0].call && s.queue[0].hdr.XID == h.XID && s.queue[0].off > 0 {
		s.queue = s.queue[1:]
	}
	s.fail(h.XID, &FailureError{f})
}

// reply2 takes the last or only message of a reply.
func (s *Session) reply2(h *wire.Header, body []byte) {
	if s.asm.skips(h) {
		s.stats.Discarded++
		return
	}
	var msg []byte
	if h.Type == wire.ReplyInline {
		var ok bool
		if msg, ok = s.whole(h, body); !ok {
			return
		}
	}
	s.finish(h, msg, h.Type == wire.ReplyExternal)
}

// finish hands a reply up after holding its chunks against the call's.
func (s *Session) finish(h *wire.Header, msg []byte, ext bool) {
	p := s.pending[h.XID]
	if p == nil {
		s.stats.Discarded++
		return
	}
	r := &Reply{Body: msg}
	ok := len(h.Writes) == 0 || len(h.Writes) == len(p.writes)
	for i, c := range h.Writes {
		ok = ok && returned(c, p.writes[i])
	}
	if ok && len(h.Writes) > 0 {
		r.Writes = cloneChunks(h.Writes)
	}
	switch {
	case ext:
		ok = ok && h.Reply != nil && p.reply != nil && returned(h.Reply, p.reply) && h.Reply.Len() >= 8
		r.Ext, r.Body = h.Reply.Len(), nil
	default:
		ok = ok && h.Reply.Len() == 0 && len(msg) >= 8 && binary.BigEndian.Uint32(msg) == h.XID && binary.BigEndian.Uint32(msg[4:]) == rpcReply
	}
	if !ok {
		s.fail(h.XID, ErrProtocol)
		return
	}
	s.settle(h.XID)
	s.event(Event{Kind: EventReply, XID: h.XID, Reply: r})
}

// returned reports whether got is the chunk want as a responder gives it back:
// the same segments, filled from the first on.
func returned(got, want wire.Chunk) bool {
	if len(got) != len(want) {
		return false
	}
	short := false
	for i, g := range got {
		w := want[i]
		if g.Handle != w.Handle || g.Offset != w.Offset || g.Length > w.Length || short && g.Length > 0 {
			return false
		}
		short = short || g.Length < w.Length
	}
	return true
}

func cloneChunks(l []wire.Chunk) []wire.Chunk {
	if len(l) == 0 {
		return nil
	}
	n := 0
	for _, c := range l {
		n += len(c)
	}
	segs := make([]wire.Segment, 0, n)
	out := make([]wire.Chunk, len(l))
	for i, c := range l {
		segs = append(segs, c...)
		out[i] = segs[len(segs)-len(c) : len(segs) : len(segs)]
	}
	return out
}
