package dataplane

import (
	"bytes"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestSCTPTerminate checks that a violation ends the session with the same code on both sides.
func TestSCTPTerminate(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	s.post(a, qa, verbs.SendWR{ID: 2, Op: rdmap.OpRead, SGEs: qa.sge(0, 100), RKey: 0x12345678, Remote: 0})
	s.closed(1)
	if ev, ok := s.hosts[1].take(EventFailed); !ok || !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("host 1: EventFailed = %v, %v", ev.Err, ok)
	}
	if ev := s.closed(0); !errors.Is(ev.Err, term.ErrInvalidSTag) {
		t.Errorf("host 0 closed by %v", ev.Err)
	}
	if len(qa.wcs) != 2 || qa.wcs[1].Status == verbs.WCSuccess {
		t.Errorf("completions %+v", qa.wcs)
	}
	s.closedSCTP()
}

// TestSCTPReject checks that a rejection reaches the other side with its private data.
func TestSCTPReject(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, req := s.requestSCTP(SCTP{}, false)
	w := s.hosts[1].w
	w.answerSCTP(w.streams[req.Conn], session.Setup{Private: []byte("no")}, Attachment{})
	if ev := s.closed(0); ev.Err != ErrRejected {
		t.Errorf("closed by %v", ev.Err)
	}
	if ev, ok := s.hosts[0].take(EventRejected); !ok || string(ev.Setup.Private) != "no" {
		t.Errorf("EventRejected %v", ok)
	}
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPRejectAndUnlisten checks that a rejection is sent even if the listener is closed at once.
func TestSCTPRejectAndUnlisten(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	_, req := s.requestSCTP(SCTP{}, false)
	w := s.hosts[1].w
	w.answerSCTP(w.streams[req.Conn], session.Setup{Private: []byte("no")}, Attachment{})
	w.unlisten(1)
	if ev := s.closed(0); ev.Err != ErrRejected {
		t.Errorf("closed by %v", ev.Err)
	}
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPAbortAndDetach checks that a session that the application aborts ends on both sides.
func TestSCTPAbortAndDetach(t *testing.T) {
	for _, detach := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
		a, _ := s.openSCTP(SCTP{}, qa, qb)
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 5, SGEs: qb.sge(0, 10)})
		if detach {
			a.detach(s.hosts[0].w)
		} else {
			s.hosts[0].w.disconnect(a, true)
		}
		if ev := s.closed(0); ev.Err == nil {
			t.Error("closed without an error")
		}
		s.closed(1)
		if len(qb.wcs) != 1 || qb.wcs[0].Status != verbs.WCFlushErr {
			t.Errorf("completions of host 1: %+v", qb.wcs)
		}
		s.closedSCTP()
	}
}

// TestSCTPLeave checks that a session whose program has left it sends what was posted just before, and reads no memory
// that the program may have reused.
func TestSCTPLeave(t *testing.T) {
	const size = 1 << 20
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	qb.recvs = []verbs.RecvWR{{ID: 1}}
	qa.sends = []verbs.SendWR{
		{ID: 2, Op: rdmap.OpSend},
		{ID: 3, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000},
	}
	qa.id.Store(uint64(a.id)) // as Engine.Attach
	s.hosts[0].during(func() { s.hosts[0].e.Leave(&qa.QPBinding) })
	for i := range qa.mem {
		qa.mem[i] = 42 // what is no business of the peer
	}
	s.closed(0)
	s.closed(1)
	if len(qb.wcs) != 1 || qb.wcs[0].Status != verbs.WCSuccess {
		t.Errorf("completions of host 1: %+v", qb.wcs)
	}
	if bytes.Contains(qb.mem, []byte{42}) {
		t.Error("the peer has memory that was reused")
	}
	s.closedSCTP()
}

// TestSCTPLeaveEarly checks that a queue pair that is attached after its program has left it receives nothing of what the
// peer had sent before.
func TestSCTPLeaveEarly(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, req := s.requestSCTP(SCTP{}, false)
	ha, hb := s.hosts[0], s.hosts[1]
	b := hb.w.streams[req.Conn]
	hb.w.answerSCTP(b, session.Setup{}, Attachment{QP: &qb.QPBinding})
	s.event(0, EventAnswer)
	cfg := qa.QP.Config()
	cfg.Shared = true // so that what is posted is not flushed either
	qa.QP, qa.recvs = verbs.NewQP(cfg), []verbs.RecvWR{{ID: 1, SGEs: qa.sge(0, 100)}}
	for i := range qb.mem {
		qb.mem[i] = 42
	}
	before := a.as().a.Stats().RxChunks
	s.post(b, qb, verbs.SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: qb.sge(0, 100), RKey: qa.reg.STag(), Remote: 0x10000})
	s.post(b, qb, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qb.sge(0, 100)})
	s.until("the peer's messages have arrived", func() bool { return a.as().a.Stats().RxChunks == before+2 })
	ha.e.Leave(&qa.QPBinding) // the engine does not know yet that they belong together
	ha.w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: mpa.Params{Initiator: true}})
	s.closed(0)
	s.closed(1)
	if bytes.Contains(qa.mem, []byte{42}) || len(qa.recvs) != 1 {
		t.Errorf("the peer's data is in the program's memory, and %d of 1 receives are left", len(qa.recvs))
	}
	s.closedSCTP()
}

