package dataplane

import (
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// joinSCTP begins session id on the association of flow. The association may be with another worker.
func (w *worker) joinSCTP(id ConnID, flow pkt.Flow, ini *initiate, timeout time.Duration, done chan<- error) {
	s := w.sctp0()
	as := s.assocs[flow]
	if to := s.moved[flow]; as == nil && to != nil {
		w.moved[id] = to
		to.post(func(w *worker) { w.joinSCTP(id, flow, ini, timeout, done) })
		return
	}
	err := ErrNoStream
	if as != nil {
		if sid, ok := as.freeStream(); ok {
			w.beginSession(as, sid, id, ini, timeout)
			err = nil
		}
	}
	if home := w.e.worker(id); err != nil && home != w {
		home.post(func(home *worker) { delete(home.moved, id) })
	}
	done <- err
}

// freeStream finds a stream for a session of ours. One on which a session has just ended
// is tried last.
func (as *assoc) freeStream() (uint16, bool) {
	n := sctpStreams // as many as the peer has: not known yet
	switch {
	case as.over || as.lst != nil || as.passive || !as.a.Open():
		return 0, false
	case as.mux != nil:
		n = as.mux.Streams()
	}
	for i := range n {
		sid := uint16((int(as.nextSID) + i) % n)
		if as.streams[sid] == nil && (as.mux == nil || as.mux.Free(sid)) {
			return sid, true
		}
	}
	return 0, false
}

// beginSession begins a session of ours on stream sid: at once, or when the association is
// established.
func (w *worker) beginSession(as *assoc, sid uint16, id ConnID, ini *initiate, timeout time.Duration) {
	c := w.newSession(as, sid, id)
	c.ini = ini
	as.nextSID = sid + 1
	if timeout > 0 {
		ini.limit = w.now.Add(timeout)
		w.waits(c, ini.limit)
	}
	if as.mux != nil {
		w.initiate(c)
	}
	w.mark(&as.carrier)
}

// initiate asks the peer for the session of c.
func (w *worker) initiate(c *conn) {
	if int(c.sid) >= c.as.mux.Streams() {
		w.endSession(c, ErrNoStream)
	} else if err := c.as.mux.Initiate(c.sid, c.ini.setup); err != nil {
		w.endSession(c, err)
	} else if c.ini.answer > 0 {
		w.waits(c, clock.Earliest(c.ini.limit, w.now.Add(c.ini.answer)))
	}
}

// waits gives the set-up of c up at a time, if no answer comes before.
func (w *worker) waits(c *conn, until clock.Time) {
	c.giveUp = until
	c.as.carrier.giveUp = clock.Earliest(c.as.carrier.giveUp, until)
}

// newSession makes the conn of a session on stream sid.
func (w *worker) newSession(as *assoc, sid uint16, id ConnID) *conn {
	c := &conn{id: id, flow: as.flow, as: as, sid: sid}
	c.timer.conn = c
	as.streams[sid] = c
	as.round = append(as.round, c)
	w.conns[c.id] = c
	return c
}

// plain notes that c asks again without enhanced data, if it may.
func (as *assoc) plain(c *conn, answer *session.Setup) bool {
	i := c.ini
	if answer != nil || i == nil || !i.fallback || i.setup.Enhanced == nil || as.enhanced || c.mode == modeClosing {
		return false
	}
	i.setup.Enhanced, i.retry = nil, true
	return true
}

// answerSCTP is Answer.
func (w *worker) answerSCTP(c *conn, set session.Setup, a Attachment) {
	as := c.as
	if c.closed || as.over || as.mux.State(c.sid) != session.Requested {
		if a.QP != nil {
			w.refuseAttach(c.id, a)
		}
		return
	}
	if a.QP == nil {
		if as.mux.Reject(c.sid, set) == nil {
			w.endSession(c, nil)
		}
		w.mark(&as.carrier)
		return
	}
	if err := as.mux.Accept(c.sid, set); err != nil {
		w.refuseAttach(c.id, a)
		w.abort(c, err)
		return
	}
	if !as.admitted {
		as.admitted = true
		as.a.SetWindow(w.sctpConfig(as.opts).RcvWindow)
	}
	w.attachSCTP(c, a)
}

func (w *worker) refuseAttach(id ConnID, a Attachment) {
	a.QP.QP.Error()
	w.flushQP(a.QP)
	w.e.events.push(Event{Kind: EventClosed, Conn: id, Worker: w.id, Err: errNoConn, QP: a.QP})
}

// attachSCTP takes a session that is open to full operation.
func (w *worker) attachSCTP(c *conn, a Attachment) {
	as := c.as
	if c.closed || as.over || as.mux == nil || as.mux.State(c.sid) != session.Open || c.qp != nil {
		w.refuseAttach(c.id, a)
		return
	}
	w.linkQP(c, a)
	c.qp.QP.Start(rdmap.Config{IRD: a.Params.IRD, ORD: a.Params.ORD})
	c.stream = c.qp.QP.Stream()
	c.mode = modeFull
	switch {
	case a.Fail != nil:
		c.stream.Fail(a.Fail, nil)
		w.violation(c, a.Fail)
	case a.Params.RTR == mpa.RTRNone:
	case a.Params.Initiator:
		c.stream.SendRTR(rtrKind(a.Params.RTR))
	default:
		c.stream.ExpectRTR(rtrKind(a.Params.RTR))
	}
	if a.Fail == nil {
		// Either side may send first (RFC 6581 section 7): a responder does not wait for the RTR.
		w.event(c, EventEstablished, nil, nil)
	}
	if err := as.mux.Attach(c.sid, &ddpSink{w, c}); err != nil {
		w.abort(c, err)
	}
	w.mark(&as.carrier)
}

// linkQP joins a connection and a queue pair.
func (w *worker) linkQP(c *conn, a Attachment) {
	b := a.QP
	c.qp, c.attachP, c.attachE = b, a.Params, a.Fail
	b.conn = c
	cl := w.client(b.Client)
	if cl == nil {
		return
	}
	for len(cl.conns) <= b.Bit {
		cl.conns = append(cl.conns, nil)
	}
	cl.conns[b.Bit] = c
	if c.as != nil {
		c = &c.as.carrier
	}
	if c.client != &w.house {
		return
	}
	queued := c.queued
	if queued {
		c.queued = false
		w.house.queue.remove(c)
	}
	c.join(cl)
	if queued {
		w.enqueue(c)
	}
}

// ddpSink hands the DDP segments of a session to its stream.
type ddpSink struct {
	w *worker
	c *conn
}

// begin notes whose memory a message touches, until end.
func (s *ddpSink) begin() { s.w.current, s.c.as.inHand = s.c, true }

func (s *ddpSink) end() { s.w.current, s.c.as.inHand = nil, false }

func (s *ddpSink) done(err *term.Error) *term.Error {
	s.end()
	if err != nil {
		s.w.violation(s.c, err)
	}
	return err
}

func (s *ddpSink) HandleULPDU(b []byte) *term.Error {
	if s.c.rxFailed || s.c.stream == nil {
		return nil
	}
	s.w.stats.RxFPDUs++
	s.begin()
	return s.done(s.c.stream.HandleULPDU(b))
}

func (s *ddpSink) HandleEarly(key serial.Num, b []byte) bool {
	if s.c.rxFailed || s.c.stream == nil {
		return false
	}
	s.w.stats.RxFPDUsEarly++
	s.begin()
	ok := s.c.stream.HandleEarly(key, b)
	s.end()
	if ok {
		s.w.stats.RxFPDUsPlacedEarly++
	}
	return ok
}

func (s *ddpSink) DeliverEarly(key serial.Num) *term.Error {
	if s.c.rxFailed || s.c.stream == nil {
		return nil
	}
	s.w.stats.RxFPDUs++
	s.begin()
	return s.done(s.c.stream.DeliverEarly(key))
}

// sessionEvents acts on what the sessions report.
func (w *worker) sessionEvents(as *assoc) int {
	n := 0
	ev := &w.sctp.ev
	for as.mux != nil && as.mux.PollEvent(ev) {
		n++
		c := as.streams[ev.Stream]
		if ev.Kind == session.EventRequest {
			if c != nil {
				w.endSession(c, nil) // the last session there; the peer knows that it is over
			}
			c = w.newSession(as, ev.Stream, w.newID())
			c.passive = true
			as.idle = 0
			e := Event{Kind: EventRequest, Conn: c.id, Flow: c.flow, Worker: w.id, Setup: ev.Setup}
			if as.lst != nil {
				e.Listener = as.lst.id
			}
			w.e.events.push(e)
			if as.passive && len(as.streams) == 1 && w.e.resolver != nil {
				go w.e.resolveConn(c.id, c.flow) // what the route says, and to hear of the neighbour
			}
			continue
		}
		if ev.Kind == session.EventNegotiate {
			e := Event{Kind: EventNegotiate, Flow: as.flow, Worker: w.id, Setup: ev.Setup}
			if c != nil {
				e.Conn = c.id
			} else if as.lst != nil {
				e.Listener = as.lst.id
			}
			w.e.events.push(e)
			continue
		}
		if c == nil {
			continue
		}
		switch ev.Kind {
		case session.EventOpen:
			c.ini = nil
			as.enhanced = as.enhanced || ev.Setup.Enhanced != nil
			w.e.events.push(Event{Kind: EventAnswer, Conn: c.id, Flow: c.flow, Worker: w.id, Setup: ev.Setup})
		case session.EventRejected:
			if as.plain(c, ev.Setup) {
				continue // as soon as the stream is free
			}
			w.e.events.push(Event{Kind: EventRejected, Conn: c.id, Flow: c.flow, Worker: w.id, Setup: ev.Setup})
			w.endSession(c, ErrRejected)
		case session.EventTerminated:
			w.event(c, EventPeerClosed, nil, nil)
			w.remoteEventsSCTP(c)
			w.dropQP(c)
			c.mode = modeClosing
		case session.EventFailed:
			w.stats.Violations++
			w.endSession(c, ev.Err) // whether the peer answers the Terminate or not
		case session.EventIdle:
			if i := c.ini; i != nil && i.retry && c.mode != modeClosing {
				i.retry = false
				w.stats.SessionRetries++
				w.initiate(c)
				continue
			}
			w.endSession(c, nil)
		}
	}
	return n
}

// remoteEventsSCTP acts on what the stream of a session reports.
func (w *worker) remoteEventsSCTP(c *conn) {
	if c.mode == modeFull && c.stream != nil {
		w.remoteEvents(c)
	}
}

// sctpTerminated ends a session whose peer sent an RDMAP Terminate.
func (w *worker) sctpTerminated(c *conn, err *term.RemoteError) {
	c.err = err
	w.closeSession(c)
}

// leaveShared is how much a session that leaves an association with others may send, in
// octets, when they have filled the window.
const leaveShared = 64 << 10

// disconnectSCTP ends the session of c: what was posted still goes out.
func (w *worker) disconnectSCTP(c *conn) {
	if c.mode == modeFull {
		room := c.as.a.Room()
		if len(c.as.round) > 1 {
			room = max(room, leaveShared) // what others have filled is no measure
		}
		w.leave(c, room)
		return
	}
	w.dropQP(c)
	c.mode = modeClosing
	w.closeSession(c)
}

// closeSession sends the session's Terminate.
func (w *worker) closeSession(c *conn) {
	as := c.as
	w.mark(&as.carrier)
	if as.mux == nil { // nothing was set up yet
		if len(as.round) > 1 {
			w.endSession(c, nil)
		} else {
			as.a.Abort(w.now)
		}
		return
	}
	if as.mux.State(c.sid) == session.Initiating {
		// Its answer is of no interest to anybody.
		_ = as.mux.Terminate(c.sid)
		w.endSession(c, nil)
		return
	}
	if as.mux.Terminate(c.sid) != nil && as.mux.State(c.sid) == session.Idle {
		w.endSession(c, nil)
	}
}

// endSession tells the control plane that a session is over, and forgets it.
func (w *worker) endSession(c *conn, err error) {
	if c.gone {
		return
	}
	as := c.as
	w.finish(c, err)
	c.gone = true
	if as.streams[c.sid] == c {
		delete(as.streams, c.sid)
	}
	if i := slices.Index(as.round, c); i >= 0 {
		as.round = slices.Delete(as.round, i, i+1)
		if i < as.turn {
			as.turn--
		}
	}
	delete(w.conns, c.id)
	if home := w.e.worker(c.id); home != w {
		id := c.id
		home.post(func(home *worker) { delete(home.moved, id) })
	}
	if len(as.streams) == 0 && as.lst != nil {
		w.idles(as)
	}
	w.mark(&as.carrier)
}
