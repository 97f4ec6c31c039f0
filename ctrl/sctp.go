package ctrl

import (
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

// sctpOf returns the SCTP settings that a client requests, or nil for TCP.
func sctpOf(w *ctrlpb.Startup, streaming bool) (*dataplane.SCTP, error) {
	o := &dataplane.SCTP{UDP: w.GetUdpEncapsulation()}
	switch w.GetTransport() {
	case ctrlpb.Transport_TRANSPORT_TCP, ctrlpb.Transport_TRANSPORT_SOCKET:
		if o.UDP {
			return nil, errorf(invalid, "ctrl: only SCTP can be encapsulated in UDP")
		}
		if w.GetSharedAssociation() {
			return nil, errorf(invalid, "ctrl: only connections over SCTP can share an association")
		}
		return nil, nil
	case ctrlpb.Transport_TRANSPORT_SCTP:
	case ctrlpb.Transport_TRANSPORT_SCTP_DRAFT:
		o.Profile = ddp.Draft
	default:
		return nil, errorf(invalid, "ctrl: unknown transport %d", w.GetTransport())
	}
	if streaming {
		return nil, errorf(invalid, "ctrl: a connection over SCTP cannot begin as a byte stream")
	}
	return o, nil
}

// transport names what l listens over, as iwarpctl's flag --transport does.
func (l *listener) transport() string {
	switch {
	case l.sctp == nil && l.on.sockets():
		return "socket"
	case l.sctp == nil:
		return "tcp"
	}
	name := "sctp"
	if l.sctp.Profile == ddp.Draft {
		name += "-draft"
	}
	if l.sctp.UDP {
		name += "-udp"
	}
	return name
}

// checkPrivate checks the length of private data for SCTP, which must leave room for the enhanced
// connection data (RFC 6581 section 7).
func checkPrivate(b []byte) error {
	if len(b) > ddp.MaxPrivate-4 {
		return errorf(invalid, "ctrl: private data over SCTP has at most %d bytes, not %d", ddp.MaxPrivate-4, len(b))
	}
	return nil
}

// steerSCTP steers the SCTP packets of a claim in addition to TCP. SCTP over UDP uses a single
// port. Called with Server.mu held.
func (cs *claims) steerSCTP(c *claim, o *dataplane.SCTP) error {
	ep := bpf.Endpoint{Proto: pkt.ProtoSCTP, Addr: c.addr.Addr(), Port: c.addr.Port()}
	if o.UDP {
		ep.Proto, ep.Port = pkt.ProtoUDP, sctp.UDPPort
	}
	if err := cs.steer(c, ep); err != nil {
		return errorf(internal, "ctrl: steering SCTP of %v: %w", c.addr, err)
	}
	return nil
}

// setSCTP adapts the settings of a connection to its transport. The draft has no enhanced set-up.
// Over SCTP a ready-to-receive indication is offered only if the client requests it, since either
// side may send first without one (RFC 6581 section 7).
func setSCTP(cfg *mpa.Config, o *dataplane.SCTP, p2p bool) {
	if o == nil {
		return
	}
	cfg.Enhanced = cfg.Enhanced && o.Profile == ddp.RFC5043
	cfg.P2P = cfg.Enhanced && p2p
}

// initiateSetup starts the negotiation and returns the contents of our Initiate. Called with
// Server.mu held.
func (c *conn) initiateSetup() ddp.Setup {
	c.neg = mpa.NewNegotiation(&c.cfg)
	return ddp.Setup{Private: c.cfg.PrivateData, Enhanced: c.neg.Request()}
}

// setParams sets the parameters for full operation over SCTP, which has its own CRC32c.
func (c *conn) setParams() {
	c.params = mpa.Params{CRC: true, Rev: 1, Initiator: c.listener == nil}
	if c.neg.Apply(&c.params); c.params.Enhanced {
		c.params.Rev = 2
	}
}

// joinedSCTP keeps the port of an association steered while it lasts: a SHUTDOWN may arrive after
// the listener and the connections are gone.
func (s *Server) joinedSCTP(ev dataplane.Event) {
	var cl *claim
	if l := s.listeners[ev.Listener]; l != nil {
		cl = l.claim
	} else if c := s.conns[ev.Conn]; c != nil {
		cl = c.claim
	}
	if cl == nil {
		return // already canceled
	}
	s.claims.join(cl, addrPort(ev.Flow.Local, 0).Addr())
	s.assocs[ev.Flow] = cl
}

// partedSCTP releases a claim whose association at local has ended. Its packets are steered a little longer,
// since the engine can answer those still in flight and the host cannot.
func (s *Server) partedSCTP(cl *claim, local netip.Addr) {
	if cl == nil {
		return
	}
	until := s.now().Add(lateTime)
	for ep := range cl.eps {
		if ep.Proto == pkt.ProtoTCP || ep.Addr.IsValid() && ep.Addr != local {
			continue
		}
		l, has := s.late[ep]
		if !has {
			if s.closed || s.devices.claim(ep) != nil {
				continue
			}
			l.uid = cl.uid
			s.charge(s.account(cl.uid), resPorts, 1)
			s.wake(until)
		}
		l.until = until
		s.late[ep] = l
	}
	s.claims.leave(cl, local)
}

// endLate ends the steering of endpoints whose time is over, and returns when the next one is due, or 0.
// Called with mu held.
func (s *Server) endLate(now clock.Time) (next clock.Time) {
	for ep, l := range s.late {
		if !l.until.Due(now) {
			next = clock.Earliest(next, l.until)
			continue
		}
		delete(s.late, ep)
		s.portFreed(l.uid)
		s.devices.unclaim(ep)
	}
	return next
}

// requestSCTP handles an Initiate of a peer.
func (s *Server) requestSCTP(ev dataplane.Event) {
	c := s.incoming(ev)
	if c == nil {
		return
	}
	c.neg = mpa.NewNegotiation(&c.cfg)
	c.neg.HandleRequest(ev.Setup.Enhanced)
	f := mpa.Frame{PrivateData: ev.Setup.Private, Rev: 1}
	if d := c.neg.Peer(); d != nil {
		f.Rev, f.Enhanced, f.EnhancedData = 2, true, *d
	}
	s.request(c, &f)
	s.arm(c)
}

// negotiateSCTP reports a Negotiate of the draft to the client of the listener or connect. A peer
// may send many: those that a slow client has no room for are not reported.
func (s *Server) negotiateSCTP(ev dataplane.Event) {
	a := &ctrlpb.AsyncError{
		Kind: ctrlpb.AsyncKind_ASYNC_NEGOTIATE, PrivateData: ev.Setup.Private,
		Local:  addrPort(ev.Flow.Local, ev.Flow.LocalPort).String(),
		Remote: addrPort(ev.Flow.Remote, ev.Flow.RemotePort).String(),
	}
	var sess *session
	if c := s.conns[ev.Conn]; c != nil && c.qp != nil {
		sess, a.Qp = c.sess, c.qp.num
	} else if l := s.listeners[ev.Listener]; l != nil {
		sess, a.Listen = l.sess, l.handle
	}
	if sess == nil || sess.dead || sess.out.behind() {
		return
	}
	sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_AsyncError{AsyncError: a}})
}