// TestSCTPDetach checks that Detach releases a queue pair that was attached to a session that the peer opened.
func TestSCTPDetach(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qb := newSimQP(t, s.hosts[1], 8192)
	_, req := s.requestSCTP(SCTP{}, false)
	h := s.hosts[1]
	h.e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding})
	h.w.turn()
	c := h.w.streams[req.Conn]
	if c == nil || c.qp != &qb.QPBinding {
		t.Fatal("no queue pair")
	}
	h.during(func() { h.e.Detach(&qb.QPBinding) })
	if c.qp != nil {
		t.Error("the session still has it")
	}
}

// TestSCTPDetachBusy is TestSCTPDetach for a queue pair with more posted than a turn flushes. Its session ends all the same.
func TestSCTPDetachBusy(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	cfg := qa.QP.Config()
	cfg.SQDepth = 4 * flushBudget
	qa.QP = verbs.NewQP(cfg)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	qa.id.Store(uint64(a.id)) // as Engine.Attach
	qa.sends = make([]verbs.SendWR, 3*flushBudget)
	s.hosts[0].during(func() { s.hosts[0].e.Detach(&qa.QPBinding) })
	if n := len(qa.wcs); n != 3*flushBudget {
		t.Errorf("%d completions", n)
	}
	s.closed(0)
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPAnswerGone checks that answering a request after its session has ended leaves no work posted.
func TestSCTPAnswerGone(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qb := newSimQP(t, s.hosts[1], 8192)
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 5, SGEs: qb.sge(0, 10)})
	a, req := s.requestSCTP(SCTP{}, false)
	h := s.hosts[1]
	s.hosts[0].w.disconnect(a, true)
	s.closed(1)
	h.e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding})
	h.w.turn()
	h.drain()
	if len(qb.wcs) != 1 || qb.wcs[0].ID != 5 || qb.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", qb.wcs)
	}
	if ev, ok := h.take(EventClosed); !ok || ev.Conn != req.Conn || !errors.Is(ev.Err, errNoConn) {
		t.Errorf("EventClosed %+v, %v", ev, ok)
	}
	s.closedSCTP()
}

// TestSCTPStaleDisconnect checks that a command for a session that has ended does not affect the next session of its
// stream, whose Initiate arrived in the same turn.
func TestSCTPStaleDisconnect(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	wa, wb, mux := s.hosts[0].w, s.hosts[1].w, a.as().mux
	a.as().lst = &listener{} // as at a peer that keeps its associations
	wa.disconnect(a, false)
	for {
		wa.turn()
		if mux.State(0) == session.Idle {
			break
		}
		wb.turn()
		if s.now = s.now.Add(time.Microsecond); s.now > s.limit {
			t.Fatal("the session does not end")
		}
	}
	if err := mux.Initiate(0, session.Setup{Private: []byte("again")}); err != nil {
		t.Fatal(err)
	}
	wa.mark(&a.as().lane)
	wa.turn()
	if b.closed() || wb.streams[b.id] != b {
		t.Fatal("the session has ended here already: this tests nothing")
	}
	wb.post(func(w *worker) {
		if c := w.streams[b.id]; c != nil {
			w.disconnect(c, false)
		}
	})
	wb.turn()
	s.until("the request", func() bool {
		ev, ok := s.hosts[1].take(EventRequest)
		return ok && string(ev.Setup.Private) == "again"
	})
	if got := b.as().mux.State(0); got != session.Requested {
		t.Errorf("the session is %v", got)
	}
}

