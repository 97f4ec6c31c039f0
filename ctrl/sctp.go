package ctrl

import (
	"net/netip"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

// sctpOf reads the transport that a client asks for; nil is TCP.
func (s *Server) sctpOf(w *ctrlpb.Startup, streaming bool) (*dataplane.SCTP, error) {
	o := &dataplane.SCTP{UDP: w.GetUdpEncapsulation()}
	switch w.GetTransport() {
	case ctrlpb.Transport_TRANSPORT_TCP:
		if o.UDP {
			return nil, errorf(invalid, "ctrl: only SCTP is encapsulated in UDP")
		}
		if w.GetSharedAssociation() {
			return nil, errorf(invalid, "ctrl: only over SCTP are associations shared")
		}
		return nil, nil
	case ctrlpb.Transport_TRANSPORT_SCTP:
	case ctrlpb.Transport_TRANSPORT_SCTP_DRAFT:
		o.Profile = ddp.Draft
	default:
		return nil, errorf(invalid, "ctrl: there is no transport %d", w.GetTransport())
	}
	if streaming {
		return nil, errorf(invalid, "ctrl: a connection over SCTP does not begin as a byte stream")
	}
	return o, nil
}

// checkPrivate checks the private data of a client for SCTP, which leaves room for
// the enhanced data (RFC 6581 section 7).
func checkPrivate(b []byte) error {
	if len(b) > ddp.MaxPrivate-4 {
		return errorf(invalid, "ctrl: private data over SCTP has at most %d octets, not %d", ddp.MaxPrivate-4, len(b))
	}
	return nil
}

// steerSCTP steers the SCTP packets of a claim beside its TCP segments; in UDP they
// all have one port. Called with Server.mu held.
func (cs *claims) steerSCTP(c *claim, o *dataplane.SCTP) error {
	if cs.steering == nil {
		return nil
	}
	ep := bpf.Endpoint{Proto: pkt.ProtoSCTP, Addr: c.addr.Addr(), Port: c.addr.Port()}
	if o.UDP {
		ep.Proto, ep.Port = pkt.ProtoUDP, sctp.UDPPort
	}
	if ep.Addr.IsUnspecified() {
		ep.Addr = netip.Addr{}
	}
	for _, have := range c.eps {
		if have == ep {
			return nil
		}
	}
	if err := cs.steering.Claim(ep); err != nil {
		return errorf(internal, "ctrl: steering SCTP of %v: %w", c.addr, err)
	}
	c.eps = append(c.eps, ep)
	return nil
}

// llp names what carries c.
func (c *conn) llp() string {
	if c.sctp != nil {
		return "sctp"
	}
	return "tcp"
}

// initiateSetup is what our Initiate says. The draft has no enhanced set-up. A
// ready-to-receive message is offered only to a client that asks for it: over SCTP
// either side may send first without one (RFC 6581 section 7).
func (c *conn) initiateSetup() ddp.Setup {
	set := ddp.Setup{Private: c.cfg.PrivateData}
	if c.cfg.Enhanced && c.sctp.Profile == ddp.RFC5043 {
		set.Enhanced = &ddp.Enhanced{IRD: uint16(c.cfg.IRD), ORD: uint16(c.cfg.ORD), PeerToPeer: c.wantRTR}
		if c.wantRTR {
			set.Enhanced.RTR = uint8(c.cfg.RTR)
		}
	}
	return set
}

// sctpParams is what full operation runs with when nothing was negotiated. SCTP has a
// CRC32c of its own.
func (c *conn) sctpParams() mpa.Params {
	p := mpa.Params{CRC: true, Rev: 1, IRD: c.cfg.IRD, ORD: c.cfg.ORD, Initiator: c.listener == nil}
	if c.enhanced != nil {
		p.Rev, p.Enhanced = 2, true
	}
	return p
}

// joinedSCTP keeps the port of an association steered while it lasts: a SHUTDOWN comes
// when listener and connections may be gone.
func (s *Server) joinedSCTP(ev dataplane.Event) {
	var cl *claim
	if l := s.listeners[ev.Listener]; l != nil {
		cl = l.claim
	} else if c := s.conns[ev.Conn]; c != nil {
		cl = c.claim
	}
	if cl == nil {
		return // given up already
	}
	cl.refs++
	s.assocs[ev.Flow] = cl
}

// partedSCTP gives back a claim whose association is gone. What the peer has under way to
// it still comes to the engine, which knows what to answer; the host does not.
func (s *Server) partedSCTP(cl *claim) {
	if cl == nil {
		return
	}
	until := s.now().Add(lateTime)
	for _, ep := range cl.eps {
		if ep.Proto == protoTCP {
			continue
		}
		if s.late[ep] == 0 {
			if s.closed || s.claims.steering.Claim(ep) != nil {
				continue
			}
			s.lateNext = append(s.lateNext, lateEndpoint{ep, until})
			s.wake(until)
		}
		s.late[ep] = until
	}
	s.claims.drop(cl)
}

// endLate ends the steering of endpoints that rest no longer, and returns when it is to be
// looked at again. Called with mu held.
func (s *Server) endLate(now clock.Time) clock.Time {
	for len(s.lateNext) > 0 && s.lateNext[0].at.Due(now) {
		l := s.lateNext[0]
		s.lateNext = s.lateNext[1:]
		if !s.late[l.ep].Due(now) { // another association has ended meanwhile
			s.lateNext = append(s.lateNext, lateEndpoint{l.ep, now.Add(lateTime)})
			continue
		}
		delete(s.late, l.ep)
		_ = s.claims.steering.Unclaim(l.ep) // gone with the program otherwise
	}
	if len(s.lateNext) == 0 {
		return 0
	}
	return s.lateNext[0].at
}

// requestSCTP takes the Initiate of a peer.
func (s *Server) requestSCTP(ev dataplane.Event) {
	l := s.listeners[ev.Listener]
	if l == nil || l.sess.dead || l.sctp == nil {
		s.engine.Disconnect(ev.Conn, true)
		return
	}
	c := &conn{
		id: ev.Conn, sess: l.sess, listener: l, state: connStartup, worker: ev.Worker, cfg: l.cfg, sctp: l.sctp, enhanced: ev.Setup.Enhanced,
		local: addrPort(ev.Flow.Local, ev.Flow.LocalPort), remote: addrPort(ev.Flow.Remote, ev.Flow.RemotePort), claim: l.claim,
	}
	c.claim.refs++
	s.conns[c.id] = c
	f := mpa.Frame{PrivateData: ev.Setup.Private, Rev: 1}
	if e := c.enhanced; e != nil {
		f.Rev, f.IRD, f.ORD, f.P2P = 2, e.IRD, e.ORD, e.PeerToPeer
	}
	s.request(c, &f)
	s.arm(c)
}

// acceptSCTP answers an Initiate for the client. ird and ord are the client's, or
// negative.
func (s *Server) acceptSCTP(c *conn, private []byte, ird, ord int) {
	c.params = c.sctpParams()
	if ird >= 0 {
		c.params.IRD = ird
	}
	if ord >= 0 {
		c.params.ORD = ord
	}
	set := ddp.Setup{Private: private}
	if e := c.enhanced; e != nil {
		// RFC 6581 9.1: our Reads within what the peer takes, and what it asks for as
		// far as we can.
		if ird < 0 && e.ORD != ddp.NoNegotiation {
			c.params.IRD = min(max(c.params.IRD, int(e.ORD)), c.cfg.MaxIRD)
		}
		if e.IRD != ddp.NoNegotiation {
			c.params.ORD = min(c.params.ORD, int(e.IRD))
		}
		set.Enhanced = &ddp.Enhanced{IRD: uint16(c.params.IRD), ORD: uint16(c.params.ORD), PeerToPeer: e.PeerToPeer}
		if e.PeerToPeer {
			set.Enhanced.RTR = uint8(mpa.RTRWrite) // needs nothing of the receiver
			c.params.RTR = mpa.RTRWrite
		}
	}
	c.state = connSwitching
	c.limit = s.now().Add(s.cfg.Startup.Timeout)
	s.engine.Answer(c.id, set, dataplane.Attachment{QP: c.qp.binding, Params: c.params})
	s.arm(c)
}

// rejectSCTP refuses an Initiate for the client.
func (s *Server) rejectSCTP(c *conn, private []byte) {
	set := ddp.Setup{Private: private}
	if c.enhanced != nil {
		set.Enhanced = &ddp.Enhanced{IRD: uint16(c.cfg.IRD), ORD: uint16(c.cfg.ORD)}
	}
	s.engine.Answer(c.id, set, dataplane.Attachment{})
	s.forget(c)
}

// chooseRTR returns the kind that needs the least of the receiver; a Read needs that we
// may have one outstanding.
func chooseRTR(set mpa.RTRs, ord int) mpa.RTR {
	switch {
	case set.Has(mpa.RTRWrite):
		return mpa.RTRWrite
	case set.Has(mpa.RTRRead) && ord > 0:
		return mpa.RTRRead
	case set.Has(mpa.RTRSend):
		return mpa.RTRSend
	}
	return mpa.RTRNone
}

// answeredSCTP takes the peer's answer to our Initiate.
func (s *Server) answeredSCTP(c *conn, ev dataplane.Event) {
	if c.state != connDialing {
		return
	}
	if ev.Kind == dataplane.EventRejected {
		s.counters.rejected.Add(1)
		r := &ctrlpb.Rejected{Conn: c.handle, Qp: c.qp.num}
		if ev.Setup != nil {
			r.PrivateData = ev.Setup.Private
		}
		c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_Rejected{Rejected: r}})
		s.forget(c)
		return
	}
	c.private, c.enhanced = ev.Setup.Private, ev.Setup.Enhanced
	c.params = c.sctpParams()
	if e := c.enhanced; e != nil {
		if e.ORD != ddp.NoNegotiation {
			c.params.IRD = min(max(c.params.IRD, int(e.ORD)), c.cfg.MaxIRD)
		}
		if e.IRD != ddp.NoNegotiation {
			c.params.ORD = min(c.params.ORD, int(e.IRD))
		}
		if c.wantRTR && e.PeerToPeer {
			c.params.RTR = chooseRTR(mpa.RTRs(e.RTR)&c.cfg.RTR, c.params.ORD)
			if c.params.RTR == mpa.RTRNone {
				s.engine.Disconnect(c.id, true)
				s.failConn(c, errorf(refused, "ctrl: the peer %v takes no ready-to-receive message that we may send (RFC 6581 section 9.2)", c.remote))
				return
			}
		}
	}
	s.attach(c, nil)
	s.arm(c)
}
