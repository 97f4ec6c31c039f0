package dataplane

import (
	"bytes"
	"runtime"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// halfClose makes the TCP of c send a FIN while its RDMAP stream stays open.
func (s *sim) halfClose(c *stream) {
	w := s.hosts[0].w
	c.conn().tcp.Close(w.now)
	w.mark(c.lane)
}

// TestHalfClose checks that what the peer requested before its FIN, and what was posted here, is sent before our FIN
// (RFC 5041 section 6.2.1).
func TestHalfClose(t *testing.T) {
	const size = 300_000 // many initial windows
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 2*size), newSimQP(t, s.hosts[1], 2*size)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	for i := range qb.mem {
		qb.mem[i] = byte(i + i/251)
	}
	qa.recvs = append(qa.recvs, verbs.RecvWR{ID: 1, SGEs: qa.sge(size, size)})
	qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 2, SGEs: qb.sge(0, 10)})
	s.post(b, qb, verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qb.sge(size, size)})
	s.post(b, qb, verbs.SendWR{ID: 4, Op: rdmap.OpRead, SGEs: qb.sge(0, 10), RKey: qa.reg.STag(), Remote: 0x10000})
	s.post(b, qb, verbs.SendWR{ID: 5, Op: rdmap.OpWrite, SGEs: qb.sge(0, 10), RKey: qa.reg.STag(), Remote: 0x10000, Flags: verbs.Fence})
	s.post(a, qa, verbs.SendWR{ID: 6, Op: rdmap.OpRead, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
	s.hosts[0].w.turn()
	s.halfClose(a)
	s.event(1, EventPeerClosed)
	s.hosts[1].w.disconnect(b, false) // as the control plane does
	if ev := s.closed(1); ev.Err != nil {
		t.Errorf("host 1 closed by %v", ev.Err)
	}
	s.until("host 0 closes", func() bool { return len(qa.wcs) == 2 })
	for _, wc := range qa.wcs {
		if wc.Status != verbs.WCSuccess {
			t.Errorf("host 0: completion %+v", wc)
		}
	}
	if !bytes.Equal(qa.mem, qb.mem) {
		t.Error("memory differs")
	}
	// The response to the Read never arrived; the Read and what waits for it are flushed.
	want := map[uint64]verbs.WCStatus{2: verbs.WCFlushErr, 3: verbs.WCSuccess, 4: verbs.WCFlushErr, 5: verbs.WCFlushErr}
	for _, wc := range qb.wcs {
		if st, ok := want[wc.ID]; !ok || st != wc.Status {
			t.Errorf("host 1: completion %+v", wc)
		}
		delete(want, wc.ID)
	}
	if len(want) != 0 {
		t.Errorf("host 1: no completion of %v", want)
	}
	s.closeAll(a)
}

// TestHalfCloseIdle checks that with nothing left to send, or nothing that may be sent, the FIN is answered at once
// and all work is flushed.
func TestHalfCloseIdle(t *testing.T) {
	for _, gated := range []bool{false, true} {
		s, a, b, _, qb := fullPair(t, mpa.Params{CRC: true})
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 1, SGEs: qb.sge(0, 10)})
		if b.gate = gated; gated { // no FPDU has been received
			s.post(b, qb, verbs.SendWR{ID: 2, Op: rdmap.OpSend, SGEs: qb.sge(0, 10)})
		}
		start := s.now
		s.halfClose(a)
		if ev := s.closed(1); ev.Err != nil {
			t.Errorf("gated %v: closed by %v", gated, ev.Err)
		}
		if d := s.now.Sub(start); d > time.Second {
			t.Errorf("gated %v: closed after %v", gated, d)
		}
		for _, wc := range qb.wcs {
			if wc.Status != verbs.WCFlushErr {
				t.Errorf("gated %v: completion %+v", gated, wc)
			}
		}
		if len(qb.wcs) == 0 {
			t.Errorf("gated %v: nothing is flushed", gated)
		}
	}
}