// TestSCTPFallback checks that when a peer that implements RFC 5043 only answers enhanced set-up data with a
// Terminate, a connect that may fall back asks again without them on the same association.
func TestSCTPFallback(t *testing.T) {
	for _, may := range []bool{true, false} {
		s := newSim(t, link.PipeConfig{})
		s.listenSCTP()
		ha, hb := s.hosts[0], s.hosts[1]
		ha.w.turn()
		id := ha.w.newID()
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
		set := session.Setup{Private: []byte("hello"), Enhanced: &mpa.EnhancedData{IRD: 4, ORD: 4}}
		ha.w.dialSCTP(t, id, flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{Fallback: may}, set, 0)
		s.until("the association", func() bool { return hb.w.sctp.n == 1 })
		for as := range hb.w.assocs() {
			as.mux = session.New(session.Config{NoEnhanced: true}, 64)
		}
		if !may {
			if ev := s.closed(0); ev.Err != ErrRejected {
				t.Errorf("closed by %v", ev.Err)
			}
			s.closedSCTP()
			continue
		}
		var req Event
		s.until("a request", func() (ok bool) {
			req, ok = hb.take(EventRequest)
			return ok
		})
		if string(req.Setup.Private) != "hello" || req.Setup.Enhanced != nil {
			t.Errorf("request %+v", req.Setup)
		}
		qb := newSimQP(t, hb, 8192)
		hb.w.answerSCTP(hb.w.streams[req.Conn], session.Setup{Private: []byte("welcome")}, Attachment{QP: &qb.QPBinding, Params: mpa.Params{IRD: 1, ORD: 1}})
		s.until("the answer", func() bool {
			ev, ok := ha.take(EventAnswer)
			return ok && ev.Conn == id && string(ev.Setup.Private) == "welcome"
		})
		if n := ha.w.stats.SessionRetries; n != 1 {
			t.Errorf("%d retries", n)
		}
		ha.w.disconnect(ha.w.streams[id], false)
		s.closedSCTP()
	}
}

// TestSCTPRTR checks that each kind of ready-to-receive indication is sent first and consumes no receive (RFC 6581
// sections 7 and 9.2).
func TestSCTPRTR(t *testing.T) {
	for _, rtr := range []mpa.RTR{mpa.RTRSend, mpa.RTRWrite, mpa.RTRRead} {
		t.Run(rtr.String(), func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
			qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 9, SGEs: qb.sge(0, 100)})
			a, b := s.openSCTPParams(SCTP{}, false, mpa.Params{RTR: rtr, IRD: 1, ORD: 1}, nil, qa, qb)
			s.post(a, qa, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qa.sge(0, 50)})
			s.until("received", func() bool { return len(qb.wcs) == 1 })
			if wc := qb.wcs[0]; wc.ID != 9 || wc.Status != verbs.WCSuccess || wc.Len != 50 {
				t.Errorf("receive completed as %+v", wc)
			}
			checkRTR(t, b, rtr, 1)
			s.hosts[0].w.disconnect(a, false)
			s.closed(0)
			s.closed(1)
			s.closedSCTP()
		})
	}
}

// TestSCTPStartupFails checks that an initiator that cannot satisfy the answer sends a Terminate with the code of RFC
// 6581 section 8, and that the session ends.
func TestSCTPStartupFails(t *testing.T) {
	for _, want := range []*term.Error{term.ErrMPAIRD, term.ErrMPARTR} {
		s := newSim(t, link.PipeConfig{})
		qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
		s.openSCTPParams(SCTP{}, false, mpa.Params{IRD: 1, ORD: 1}, want, qa, qb)
		s.closed(0)
		if _, ok := s.hosts[0].take(EventEstablished); ok {
			t.Error("established")
		}
		if ev := s.closed(1); !errors.Is(ev.Err, want) {
			t.Errorf("the responder was closed by %v", ev.Err)
		}
		if ev, ok := s.hosts[1].take(EventTerminated); !ok || !errors.Is(ev.Err, want) {
			t.Errorf("EventTerminated %v, %v", ev.Err, ok)
		}
		s.closedSCTP()
	}
}

// TestSCTPNegotiate checks that a Negotiate of the draft that crosses the Initiate, or arrives with the COOKIE ACK,
// is reported and ends nothing, and that one before the peer's Initiate is reported to the listener.
func TestSCTPNegotiate(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTPWith(SCTP{Profile: session.Draft})
	ha, hb := s.hosts[0], s.hosts[1]
	ha.w.turn()
	id := ha.w.newID()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
	ha.w.dialSCTP(t, id, flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{Profile: session.Draft}, session.Setup{Private: []byte("hello")}, 0)
	s.until("the association", func() bool {
		for as := range hb.w.assocs() {
			return as.mux != nil
		}
		return false
	})
	for as := range hb.w.assocs() {
		as.negotiate(hb.w, 0, "how about")
	}
	req := s.event(1, EventRequest)
	s.until("the Negotiate", func() bool {
		ev, ok := ha.take(EventNegotiate)
		return ok && ev.Conn == id && string(ev.Setup.Private) == "how about"
	})
	qb := newSimQP(t, hb, 8192)
	hb.w.answerSCTP(hb.w.streams[req.Conn], session.Setup{Private: []byte("welcome")}, Attachment{QP: &qb.QPBinding, Params: mpa.Params{IRD: 1, ORD: 1}})
	ans := s.event(0, EventAnswer)
	if ans.Conn != id || string(ans.Setup.Private) != "welcome" {
		t.Errorf("answer %+v", ans)
	}

	// The dialing side sends a Negotiate on another stream; the listener's ULP gets it.
	as := ha.w.streams[id].as()
	as.negotiate(ha.w, 1, "and")
	s.until("the listener's Negotiate", func() bool {
		ev, ok := hb.take(EventNegotiate)
		return ok && ev.Conn == 0 && ev.Listener == 1 && string(ev.Setup.Private) == "and"
	})
	ha.w.disconnect(ha.w.streams[id], false)
	s.closedSCTP()
}

