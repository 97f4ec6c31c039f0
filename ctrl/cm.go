package ctrl

import (
	"errors"
	"net/netip"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/mpa"
)

// OnEvent handles an event of the engine; it is the OnEvent of dataplane.Config.
func (s *Server) OnEvent(ev dataplane.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch ev.Kind {
	case dataplane.EventAccepted:
		s.accepted(ev)
		return
	case dataplane.EventRequest:
		s.requestSCTP(ev)
		return
	case dataplane.EventNegotiate:
		s.negotiateSCTP(ev)
		return
	case dataplane.EventJoined:
		s.joinedSCTP(ev)
		return
	case dataplane.EventParted:
		s.partedSCTP(s.assocs[ev.Flow], addrPort(ev.Flow.Local, 0).Addr())
		delete(s.assocs, ev.Flow)
		return
	}
	c := s.conns[ev.Conn]
	if c == nil { // already abandoned
		if ev.Kind == dataplane.EventClosed {
			s.endLinger(ev.Conn)
		}
		return
	}
	c.worker = ev.Worker
	switch ev.Kind {
	case dataplane.EventConnected:
		c.within = ev.Host
		switch {
		case c.state != connDialing:
		case c.streaming:
			s.streamReady(c)
		default:
			c.initiator = true
			s.startup(c)
		}
	case dataplane.EventAnswer, dataplane.EventRejected:
		s.answeredSCTP(c, ev)
	case dataplane.EventData:
		s.streamData(c, ev.Data)
	case dataplane.EventWritable:
		if c.state == connStreaming {
			c.unsent = 0 // at most half of the engine's buffer is left
		}
	case dataplane.EventEstablished:
		if c.state == connSwitching && c.failure == nil {
			s.established(c)
		}
	case dataplane.EventPeerClosed:
		s.peerClosed(c)
	case dataplane.EventTerminated, dataplane.EventFailed:
		s.terminated(c, ev)
	case dataplane.EventClosed:
		s.closedEvent(c, ev.Err, ev.TimeWait)
	}
}

// incoming returns the connection of a peer with a listener that ev reports. If the listener has ended, or the rules
// do not admit the peer any more, it resets the connection and returns nil.
func (s *Server) incoming(ev dataplane.Event) *conn {
	l := s.listeners[ev.Listener]
	remote := addrPort(ev.Flow.Remote, ev.Flow.RemotePort)
	if l == nil || l.sess.dead || !l.admits(remote.Addr()) {
		s.engine.Disconnect(ev.Conn, true)
		return nil
	}
	c := &conn{
		id: ev.Conn, sess: l.sess, listener: l, state: connStartup, worker: ev.Worker, cfg: l.cfg, within: ev.Host,
		local: addrPort(ev.Flow.Local, ev.Flow.LocalPort), remote: remote, claim: l.claim, overSCTP: overSCTP{sctp: l.sctp},
	}
	s.claims.join(c.claim, c.local.Addr())
	s.conns[c.id] = c
	return c
}

// accepted starts the MPA startup of a passive open.
func (s *Server) accepted(ev dataplane.Event) {
	c := s.incoming(ev)
	if c == nil {
		return
	}
	l := c.listener
	if l.streaming {
		s.streamAccepted(c)
		return
	}
	s.makeRoom(l, c.remote.Addr())
	l.starting.add(c)
	s.startup(c)
}

// startup starts the MPA startup.
func (s *Server) startup(c *conn) {
	c.state = connStartup
	cfg := c.cfg
	cfg.CRC = s.cfg.Startup.crc(c.remote.Addr(), c.within, cfg.CRC)
	if c.initiator {
		c.st = mpa.NewInitiator(cfg, s.now())
	} else {
		c.st = mpa.NewResponder(cfg, s.now())
	}
	s.pump(c)
}

func addrPort(a [16]byte, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(a).Unmap(), port)
}

// streamData passes streaming-mode bytes to the startup. Bytes after the frame stay in the engine: they are FPDUs.
func (s *Server) streamData(c *conn, b []byte) {
	if c.state == connStreaming {
		c.in = append(c.in, b...)
		c.show()
		return
	}
	if c.state != connStartup && c.state != connWaiting {
		return
	}
	n, _ := c.st.HandleStream(s.now(), b) // the error comes as an event too
	if n > 0 {
		s.engine.StreamConsumed(c.id, n)
	}
	s.pump(c)
}

