package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// joinSCTP begins one more session of host 0 on its association.
func (s *sim) joinSCTP(as *assoc, timeout time.Duration) (*stream, error) {
	w, done := s.hosts[0].w, make(chan error, 1)
	id := w.newID()
	w.joinSCTP(id, joinRequest(as.key.Flow, timeout), done)
	return w.streams[id], <-done
}

// mustJoin is joinSCTP where there is a free stream.
func (s *sim) mustJoin(as *assoc) *stream {
	s.t.Helper()
	c, err := s.joinSCTP(as, 0)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// answerSCTP makes host 1 accept the session that a requests, and takes both ends to full operation.
func (s *sim) answerSCTP(a *stream, qa, qb *simQP) (b *stream) {
	s.t.Helper()
	ha, hb := s.hosts[0], s.hosts[1]
	p := mpa.Params{IRD: 4, ORD: 4}
	b = hb.w.streams[s.event(1, EventRequest).Conn]
	hb.w.answerSCTP(b, session.Setup{}, Attachment{QP: &qb.QPBinding, Params: p})
	s.until("answer", func() bool {
		ev, ok := ha.take(EventAnswer)
		return ok && ev.Conn == a.id
	})
	p.Initiator = true
	ha.w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: p})
	return b
}

// write performs a Write of n bytes and waits for it.
func (s *sim) write(a *stream, qa, qb *simQP, n int) {
	s.t.Helper()
	done := len(qa.wcs)
	s.post(a, qa, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, n), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("a Write", func() bool { return len(qa.wcs) > done })
	if wc := qa.wcs[done]; wc.Status != verbs.WCSuccess {
		s.t.Fatalf("Write: %v", wc.Status)
	}
}

// ended waits for the end of connection c on a host.
func (s *sim) ended(host int, c *stream) (last Event) {
	s.t.Helper()
	s.until("an end", func() bool {
		h := s.hosts[host]
		for i, ev := range h.events {
			if ev.Kind == EventClosed && ev.Conn == c.id {
				last = ev
				h.events = append(h.events[:i:i], h.events[i+1:]...)
				return true
			}
		}
		return false
	})
	return last
}

