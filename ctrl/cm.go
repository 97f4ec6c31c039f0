package ctrl

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/sctp"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
)

// connState is the state of a connection.
type connState uint8

const (
	connResolving connState = iota // route and neighbour are being resolved
	connDialing                    // TCP active open
	connStreaming                  // a byte stream, until the client starts MPA
	connStartup                    // MPA frames
	connWaiting                    // a connect request that the client has not answered
	connSwitching                  // attached, but full operation is not reached
	connUp
	connClosing // we are closing the connection
	connGone    // removed from all tables
)

var connStates = [...]string{"RESOLVING", "DIALING", "STREAMING", "STARTUP", "WAITING", "SWITCHING", "UP", "CLOSING", "GONE"}

// conn is a connection, from the request to open it to its end. Server.mu guards it.
type conn struct {
	id     dataplane.ConnID // 0 until it is opened
	handle uint32
	sess   *session
	qp     *qp // nil until connect or accept
	worker int
	state  connState

	// The two ends. claim holds the local port.
	listener *listener // nil for an active open
	local    netip.AddrPort
	by       *device        // device that the client requested; nil means that of the route
	wantAddr netip.AddrPort // local address that the client requested
	remote   netip.AddrPort
	ip       dataplane.IPOptions // active
	claim    *claim
	within   bool // the peer is a program of this host

	// The startup of MPA and its result.
	cfg       mpa.Config
	initiator bool         // this side sends the MPA request; otherwise it waits for the peer's
	st        *mpa.Startup // over TCP
	limit     clock.Time   // deadline of the whole setup, or of the current wait
	deadline  clock.Time   // the earlier of limit and the deadline of st
	params    mpa.Params
	private   []byte            // the peer's private data
	peer      *mpa.EnhancedData // the peer's depths, or nil if it sent none
	waiting   bool              // in listener.waiting
	loose     bool              // its kernel socket is counted in Server.files, because it has no queue pair

	// How and why it ends.
	failure         error // connSwitching: the startup failed, and a Terminate is being sent to the peer
	reason          error // connClosing: why we reset it, or nil if the client requested it or the engine knows why
	peerClosedFirst bool  // the peer closed first and holds TIME-WAIT
	orderly         bool  // closed in order: its port stays in TIME-WAIT

	overSCTP
	byteStream
}

// overSCTP is the state that only a connection over SCTP has.
type overSCTP struct {
	sctp    *dataplane.SCTP // nil: TCP
	neg     mpa.Negotiation // over TCP, conn.st has it
	shares  bool            // may share an association with other connections of its client
	shared  *shared         // that association, or nil
	alone   bool            // start a new association, because the others had no stream
	redials int             // number of attempts with another stream
}

// byteStream is the state of a connection that begins as a byte stream (connStreaming).
type byteStream struct {
	streaming bool
	held      bool   // counted as a byte stream
	in        []byte // received and not consumed
	shown     int    // bytes of in that were reported to the client
	ended     bool   // the peer sends no more data
	endTold   bool
	memory    uint64 // quota charged while it is a byte stream
	unsent    int    // bytes of StreamSend that the peer has not acknowledged, as far as known
}

// maxPrivate is the maximum length of a client's private data (RFC 5044 section 7.1.1).
const maxPrivate = mpa.MaxPrivateData

// OnEvent handles an event of the engine; it is the OnEvent of dataplane.Config.
func (s *Server) OnEvent(ev dataplane.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ev.Kind == dataplane.EventAccepted {
		s.accepted(ev)
		return
	}
	switch ev.Kind {
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
		s.partedSCTP(s.assocs[ev.Flow])
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
		s.closedEvent(c, ev.Err)
	}
}