// pump performs the output of the startup.
func (s *Server) pump(c *conn) {
	out, _ := c.st.PollTransmit()
	ev, ok := c.st.PollEvent()
	if !ok {
		if out != nil {
			s.engine.StreamSend(c.id, out)
		}
		s.arm(c)
		return
	}
	switch ev.Kind {
	case mpa.EventRequest:
		s.request(c, &ev.Frame)
	case mpa.EventAccepted:
		c.params, c.peer = c.st.Result(), ev.Frame.Data()
		if c.initiator {
			c.private = ev.Frame.PrivateData
		}
		s.attach(c, out)
	case mpa.EventRejected:
		if !c.initiator { // we rejected
			s.engine.StreamSend(c.id, out)
			s.engine.Disconnect(c.id, false)
			c.leaving = true
			if c.qp != nil {
				s.failConn(c, errorf(canceled, "ctrl: the application rejected the request of %v", c.remote))
				return
			}
			s.forget(c)
			return
		}
		s.rejected(c, &ev)
	case mpa.EventFailed:
		if out != nil {
			s.engine.StreamSend(c.id, out)
		}
		c.params = c.st.Result()
		s.startupFailed(c, ev.Err)
	}
	s.arm(c)
}

// request reports a connect request to the client.
func (s *Server) request(c *conn, f *mpa.Frame) {
	ask := &ctrlpb.ConnectRequest{
		Local: c.local.String(), Remote: c.remote.String(), PrivateData: f.PrivateData,
		Ird: uint32(f.IRD), Ord: uint32(f.ORD), Revision: uint32(f.Rev), P2P: f.P2P,
	}
	if l := c.listener; l != nil {
		spare := l.starting.spare()
		if l.starting.remove(c) && !spare {
			s.dropConn(c, errFiles)
			return
		}
		if err := l.wait(c); err != nil {
			s.dropConn(c, err)
			return
		}
		ask.Listen = l.handle
	} else {
		ask.Qp = c.qp.num
	}
	c.state, c.peer = connWaiting, f.Data()
	if c.handle == 0 {
		c.sess.adopt(c)
	}
	c.limit = s.now().Add(s.cfg.Startup.Accept)
	s.counters.connRequests.Add(1)
	ask.Conn = c.handle
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_ConnectRequest{ConnectRequest: ask}})
}

var (
	errBacklog = errors.New("backlog full")
	errFiles   = errors.New("the daemon has few descriptors left: raise LimitNOFILE of the unit (ulimit -n)")
)

// dropConn drops a connection for which the listener or the client has no room. The client is notified if it knows the connection, which is
// then a byte stream on which it has started MPA.
func (s *Server) dropConn(c *conn, why error) {
	l := c.listener
	l.dropped++
	if l.dropped&(l.dropped-1) == 0 { // the peer controls how often this happens
		l.sess.log.Warn("connections dropped", zap.Stringer("peer", c.remote), zap.Error(why), zap.Int("backlog", l.backlog), zap.Uint64("dropped", l.dropped))
	}
	if c.handle != 0 {
		s.end(c, errorf(quota, "ctrl: the request of %v was dropped: %w", c.remote, why))
		return
	}
	s.abandon(c)
}

func (c *session) accept(r *ctrlpb.Accept) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.connOf(r.Conn, connWaiting, "waiting for an answer")
	if err != nil {
		return err
	}
	q := cn.qp // for Connect: a byte stream whose initiator is the peer
	if q == nil {
		if q, err = c.freshQP(r.Qp); err != nil {
			return err
		}
	} else if r.Qp != 0 && r.Qp != q.num {
		return errorf(invalid, "ctrl: connection %d belongs to queue pair %d, not %d", r.Conn, q.num, r.Qp)
	}
	ird, ord := -1, -1
	if r.Ird != nil {
		ird = int(min(*r.Ird, uint32(s.cfg.Startup.MaxIRD)))
	}
	if r.Ord != nil {
		ord = int(min(*r.Ord, uint32(s.cfg.Startup.MaxIRD)))
	}
	if cn.sctp != nil {
		return s.acceptSCTP(cn, q, r.PrivateData, ird, ord)
	}
	if err := cn.st.Accept(r.PrivateData, ird, ord); err != nil {
		return errorf(invalid, "ctrl: accept: %w", err)
	}
	cn.accepted(q)
	s.pump(cn)
	return nil
}

func (c *session) reject(r *ctrlpb.Reject) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.connOf(r.Conn, connWaiting, "waiting for an answer")
	if err != nil {
		return err
	}
	if cn.sctp != nil {
		return s.rejectSCTP(cn, r.PrivateData)
	}
	if err := cn.st.Reject(r.PrivateData); err != nil {
		return errorf(invalid, "ctrl: reject: %w", err)
	}
	cn.rejected()
	s.pump(cn)
	return nil
}

