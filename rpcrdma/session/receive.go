package session

import (
	"encoding/binary"
	"errors"
	"slices"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// RPC message types (RFC 5531 section 9).
const (
	rpcCall  = 0
	rpcReply = 1
)

// HandleMessage processes the bytes of a received Send. It does not retain b.
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
	} else {
		s.receive2(h, err, b[n:])
	}
}

// badVersion answers a header with an unsupported version.
func (s *Session) badVersion(h *wire.Header) {
	if h.Type == wire.Error { // never answered, in any version
		s.stats.Discarded++
		return
	}
	if s.version == 2 {
		s.sendError(h.XID, h.Vers, wire.Failure{Code: wire.ErrVersMismatch})
		return
	}
	s.sendError(h.XID, h.Vers, wire.Failure{Code: wire.ErrVers, Low: uint32(s.cfg.MinVersion), High: uint32(s.cfg.Version)})
}

// mismatch answers a header whose version is not that of the connection (draft section 7.1.2; RFC
// 8166 section 4.5.1 has only ERR_VERS).
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

// negotiate determines the version from the peer's first message. It returns false if the message
// needs no further processing.
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
			s.sendProps()
		}
		if s.cfg.Auth == nil {
			s.becomeReady()
		}
		return true
	}
	if h.Type == wire.Error && h.Failure.Code == wire.ErrVers && err == nil {
		f := h.Failure
		if f.Low <= 1 && f.High >= 1 && s.cfg.MinVersion <= 1 {
			// The error may be of version 1 or 2; the bytes are the same.
			s.version, s.ctrl = 1, nil
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
	if s.cfg.Auth == nil {
		s.becomeReady()
	}
	return true
}

// receive2 processes a message of version 2.
func (s *Session) receive2(h *wire.Header, err error, body []byte) {
	// Accept one message beyond the credits: it may be a Grant, or the peer may read the rule
	// literally. More would be unbounded.
	if int32(s.received-s.told) > 1 {
		s.close(ErrProtocol)
		return
	}
	s.limit = h.Credit // "in the most recently received message": it may fall
	if h.Type != wire.Grant {
		s.payload = true
	}
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
	// A Grant or an Error may arrive between the parts of a continued message: the sender may
	// be waiting for credits.
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
		if !s.authed {
			s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrSystem})
			return
		}
		s.incoming2(h, body)
	case wire.ReplyMiddle:
		if s.asm.last == 0 && s.pending[h.XID] == nil {
			s.stats.Discarded++
		} else if !s.skips(h) {
			s.middle(h, body)
		}
	case wire.ReplyInline, wire.ReplyExternal:
		s.reply2(h, body)
	}
}

// badXDR answers a header that cannot be parsed. Replies are not answered; their call fails.
func (s *Session) badXDR(h *wire.Header) {
	if h.Type == wire.Error || h.Type == wire.Grant {
		s.stats.Discarded++
		return
	}
	s.interrupted(h)
	s.asm = assembly{}
	switch h.Type {
	case wire.ReplyExternal, wire.ReplyMiddle, wire.ReplyInline:
		s.fail(h.XID, ErrProtocol)
	default:
		s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadXDR})
	}
}

// interrupted reports whether h does not continue the continued message that is being received, and
// in this case abandons the message (draft sections 6.3.6 and 6.3.9).
func (s *Session) interrupted(h *wire.Header) bool {
	a := s.asm.parts
	if a.last == 0 || a.has(h) {
		return false
	}
	if a.xid != h.XID { // answer the interrupted one too, since its caller waits
		s.abandon()
		return true
	}
	s.asm = assembly{}
	if a.last == wire.ReplyInline {
		s.fail(a.xid, ErrProtocol)
	}
	return true
}

// abandon discards the assembly and what is to come of it, and reports that to the peer.
func (s *Session) abandon() {
	a := s.asm.parts
	s.asm, s.broken = assembly{}, a
	s.sendError(a.xid, 2, wire.Failure{Code: wire.ErrInvalCont})
	if a.last == wire.ReplyInline {
		s.fail(a.xid, ErrProtocol)
	}
}

// skips reports whether h is a later part of a continued message that failed; it is discarded
// (draft section 7.1.4).
func (s *Session) skips(h *wire.Header) bool {
	if !s.broken.has(h) {
		return false
	}
	if h.Type == s.broken.last {
		s.broken = parts{}
	}
	s.stats.Discarded++
	return true
}

