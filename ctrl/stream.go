package ctrl

import (
	"net/netip"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
)

// Delayed MPA start (RFC 5044 section 7.1.3): a connection is a byte stream until the client starts MPA. The engine closes the receive
// window while the client has not consumed data, and the client gets one chunk at a time, so neither events nor buffered bytes grow without
// limit. Bytes not consumed when MPA starts are the peer's MPA frame and FPDUs.

// maxChunk is the maximum size in bytes of one StreamSend or StreamData.
const maxChunk = 32 << 10

// maxUnsent is the number of unacknowledged bytes that StreamSend accepts.
const maxUnsent = 256 << 10

// streamReady reports to the client that TCP is established.
func (s *Server) streamReady(c *conn) {
	c.state, c.limit = connStreaming, 0 // from here on there is no deadline: the client decides
	s.arm(c)
	ev := &ctrlpb.StreamReady{Conn: c.handle, Local: c.local.String(), Remote: c.remote.String()}
	if c.listener != nil {
		ev.Listen = c.listener.handle
	} else {
		ev.Qp = c.qp.num
	}
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_StreamReady{StreamReady: ev}})
}

// streamAccepted is streamReady for a passive open. The stream counts in the backlog until MPA starts, and against the maximum number of
// queue pairs, because it outlives its listener.
func (s *Server) streamAccepted(c *conn) {
	memory, err := s.cfg.streamMemory(), c.listener.wait(c)
	if err == nil {
		err = c.sess.take(resRings, memory)
	}
	if err != nil {
		s.dropConn(c, err)
		return
	}
	c.streaming, c.memory = true, memory
	c.sess.adopt(c)
	s.streamReady(c)
}

// streamMemory is the memory that a byte stream may use: data that the client has not read, in the engine and here, and data that the peer
// has not acknowledged. It is charged when the stream starts, because data of the peer cannot be refused later. The current chunk is charged as
// a message, since it may outlive the stream.
func (c *Config) streamMemory() uint64 { return 2*uint64(c.ReceiveWindow) + maxUnsent }

// uncharge returns the quota of a byte stream. Called with mu held.
func (c *conn) uncharge() {
	c.sess.give(resRings, c.memory)
	c.memory = 0
}

// A linger is a connection that was closed in order before full operation. The engine may still
// send the last data of its client.
type linger struct {
	id     dataplane.ConnID
	uid    uint32
	memory uint64 // of resRings, charged to uid
	limit  clock.Time
	claim  *claim // steers its packets
	local  netip.Addr
}

// lingerTime is the maximum time of a linger. It is longer than TCP waits for an
// acknowledgement (R2), so that it ends only connections whose peer answers and keeps its
// window closed.
const lingerTime = 2 * time.Minute

// linger keeps charging for c, which is being forgotten, until EventClosed, since the engine
// may still hold data of it. Its port stays steered, or the kernel would reset it: a listener may
// end before it. The charge moves from the client, which may leave, to its user. A
// peer whose requests are rejected may keep each of them open, so a user may have as many
// lingers as queue pairs, and a further one resets the oldest. Called with mu held.
func (s *Server) linger(c *conn) {
	l := &linger{c.id, c.sess.cred.Uid, min(c.memory, maxUnsent), s.now().Add(lingerTime), c.claim, c.local.Addr()}
	s.claims.join(l.claim, l.local)
	if l.claim.on.sockets() {
		s.files.extra++ // its socket, which no queue pair has any more
	}
	c.sess.own[resRings] -= l.memory
	c.memory -= l.memory
	u := c.sess.use
	s.lingers[l.id] = l
	u.lingers = append(u.lingers, l)
	s.wake(l.limit)
	if len(u.lingers) > c.sess.policy().limits.QPs {
		s.resetLinger(u.lingers[0])
	}
}

// endLinger handles the EventClosed of a connection that may be a linger. Called with mu held.
func (s *Server) endLinger(id dataplane.ConnID) {
	l := s.lingers[id]
	if l == nil {
		return
	}
	delete(s.lingers, id)
	u := s.usageOf(l.uid)
	u.lingers = slices.DeleteFunc(u.lingers, func(o *linger) bool { return o == l })
	u.account[resRings] -= l.memory
	if l.claim.on.sockets() {
		s.files.extra--
	}
	s.claims.leave(l.claim, l.local)
	s.settle(l.uid)
	s.checkDrained()
}

// resetLingers resets the lingers that have lasted too long, and returns when the next one does, or 0. Called with mu held.
func (s *Server) resetLingers(now clock.Time) (next clock.Time) {
	for _, u := range s.usage {
		for len(u.lingers) > 0 && u.lingers[0].limit.Due(now) {
			s.resetLinger(u.lingers[0])
		}
		if len(u.lingers) > 0 {
			next = clock.Earliest(next, u.lingers[0].limit)
		}
	}
	return next
}

func (s *Server) resetLinger(l *linger) {
	s.engine.Disconnect(l.id, true)
	s.endLinger(l.id)
}