// TestSCTPStreams opens and ends sessions on one association at random. They reuse its streams and never need more
// than there are.
func TestSCTPStreams(t *testing.T) {
	oneGoroutine(t)
	for _, profile := range []session.Profile{session.RFC5043, session.Draft} {
		t.Run(profile.String(), func(t *testing.T) {
			type pair struct {
				a, b   *stream
				qa, qb *simQP
			}
			rng := rand.New(rand.NewPCG(testenv.Seed(t), 1))
			s := newSim(t, link.PipeConfig{})
			s.limit = s.now.Add(time.Hour)
			qps := func() (qa, qb *simQP) { return newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096) }
			qa, qb := qps()
			a, b := s.openSCTP(SCTP{Profile: profile}, qa, qb)
			as, open := a.as(), []pair{{a, b, qa, qb}}
			used := map[uint16]int{0: 1}
			for joins := 1; joins < 3*sctpStreams; {
				if n := len(open); n > 1 && rng.IntN(2*sctpStreams) < n {
					i := rng.IntN(n)
					p := open[i]
					open = append(open[:i], open[i+1:]...)
					host := rng.IntN(2)
					s.hosts[host].w.disconnect([]*stream{p.a, p.b}[host], false)
					for i, c := range []*stream{p.a, p.b} {
						if ev := s.ended(i, c); ev.Err != nil {
							t.Fatalf("host %d: stream %d ended by %v", i, c.sid, ev.Err)
						}
					}
					continue
				}
				a, err := s.joinSCTP(as, 0)
				if len(open) == sctpStreams {
					if !errors.Is(err, ErrNoStream) || a != nil {
						t.Fatalf("a session beyond the last stream: %v", err)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				qa, qb := qps()
				b := s.answerSCTP(a, qa, qb)
				used[a.sid]++
				joins++
				if a.sid != b.sid {
					t.Fatalf("streams %d and %d", a.sid, b.sid)
				}
				open = append(open, pair{a, b, qa, qb})
				p := open[rng.IntN(len(open))]
				s.write(p.a, p.qa, p.qb, 1+rng.IntN(4096))
			}
			if len(used) != sctpStreams {
				t.Errorf("streams used %v", used)
			}
			for _, p := range open {
				s.hosts[0].w.disconnect(p.a, false)
			}
			s.closedSCTP()
		})
	}
}

// TestSCTPFewStreams opens sessions before it is known that the peer has fewer streams.
func TestSCTPFewStreams(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTP()
	hb := s.hosts[1].w
	for _, l := range hb.listeners {
		cfg := hb.sctpConfig(SCTP{})
		cfg.Streams = 2
		l.sctp = sctp.NewListener(cfg, hb.e.sctpSecret(), hb.mtu)
	}
	cs := []*stream{s.dialSCTP(40000, 0)}
	for range 3 {
		c := s.mustJoin(cs[0].as())
		cs = append(cs, c)
	}
	for range 2 {
		qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
		var a *stream
		s.until("an answer", func() bool {
			if ev, ok := s.hosts[1].take(EventRequest); ok {
				hb.answerSCTP(hb.streams[ev.Conn], session.Setup{}, Attachment{QP: &qb.QPBinding})
			}
			ev, ok := s.hosts[0].take(EventAnswer)
			if ok {
				a = s.hosts[0].w.streams[ev.Conn]
			}
			return ok
		})
		s.hosts[0].w.attach(a.id, a, Attachment{QP: &qa.QPBinding, Params: mpa.Params{Initiator: true}})
		s.write(a, qa, qb, 100)
	}
	for _, c := range cs[2:] {
		if ev := s.ended(0, c); !errors.Is(ev.Err, ErrNoStream) {
			t.Errorf("ended by %v", ev.Err)
		}
	}
	if _, err := s.joinSCTP(cs[0].as(), 0); !errors.Is(err, ErrNoStream) {
		t.Errorf("a third session: %v", err)
	}
	for _, c := range cs[:2] {
		s.hosts[0].w.disconnect(c, false)
	}
	s.closedSCTP()
	if _, err := s.joinSCTP(cs[0].as(), 0); !errors.Is(err, ErrNoStream) {
		t.Errorf("a session on an association that is over: %v", err)
	}
}

// TestSCTPSharedTimeout checks that a session whose Initiate is not answered in time ends without affecting others of
// its association, and that each has its own time limit before the association is established.
func TestSCTPSharedTimeout(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	var cs [2]*stream
	for i := range cs {
		cs[i], _ = s.joinSCTP(a.as(), time.Duration(i+1)*time.Second)
	}
	began := s.now
	for i, c := range cs {
		if ev := s.ended(0, c); !errors.Is(ev.Err, ErrTimeout) {
			t.Errorf("ended by %v", ev.Err)
		}
		if d := s.now.Sub(began).Round(time.Second / 4); d != time.Duration(i+1)*time.Second {
			t.Errorf("session %d ended after %v", i, d)
		}
	}
	s.write(a, qa, qb, 100)
	s.hosts[0].w.disconnect(a, true)
	s.closedSCTP()

	silent := newSim(t, link.PipeConfig{Filter: func(toB bool, _ []byte) bool { return toB }})
	c := silent.dialSCTP(40000, 3*time.Second)
	silent.hosts[1].w.sctp0()
	d, err := silent.joinSCTP(c.as(), time.Second)
	if err != nil {
		t.Fatal(err)
	}
	began = silent.now
	for _, c := range []*stream{d, c} {
		if ev := silent.ended(0, c); !errors.Is(ev.Err, ErrTimeout) {
			t.Errorf("ended by %v", ev.Err)
		}
	}
	if d := silent.now.Sub(began).Round(time.Second / 4); d != 3*time.Second {
		t.Errorf("the second ended after %v", d)
	}
	silent.closedSCTP()
}

// TestSCTPSharedEnd checks that whatever ends the association ends all its sessions, set up or not, with the same
// reason.
func TestSCTPSharedEnd(t *testing.T) {
	for how, end := range map[string]func(*sim, *assoc, *assoc){
		"ABORT":     func(s *sim, _, b *assoc) { b.a.Abort(); s.hosts[1].w.mark(&b.lane) },
		"forgotten": func(s *sim, _, b *assoc) { delete(s.hosts[1].w.lanes, b.key) },
	} {
		t.Run(how, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			s.limit = s.now.Add(time.Hour)
			q := [4]*simQP{newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096), newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)}
			a, b := s.openSCTP(SCTP{}, q[0], q[1])
			second, _ := s.joinSCTP(a.as(), 0)
			s.answerSCTP(second, q[2], q[3])
			third, _ := s.joinSCTP(a.as(), 0)
			for _, q := range q {
				q.recvs = append(q.recvs, verbs.RecvWR{ID: 5, SGEs: q.sge(0, 10)})
			}
			var abort *sctp.AbortError
			end(s, a.as(), b.as())
			if how == "forgotten" {
				clear(s.hosts[1].w.listeners)
				s.post(a, q[0], verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: q[0].sge(0, 10), RKey: q[1].reg.STag(), Remote: 0x10000})
			}
			for i, c := range []*stream{a, second, third} {
				if ev := s.ended(0, c); !errors.As(ev.Err, &abort) {
					t.Errorf("session %d ended by %v", i, ev.Err)
				}
			}
			for i, q := range q {
				if n := len(q.wcs); i%2 == 0 && (n == 0 || q.wcs[n-1].ID != 5 || q.wcs[n-1].Status != verbs.WCFlushErr) {
					t.Errorf("queue pair %d: completions %+v", i, q.wcs)
				}
			}
		})
	}
}

