package ctrl

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/sctp"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
)

// peerClosed handles the end of the peer's data. Outside of full operation it ends the connection; in full operation we close the LLP too
// (RFC 5040 section 6.1), after the data that the engine still sends.
func (s *Server) peerClosed(c *conn) {
	switch c.state {
	case connStreaming:
		c.ended = true
		c.show()
	case connStartup:
		c.st.HandleClosed()
		s.pump(c)
	case connWaiting:
		s.end(c, errorf(refused, "mpa: the peer %v left before it was answered", c.remote))
	case connSwitching, connUp:
		if c.state == connUp {
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
	if e, ok := errors.AsType[*term.Error](ev.Err); ok {
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
func (s *Server) closedEvent(c *conn, err error, timeWait bool) {
	c.timeWait = timeWait
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
	case connStartup:
		c.st.HandleClosed()
		s.pump(c)
		return
	case connWaiting:
		err = cmp.Or(err, errLeft)
	case connSwitching:
		if c.failure != nil {
			s.failConn(c, c.failure)
			return
		}
	case connUp, connClosing:
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
		return
	}
	s.failConn(c, errorf(closeCode(err), "%w (peer %v)", cmp.Or(err, errClosedEarly), c.remote))
}

// closeCode returns the code of a connection that the engine ended with err.
func closeCode(err error) ctrlpb.Code {
	_, violated := errors.AsType[*ddp.Error](err)
	switch {
	case violated, errors.Is(err, sctp.ErrProtocol):
		return protocol
	case errors.Is(err, dataplane.ErrTimeout), errors.Is(err, tcp.ErrTimeout), errors.Is(err, sctp.ErrTimeout):
		return timedOut
	case errors.Is(err, tcp.ErrUnreachable), errors.Is(err, sctp.ErrUnreachable):
		return unreachable
	}
	return refused
}

var (
	errClosedEarly = errors.New("closed during set-up")
	errLeft        = errors.New("the peer left before it was answered")
)

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
	if c.leaving {
		s.linger(c)
	}
	c.uncharge()
	if c.late {
		c.sess.late = slices.DeleteFunc(c.sess.late, func(o *conn) bool { return o == c })
	}
	c.unshare()
	if c.handle != 0 {
		delete(c.sess.conns, c.handle)
	}
	if c.qp != nil && c.qp.conn == c {
		c.qp.conn = nil
		if c.state >= connSwitching {
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
	if r.Leave && (q.used || r.Abort) {
		c.leave(q)
	}
	if q.conn != nil || !q.used && !r.Abort {
		return s.disconnectQP(q, r.Abort, "by the application")
	}
	if !q.used { // it can have no connection any more
		q.used = true
		c.event(&ctrlpb.Event{Body: &ctrlpb.Event_ConnectFailed{ConnectFailed: &ctrlpb.ConnectFailed{
			Qp: q.num, Error: toPB(errorf(canceled, "ctrl: queue pair %d ended by the application", q.num)),
		}}})
	}
	// Work requests posted before the connection failed, or while it ended, are flushed by a worker.
	s.engine.Attach(q.over, dataplane.Attachment{QP: q.binding})
	return nil
}

// leave makes a QP access no memory and complete nothing, so that it uses its protection domain, completion queues
// and shared receive queue no more. Called with mu held, which it releases meanwhile.
func (c *session) leave(q *qp) {
	s := c.srv
	s.mu.Unlock()
	s.engine.Leave(q.binding)
	c.mem.fence()
	s.mu.Lock()
	q.release()
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