// acceptSCTP accepts an Initiate for the client. ird and ord are the client's, or negative.
func (s *Server) acceptSCTP(c *conn, q *qp, private []byte, ird, ord int) error {
	if err := checkPrivate(private); err != nil {
		return err
	}
	enhanced, err := c.neg.Accept(ird, ord)
	if err != nil {
		return errorf(invalid, "ctrl: accept: %w", err)
	}
	c.accepted(q)
	c.setParams()
	c.state = connSwitching
	c.limit = s.now().Add(s.cfg.Startup.Timeout)
	s.engine.Answer(c.id, ddp.Setup{Private: private, Enhanced: enhanced}, dataplane.Attachment{QP: q.binding, Params: c.params})
	s.arm(c)
	return nil
}

// rejectSCTP refuses an Initiate for the client.
func (s *Server) rejectSCTP(c *conn, private []byte) error {
	if err := checkPrivate(private); err != nil {
		return err
	}
	c.rejected()
	s.engine.Answer(c.id, ddp.Setup{Private: private, Enhanced: c.neg.Reject()}, dataplane.Attachment{})
	s.forget(c)
	return nil
}

// answeredSCTP handles the peer's answer to our Initiate.
func (s *Server) answeredSCTP(c *conn, ev dataplane.Event) {
	if c.state != connDialing {
		return
	}
	if ev.Kind == dataplane.EventRejected {
		set := ev.Setup
		if set == nil { // refused by a Terminate, which carries no data
			set = &ddp.Setup{}
		}
		c.neg.HandleReject(set.Enhanced)
		s.reportRejected(c, set.Private, c.neg.Peer())
		return
	}
	c.private = ev.Setup.Private
	err := c.neg.HandleAccept(ev.Setup.Enhanced)
	c.setParams()
	if err != nil {
		s.startupFailed(c, err)
	} else {
		c.peer = c.neg.Peer()
		s.attach(c, nil)
	}
	s.arm(c)
}

// lateEndpoint is the end of the steering of an SCTP endpoint.
type lateEndpoint struct {
	until clock.Time
	uid   uint32 // user whose quota of ports it counts in
}

// lateTime is the time for which SCTP packets to a port are still steered after its last
// association has ended: for packets in flight, and a few retransmissions of a SHUTDOWN ACK.
// The port may be used again meanwhile.
const lateTime = 10 * time.Second
