package session

import (
	"cmp"

	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// firstLimit is the maximum length of a client's first message, since the server may support only
// version 1 (draft section 4.3).
const firstLimit = 1024

// Out is a message to be sent by one Send.
type Out struct {
	B   []byte // PollTransmit appends to B[:0]
	Inv uint32 // not 0: by Send with Invalidate of this STag
}

// edge returns the credit value to advertise: the total number of messages that the peer may have
// sent, modulo 2^32, which never decreases. In version 1 it is the number of calls in progress.
func (s *Session) edge() uint32 {
	if s.version == 1 {
		return uint32(s.cfg.Window)
	}
	e := s.received + uint32(s.cfg.Window-s.busy)
	if int32(e-s.told) < 0 {
		return s.told
	}
	return e
}

// may reports whether the credits allow a message. Data messages must stay within limit. A Grant
// may exceed it by one, for which the peer has a spare Receive (draft sections 4.2.1 and 4.2.1.1).
func (s *Session) may(grant bool) bool {
	d := int32(s.sent - s.limit)
	return d < 0 || grant && d == 0
}

// wantGrant reports whether to send a Grant: half of the credits, or all, are used and no other
// message is due.
func (s *Session) wantGrant() bool {
	if s.version != 2 {
		return false
	}
	left, more := int32(s.told-s.received), int32(s.edge()-s.told)
	return more > 0 && (left <= 0 || s.payload && int(left) <= s.cfg.Window/2)
}

// PollTransmit stores the next message to be sent in out. It returns false if there is none.
func (s *Session) PollTransmit(out *Out) bool {
	if s.closed {
		return false
	}
	if s.version == 1 {
		return s.poll1(out)
	}
	// Only a Grant may interrupt a continued message without breaking it.
	cont := len(s.queue) > 0 && s.queue[0].off > 0
	if s.may(false) {
		if len(s.ctrl) > 0 && !cont {
			m := s.ctrl[0]
			s.ctrl = s.ctrl[1:]
			s.emit(out, &m)
			return true
		}
		if len(s.queue) > 0 && s.version != 0 && s.propsSent != phaseMiddle {
			s.next(out)
			return true
		}
	}
	if s.wantGrant() && s.may(true) && s.propsSent != phaseNone {
		m := message{hdr: wire.Header{Type: wire.Grant}}
		s.stats.Grants++
		s.emit(out, &m)
		return true
	}
	return false
}

// next emits the message at the head of the queue, or its next part.
func (s *Session) next(out *Out) {
	m := &s.queue[0]
	h := &m.hdr
	limit, left := s.sendLimit(), len(m.body)-m.off
	// No part must be empty, even if the peer's limit has become shorter than the header of the last one.
	if n := min(limit-wire.PrefixSize-4, left-1) &^ 3; m.pieces && n > 0 && h.Len()+left > limit {
		mid := wire.Header{XID: h.XID, Type: wire.ReplyMiddle, Remaining: uint32(left - n)}
		if m.call {
			mid.Type = wire.CallMiddle
		}
		piece := message{hdr: mid, body: m.body[m.off : m.off+n]}
		m.off += n
		s.emit(out, &piece)
		return
	}
	piece := *m
	piece.body = m.body[m.off:]
	s.left(m)
	s.queue[0] = message{}
	s.queue = s.queue[1:]
	s.emit(out, &piece)
}

// left updates the counters when m leaves the queue.
func (s *Session) left(m *message) {
	if !m.call {
		s.replies.n--
		if m.pieces {
			s.replies.bytes -= len(m.body)
		}
	}
}

func (s *Session) emit(out *Out, m *message) {
	h := &m.hdr
	if h.Type != wire.Error { // an error has the version of what it answers
		h.Vers = uint32(cmp.Or(s.version, s.cfg.Version))
	}
	h.Credit = s.edge()
	*out = Out{B: h.Append(out.B[:0]), Inv: s.invalidate(m)}
	out.B = append(out.B, m.body...)
	s.told = h.Credit
	s.payload = false
	s.sent++
	s.stats.Sent++
}

// invalidate returns the STag that m invalidates, or 0. It must not be one that an unanswered call
// names (RFC 8797 section 4.1), even if that call arrived after the reply was made.
func (s *Session) invalidate(m *message) uint32 {
	if s.named[m.inv] > 0 {
		return 0
	}
	return m.inv
}

// poll1 is PollTransmit for version 1, where credits count calls (RFC 8166 section
// 3.3.1).
func (s *Session) poll1(out *Out) bool {
	var m message
	if len(s.ctrl) > 0 {
		m = s.ctrl[0]
		s.ctrl = s.ctrl[1:]
	} else {
		i := 0
		for ; i < len(s.queue) && s.queue[i].call && s.flight1 >= min(s.grant1, s.cfg.Window); i++ {
		}
		if i == len(s.queue) {
			return false
		}
		m = s.queue[i]
		s.left(&m)
		s.queue = append(s.queue[:i], s.queue[i+1:]...)
		if m.call {
			s.flight1++
			if p := s.pending[m.hdr.XID]; p != nil {
				p.got = true
			}
		}
	}
	s.emit(out, &m)
	return true
}

// sendError answers a message with that XID and version by an error (draft section 7). A peer that
// ignores errors and continues is disconnected.
func (s *Session) sendError(xid, vers uint32, f wire.Failure) {
	if s.closed {
		return
	}
	if len(s.ctrl) >= 4*s.cfg.Window+16 {
		s.close(ErrProtocol)
		return
	}
	s.stats.Errors++
	s.ctrl = append(s.ctrl, message{hdr: wire.Header{XID: xid, Vers: vers, Type: wire.Error, Failure: f}})
}

// sendProps queues our properties, in as many messages as needed.
func (s *Session) sendProps() {
	var material []byte
	if s.cfg.Auth != nil && !s.cfg.Server {
		var err error
		if material, s.authed, err = s.cfg.Auth.Step(nil); err != nil {
			s.close(ErrAuth)
			return
		}
	}
	s.queueProps(append(s.cfg.Props.Props(), s.cfg.Extra...), material, s.authed)
}

// queueProps queues CONNPROP messages with props and material. final marks the last of them as the
// end of the exchange.
func (s *Session) queueProps(props []wire.Prop, material []byte, final bool) {
	limit := 4096
	if s.version == 0 {
		limit = firstLimit
	}
	limit = min(limit, s.sendLimit())
	for len(material) > 0 {
		n := min(len(material), limit-wire.PrefixSize-4-16)
		props = append(props, wire.HostAuth(material[:n]))
		material = material[n:]
	}
	h := wire.Header{Type: wire.ConnPropMiddle}
	for _, p := range props {
		one := wire.Header{Type: wire.ConnPropMiddle, Props: []wire.Prop{p}}
		if len(h.Props) > 0 && h.Len()+one.Len()-wire.PrefixSize-4 > limit {
			s.ctrl = append(s.ctrl, message{hdr: h})
			h = wire.Header{Type: wire.ConnPropMiddle}
		}
		h.Props = append(h.Props, p)
	}
	s.propsSent = phaseMiddle
	if final {
		h.Type, s.propsSent = wire.ConnPropFinal, phaseFinal
	}
	s.ctrl = append(s.ctrl, message{hdr: h})
}
