package dataplane

import (
	"cmp"
	"errors"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// mode is the state of a stream.
type mode uint8

const (
	modeOpening   mode = iota // handshake of the transport, and of the session over SCTP
	modeStreaming             // TCP: bytes are exchanged with the control plane
	modeSwitching             // TCP: attached; the last streaming-mode bytes are being sent
	modeFull                  // full operation: DDP segments
	modeClosing               // nothing more is sent
	modeForsaken              // so it is, and the peer's FIN is not waited for: the program has left
	modeSettling              // ended, but data must still be stored in far memory or work be flushed
	modeClosed                // reported by EventClosed
)

// health says whether a stream in full operation is about to end for an error.
type health uint8

const (
	healthy health = iota
	deaf           // received data is ignored
	failed         // so it is, and a Terminate is queued or sent
)

// streamEnd says why a stream in full operation closes soon, once nothing is left to be sent.
type streamEnd uint8

const (
	endNone    streamEnd = iota
	endLeaving           // the application has disconnected
	endHalf              // the peer has closed: only stream.rest more work requests are taken
)

// stream is a DDP stream and its queue pair. A TCP connection has one, an association one per
// session. Only its worker's goroutine uses it.
type stream struct {
	id     ConnID
	lane   *lane
	mode   mode
	err    error      // why the stream ends; nil means the transport's reason
	giveUp clock.Time // deadline of an active open, or of a FIN of the peer that no program waits for

	// SCTP only.
	sid   uint16    // SCTP stream
	ini   *initiate // state of a session that we requested, until it is answered
	share int       // cost in bytes that it may send before the turns of other sessions

	// Full operation.
	qp      *QPBinding
	bells   *shm.Doorbells // of its client, or nil
	params  mpa.Params
	ddp     *rdmap.Stream
	pending rdmap.Segment // polled but not yet composed, if hasPend is set
	hasPend bool
	gate    bool // a responder must wait for the first FPDU
	timed   timed
	health  health
	end     streamEnd
	rest    int // see endHalf
}

var (
	errDetached   = errors.New("dataplane: queue pair destroyed")
	errFaulted    = errors.New("dataplane: fault in client memory, on another connection")
	errAborted    = errors.New("dataplane: connection aborted by the application")
	errNoConn     = errors.New("dataplane: connection is gone")
	errTooMany    = errors.New("dataplane: too many connections")
	errFlowExists = errors.New("dataplane: a connection with these addresses and ports exists")
	errStreamFull = errors.New("dataplane: peer sent too much before MPA startup ended")
)

// closed reports whether s has ended.
func (s *stream) closed() bool { return s.mode >= modeSettling }

// flow returns the addresses and ports of the stream's transport.
func (s *stream) flow() pkt.Flow { return s.lane.key.Flow }

// conn returns the TCP connection of s, or nil if s is an SCTP session.
func (s *stream) conn() *tcpConn {
	c, _ := s.lane.llp.(*tcpConn)
	return c
}

// event sends an event about s.
func (w *worker) event(s *stream, ev Event) { w.e.events.push(s.eventOf(w, ev)) }

// eventOf returns ev as an event about s.
func (s *stream) eventOf(w *worker, ev Event) Event {
	ev.Conn, ev.Flow, ev.Worker = s.id, s.flow(), w.id
	return ev
}

// withStream calls f on the worker that owns stream id, with nil if it no longer exists.
func (w *worker) withStream(id ConnID, f func(*worker, *stream)) {
	if to := w.moved[id]; to != nil {
		to.post(func(w *worker) { w.withStream(id, f) })
		return
	}
	f(w, w.streams[id])
}

// forget removes a stream from the tables of its worker and of the worker that dialed it.
func (w *worker) forget(s *stream) {
	if s.mode == modeSettling {
		return // settle does
	}
	delete(w.streams, s.id)
	if home := w.e.worker(s.id); home != w {
		id := s.id
		home.post(func(home *worker) { delete(home.moved, id) })
	}
}

// attach starts full operation of s, or flushes the queue pair if s no longer exists.
func (w *worker) attach(id ConnID, s *stream, a Attachment) {
	if s == nil {
		w.refuseAttach(id, a)
		return
	}
	s.lane.llp.attach(w, s, a)
}

// answer is attach in response to a request of the peer.
func (w *worker) answer(id ConnID, s *stream, set session.Setup, a Attachment) {
	if s != nil {
		s.lane.llp.answer(w, s, set, a)
	} else if a.QP != nil {
		w.refuseAttach(id, a)
	}
}

// refuseAttach flushes a queue pair that cannot be attached to stream id. Only one worker may: the one that has had its
// stream, or else the one that dialed, whichever worker finds out.
func (w *worker) refuseAttach(id ConnID, a Attachment) {
	if to := cmp.Or(a.QP.worker, w.e.worker(id)); to != w {
		to.post(func(w *worker) { w.refuseAttach(id, a) })
		return
	}
	a.QP.QP.Error()
	w.flushes.deliver(w, a.QP)
	w.flushes.after(w, a.QP, func(w *worker) {
		w.publishFor(a.QP)
		w.e.events.push(Event{Kind: EventClosed, Conn: id, Worker: w.id, Err: errNoConn})
	})
}

// linkQP connects a stream and a queue pair.
func (s *stream) linkQP(w *worker, a Attachment) {
	b := a.QP
	s.qp, s.params = b, a.Params
	b.stream, b.worker = s, w
	cl := w.client(b.Client)
	if cl == nil {
		return
	}
	for len(cl.streams) <= b.Bit {
		cl.streams = append(cl.streams, nil)
	}
	cl.streams[b.Bit] = s
	s.bells = cl.bells
	if b.Far != nil {
		look := func(w *worker) { w.lookMoved(b) }
		b.Far.Notify(func() {
			if !b.moved.Swap(true) {
				w.post(look)
			}
		})
	}
	if m := &s.lane.member; m.Group() == &w.clientless {
		w.sched.Join(m, cl.group)
	}
}

func (s *stream) unlinkQP(w *worker) {
	b := s.qp
	if b == nil {
		return
	}
	if cl := w.client(b.Client); cl != nil && b.Bit < len(cl.streams) && cl.streams[b.Bit] == s {
		cl.streams[b.Bit] = nil
	}
	b.stream = nil
	s.qp, s.ddp, s.bells = nil, nil, nil
}

// start begins full operation.
func (s *stream) start() {
	s.qp.QP.SetTurns(turns{s.qp.worker})
	s.qp.QP.Start(rdmap.Config{IRD: s.params.IRD, ORD: s.params.ORD})
	s.ddp = s.qp.QP.Stream()
	s.mode = modeFull
}

// getReady sends the ready-to-receive message that was negotiated, if any, or expects it.
func (s *stream) getReady() {
	op := rdmap.OpSend
	switch s.params.RTR {
	case mpa.RTRNone:
		return
	case mpa.RTRWrite:
		op = rdmap.OpWrite
	case mpa.RTRRead:
		op = rdmap.OpRead
	}
	if s.params.Initiator {
		s.ddp.SendRTR(op)
	} else {
		s.ddp.ExpectRTR(op)
	}
}

// disconnect closes s at the request of the application.
func (w *worker) disconnect(s *stream, abort bool) {
	if s.mode == modeSettling {
		return
	}
	if abort {
		s.abort(w, errAborted)
		return
	}
	s.lane.llp.disconnect(w, s)
}

// leave closes s after everything posted or queued has been sent. Like all senders s waits for
// its turns of the round, and for the window. The control plane bounds the time.
func (s *stream) leave(w *worker) {
	s.end = max(s.end, endLeaving)
	w.mark(s.lane)
}

// forsake closes s, whose program has destroyed the queue pair. What the peer sends is dropped, and s ends when its FIN
// is acknowledged, without that of the peer; a kernel socket, whose acknowledgements nobody reports, waits for that too.
func (s *stream) forsake(w *worker) {
	if s.mode < modeClosing {
		s.close(w)
	}
	if s.mode == modeClosing {
		s.mode = modeForsaken
	}
	w.mark(s.lane)
}

// close closes s gracefully and flushes what it has not sent.
func (s *stream) close(w *worker) {
	s.dropQP(w)
	s.mode = max(s.mode, modeClosing)
	s.lane.llp.closeStream(w, s)
}

// abort resets s: a connection with a RST, and the last session of an association with an
// ABORT. Other sessions just end.
func (s *stream) abort(w *worker, why error) {
	if s.err == nil {
		s.err = why
	}
	s.dropQP(w)
	s.mode = max(s.mode, modeClosing)
	s.lane.llp.abortStream(w, s)
	w.mark(s.lane)
}

// detach resets s because its queue pair is being destroyed, and releases the queue pair at
// once.
func (s *stream) detach(w *worker) {
	if s.mode != modeSettling {
		s.abort(w, errDetached)
	}
	if s.mode == modeSettling { // a session ends at once
		s.over(w)
		w.forget(s)
	}
	s.unlinkQP(w)
}

// finish reports that s has closed. Its tcp.Conn may stay in TIME-WAIT.
func (s *stream) finish(w *worker, err error) {
	if s.closed() {
		return
	}
	if s.end == endHalf && errors.Is(err, tcp.ErrReset) {
		err = nil // it was already closed
	}
	if s.err == nil {
		s.err = err
	}
	s.dropQP(w)
	s.mode = modeSettling
	if s.settled(w) {
		s.over(w)
	}
}

// settled reports whether nothing is left to flush, and all placed data is in far memory.
// Completions wait until then.
func (s *stream) settled(w *worker) bool {
	return s.qp == nil || w.flushes.done(s.qp) && s.qp.QP.Settled()
}

// settle reports that the closed stream s is gone, if it is settled.
func (s *stream) settle(w *worker) {
	if s.mode == modeSettling && s.settled(w) {
		s.over(w)
		w.forget(s)
	}
}

// over reports that s is gone.
func (s *stream) over(w *worker) {
	s.mode = modeClosed
	if s.qp != nil {
		w.publishFor(s.qp)
	}
	if c := s.conn(); c == nil || c.lst == nil { // a peer could cause any number of events of half-open ones
		w.event(s, Event{Kind: EventClosed, Err: s.err, TimeWait: c != nil && c.tcp.State() != tcp.Closed})
	}
	s.unlinkQP(w)
}

// lookMoved continues a queue pair for which far memory was moved.
func (w *worker) lookMoved(b *QPBinding) {
	b.moved.Store(false)
	s := b.stream
	if done, _ := b.Far.Stored(); done != b.stored {
		b.stored = done
		if s != nil && s.bells != nil {
			s.bells.Received()
		}
	}
	switch {
	case s == nil:
	case s.mode != modeSettling:
		if c := s.conn(); c != nil && s.mode == modeFull {
			c.noteBacklog(w)
			c.tcp.SetBacklog(c.backlog) // even if it is the same: the client may no longer be crowded
		}
		w.mark(s.lane)
	default:
		w.flushes.deliver(w, b)
		s.settle(w)
	}
}

// dropQP ends the queue pair of s and flushes posted work.
func (s *stream) dropQP(w *worker) {
	if s.qp == nil {
		return
	}
	s.hasPend = false
	s.qp.QP.Error()
	w.flushes.deliver(w, s.qp)
}

// flushLate completes work requests posted after the queue pair ended, while its stream still
// exists.
func (s *stream) flushLate(w *worker) {
	if s.mode >= modeClosing && s.qp != nil {
		w.flushes.deliver(w, s.qp)
	}
}

// pull takes a batch of work requests from the queue pair. After the peer has closed, the total
// is limited to what the queue can have held then.
func (s *stream) pull(w *worker) int {
	budget := pullBudget
	if s.end == endHalf {
		budget = min(budget, s.rest)
	}
	n := s.qp.QP.HandleSends(budget)
	if s.end == endHalf {
		s.rest -= n
	}
	if n > 0 && s.timed.since == 0 {
		s.timed = timed{s.qp.QP.Taken() - uint64(n), w.now}
	}
	return n
}

// timed is the work request whose time to completion is measured. A queue pair measures one at
// a time, in steps of a turn, so that measuring needs no clock reading and no state per
// request.
type timed struct {
	seq   uint64     // number of the work request, from 0
	since clock.Time // 0: none is measured
}

// measure ends the measurement of a work request that is complete.
func (s *stream) measure(w *worker) {
	if s.timed.since != 0 && s.qp.QP.Retired() > s.timed.seq {
		w.times.completions.Add(w.now.Sub(s.timed.since))
		s.timed.since = 0
	}
}

// lookAt does the work of a stream in full operation that needs no slot, while it waits for its
// turn to send.
func (s *stream) lookAt(w *worker) {
	s.remoteEvents(w)
	if s.mode == modeFull && !s.gate && s.health != failed {
		s.pull(w)
	}
}

// pullMore takes the work requests that did not fit in the send queue before this turn's
// completions, or in its batch. No later doorbell or acknowledgement might trigger that.
func (s *stream) pullMore(w *worker) {
	if !s.gate && s.health != failed && s.pull(w) > 0 {
		w.mark(s.lane)
	}
}

// poll builds the next segment of s, as PollFilling of its DDP stream does. That performs an atomic of the peer in
// the client's memory.
func (s *stream) poll(w *worker, room, mulpdu int) bool {
	w.current = s
	ok := s.ddp.PollFilling(room, mulpdu, &s.pending)
	w.current = nil
	return ok
}

// sendable reports whether s has a segment to compose.
func (s *stream) sendable() bool { return s.hasPend || s.ddp != nil && s.ddp.Sendable() }

// composed is called when s has composed what it may in its turn of the round. It closes s once all
// has been sent that s sends before its end. some says that s has composed anything, idle that it
// stopped for want of data or window.
func (s *stream) composed(w *worker, some, idle bool) {
	if some || s.health == failed {
		s.remoteEvents(w)
	}
	switch {
	case s.mode != modeFull:
	case s.ddp.TerminateSent() && !s.hasPend: // a pending segment is sent first
		s.close(w)
	case s.health == failed: // the Terminate ends it
	case s.end != endNone && idle && (s.gate || !s.sendable()):
		s.close(w)
	}
}

// gather returns the payload of n bytes of the pending segment, and of those that follow it, in
// client memory. ok is false if the memory is no longer valid; the stream then has a Terminate
// pending. It is also false if far memory has not been fetched yet: the segment stays pending.
func (s *stream) gather(w *worker, n int) (payload [][]byte, ok bool) {
	p := &s.pending
	if n == 0 || p.Src.Kind == rdmap.SourceNone {
		return nil, true
	}
	payload, ok = s.qp.QP.Gather(&p.Src, n, w.parts[:0])
	switch {
	case s.qp.QP.Awaits(): // far memory
		s.hasPend = true
		w.response.news = true
	case !ok:
		s.violation(w, s.ddp.Err())
		w.mark(s.lane)
	}
	return payload, ok
}

// crowded reports whether the client of s should receive no more, because its far memory is
// slow.
func (s *stream) crowded() bool { return s.qp != nil && s.qp.Far != nil && s.qp.Far.Crowded() }

// showReceived shows the client of s that data of its peer has been placed. If some must still be stored in far memory,
// lookMoved shows that.
func (s *stream) showReceived() {
	if s.bells != nil && (s.qp.Far == nil || s.qp.Far.Backlog() == 0) {
		s.bells.Received()
	}
}

// violation records a violation that the DDP stream has detected and answered with a Terminate.
func (s *stream) violation(w *worker, err *term.Error) {
	if s.health == failed {
		return
	}
	s.health = failed
	s.gate = false
	w.stats.Violations++
	w.event(s, Event{Kind: EventFailed, Err: err})
}

// fail terminates the stream after a violation: it sends a Terminate, then a FIN.
func (s *stream) fail(w *worker, err *term.Error) {
	if s.health != failed {
		s.ddp.Fail(err)
		w.mark(s.lane)
	}
	s.violation(w, err)
}

// completions moves completions of the queue pair to its CQs. A work request is complete only
// after its payload has been copied.
func (s *stream) completions(w *worker) {
	if s.pushCompletions(w); s.err != nil {
		s.abort(w, s.err)
		return
	}
	s.measure(w)
}

// pushCompletions moves them until one does not fit in its CQ. It sets the reason for the end then, and only then: other
// reasons end full operation at once.
func (s *stream) pushCompletions(w *worker) {
	for s.err == nil && s.qp.QP.PollWC(&w.wc) {
		if !w.complete(s.qp, &w.wc) {
			s.err = ErrCQOverrun
		}
	}
	if s.qp.QP.Invalidates() {
		w.waits = true
		w.mark(s.lane)
	}
}

// makeRoom moves completions if the queue pair holds as many receives as it can, so that the next
// Send can take one: an SRQ may have more of them than that for a turn. If a completion does not
// fit in its CQ, the stream receives nothing more, and completions ends it.
func (s *stream) makeRoom(w *worker) {
	if s.mode == modeFull && s.qp.QP.RecvsFull() {
		if s.pushCompletions(w); s.err != nil {
			s.health = max(s.health, deaf)
		}
	}
}

// complete pushes a completion. It returns false if the CQ is full.
func (w *worker) complete(b *QPBinding, wc *verbs.WC) bool {
	cq := b.SendCQ
	if wc.IsRecv() {
		cq = b.RecvCQ
	}
	if cq == nil || b.left.Load() {
		return true
	}
	listed := cq.Pending(w.id)
	if !cq.Push(w.id, wc) {
		w.stats.CQOverruns++
		return false
	}
	if !listed {
		w.cqs = append(w.cqs, cq)
		w.response = response{w.now.Add(replyTime), b.stream != nil && b.stream.near(), true}
	}
	return true
}

// near reports whether s is within the host.
func (s *stream) near() bool {
	c := s.conn()
	return c != nil && c.host != nil
}

// remoteEvents handles the events of the DDP stream.
func (s *stream) remoteEvents(w *worker) {
	if s.mode != modeFull {
		return
	}
	for {
		ev, ok := s.ddp.PollEvent()
		if !ok {
			return
		}
		switch ev {
		case rdmap.EventFailed: // detected while composing, or already reported to violation
			s.violation(w, s.ddp.Err())
		case rdmap.EventTerminated:
			err := &term.RemoteError{Err: s.ddp.Remote()}
			s.err = err
			w.event(s, Event{Kind: EventTerminated, Err: err, Data: append([]byte(nil), s.ddp.RemoteRaw()...)})
			s.close(w)
			return
		}
	}
}
