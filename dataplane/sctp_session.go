package dataplane

import (
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// joinSCTP starts session id on the association that r names, which another worker may have
// adopted.
func (w *worker) joinSCTP(id ConnID, r *ConnectRequest, done chan<- error) {
	k := handoff.Key{Flow: pkt.NewFlow(r.Local, r.Remote), Proto: pkt.ProtoSCTP}
	as, home := w.assocOf(k), w.e.worker(id)
	if to := w.e.dir.Find(&k); as == nil && w == home && to != nil && to != w {
		w.moved[id] = to
		to.post(func(w *worker) { w.joinSCTP(id, r, done) })
		return
	}
	err := ErrNoStream
	if as != nil {
		if sid, ok := as.freeStream(); ok {
			as.beginSession(w, sid, id, r)
			err = nil
		}
	}
	if err != nil && home != w {
		home.post(func(home *worker) { delete(home.moved, id) })
	}
	done <- err
}

// freeStream returns a stream for a new session. It prefers streams on which no session has
// just ended.
func (as *assoc) freeStream() (uint16, bool) {
	n := sctpStreams // the peer's number is not known yet
	switch {
	case as.gone || as.lst != nil || as.passive || !as.a.Open():
		return 0, false
	case as.mux != nil:
		n = as.mux.Streams()
	}
	for i := range n {
		sid := uint16((int(as.nextSID) + i) % n)
		if as.sessions[sid] == nil && (as.mux == nil || as.mux.Free(sid)) {
			return sid, true
		}
	}
	return 0, false
}

// beginSession starts session id of r on SCTP stream sid, at once or when the association is
// established.
func (as *assoc) beginSession(w *worker, sid uint16, id ConnID, r *ConnectRequest) {
	s := as.newSession(w, sid, id)
	s.ini = &initiate{setup: r.Setup, limit: w.deadlineAfter(r.Timeout), answer: r.SCTP.Answer, fallback: r.SCTP.Fallback}
	as.nextSID = sid + 1
	as.waits(s, s.ini.limit)
	if as.mux != nil {
		as.initiate(w, s)
	}
	w.mark(&as.lane)
}

// initiate sends the peer the request for the session of s.
func (as *assoc) initiate(w *worker, s *stream) {
	if int(s.sid) >= as.mux.Streams() {
		as.endSession(w, s, ErrNoStream)
	} else if err := as.mux.Initiate(s.sid, s.ini.setup); err != nil {
		as.endSession(w, s, err)
	} else if s.ini.answer > 0 {
		as.waits(s, clock.Earliest(s.ini.limit, w.now.Add(s.ini.answer)))
	}
}

// waits sets the time at which s gives up waiting for an answer; 0 means never.
func (as *assoc) waits(s *stream, until clock.Time) {
	s.giveUp = until
	as.giveUp = clock.Earliest(as.giveUp, until)
}

// newSession creates the stream of a session on SCTP stream sid.
func (as *assoc) newSession(w *worker, sid uint16, id ConnID) *stream {
	s := &stream{id: id, lane: &as.lane, sid: sid}
	as.sessions[sid] = s
	as.round = append(as.round, s)
	w.streams[id] = s
	return s
}

// plain makes s retry without enhanced data, if allowed.
func (as *assoc) plain(s *stream, answer *session.Setup) bool {
	i := s.ini
	if answer != nil || i == nil || !i.fallback || i.setup.Enhanced == nil || as.enhanced || s.mode >= modeClosing {
		return false
	}
	i.setup.Enhanced, i.retry = nil, true
	return true
}

func (as *assoc) answer(w *worker, s *stream, set session.Setup, a Attachment) {
	if s.closed() || as.gone || as.mux == nil || as.mux.State(s.sid) != session.Requested {
		if a.QP != nil {
			w.refuseAttach(s.id, a)
		}
		return
	}
	if a.QP == nil {
		if as.mux.Reject(s.sid, set) == nil {
			as.endSession(w, s, nil)
		}
		w.mark(&as.lane)
		return
	}
	if err := as.mux.Accept(s.sid, set); err != nil {
		w.refuseAttach(s.id, a)
		s.abort(w, err)
		return
	}
	if !as.admitted {
		as.admitted = true
		as.a.SetWindow(w.sctpConfig(as.opts).RcvWindow)
	}
	as.setCounted(w, false)
	as.attach(w, s, a)
}

// attach starts full operation of an open session.
func (as *assoc) attach(w *worker, s *stream, a Attachment) {
	if s.closed() || as.gone || as.mux == nil || as.mux.State(s.sid) != session.Open || s.qp != nil {
		w.refuseAttach(s.id, a)
		return
	}
	s.linkQP(w, a)
	if a.QP.left.Load() {
		s.forsake(w) // first: nothing that has arrived may be placed
		return
	}
	s.start()
	if a.Fail != nil {
		s.fail(w, a.Fail)
	} else {
		s.getReady()
		// Either side may send first (RFC 6581 section 7): a responder does not wait for the RTR.
		w.event(s, Event{Kind: EventEstablished})
	}
	if err := as.mux.Attach(s.sid, &ddpSink{w, as, s}); err != nil {
		s.abort(w, err)
	}
	w.mark(&as.lane)
}

// ddpSink passes the DDP segments of a session to its DDP stream.
type ddpSink struct {
	w  *worker
	as *assoc
	s  *stream
}

// begin records whose memory a message accesses, until end.
func (k *ddpSink) begin() { k.w.current, k.as.inHand = k.s, true }

func (k *ddpSink) end() { k.w.current, k.as.inHand = nil, false }

func (k *ddpSink) done(err *term.Error) *term.Error {
	k.end()
	k.s.showReceived()
	if err != nil {
		k.s.violation(k.w, err)
	}
	return err
}

// closed reports whether the session ignores further messages.
func (k *ddpSink) closed() bool { return k.s.health != healthy || k.s.ddp == nil }

// Waits reports whether b is a Send that needs a receive of an SRQ while the queue pair holds as many as it can, whose data must still be
// stored in far memory, as mustWait over TCP. Meanwhile the peer should send nothing more.
func (k *ddpSink) Waits(b []byte) bool {
	if k.s.makeRoom(k.w); k.closed() || !k.s.qp.QP.RecvsFull() {
		return false
	}
	k.begin()
	waits := k.s.ddp.AwaitsReceive(marked.Bytes{B: b})
	k.end()
	k.as.stalled = k.as.stalled || waits
	return waits
}

func (k *ddpSink) HandleULPDU(b []byte) *term.Error {
	if k.s.makeRoom(k.w); k.closed() {
		return nil
	}
	k.w.stats.RxFPDUs++
	k.w.segments++
	k.begin()
	return k.done(k.s.ddp.HandleULPDU(b))
}

func (k *ddpSink) HandleEarly(key serial.Num, b []byte) bool {
	if k.closed() {
		return false
	}
	k.w.stats.RxFPDUsEarly++
	k.w.segments++
	k.begin()
	ok := k.s.ddp.HandleEarly(key, b)
	k.end()
	if ok {
		k.w.stats.RxFPDUsPlacedEarly++
	}
	return ok
}

func (k *ddpSink) DeliverEarly(key serial.Num) *term.Error {
	if k.closed() {
		return nil
	}
	k.w.stats.RxFPDUs++
	k.w.segments++
	k.begin()
	return k.done(k.s.ddp.DeliverEarly(key))
}

// resume continues with the sessions that wait to receive. It returns 1 if none waits any more: the window opens again.
func (as *assoc) resume() int {
	if !as.stalled {
		return 0
	}
	as.stalled = false
	for _, s := range as.round {
		as.mux.Resume(s.sid)
	}
	if as.stalled {
		return 0
	}
	return 1
}

// sessionEvents handles the events of the sessions.
func (as *assoc) sessionEvents(w *worker) int {
	n := 0
	ev := &w.sctp.ev
	for as.mux != nil && as.mux.PollEvent(ev) {
		n++
		s := as.sessions[ev.Stream]
		switch {
		case ev.Kind == session.EventRequest:
			as.requested(w, s, ev)
		case ev.Kind == session.EventNegotiate:
			as.negotiated(w, s, ev)
		case s != nil:
			as.sessionEvent(w, s, ev)
		}
	}
	return n
}

// requested handles the peer's request for a session on the stream of before, the previous session
// there, or nil.
func (as *assoc) requested(w *worker, before *stream, ev *session.Event) {
	if before != nil {
		as.endSession(w, before, nil) // the peer knows that it has ended
	}
	if as.unseen >= as.mux.Streams() {
		_ = as.mux.Terminate(ev.Stream) // RFC 5043 6.4: refused without asking the ULP
		return
	}
	s := as.newSession(w, ev.Stream, w.newID())
	as.idle = 0
	e := s.eventOf(w, Event{Kind: EventRequest, Setup: ev.Setup})
	if as.lst != nil {
		e.Listener = as.lst.id
	}
	w.e.events.pushCounted(w, &as.unseen, e)
	if as.passive && len(as.sessions) == 1 {
		as.findHop(w)
	}
}

// negotiated reports a Negotiate of the peer for s, or for the listener if s is nil.
func (as *assoc) negotiated(w *worker, s *stream, ev *session.Event) {
	if as.unseen >= as.mux.Streams() {
		return
	}
	e := Event{Kind: EventNegotiate, Flow: as.key.Flow, Worker: w.id, Setup: ev.Setup}
	if s != nil {
		e.Conn = s.id
	} else if as.lst != nil {
		e.Listener = as.lst.id
	}
	w.e.events.pushCounted(w, &as.unseen, e)
}

// sessionEvent handles an event of s.
func (as *assoc) sessionEvent(w *worker, s *stream, ev *session.Event) {
	switch ev.Kind {
	case session.EventOpen:
		s.ini = nil
		as.enhanced = as.enhanced || ev.Setup.Enhanced != nil
		w.event(s, Event{Kind: EventAnswer, Setup: ev.Setup})
	case session.EventRejected:
		if as.plain(s, ev.Setup) {
			return // retried when the stream is free
		}
		w.event(s, Event{Kind: EventRejected, Setup: ev.Setup})
		as.endSession(w, s, ErrRejected)
	case session.EventTerminated:
		w.event(s, Event{Kind: EventPeerClosed})
		s.remoteEvents(w)
		s.dropQP(w)
		s.mode = max(s.mode, modeClosing)
	case session.EventFailed:
		w.stats.Violations++
		as.endSession(w, s, ev.Err) // regardless of whether the peer answers the Terminate
	case session.EventIdle:
		if i := s.ini; i != nil && i.retry && s.mode < modeClosing {
			i.retry = false
			w.stats.SessionRetries++
			as.initiate(w, s)
			return
		}
		as.endSession(w, s, nil)
	}
}

// disconnect closes s after everything posted has been sent.
func (as *assoc) disconnect(w *worker, s *stream) {
	if s.mode != modeFull {
		s.close(w)
		return
	}
	s.leave(w)
}

// closeStream sends the session's Terminate.
func (as *assoc) closeStream(w *worker, s *stream) {
	w.mark(&as.lane)
	if as.mux == nil { // nothing has been set up yet
		if len(as.round) > 1 {
			as.endSession(w, s, nil)
		} else {
			as.a.Abort()
		}
		return
	}
	if as.mux.State(s.sid) == session.Initiating {
		// The answer does not matter.
		_ = as.mux.Terminate(s.sid)
		as.endSession(w, s, nil)
		return
	}
	if as.mux.Terminate(s.sid) != nil && as.mux.State(s.sid) == session.Idle {
		as.endSession(w, s, nil)
	}
}

// abortStream ends the session. If it was the last, it aborts the association.
func (as *assoc) abortStream(w *worker, s *stream) {
	if as.lst == nil && len(as.round) == 1 {
		as.a.Abort()
	} else {
		as.closeStream(w, s)
	}
	as.endSession(w, s, nil)
}

// endSession reports that a session has ended, and removes it.
func (as *assoc) endSession(w *worker, s *stream, err error) {
	if s.closed() {
		return
	}
	s.finish(w, err)
	if as.sessions[s.sid] == s {
		delete(as.sessions, s.sid)
	}
	if i := slices.Index(as.round, s); i >= 0 {
		as.round = slices.Delete(as.round, i, i+1)
		if i < as.turn {
			as.turn--
		}
	}
	w.forget(s)
	if len(as.sessions) == 0 {
		as.setCounted(w, true)
		if as.lst != nil {
			as.startIdle(w)
		}
	}
	w.mark(&as.lane)
}
