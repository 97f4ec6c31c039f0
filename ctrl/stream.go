package ctrl

import (
	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/mpa"
)

// Delayed MPA start (RFC 5044 section 7.1.3): a connection is a byte stream until
// the client says where MPA begins. The engine holds what the client has not
// consumed back from the peer by the window, and the client is shown one chunk at
// a time, so neither the events nor the octets that wait grow without bound. What
// is not consumed at the start of MPA is the peer's MPA frame, and FPDUs.

// maxChunk is the most that one StreamSend or StreamData carries, in octets.
const maxChunk = 32 << 10

// maxUnsent is how many octets StreamSend takes before the peer has taken them.
const maxUnsent = 256 << 10

// streamReady tells the client that TCP is there.
func (s *Server) streamReady(c *conn) {
	c.state, c.limit = connStreaming, 0 // from here on the client says how long it takes
	s.arm(c)
	ev := &ctrlpb.StreamReady{Conn: c.handle, Local: c.local.String(), Remote: c.remote.String()}
	if c.listener != nil {
		ev.Listen = c.listener.handle
	} else {
		ev.Qp = c.qp.num
	}
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_StreamReady{StreamReady: ev}})
}

// streamAccepted is streamReady for a passive open. It has a place in the backlog
// until MPA is started, and one of as many as there may be queue pairs: it outlives
// its listener.
func (s *Server) streamAccepted(c *conn) {
	l := c.listener
	s.uncountPeer(c)
	if l.waiting >= l.backlog {
		l.dropped++
		l.sess.log.Warn("connection dropped: backlog full", zap.Stringer("peer", c.remote), zap.Int("backlog", l.backlog))
		s.engine.Disconnect(c.id, true)
		s.forget(c)
		return
	}
	if err := c.sess.count("accepted byte streams", c.sess.policy().limits.QPs, countStream); err != nil {
		l.dropped++
		l.sess.log.Warn("connection dropped", zap.Stringer("peer", c.remote), zap.Error(err))
		s.engine.Disconnect(c.id, true)
		s.forget(c)
		return
	}
	l.waiting++
	c.waiting, c.streaming, c.held = true, true, true
	c.handle = c.sess.newHandle()
	c.sess.conns[c.handle] = c
	s.streamReady(c)
}

// unhold takes c out of the count of accepted byte streams.
func (s *Server) unhold(c *conn) {
	if c.held {
		c.held = false
		c.sess.uncount(countStream)
	}
}

// show gives the client the next chunk, if it has consumed the one before.
func (s *Server) show(c *conn) {
	if c.shown > 0 || c.endTold || len(c.in) == 0 && !c.ended {
		return
	}
	c.shown = min(len(c.in), maxChunk)
	c.endTold = c.ended && c.shown == len(c.in)
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_StreamData{StreamData: &ctrlpb.StreamData{Conn: c.handle, Data: c.in[:c.shown], End: c.endTold}}})
}

// streamConn finds a connection in streaming mode. Called with mu held.
func (c *session) streamConn(h uint32) (*conn, error) {
	cn := c.conns[h]
	if cn == nil {
		return nil, errorf(noObject, "ctrl: no connection %d: the peer may have left", h)
	}
	if cn.state != connStreaming {
		return nil, errorf(badState, "ctrl: connection %d is no byte stream, or not any more", h)
	}
	return cn, nil
}

func (c *session) streamSend(r *ctrlpb.StreamSend) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.streamConn(r.Conn)
	if err != nil {
		return err
	}
	if len(r.Data) > maxChunk {
		return errorf(invalid, "ctrl: %d octets at a time: at most %d", len(r.Data), maxChunk)
	}
	if cn.unsent += len(r.Data); cn.unsent > maxUnsent {
		cn.unsent -= len(r.Data)
		return errorf(busy, "ctrl: the peer %v is behind by more than %d octets: send less before MPA is started, or wait", cn.remote, maxUnsent)
	}
	s.engine.StreamSend(cn.id, r.Data)
	return nil
}

func (c *session) streamConsumed(r *ctrlpb.StreamConsumed) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.streamConn(r.Conn)
	if err != nil {
		return err
	}
	n := int(r.Count)
	if n > cn.shown {
		return errorf(invalid, "ctrl: %d octets consumed of %d that were shown", n, cn.shown)
	}
	cn.in = append([]byte(nil), cn.in[n:]...)
	cn.shown -= n
	s.engine.StreamConsumed(cn.id, n)
	s.show(cn)
	return nil
}

// startMPA ends streaming mode: what was received and not consumed is MPA's.
func (c *session) startMPA(r *ctrlpb.StartMPA) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.streamConn(r.Conn)
	if err != nil {
		return err
	}
	cfg := cn.cfg
	if cn.listener == nil {
		cfg.PrivateData = r.PrivateData
	} else if len(r.PrivateData) > 0 {
		return errorf(invalid, "ctrl: private data of the responder goes with Accept")
	}
	if err := cfg.Validate(); err != nil {
		return errorf(invalid, "ctrl: %w", err)
	}
	cn.cfg = cfg
	left := cn.in
	cn.in, cn.shown = nil, 0
	s.answered(cn)
	s.unhold(cn)
	if cn.listener == nil {
		s.startInitiator(cn)
	} else {
		cn.state = connStartup
		cn.st = mpa.NewResponder(cn.cfg, s.now())
		s.pump(cn)
	}
	if len(left) > 0 {
		s.streamData(cn, left)
	}
	if cn.ended && (cn.state == connStartup || cn.state == connWaiting) {
		s.peerClosed(cn)
	}
	return nil
}

func (c *session) streamClose(r *ctrlpb.StreamClose) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.streamConn(r.Conn)
	if err != nil {
		return err
	}
	s.engine.Disconnect(cn.id, r.Abort)
	cn.lingers = !r.Abort
	if cn.qp != nil {
		s.failConn(cn, errorf(canceled, "ctrl: connection with %v closed by the application", cn.remote))
		return nil
	}
	s.forget(cn)
	return nil
}