// show sends the client the next chunk, if it has consumed the last one. The chunk waits for showLate while the client
// leaves so much unread that it could be cut off: peers choose when they send.
func (c *conn) show() {
	if c.shown > 0 || c.endShown || len(c.in) == 0 && !c.ended {
		return
	}
	if c.sess.out.behind() {
		if !c.late {
			c.late = true
			c.sess.late = append(c.sess.late, c)
		}
		c.sess.out.late.Store(true)
		if c.sess.out.behind() { // otherwise the writer may have made room before it could see late
			return
		}
	}
	c.shown = min(len(c.in), maxChunk)
	c.endShown = c.ended && c.shown == len(c.in)
	c.sess.event(&ctrlpb.Event{Body: &ctrlpb.Event_StreamData{StreamData: &ctrlpb.StreamData{Conn: c.handle, Data: c.in[:c.shown], End: c.endShown}}})
}

// showLate sends the chunks that have waited, as far as the client keeps up now.
func (c *session) showLate() {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(c.late) > 0 && !c.out.behind() {
		cn := c.late[0]
		c.late = slices.Delete(c.late, 0, 1) // nothing must keep cn when it has ended
		if cn.late = false; cn.state == connStreaming {
			cn.show()
		}
	}
	c.out.late.Store(len(c.late) > 0)
}

// onStream calls f for a connection in streaming mode, with mu held.
func (c *session) onStream(h uint32, f func(cn *conn) error) error {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	cn, err := c.connOf(h, connStreaming, "a byte stream, or no longer one")
	if err != nil {
		return err
	}
	return f(cn)
}

func (s *Server) streamSend(cn *conn, r *ctrlpb.StreamSend) error {
	if len(r.Data) > maxChunk {
		return errorf(invalid, "ctrl: %d bytes at once: at most %d are allowed", len(r.Data), maxChunk)
	}
	if cn.unsent += len(r.Data); cn.unsent > maxUnsent {
		cn.unsent -= len(r.Data)
		return errorf(busy, "ctrl: the peer %v has not read more than %d bytes: send less before MPA is started, or wait", cn.remote, maxUnsent)
	}
	s.engine.StreamSend(cn.id, r.Data)
	return nil
}

func (s *Server) streamConsumed(cn *conn, r *ctrlpb.StreamConsumed) error {
	n := int(r.Count)
	if n > cn.shown {
		return errorf(invalid, "ctrl: %d bytes consumed, but only %d were sent to the client", n, cn.shown)
	}
	if cn.in = cn.in[n:]; len(cn.in) == 0 {
		cn.in = nil // otherwise streamData would append to the old buffer
	}
	cn.shown -= n
	s.engine.StreamConsumed(cn.id, n)
	cn.show()
	return nil
}

// startMPA ends streaming mode: received bytes that were not consumed belong to MPA. The initiator need not be the side that opened the TCP
// connection (RFC 5044 section 7.1).
func (s *Server) startMPA(cn *conn, r *ctrlpb.StartMPA) error {
	initiator := cn.listener == nil
	switch r.Role {
	case ctrlpb.MPARole_MPA_ROLE_UNSPECIFIED:
	case ctrlpb.MPARole_MPA_ROLE_INITIATOR, ctrlpb.MPARole_MPA_ROLE_RESPONDER:
		initiator = r.Role == ctrlpb.MPARole_MPA_ROLE_INITIATOR
	default:
		return errorf(invalid, "ctrl: MPA has no role %d", r.Role)
	}
	q := cn.qp
	switch {
	case !initiator && len(r.PrivateData) > 0:
		return errorf(invalid, "ctrl: the responder's private data must be passed to Accept")
	case q != nil && r.Qp != 0 && r.Qp != q.num:
		return errorf(invalid, "ctrl: connection %d belongs to queue pair %d, not %d", r.Conn, q.num, r.Qp)
	case q == nil && initiator:
		var err error
		if q, err = cn.sess.freshQP(r.Qp); err != nil {
			return err
		}
	case q == nil && r.Qp != 0:
		return errorf(invalid, "ctrl: the responder's queue pair must be passed to Accept")
	}
	cfg := cn.cfg
	cfg.PrivateData = r.PrivateData
	cfg.RetryRev1, cfg.RetryNoMarkers = false, false // bytes already sent cannot be sent again
	if err := cfg.Validate(); err != nil {
		return errorf(invalid, "ctrl: %w", err)
	}
	cn.cfg, cn.initiator = cfg, initiator
	if q != nil {
		cn.take(q)
	}
	left := cn.in
	cn.in, cn.shown = nil, 0
	cn.answered()
	s.startup(cn)
	if len(left) > 0 {
		s.streamData(cn, left)
	}
	if cn.ended && (cn.state == connStartup || cn.state == connWaiting) {
		s.peerClosed(cn)
	}
	return nil
}

func (s *Server) streamClose(cn *conn, r *ctrlpb.StreamClose) error {
	s.engine.Disconnect(cn.id, r.Abort)
	cn.leaving = !r.Abort
	if cn.qp != nil {
		s.failConn(cn, errorf(canceled, "ctrl: connection with %v closed by the application", cn.remote))
		return nil
	}
	s.forget(cn)
	return nil
}