// attach enters full operation; reply is the responder's last frame.
func (s *Server) attach(c *conn, reply []byte) {
	c.state = connSwitching
	c.limit = s.now().Add(s.cfg.Startup.Timeout)
	s.engine.Attach(c.id, dataplane.Attachment{QP: c.qp.binding, Params: c.params, Reply: reply})
	if !c.params.Initiator && c.params.RTR == mpa.RTRNone && c.sctp == nil {
		// Outside of the peer-to-peer model the responder need not wait: its sends are held back until the initiator's first FPDU.
		s.established(c)
	}
}

func (s *Server) established(c *conn) {
	c.state = connUp
	c.limit = 0
	c.uncharge() // the engine has passed everything to the queue pair
	s.arm(c)
	s.counters.established.Add(1)
	e := &ctrlpb.Established{
		Conn: c.handle, Qp: c.qp.num, Worker: uint32(c.worker), Local: c.local.String(), Remote: c.remote.String(),
		PrivateData: c.private, Negotiated: negotiated(&c.params),
	}
	e.PeerIrd, e.PeerOrd = depths(c.peer)
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_Established{Established: e}})
	c.sess.log.Debug("connection established", zap.Uint32("qp", c.qp.num), zap.Stringer("peer", c.remote),
		zap.Uint8("mpa", c.params.Rev), zap.Bool("crc", c.params.CRC), zap.Int("ird", c.params.IRD), zap.Int("ord", c.params.ORD))
}

func negotiated(p *mpa.Params) *ctrlpb.Negotiated {
	return &ctrlpb.Negotiated{
		Revision: uint32(p.Rev), Crc: p.CRC, SendMarkers: p.SendMarkers, RecvMarkers: p.RecvMarkers,
		P2P: p.RTR != mpa.RTRNone, Rtr: uint32(p.RTR), Ird: uint32(p.IRD), Ord: uint32(p.ORD), Initiator: p.Initiator,
	}
}

// rejected ends an active open that the peer's application rejected, or tries again if the rejection may be due to a setting.
func (s *Server) rejected(c *conn, ev *mpa.Event) {
	if ev.Err != nil && ev.Err.Retry != mpa.RetryNone {
		s.retry(c, ev.Err.Retry)
		return
	}
	s.engine.Disconnect(c.id, true)
	s.reportRejected(c, ev.Frame.PrivateData, ev.Frame.Data())
}

// reportRejected reports the rejection by the peer's application to the client, and forgets c.
func (s *Server) reportRejected(c *conn, private []byte, peer *mpa.EnhancedData) {
	s.counters.rejected.Add(1)
	r := &ctrlpb.Rejected{Conn: c.handle, Qp: c.qp.num, PrivateData: private}
	r.PeerIrd, r.PeerOrd = depths(peer)
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_Rejected{Rejected: r}})
	s.forget(c)
}

// depths returns the IRD and ORD of the peer's message, or nil if it has none.
func depths(d *mpa.EnhancedData) (ird, ord *uint32) {
	if d == nil {
		return nil, nil
	}
	return proto.Uint32(uint32(d.IRD)), proto.Uint32(uint32(d.ORD))
}

// startupFailed ends a startup that failed because of the peer or a time-out.
func (s *Server) startupFailed(c *conn, err *mpa.Error) {
	if err.Retry != mpa.RetryNone {
		s.retry(c, err.Retry)
		return
	}
	s.counters.startupFailed.Add(1)
	code := protocol
	switch {
	case errors.Is(err, mpa.ErrTimeout), errors.Is(err, mpa.ErrDecision):
		s.counters.startupTimeout.Add(1)
		code = timedOut
	case errors.Is(err, mpa.ErrClosed):
		code = refused
	}
	failure := errorf(code, "%w (peer %v)", err, c.remote)
	if c.streaming && !c.initiator && errors.Is(err, mpa.ErrTimeout) {
		failure = errorf(code, "%w: the peer %v may be a responder too", err, c.remote)
	}
	if err.Terminate && c.qp != nil {
		c.failure, c.state, c.limit = failure, connSwitching, s.now().Add(closeTimeout)
		s.engine.Attach(c.id, dataplane.Attachment{QP: c.qp.binding, Params: c.params, Fail: err.Term})
		return
	}
	// A peer that started as initiator too learns the reason from our request, which a reset must not overtake.
	c.leaving = errors.Is(err, mpa.ErrBothInitiators)
	s.engine.Disconnect(c.id, !c.leaving)
	s.failConn(c, failure)
}

// retry opens a new TCP connection with other settings, within the deadline of the first.
func (s *Server) retry(c *conn, r mpa.Retry) {
	s.counters.fallbacks.Add(1)
	c.sess.log.Info("MPA start-up refused", zap.Stringer("peer", c.remote), zap.Stringer("next", r))
	s.engine.Disconnect(c.id, true)
	delete(s.conns, c.id)
	s.leavePort(c)
	c.claim = nil
	c.unshare()
	c.cfg = r.Apply(c.cfg)
	s.startDial(c)
}