// TestSCTPCollision makes both sides open a session on one stream at once. RFC 5043 does not provide for that; in the
// draft it is one session. Other sessions are unaffected, and the stream can be reused.
func TestSCTPCollision(t *testing.T) {
	for _, profile := range []session.Profile{session.RFC5043, session.Draft} {
		t.Run(profile.String(), func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
			a, b := s.openSCTP(SCTP{Profile: profile}, qa, qb)
			s.write(a, qa, qb, 10)
			c := s.mustJoin(a.as())
			// A peer that opens sessions on an association that it accepted.
			mux := b.as().mux
			if err := mux.Initiate(c.sid, session.Setup{}); err != nil {
				t.Fatal(err)
			}
			s.hosts[1].w.mark(&b.as().lane)
			if profile == session.RFC5043 {
				if ev := s.ended(0, c); !errors.Is(ev.Err, session.ErrCollision) {
					t.Errorf("ended by %v", ev.Err)
				}
			} else {
				s.until("open", func() bool {
					ev, ok := s.hosts[0].take(EventAnswer)
					return ok && ev.Conn == c.id
				})
				s.hosts[0].w.disconnect(c, false)
				s.ended(0, c)
			}
			s.until("a free stream", func() bool { return mux.Free(c.sid) && a.as().mux.Free(c.sid) })
			a.as().nextSID = c.sid
			again, err := s.joinSCTP(a.as(), 0)
			if err != nil || again.sid != c.sid {
				t.Fatalf("stream %d again: %v", c.sid, err)
			}
			qc, qd := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
			s.answerSCTP(again, qc, qd)
			s.write(again, qc, qd, 10)
			s.write(a, qa, qb, 10)
			s.hosts[0].w.disconnect(a, false)
			s.hosts[0].w.disconnect(again, false)
			s.closedSCTP()
		})
	}
}

// sharedLoad opens n sessions on one association, each with endless Writes.
func sharedLoad(t *testing.T, n int) (*sim, []*stream, []*loadQP) {
	const size = 32 << 10
	s, a, q := newLoadSCTP(t, 1500, rdmap.OpWrite, size)
	cs, qs := []*stream{a}, []*loadQP{q}
	for range n - 1 {
		c := s.mustJoin(a.as())
		qa, qb := &loadQP{simQP: newSimQP(t, s.hosts[0], size)}, newSimQP(t, s.hosts[1], size)
		qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: qa.h.table, SQDepth: 256, MaxSGE: 1, SigAll: true, Sends: qa, Recvs: qa})
		qa.SendCQ, qa.RecvCQ = qa, qa
		qa.wr = verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000}
		s.answerSCTP(c, qa.simQP, qb)
		cs, qs = append(cs, c), append(qs, qa)
	}
	for i, q := range qs {
		q.left = 1 << 60
		s.hosts[0].w.mark(cs[i].lane)
	}
	return s, cs, qs
}

