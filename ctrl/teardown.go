package ctrl

import (
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
)

// fault cuts off a client whose memory could not be accessed.
func (c *session) fault() {
	c.srv.counters.faults.Add(1)
	c.cutOff(errorf(invalid, "ctrl: the client's memory could not be accessed: it must not change while it is registered"))
}

// cutOff ends the session and reports the reason to the client if it reads. It may block for a
// while, so neither a worker nor a goroutine that holds Server.mu may call it.
func (c *session) cutOff(why error) {
	if !c.cut.CompareAndSwap(false, true) {
		return
	}
	c.logCut(why)
	c.srv.counters.cutOff.Add(1)
	m := &ctrlpb.Message{Body: &ctrlpb.Message_Event{Event: &ctrlpb.Event{Body: &ctrlpb.Event_CutOff{CutOff: &ctrlpb.CutOff{Error: toPB(why)}}}}}
	if b, err := proto.Marshal(m); err == nil {
		c.conn.WriteLast(b, cutOffWait)
	}
	c.shutdown()
}

// cutOffWait is the time to wait for a client that is cut off to read the reason.
const cutOffWait = 200 * time.Millisecond

// logCut logs that the client was cut off. A program may reconnect and be cut off repeatedly, so
// only some lines are logged.
func (c *session) logCut(why error) {
	if n, due := c.srv.cuts.add(c.srv.now()); due {
		c.log.Warn("client cut off", zap.Error(why), zap.Uint64("times", n))
	}
}

// teardown releases everything that the client has.
func (c *session) teardown() {
	s := c.srv
	c.shutdown()
	c.endConnections()
	if c.binding != nil {
		s.engine.Unbind(c.binding)
	}
	s.mu.Lock()
	closing := s.closed
	s.mu.Unlock()
	c.releaseMemory()
	c.releaseRings(closing)
	if !closing && c.conn.Unread() > 0 {
		c.holdUntil(s.drain(c.conn))
	} else { // messages in the socket may have descriptors, whose closing may block
		c.away("its socket", func() { c.conn.Close() })
	}
	close(c.out.quit)
	if len(c.stuck) == 0 {
		c.gone()
		return
	}
	go func() { // the server may be closed in the meantime
		for _, over := range c.stuck {
			<-over
		}
		c.gone()
	}()
}

// endConnections ends everything of the client that the engine knows of, except its binding. Queue pairs that the
// client has left still send what is in TX slots, as close(2) leaves it to the kernel, unless the client was cut off.
func (c *session) endConnections() {
	s := c.srv
	s.mu.Lock()
	c.dead = true
	conns := values(c.conns)
	s.mu.Unlock()
	for _, l := range c.listens {
		c.dropListener(l)
	}
	for _, cn := range conns {
		s.mu.Lock()
		if cn.qp == nil || !cn.qp.left {
			s.abandon(cn)
		}
		s.mu.Unlock()
	}
	for _, q := range c.qps {
		if !q.left {
			c.dropQP(q)
		}
	}
	for _, q := range c.qps {
		c.awaitEnd(q)
		c.dropQP(q)
	}
}

// awaitEnd waits until the connection of q, which the client has left, has ended. That takes at most closeTimeout.
func (c *session) awaitEnd(q *qp) {
	s := c.srv
	for wait := lookAgain; !c.cut.Load(); wait = min(2*wait, drainLook) {
		s.mu.Lock()
		over := q.conn == nil
		s.mu.Unlock()
		if over {
			return
		}
		select {
		case <-time.After(wait):
		case <-s.done:
			return
		}
	}
}

// releaseMemory ends the access of workers to the client's memory and unmaps it.
func (c *session) releaseMemory() {
	s := c.srv
	for _, w := range c.mws { // before the regions to which they are bound
		_ = s.table.Deregister(w.window)
	}
	for _, m := range c.mrs {
		_ = s.table.Deregister(m.region) // cannot be busy: its windows have been deregistered
	}
	for _, q := range c.cqs {
		q.ring.Moderate(0, 0) // no worker delays a wake-up of the client
	}
	if len(c.mrs)+len(c.cqs) > 0 {
		s.quiet() // no worker accesses the regions any longer
	}
	for _, m := range c.mrs {
		c.unmapMR(m)
	}
	c.mem.detach()
}

// releaseRings frees the rings that the client shares with the workers. If the server is closing,
// the completions made so far stay readable.
func (c *session) releaseRings(closing bool) {
	var rings []interface{ Free() error }
	for _, q := range c.cqs {
		if closing {
			q.ring.Close()
		} else {
			rings = append(rings, q.ring)
		}
	}
	for _, q := range c.srqs {
		rings = append(rings, q.ring)
	}
	if c.binding != nil {
		for _, b := range c.binding.Doorbells {
			rings = append(rings, b)
		}
	}
	for _, ch := range c.channels { // no queue uses them any longer
		unix.Close(ch.wake)
	}
	if len(rings) > 0 {
		c.free(rings...)
	}
}

// drain calls awaitUnread and then abandons conn, which is already shut down. It closes over at
// the end.
func (s *Server) drain(conn *seqpacket.Conn) (over <-chan struct{}) {
	done := make(chan struct{})
	s.wg.Go(func() {
		defer close(done)
		awaitUnread(conn.Unread, s.done)
		conn.Abandon()
	})
	return done
}

// awaitUnread waits until unread, for a socket that is shut down, returns 0: the client has read all messages or
// has closed its end. It returns at the latest when done is closed. Until then the kernel holds up to a socket
// buffer of messages and their descriptors, which count in the daemon's memory.
func awaitUnread(unread func() int, done <-chan struct{}) {
	for wait := lookAgain; unread() > 0; wait = min(2*wait, drainLook) {
		select {
		case <-time.After(wait):
		case <-done:
			return
		}
	}
}

// drainLook is the longest interval between two checks of a client's socket.
const drainLook = 250 * time.Millisecond

// gone returns the quotas of a session that has released everything.
func (c *session) gone() {
	s := c.srv
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, c.id)
	c.out.close()
	c.giveMover()
	c.giveAll()
}
