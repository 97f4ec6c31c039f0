package dataplane

import (
	"errors"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// mode is where a stream stands on its way to full operation.
type mode uint8

const (
	modeOpening   mode = iota // the transport's handshake, and over SCTP the session's
	modeStreaming             // TCP: bytes go to and come from the control plane
	modeSwitching             // TCP: attached; the last streaming bytes wait for the window
	modeFull                  // full operation: DDP segments
	modeClosing               // nothing more is composed
)

// stream is a DDP stream with its queue pair. A TCP connection has one, an association
// one for each session. Its worker's goroutine is the only one to touch it.
type stream struct {
	id      ConnID
	lane    *lane
	mode    mode
	passive bool       // the peer asked for it
	closed  bool       // EventClosed is out
	err     error      // why it ends; nil: what the transport says
	giveUp  clock.Time // of an active open

	// Of an association.
	sid   uint16    // SCTP stream
	ini   *initiate // a session that we began, until it is answered
	share int       // what it may still send before other sessions, in bytes of cost

	// Full operation.
	qp      *QPBinding
	params  mpa.Params
	ddp     *rdmap.Stream
	pending rdmap.Segment // polled and not composed, if
	hasPend bool
	gate    bool // a responder waits for the first FPDU

	// The end of it.
	failed   bool // a Terminate is queued or sent
	rxFailed bool // nothing that arrives is looked at any more
	leaving  bool // closed once it has sent what was posted, but no more than
	last     int  // so many bytes
	half     bool // the peer has closed, and
	rest     int  // so many work requests may still be taken
}

var (
	errDetached   = errors.New("dataplane: queue pair destroyed")
	errAborted    = errors.New("dataplane: connection aborted by the application")
	errNoConn     = errors.New("dataplane: connection is gone")
	errTooMany    = errors.New("dataplane: too many connections")
	errFlowExists = errors.New("dataplane: a connection with these addresses and ports exists")
	errStreamFull = errors.New("dataplane: peer sent too much before MPA startup ended")
)

// flow returns the addresses and ports of the stream's transport.
func (s *stream) flow() pkt.Flow { return s.lane.key.Flow }

// event reports what happened to s.
func (w *worker) event(s *stream, kind EventKind, err error, data []byte) {
	w.e.events.push(Event{Kind: kind, Conn: s.id, Flow: s.flow(), Worker: w.id, Err: err, Data: data, QP: s.qp})
}

// withStream calls f with the stream id, nil if it is gone, on the worker that has it.
func (w *worker) withStream(id ConnID, f func(*worker, *stream)) {
	if to := w.moved[id]; to != nil {
		to.post(func(w *worker) { w.withStream(id, f) })
		return
	}
	f(w, w.streams[id])
}

// forget takes a stream out of the tables, here and where it was dialed.
func (w *worker) forget(s *stream) {
	delete(w.streams, s.id)
	if home := w.e.worker(s.id); home != w && s.id != 0 {
		id := s.id
		home.post(func(home *worker) { delete(home.moved, id) })
	}
}

// attach takes s to full operation, or, when it is gone, flushes the queue pair.
func (w *worker) attach(id ConnID, s *stream, a Attachment) {
	if s == nil {
		w.refuseAttach(id, a)
		return
	}
	s.lane.llp.attach(w, s, a)
}

// answer is attach for a request of the peer.
func (w *worker) answer(id ConnID, s *stream, set session.Setup, a Attachment) {
	if s != nil {
		s.lane.llp.answer(w, s, set, a)
	} else if a.QP != nil {
		w.refuseAttach(id, a)
	}
}

func (w *worker) refuseAttach(id ConnID, a Attachment) {
	a.QP.QP.Error()
	w.flushQP(a.QP)
	w.e.events.push(Event{Kind: EventClosed, Conn: id, Worker: w.id, Err: errNoConn, QP: a.QP})
}

// linkQP joins a stream and a queue pair.
func (s *stream) linkQP(w *worker, a Attachment) {
	b := a.QP
	s.qp, s.params = b, a.Params
	b.stream = s
	cl := w.client(b.Client)
	if cl == nil {
		return
	}
	for len(cl.streams) <= b.Bit {
		cl.streams = append(cl.streams, nil)
	}
	cl.streams[b.Bit] = s
	if m := &s.lane.member; m.Group() == &w.house {
		w.sched.Join(m, &cl.group)
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
	s.qp, s.ddp = nil, nil
}

// start begins full operation.
func (s *stream) start() {
	s.qp.QP.Start(rdmap.Config{IRD: s.params.IRD, ORD: s.params.ORD})
	s.ddp = s.qp.QP.Stream()
	s.mode = modeFull
}

// disconnect closes s at the application's wish.
func (w *worker) disconnect(s *stream, abort bool) {
	if abort {
		s.abort(w, errAborted)
		return
	}
	s.lane.llp.disconnect(w, s)
}

// leave closes s after what was posted or queued before, as far as room goes, the
// window's at the time of the call, or, when the peer has closed, all of it; the rest is
// flushed. As anything that takes TX slots it waits for its turns of the round.
func (s *stream) leave(w *worker, room int) {
	if !s.leaving {
		s.leaving, s.last = true, room
	}
	w.mark(s.lane)
}

// sent notes that s composed n bytes, and whether it has nothing more to send. It
// reports whether s has to be closed now.
func (s *stream) sent(n int, idle bool) bool {
	if !s.leaving || s.mode != modeFull || s.failed { // a Terminate ends it
		return false
	}
	if s.half { // also what the window does not let out yet
		return idle && (s.gate || !s.hasPend && !s.ddp.Sendable())
	}
	s.last -= n
	return s.last <= 0 || idle
}

// close ends s in order, and flushes what it has not sent.
func (s *stream) close(w *worker) {
	s.dropQP(w)
	s.mode = modeClosing
	s.lane.llp.closeStream(w, s)
}

// abort cuts s: a connection with a RST. Of an association it ends the session, and the
// association by ABORT if that was its last.
func (s *stream) abort(w *worker, why error) {
	if s.err == nil {
		s.err = why
	}
	s.dropQP(w)
	s.mode = modeClosing
	s.lane.llp.abortStream(w, s)
	w.mark(s.lane)
}

// detach cuts s because its queue pair goes away, and lets go of the pair at
// once.
func (s *stream) detach(w *worker) {
	s.abort(w, errDetached)
	s.unlinkQP(w)
}

// finish reports that s is closed; a tcp.Conn may stay in TIME-WAIT.
func (s *stream) finish(w *worker, err error) {
	if s.closed {
		return
	}
	s.closed = true
	if s.half && errors.Is(err, tcp.ErrReset) {
		err = nil // it had closed, and wants nothing more
	}
	if s.err != nil {
		err = s.err
	}
	s.dropQP(w)
	s.mode = modeClosing
	if s.id != 0 {
		w.event(s, EventClosed, err, nil)
	}
	s.unlinkQP(w)
}

// dropQP ends the queue pair of s: what was posted is flushed.
func (s *stream) dropQP(w *worker) {
	if s.qp == nil {
		return
	}
	s.hasPend = false
	s.qp.QP.Error()
	w.flushQP(s.qp)
}

// flushQP delivers the completions of a queue pair in ERROR, flushed work
// requests included.
func (w *worker) flushQP(b *QPBinding) {
	for b.QP.PollWC(&w.wc) {
		w.complete(b, &w.wc)
	}
}

// flushLate completes what was posted to a queue pair after it ended, as long as
// its stream is there for a bell to ring.
func (s *stream) flushLate(w *worker) {
	if s.mode == modeClosing && s.qp != nil {
		w.flushQP(s.qp)
	}
}

// pull takes work requests from the queue pair, as many as are sensible at once. Once
// the peer has closed these are no more than the queue may have held then.
func (s *stream) pull() int {
	if !s.half {
		return s.qp.QP.HandleSends(pullBudget)
	}
	n := s.qp.QP.HandleSends(min(pullBudget, s.rest))
	s.rest -= n
	return n
}

// lookAt does for a stream in full operation what takes no slot, while it waits for
// its turn to send.
func (s *stream) lookAt(w *worker) {
	s.remoteEvents(w)
	if s.mode == modeFull && !s.gate && !s.failed {
		s.pull()
	}
}

// pullMore takes the work requests for which the send queue had no room before
// this turn's completions: no bell need ring for them again, and nothing may be
// in flight whose acknowledgement would do.
func (s *stream) pullMore(w *worker) {
	if !s.gate && !s.failed && s.pull() > 0 {
		w.mark(s.lane)
	}
}

// gather returns the payload of the pending segment in client memory. ok is false if the
// memory went away under the work request or the read; the Terminate that the stream
// has then is next.
func (s *stream) gather(w *worker) (payload [][]byte, ok bool) {
	p := &s.pending
	if p.Len == 0 || p.Src.Kind == rdmap.SourceNone {
		return nil, true
	}
	if payload, ok = s.qp.QP.Gather(&p.Src, p.Len, w.parts[:0]); !ok {
		s.violation(w, s.ddp.Err())
		w.mark(s.lane)
	}
	return payload, ok
}

// violation notes what the DDP stream itself has found, and answered by a Terminate.
func (s *stream) violation(w *worker, err *term.Error) {
	s.rxFailed = true
	if s.failed {
		return
	}
	s.failed = true
	s.gate = false
	w.stats.Violations++
	w.event(s, EventFailed, err, nil)
}

// fail ends the stream for a violation: a Terminate goes out, then a FIN.
func (s *stream) fail(w *worker, err *term.Error) {
	if !s.failed {
		s.ddp.Fail(err, nil)
		w.mark(s.lane)
	}
	s.violation(w, err)
}

// completions moves what the queue pair has completed to its CQs. A work request
// is complete only when its payload has been copied.
func (s *stream) completions(w *worker) {
	for s.qp.QP.PollWC(&w.wc) {
		if !w.complete(s.qp, &w.wc) {
			s.abort(w, ErrCQOverrun)
			return
		}
	}
}

// complete writes one completion. It reports false when the CQ is full.
func (w *worker) complete(b *QPBinding, wc *verbs.WC) bool {
	cq := b.SendCQ
	if wc.IsRecv() {
		cq = b.RecvCQ
	}
	if cq == nil {
		return true
	}
	listed := cq.Pending(w.id)
	if !cq.Push(w.id, wc) {
		w.stats.CQOverruns++
		return false
	}
	if !listed {
		w.cqs = append(w.cqs, cq)
	}
	return true
}

// remoteEvents acts on what the DDP stream reports.
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
		case rdmap.EventFailed: // found while composing, or known to violation already
			s.violation(w, s.ddp.Err())
		case rdmap.EventTerminated:
			err := &term.RemoteError{Err: s.ddp.Remote()}
			s.err = err
			s.rxFailed = true
			w.event(s, EventTerminated, err, append([]byte(nil), s.ddp.RemoteRaw()...))
			s.close(w)
			return
		}
	}
}

// rtrKind returns the RDMAP operation of a ready-to-receive message.
func rtrKind(r mpa.RTR) rdmap.Op {
	switch r {
	case mpa.RTRWrite:
		return rdmap.OpWrite
	case mpa.RTRRead:
		return rdmap.OpRead
	}
	return rdmap.OpSend
}