// accepted starts the MPA startup of a passive open.
func (s *Server) accepted(ev dataplane.Event) {
	l := s.listeners[ev.Listener]
	remote := addrPort(ev.Flow.Remote, ev.Flow.RemotePort)
	if l == nil || l.sess.dead || !l.admits(remote.Addr()) { // it may have been admitted by older rules
		s.engine.Disconnect(ev.Conn, true)
		return
	}
	c := &conn{
		id: ev.Conn, sess: l.sess, listener: l, state: connStartup, worker: ev.Worker, cfg: l.cfg, within: ev.Host,
		local: addrPort(ev.Flow.Local, ev.Flow.LocalPort), remote: remote, claim: l.claim,
	}
	c.claim.refs++
	s.conns[c.id] = c
	if l.streaming {
		s.streamAccepted(c)
		return
	}
	s.makeRoom(l, remote.Addr())
	l.starting.add(c)
	if l.on.sockets() {
		c.loose = true
		s.files.extra++
	}
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
			c.orderly = true
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
		l.starting.remove(c)
		if l.waiting >= l.backlog || c.sess.out.behind() {
			// The same applies to a client that does not keep up: a peer that connects
			// and leaves repeatedly must not cause the client to be cut off.
			s.dropConn(c, errBacklog)
			return
		}
		if c.loose && !s.files.spare() {
			s.dropConn(c, errFiles)
			return
		}
		l.waiting++
		c.waiting = true
		ask.Listen = l.handle
	} else {
		ask.Qp = c.qp.num
	}
	c.state, c.peer = connWaiting, f.Data()
	if c.handle == 0 {
		c.handle = c.sess.newHandle()
		c.sess.conns[c.handle] = c
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
	s.engine.Disconnect(c.id, true)
	if c.handle != 0 {
		s.failConn(c, errorf(quota, "ctrl: the request of %v was dropped: %w", c.remote, why))
		return
	}
	s.forget(c)
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
	var set ddp.Setup
	if cn.sctp != nil {
		set, err = cn.acceptSetup(r.PrivateData, ird, ord)
	} else if err = cn.st.Accept(s.now(), r.PrivateData, ird, ord); err != nil {
		err = errorf(invalid, "ctrl: accept: %w", err)
	}
	if err != nil {
		return err
	}
	cn.answered()
	if cn.listener != nil {
		cn.listener.accepted++
	}
	cn.take(q)
	if cn.sctp != nil {
		s.acceptSCTP(cn, set)
		return nil
	}
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
		err = checkPrivate(r.PrivateData)
	} else if err = cn.st.Reject(s.now(), r.PrivateData); err != nil {
		err = errorf(invalid, "ctrl: reject: %w", err)
	}
	if err != nil {
		return err
	}
	cn.answered()
	if cn.listener != nil {
		cn.listener.rejected++
	}
	if cn.sctp != nil {
		s.rejectSCTP(cn, r.PrivateData)
		return nil
	}
	s.pump(cn)
	return nil
}

// take assigns q to c.
func (c *conn) take(q *qp) {
	c.qp, q.conn, q.used = q, c, true
	c.fasten()
}

// fasten stops counting the kernel socket of c: a queue pair has it now, or it is closed.
func (c *conn) fasten() {
	if c.loose {
		c.loose = false
		c.sess.srv.files.extra--
	}
}

// answered records that the client has answered the connect request, or started MPA.
func (c *conn) answered() {
	if c.waiting {
		c.waiting = false
		c.listener.waiting--
	}
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
	c.orderly = errors.Is(err, mpa.ErrBothInitiators)
	s.engine.Disconnect(c.id, !c.orderly)
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
	c.cfg = r.Apply(c.cfg)
	s.startDial(c)
}

// peerClosed handles the end of the peer's data. Outside of full operation it ends the connection; in full operation we close the LLP too
// (RFC 5040 section 6.1), after the data that the engine still sends.
func (s *Server) peerClosed(c *conn) {
	switch c.state {
	case connStreaming:
		c.ended = true
		c.show()
	case connStartup:
		c.st.HandleClosed(s.now())
		s.pump(c)
	case connWaiting:
		s.engine.Disconnect(c.id, true)
		s.failConn(c, errorf(refused, "mpa: the peer %v left before it was answered", c.remote))
	case connSwitching, connUp:
		if c.state == connUp {
			c.peerClosedFirst = c.limit == 0 // no Terminate: the engine had not started to close
			c.state = connClosing
		}
		c.limit = s.now().Add(closeTimeout)
		s.engine.Disconnect(c.id, false)
		s.arm(c)
	}
}