// TestSCTPSharedFair checks that busy sessions get equal shares of their association, whichever other sessions have
// ended.
func TestSCTPSharedFair(t *testing.T) {
	oneGoroutine(t)
	for _, gone := range []int{0, 7} {
		t.Run(fmt.Sprint(gone), func(t *testing.T) {
			s, cs, qs := sharedLoad(t, 5+gone)
			for i := range gone {
				qs[i].left = 0
				s.until("quiet", func() bool { return qs[i].QP.Retired() == qs[i].QP.Taken() })
				s.hosts[0].w.disconnect(cs[i], false)
				s.ended(0, cs[i])
			}
			qs = qs[gone:]
			began := make([]int, len(qs))
			for i, q := range qs {
				began[i] = q.done
			}
			s.until("some Writes", func() bool {
				sum := 0
				for i, q := range qs {
					sum += q.done - began[i]
				}
				return sum >= 100*len(qs)
			})
			for i, q := range qs {
				if n := q.done - began[i]; n < 95 || n > 105 {
					t.Errorf("session %d has done %d Writes when all have done 100 on average", i, n)
				}
			}
		})
	}
}

// TestSCTPSharedLeave checks that work posted before a session is closed is sent even if other sessions have filled
// the association's window.
func TestSCTPSharedLeave(t *testing.T) {
	s, cs, _ := sharedLoad(t, 3)
	for range 20 {
		c := s.mustJoin(cs[0].as())
		qa, qb := newSimQP(t, s.hosts[0], 16384), newSimQP(t, s.hosts[1], 16384)
		d := s.answerSCTP(c, qa, qb)
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: 5, SGEs: qb.sge(0, 10)})
		qa.sends = append(qa.sends, verbs.SendWR{ID: 1, Op: rdmap.OpWrite, SGEs: qa.sge(0, 16000), RKey: qb.reg.STag(), Remote: 0x10000},
			verbs.SendWR{ID: 2, Op: rdmap.OpSend, SGEs: qa.sge(0, 10)})
		s.hosts[0].w.disconnect(c, false)
		s.ended(0, c)
		s.ended(1, d)
		if len(qb.wcs) != 1 || qb.wcs[0].Status != verbs.WCSuccess {
			t.Fatalf("what was sent last did not come: %+v", qb.wcs)
		}
	}
}

// TestSCTPLeaveShared is TestSCTPLeave for a session whose association it is another session's turn to use, one with
// much to send or one whose memory faults.
func TestSCTPLeaveShared(t *testing.T) {
	const size = 1 << 20
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	for _, faults := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		h := s.hosts[0]
		other, qc := newSimQP(t, h, size), newSimQP(t, s.hosts[1], size)
		qa, qb := newSimQP(t, h, size), newSimQP(t, s.hosts[1], size)
		c, _ := s.openSCTP(SCTP{}, other, qc)
		a := s.mustJoin(c.as())
		b := s.answerSCTP(a, qa, qb)
		if faults {
			mem := testenv.Mmap(t, size, unix.PROT_NONE)
			other.reg = other.register(mem)
		}
		as := a.as()
		as.turn = slices.Index(as.round, c)
		other.sends = []verbs.SendWR{{ID: 1, Op: rdmap.OpWrite, SGEs: other.sge(0, size), RKey: qc.reg.STag(), Remote: 0x10000}}
		qb.recvs = []verbs.RecvWR{{ID: 2}}
		qa.sends = []verbs.SendWR{
			{ID: 3, Op: rdmap.OpSend},
			{ID: 4, Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000},
		}
		qa.id.Store(uint64(a.id)) // as Engine.Attach
		over := h.begin(func() { h.e.Leave(&qa.QPBinding) })
		h.w.mark(a.lane)
		step := func() { // as loop
			defer h.w.survive()
			s.step()
		}
		step()
		<-over
		for i := range qa.mem {
			qa.mem[i] = 42 // what is no business of the peer
		}
		for faults && h.w.stats.Faults == 0 {
			step()
		}
		s.ended(0, a)
		s.ended(1, b)
		if len(qb.wcs) != 1 || qb.wcs[0].Status != verbs.WCSuccess {
			t.Errorf("faults %v: completions of host 1: %+v", faults, qb.wcs)
		}
		if bytes.Contains(qb.mem, []byte{42}) {
			t.Errorf("faults %v: the peer has memory that was reused", faults)
		}
		h.w.disconnect(c, false)
		s.closedSCTP()
	}
}