// negotiate sends the next message of a stream, a Negotiate of the draft, which iwarpd itself never sends.
func (as *assoc) negotiate(w *worker, stream uint16, private string) {
	b := make([]byte, session.HeaderLen)
	as.mux.Resume(stream) // makes the stream
	as.mux.Begin(stream, b)
	b = append(append(b, 0, 1), private...)
	as.sendControl(w, &session.Control{Stream: stream, PPID: session.Draft.Control(), Data: b})
	w.mark(&as.lane)
}

// TestSCTPPieces checks that a message that the peer has divided into DATA chunks is one message: a Terminate.
func TestSCTPPieces(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.requestSCTP(SCTP{}, false)
	w := s.hosts[1].w
	for as := range w.assocs() {
		for i, piece := range [][]byte{{0, 1}, {0}, {4}} {
			d := sctp.Data{PPID: session.RFC5043.Control(), Unordered: true, Begin: i == 0, End: i == 2}
			as.message(w, &d, piece)
		}
		w.mark(&as.lane)
	}
	if ev := s.closed(1); ev.Err != nil {
		t.Errorf("closed by %v", ev.Err)
	}
}

// TestSCTPViolationInSetup checks that a violation by the peer during set-up ends it at once on either side, even if
// the peer does not answer the Terminate.
func TestSCTPViolationInSetup(t *testing.T) {
	for guilty := range 2 {
		deaf := false
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, _ []byte) bool { return !deaf || toB == (guilty == 0) }})
		_, req := s.requestSCTP(SCTP{}, false)
		for as := range s.hosts[guilty].w.assocs() {
			as.sendControl(s.hosts[guilty].w, &session.Control{PPID: session.RFC5043.Control(), Data: []byte{0, byte(1 - guilty), 0, 99}})
			s.hosts[guilty].w.mark(&as.lane)
		}
		deaf = true
		start := s.now
		ev := s.closed(1 - guilty)
		if _, ok := errors.AsType[*session.Error](ev.Err); !ok {
			t.Errorf("closed by %v", ev.Err)
		}
		if d := s.now.Sub(start); d > time.Second {
			t.Errorf("reported after %v", d)
		}
		if guilty == 0 && ev.Conn != req.Conn {
			t.Errorf("closed %v, not the request %v", ev.Conn, req.Conn)
		}
	}
}

// TestSCTPAnswerTimeout checks the separate time limit for the answer to an Initiate.
func TestSCTPAnswerTimeout(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTP()
	w := s.hosts[0].w
	w.turn()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174))
	w.dialSCTP(t, w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{Answer: 2 * time.Second}, session.Setup{}, 30*time.Second)
	start := s.now
	s.limit = s.now.Add(time.Minute)
	if ev := s.closed(0); !errors.Is(ev.Err, ErrTimeout) || ev.Err != errNoAnswer {
		t.Errorf("closed by %v", ev.Err)
	}
	if d := s.now.Sub(start); d < 2*time.Second || d > 3*time.Second {
		t.Errorf("after %v", d)
	}
	s.closedSCTP()
}

// TestSessionLookups checks that peers that request sessions cause no more lookups of next hops than those that open
// connections over TCP.
func TestSessionLookups(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	r := &slowly{asked: make(chan netip.Addr, 1), gone: make(chan struct{})}
	defer close(r.gone)
	e := s.hosts[1].e
	e.resolver = r
	e.accepted.Store(maxAcceptLookups)
	_, b := s.openSCTP(SCTP{}, newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64))
	if b.as().finding {
		t.Error("looked up, though as many others are")
	}
	e.accepted.Store(0)
	b.as().findHop(s.hosts[1].w)
	if !b.as().finding || <-r.asked != addrA {
		t.Error("not looked up later")
	}
}