// closeTimeout is the time that a graceful close may take before the connection is reset.
const closeTimeout = 10 * time.Second

// terminated reports a Terminate, sent or received, to the client.
func (s *Server) terminated(c *conn, ev dataplane.Event) {
	if c.qp == nil || c.state < connSwitching || c.failure != nil {
		return
	}
	t := &ctrlpb.Terminated{Qp: c.qp.num, Remote: ev.Kind == dataplane.EventTerminated, Headers: ev.Data}
	if e := termOf(ev.Err); e != nil {
		t.Layer, t.Type, t.Code = uint32(e.Layer), uint32(e.Type), uint32(e.Code)
	}
	if ev.Err != nil {
		t.Text = clip(ev.Err.Error(), maxText)
	}
	c.sess.log.Info("stream terminated", zap.Uint32("qp", c.qp.num), zap.Stringer("peer", c.remote), zap.Bool("by-peer", t.Remote), zap.Error(ev.Err))
	if c.state == connSwitching { // the client must learn of the connection first
		s.established(c)
	}
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_Terminated{Terminated: t}})
	c.qp.async(ctrlpb.AsyncKind_ASYNC_QP_FATAL, errorf(protocol, "%w (peer %v)", ev.Err, c.remote))
	c.limit = s.now().Add(closeTimeout)
	s.arm(c)
}

// closedEvent handles the last event of a connection.
func (s *Server) closedEvent(c *conn, err error) {
	if why, ok := errors.AsType[*Error](err); ok { // of Unplug
		if c.state != connUp && c.state != connClosing {
			s.failConn(c, why)
			return
		}
		c.reason = why
	}
	switch c.state {
	case connDialing:
		if s.reshare(c, err) {
			return
		}
		s.failConn(c, errorf(closeCode(err), "%w (peer %v)", orClosed(err), c.remote))
	case connStreaming:
		s.failConn(c, errorf(refused, "%w (peer %v)", orClosed(err), c.remote))
	case connStartup:
		c.st.HandleClosed(s.now())
		s.pump(c)
	case connWaiting:
		if err == nil {
			err = errors.New("the peer left before it was answered")
		}
		s.failConn(c, errorf(closeCode(err), "%w (peer %v)", err, c.remote))
	case connSwitching:
		if c.failure != nil {
			s.failConn(c, c.failure)
			return
		}
		s.failConn(c, errorf(refused, "%w (peer %v)", orClosed(err), c.remote))
	case connUp, connClosing:
		c.orderly = err == nil && c.sctp == nil && !c.peerClosedFirst
		if errors.Is(err, dataplane.ErrCQOverrun) {
			c.qp.async(ctrlpb.AsyncKind_ASYNC_CQ_OVERRUN, errorf(quota, "%w: its depth must be at least the number of work requests that its queue pairs can have outstanding", err))
		}
		d := &ctrlpb.Disconnected{Conn: c.handle, Qp: c.qp.num}
		switch {
		case c.reason != nil:
			d.Error = toPB(c.reason)
		case err != nil:
			d.Error = toPB(errorf(closeCode(err), "%w (peer %v)", err, c.remote))
		}
		c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_Disconnected{Disconnected: d}})
		s.forget(c)
	}
}

// closeCode returns the code of a connection that the engine ended with err.
func closeCode(err error) ctrlpb.Code {
	if _, ok := errors.AsType[*ddp.Error](err); ok {
		return protocol
	}
	if errors.Is(err, dataplane.ErrTimeout) || errors.Is(err, tcp.ErrTimeout) || errors.Is(err, sctp.ErrTimeout) {
		return timedOut
	}
	return refused
}