// TestHalfCloseBounds checks that neither a peer that acknowledges nothing nor an application that keeps posting can
// keep alive a connection that the peer has closed.
func TestHalfCloseBounds(t *testing.T) {
	t.Run("time", func(t *testing.T) {
		silent := false
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, _ []byte) bool { return !silent }})
		const size = 300_000
		a, b := s.open()
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
		s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpRead, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 2, SGEs: qb.sge(0, 10)})
		s.hosts[0].w.turn()
		s.halfClose(a)
		s.event(1, EventPeerClosed)
		silent = true
		start := s.now
		s.until("the rest is flushed", func() bool { return len(qb.wcs) > 0 })
		if d := s.now.Sub(start); d < halfTime-time.Second || d > halfTime+time.Second {
			t.Errorf("flushed after %v", d)
		}
	})
	t.Run("work requests", func(t *testing.T) {
		s, a, b, qa, qb := fullPair(t, mpa.Params{CRC: true})
		w := s.hosts[1].w
		write := verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qb.sge(0, 1000), RKey: qa.reg.STag(), Remote: 0x10000}
		s.halfClose(a)
		b.gate = false
		n, over := 0, false
		s.until("closed", func() bool {
			for len(qb.sends) < 1000 {
				qb.sends = append(qb.sends, write)
			}
			if b.qp != nil {
				w.mark(b.lane)
			}
			n = max(n, int(qb.QP.Stats().Sends))
			_, over = s.hosts[1].take(EventClosed)
			return over || s.now > s.limit
		})
		if depth := qb.QP.Config().SQDepth; n < depth || n > 2*depth {
			t.Errorf("%d work requests were taken", n)
		}
	})
}

// TestHalfCloseReset checks that a peer that closes and then resets the connection when more data arrives counts as
// an orderly close.
func TestHalfCloseReset(t *testing.T) {
	s, a, b, qa, qb := fullPair(t, mpa.Params{CRC: true})
	b.gate = false
	s.post(b, qb, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qb.sge(0, 8000), RKey: qa.reg.STag(), Remote: 0x10000})
	s.halfClose(a)
	s.hosts[0].w.turn()
	a.abort(s.hosts[0].w, errAborted)
	if ev := s.closed(1); ev.Err != nil {
		t.Errorf("closed by %v", ev.Err)
	}
	if len(qb.wcs) != 1 {
		t.Errorf("completions %+v", qb.wcs)
	}
}

// TestLeave checks that a queue pair that its program has left sends what was posted just before, reads no memory that
// the program may have reused, neither completes nor receives anything, and is closed. One that is left before it is
// attached sends nothing.
func TestLeave(t *testing.T) {
	const size = 1 << 20 // more than a turn sends, and than the initial window
	for _, early := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		a, b := s.open()
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		qa.recvs, qb.recvs = []verbs.RecvWR{{ID: 1}}, []verbs.RecvWR{{ID: 2}}
		if early {
			s.hosts[0].e.Leave(&qa.QPBinding)
			s.hosts[1].w.attach(b.id, b, Attachment{QP: &qb.QPBinding})
			s.hosts[0].w.attach(a.id, a, Attachment{QP: &qa.QPBinding})
		} else {
			s.attach(a, b, qa, qb, mpa.Params{CRC: true})
			b.gate = false
			qa.sends = append(qa.sends, verbs.SendWR{ID: 3, Op: rdmap.OpSend},
				verbs.SendWR{ID: 4, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
			s.post(b, qb, verbs.SendWR{ID: 5, Op: rdmap.OpSend})
			qa.id.Store(uint64(a.id)) // as Engine.Attach
			s.hosts[0].during(func() { s.hosts[0].e.Leave(&qa.QPBinding) })
		}
		for i := range qa.mem {
			qa.mem[i] = 42 // what is no business of the peer
		}
		if ev := s.closed(0); ev.Err != nil {
			t.Errorf("early %v: closed by %v", early, ev.Err)
		}
		for _, wc := range qa.wcs {
			if early || wc.ID != 3 { // the Send may have completed before
				t.Errorf("early %v: completion %v", early, wc)
			}
		}
		s.event(1, EventClosed)
		for _, wc := range qb.wcs {
			if wc.ID == 2 && (wc.Status == verbs.WCSuccess) == early {
				t.Errorf("early %v: the peer has %v", early, wc)
			}
		}
		if bytes.Contains(qb.mem, []byte{42}) {
			t.Errorf("early %v: the peer has memory that was reused", early)
		}
	}
}

// TestLeavePublishes checks that the completions that a queue pair had in the turn in which it is left are published
// when Leave returns.
func TestLeavePublishes(t *testing.T) {
	s, a, _, qa, _ := fullPair(t, mpa.Params{CRC: true})
	w, cq, held := s.hosts[0].w, &heldCQ{CQ: qa}, -1
	qa.SendCQ = cq
	qa.id.Store(uint64(a.id)) // as Engine.Attach
	w.complete(&qa.QPBinding, &verbs.WC{ID: 1})
	over := s.hosts[0].begin(func() { s.hosts[0].e.Leave(&qa.QPBinding) })
	w.post(func(*worker) { held = cq.held })
	w.turn()
	if <-over; held != 0 {
		t.Errorf("%d completions are not published", held)
	}
}

// TestDetachPublishes is TestLeavePublishes for Detach, and for a queue pair that needs several turns to flush what was
// posted.
func TestDetachPublishes(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	cfg := qa.QP.Config()
	cfg.SQDepth = 4 * flushBudget
	qa.QP = verbs.NewQP(cfg)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true})
	w, cq, held := s.hosts[0].w, &heldCQ{CQ: qa}, -1
	qa.SendCQ = cq
	qa.id.Store(uint64(a.id)) // as Engine.Attach
	qa.sends = make([]verbs.SendWR, 3*flushBudget)
	over := s.hosts[0].begin(func() { s.hosts[0].e.Detach(&qa.QPBinding) })
	w.turn()
	testenv.Until(t, "Detach waits for the rest", func() bool { return w.cmds.pending.Load() == 1 })
	w.post(func(w *worker) { w.flushes.after(w, &qa.QPBinding, func(*worker) { held = cq.held }) })
	for held < 0 {
		w.turn()
	}
	if <-over; held != 0 {
		t.Errorf("%d completions are not published", held)
	}
}