// TestAdoptJoin checks that sessions are opened on an association through the worker that dialed it, whichever worker
// owns it now.
func TestAdoptJoin(t *testing.T) {
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 7174)
	q := newTwoQueues(t, 1)
	w, second, b := q.workers[0], q.workers[1], q.workers[2]
	b.turn()
	b.listenSCTP(t, 1, remote, SCTP{})
	flow := pkt.NewFlow(local, remote)
	ids := []ConnID{w.newID()}
	w.dialSCTP(t, ids[0], flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, time.Minute)
	join := func() {
		done := make(chan error, 1)
		ids = append(ids, w.newID())
		w.post(func(w *worker) { w.joinSCTP(ids[len(ids)-1], joinRequest(flow, time.Minute), done) })
		q.until("joined", func() bool { return len(done) == 1 })
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	join()
	q.until("adopted", func() bool { return second.sctp != nil && second.sctp.n == 1 })
	join()
	for range ids {
		qb := newSimQP(t, q.hosts[1], 4096)
		req := q.event(1, EventRequest)
		q.hosts[1].e.Answer(req.Conn, session.Setup{}, Attachment{QP: &qb.QPBinding})
		if ev := q.event(0, EventAnswer); ev.Worker != 1 {
			t.Errorf("event %+v", ev)
		}
	}
	for _, id := range ids {
		q.hosts[0].e.Disconnect(id, false)
	}
	for range ids {
		q.event(0, EventClosed)
	}
	q.until("nothing left", func() bool {
		return len(w.streams)+len(w.moved)+len(second.streams)+second.sctp.n == 0
	})
	done := make(chan error, 1)
	w.post(func(w *worker) { w.joinSCTP(w.newID(), joinRequest(flow, time.Minute), done) })
	q.until("refused", func() bool { return len(done) == 1 })
	if err := <-done; !errors.Is(err, ErrNoStream) || len(w.moved) != 0 {
		t.Errorf("a session on what is over: %v", err)
	}
}

// TestSCTPUnhandledRequests checks that a request is refused if the control plane has not handled as many as there are
// streams, and that the next one after it has is reported.
func TestSCTPUnhandledRequests(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	as := b.as()
	as.unseen += as.mux.Streams()
	c := s.mustJoin(a.as())
	if ev := s.closed(0); ev.Conn != c.id || ev.Err == nil {
		t.Errorf("%+v", ev)
	}
	if _, ok := s.hosts[1].take(EventRequest); ok {
		t.Error("the request is reported")
	}
	as.unseen -= as.mux.Streams()
	s.mustJoin(a.as())
	s.event(1, EventRequest)
}

// TestSCTPUnlistenIdle checks that an association without sessions, which a listener keeps, ends when the listener is
// closed.
func TestSCTPUnlistenIdle(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	a.as().lst = &listener{} // the peer keeps it too
	as := b.as()
	s.hosts[0].w.disconnect(a, false)
	s.closed(0)
	s.closed(1)
	for end := s.now.Add(100 * time.Millisecond); s.now < end && s.step(); {
	}
	if as.gone || len(as.sessions) > 0 {
		t.Fatal("the association has ended before")
	}
	from := s.now
	s.hosts[1].w.unlisten(1)
	s.until("its end", func() bool { return as.gone })
	if d := s.now.Sub(from); d > 100*time.Microsecond { // or it waited for a timer
		t.Errorf("it ends after %v", d)
	}
	s.closedSCTP()
}