func orClosed(err error) error {
	if err == nil {
		return errClosedEarly
	}
	return err
}

var errClosedEarly = errors.New("closed during set-up")

func termOf(err error) *term.Error {
	e, _ := errors.AsType[*term.Error](err)
	return e
}

// failConn ends a setup with err, and notifies the client if it knows the connection. The caller has already ended it in the engine. Called
// with mu held.
func (s *Server) failConn(c *conn, err error) {
	switch {
	case c.listener == nil, c.qp != nil:
		c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_ConnectFailed{ConnectFailed: &ctrlpb.ConnectFailed{
			Conn: c.handle, Qp: c.qp.num, Error: toPB(err),
		}}})
	case c.handle != 0:
		c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_ConnectGone{ConnectGone: &ctrlpb.ConnectGone{Conn: c.handle, Error: toPB(err)}}})
	default:
		c.listener.dropped++
	}
	c.sess.log.Debug("connection not made", zap.Stringer("peer", c.remote), zap.Error(err))
	s.forget(c)
}

// forget removes c from every table. Called with mu held.
func (s *Server) forget(c *conn) {
	if c.state == connGone {
		return
	}
	delete(s.conns, c.id)
	delete(s.pending, c)
	if c.listener != nil {
		c.listener.starting.remove(c)
	}
	c.answered()
	c.fasten()
	c.unhold()
	if c.orderly && c.state < connUp { // otherwise the engine has nothing left of it
		s.linger(c)
	}
	c.uncharge()
	c.unshare()
	if c.handle != 0 {
		delete(c.sess.conns, c.handle)
	}
	if c.qp != nil && c.qp.conn == c {
		c.qp.conn = nil
		if c.state == connUp || c.state == connClosing {
			c.qp.over = c.id
		}
	}
	s.leavePort(c)
	c.claim, c.state = nil, connGone
	s.checkDrained()
}

// abandon ends a connection without notifying the client. Called with mu held.
func (s *Server) abandon(c *conn) {
	if c.state == connGone {
		return
	}
	if c.id != 0 {
		s.engine.Disconnect(c.id, true)
	}
	s.forget(c)
}

func (c *session) disconnect(r *ctrlpb.Disconnect) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	q, err := c.qpOf(r.Qp)
	if err != nil {
		return err
	}
	if q.conn == nil && q.over != 0 {
		// Work requests posted while the connection ended are flushed by a worker.
		s.engine.Attach(q.over, dataplane.Attachment{QP: q.binding})
		return nil
	}
	return s.disconnectQP(q, r.Abort, "by the application")
}

// disconnectQP ends the connection of q. Called with mu held.
func (s *Server) disconnectQP(q *qp, abort bool, who string) error {
	c := q.conn
	if c == nil {
		return errorf(badState, "ctrl: queue pair %d has no connection", q.num)
	}
	switch c.state {
	case connUp, connClosing:
		s.closeConn(c, abort)
	default:
		s.end(c, errorf(canceled, "ctrl: connect to %v canceled %s", c.remote, who))
	}
	return nil
}

// closeConn makes the engine close an established connection.
func (s *Server) closeConn(c *conn, abort bool) {
	c.state = connClosing
	s.engine.Disconnect(c.id, abort)
	c.limit = s.now().Add(closeTimeout)
	s.arm(c)
}

// end resets a connection in any state and reports why to its client. Called with mu held.
func (s *Server) end(c *conn, why error) {
	switch c.state {
	case connGone:
	case connUp, connClosing:
		c.reason = why
		s.closeConn(c, true)
	default:
		if c.id != 0 {
			s.engine.Disconnect(c.id, true)
		}
		s.failConn(c, why)
	}
}

// String returns the name of the state.
func (s connState) String() string {
	if int(s) < len(connStates) {
		return connStates[s]
	}
	return fmt.Sprintf("state %d", uint8(s))
}