// middle processes a part that is not the last.
func (s *Session) middle(h *wire.Header, body []byte) {
	a := &s.asm
	if a.last == 0 {
		if len(body) >= 4 && binary.BigEndian.Uint32(body) != h.XID {
			if h.Type == wire.ReplyMiddle {
				s.fail(h.XID, ErrProtocol)
			} else {
				s.sendError(h.XID, 2, wire.Failure{Code: wire.ErrBadXDR})
			}
			return
		}
		// The draft does not say whether rdma_remaining includes the current part. The
		// following parts show which reading the peer uses.
		a.parts = parts{h.XID, h.Type + 1}
		a.total = [2]int{len(body) + int(h.Remaining), int(h.Remaining)}
		a.ok = [2]bool{h.Remaining > 0, int64(h.Remaining) > int64(len(body))}
	} else {
		a.ok[0] = a.ok[0] && h.Remaining > 0 && len(a.buf)+len(body)+int(h.Remaining) == a.total[0]
		a.ok[1] = a.ok[1] && len(a.buf)+int(h.Remaining) == a.total[1]
	}
	if !a.ok[0] && !a.ok[1] || len(a.buf)+len(body) > s.cfg.Limits.Message || a.least() > s.cfg.Limits.Message {
		s.abandon()
		return
	}
	if a.buf == nil {
		a.buf = make([]byte, 0, min(a.least(), s.cfg.Limits.Message))
	}
	a.buf = append(a.buf, body...)
}

// least returns the minimum length of the whole message, in bytes.
func (a *assembly) least() int {
	if a.ok[1] {
		return a.total[1]
	}
	return a.total[0]
}

// whole adds the last part. ok is false if the message is incomplete or malformed.
func (s *Session) whole(body []byte) (msg []byte, ok bool) {
	a := &s.asm
	if a.last == 0 {
		return append([]byte(nil), body...), true
	}
	n := len(a.buf) + len(body)
	if !(a.ok[0] && n == a.total[0] || a.ok[1] && n == a.total[1]) {
		s.abandon()
		s.broken = parts{}
		return nil, false
	}
	msg = append(a.buf, body...)
	s.asm = assembly{}
	return msg, true
}

// properties processes CONNPROP messages.
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
	if s.cfg.Auth == nil {
		return
	}
	for _, m := range auth {
		if s.authed && s.propsSent == phaseFinal {
			break
		}
		out, done, err := s.cfg.Auth.Step(m)
		if err != nil {
			s.close(errors.Join(ErrAuth, err))
			return
		}
		s.authed = done
		if len(out) > 0 || done {
			s.queueProps(nil, out, done)
		}
	}
	switch {
	case s.propsIn != phaseFinal:
	case !s.authed:
		s.close(ErrAuth)
	default:
		if s.propsSent != phaseFinal {
			s.queueProps(nil, nil, true)
		}
		s.becomeReady()
	}
}

// failure processes an Error of the peer.
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
		// A format that the peer rejects is not used again (draft section 7.1.3), except
		// plain inline, which every peer must accept.
		if p := s.pending[h.XID]; p != nil {
			s.refused |= p.types &^ (1 << wire.CallInline)
		}
	case wire.ErrVers:
		// Messages of this version are no longer allowed (draft section 7.1.1), and a
		// connection cannot change its version.
		if f.Low > 2 || f.High < 2 {
			defer s.close(ErrVersion)
		}
	}
	if s.pending[h.XID] == nil {
		s.stats.Discarded++
		return
	}
	// The rest of a continued call in the queue is useless now.
	if len(s.queue) > 0 && s.queue[0].call && s.queue[0].hdr.XID == h.XID && s.queue[0].off > 0 {
		s.queue = s.queue[1:]
	}
	s.fail(h.XID, &FailureError{f})
}

// reply2 processes the last or only message of a version 2 reply.
func (s *Session) reply2(h *wire.Header, body []byte) {
	if s.skips(h) {
		return
	}
	var msg []byte
	if h.Type == wire.ReplyInline {
		var ok bool
		if msg, ok = s.whole(body); !ok {
			return
		}
	}
	s.finish(h, msg, h.Type == wire.ReplyExternal)
}

// finish validates the chunks of a reply against those of its call and delivers it.
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
	if ext {
		ok = ok && h.Reply != nil && p.reply != nil && returned(h.Reply, p.reply) && h.Reply.Len() >= 8
		r.Ext, r.Body = h.Reply.Len(), nil
	} else {
		ok = ok && h.Reply.Len() == 0 && len(msg) >= 8 && binary.BigEndian.Uint32(msg) == h.XID && binary.BigEndian.Uint32(msg[4:]) == rpcReply
	}
	if !ok {
		s.fail(h.XID, ErrProtocol)
		return
	}
	s.settle(h.XID)
	s.event(Event{Kind: EventReply, XID: h.XID, Reply: r})
}

// returned reports whether got is the chunk want as returned by a responder: the same segments,
// filled in order.
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
	l = slices.Clone(l)
	for i := range l {
		l[i] = slices.Clone(l[i])
	}
	return l
}