// begin calls f, and returns a channel that is closed when f has returned, as soon as the worker has a command of it.
func (h *simHost) begin(f func()) <-chan struct{} {
	over := make(chan struct{})
	go func() {
		f()
		close(over)
	}()
	for h.w.cmds.pending.Load() == 0 {
		runtime.Gosched()
	}
	return over
}

// heldCQ counts the completions that are not published.
type heldCQ struct {
	CQ
	held int
}

func (c *heldCQ) Push(worker int, wc *verbs.WC) bool {
	c.held++
	return c.CQ.Push(worker, wc)
}

func (c *heldCQ) Pending(int) bool { return c.held > 0 }

func (c *heldCQ) Flush(worker int, now clock.Time) clock.Time {
	c.held = 0
	return c.CQ.Flush(worker, now)
}

// TestLeaveUnread checks that a connection whose program takes nothing more is closed when the peer has all that was sent, though the peer
// does not close, and that its TCP connection ends soon though the peer sends on.
func TestLeaveUnread(t *testing.T) {
	for _, deaf := range []bool{false, true} {
		s, a, b, qa, qb := fullPair(t, mpa.Params{CRC: true})
		b.mode = modeStreaming // it answers no FIN
		start := s.now
		s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
		if s.hosts[0].w.turn(); deaf {
			a.forsake(s.hosts[0].w)
		} else {
			s.hosts[0].w.disconnect(a, false)
		}
		ev := s.closed(0)
		if took := s.now.Sub(start); deaf != (took < time.Second) || deaf && (ev.Err != nil || !ev.TimeWait) {
			t.Errorf("deaf %v: closed after %v by %v, TIME-WAIT %v", deaf, took, ev.Err, ev.TimeWait)
		}
		if len(qa.wcs) != 1 || qa.wcs[0].Status != verbs.WCSuccess {
			t.Errorf("deaf %v: %v", deaf, qa.wcs)
		}
		for gone, end := false, s.now; !gone; {
			if took := s.now.Sub(start); took > 2*time.Minute {
				t.Fatalf("deaf %v: not gone after %v", deaf, took)
			}
			b.conn().streamSend(s.hosts[1].w, []byte{1}) // the peer goes on
			end = end.Add(time.Second)
			s.until("the connection is gone, or time passes", func() bool { gone = s.hosts[0].w.stats.Conns == 0; return gone || s.now > end })
		}
	}
}
