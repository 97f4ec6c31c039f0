package dataplane

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// deepPairs returns connections whose queue pairs on host 1 have posted work requests each.
func deepPairs(t *testing.T, pairs, posted int) (s *sim, streams []*stream, qps []*simQP) {
	t.Helper()
	s = newSim(t, link.PipeConfig{})
	for i := range pairs {
		a, b := s.openFrom(netip.AddrPortFrom(addrA, 40000+uint16(i)), addrB)
		qa, qb := newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64)
		cfg := qb.QP.Config()
		cfg.SQDepth = posted
		qb.QP = verbs.NewQP(cfg)
		s.attach(a, b, qa, qb, mpa.Params{CRC: true})
		for id := range uint64(posted) {
			qb.sends = append(qb.sends, verbs.SendWR{ID: id, Op: rdmap.OpSend, SGEs: qb.sge(0, 8)})
		}
		streams, qps = append(streams, b), append(qps, qb)
	}
	return s, streams, qps
}

// TestFlushesAreBounded checks that a turn flushes a bounded part of the work of a client that
// ends, alternating between its queue pairs, and that a connection is reported closed when all
// its work is flushed.
func TestFlushesAreBounded(t *testing.T) {
	const pairs, posted = 8, 5000
	s, streams, qps := deepPairs(t, pairs, posted)
	w := s.hosts[1].w
	for _, b := range streams {
		w.post(func(w *worker) { w.disconnect(b, true) })
	}
	flushed := func() (n, least int) {
		least = posted
		for _, q := range qps {
			n += len(q.wcs)
			least = min(least, len(q.wcs))
		}
		return n, least
	}
	closed := 0
	for before := 0; closed < pairs; {
		w.turn()
		s.hosts[1].drain()
		n, least := flushed()
		if n-before > flushBudget {
			t.Fatalf("%d completions in a turn", n-before)
		}
		if n > 3*pairs*flushShare && least == 0 {
			t.Fatalf("after %d completions a queue pair has none", n)
		}
		for {
			ev, ok := s.hosts[1].take(EventClosed)
			if !ok {
				break
			}
			closed++
			i := slices.IndexFunc(streams, func(s *stream) bool { return s.id == ev.Conn })
			if n := len(qps[i].wcs); n != posted {
				t.Errorf("connection %d is closed with %d of %d work requests flushed", i, n, posted)
			}
		}
		if n == before && closed < pairs {
			t.Fatalf("at rest after %d completions and %d ends", n, closed)
		}
		before = n
	}
	for i, q := range qps {
		for id, wc := range q.wcs {
			if wc.ID != uint64(id) || wc.Status != verbs.WCFlushErr {
				t.Fatalf("queue pair %d: completion %d is %+v", i, id, wc)
			}
		}
	}
	if len(w.streams) != 0 || len(w.flushes.of) != 0 {
		t.Errorf("%d streams are left, %d queue pairs to be flushed", len(w.streams), len(w.flushes.of))
	}
}

// TestDetachFlushes checks that when Detach returns, all posted work is flushed and no worker
// uses the queue pair.
func TestDetachFlushes(t *testing.T) {
	const posted = 5000
	s, streams, qps := deepPairs(t, 1, posted)
	h, b := s.hosts[1], qps[0]
	b.id.Store(uint64(streams[0].id))
	h.during(func() { h.e.Detach(&b.QPBinding) })
	if len(b.wcs) != posted || !h.w.flushes.done(&b.QPBinding) {
		t.Errorf("%d of %d work requests are flushed", len(b.wcs), posted)
	}
}

// TestCommandsAreBounded checks that a turn calls a bounded number of the posted functions, and
// that all are called in order.
func TestCommandsAreBounded(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	w := s.hosts[0].w
	const n = 1000
	var got []int
	for i := range n {
		w.post(func(w *worker) {
			got = append(got, i)
			if i%100 == 0 {
				w.post(func(*worker) { got = append(got, n) })
			}
		})
	}
	for before := -1; len(got) > before; {
		before = len(got)
		w.turn()
		if len(got)-before > cmdBudget {
			t.Fatalf("%d commands in a turn", len(got)-before)
		}
	}
	for i, g := range got {
		if want := min(i, n); g != want {
			t.Fatalf("command %d was the %d.", i, g)
		}
	}
	if len(got) != n+n/100 {
		t.Errorf("%d commands were called", len(got))
	}
}

// A queue pair that has ended costs a turn something even if nothing is posted: a client may have thousands.
func TestFlushesOfManyAreBounded(t *testing.T) {
	const pairs = 3 * flushBudget
	h := newSim(t, link.PipeConfig{}).hosts[0]
	w := h.w
	w.turn()
	w.flushes.left = 0 // others have used up this turn
	ended := 0
	for range pairs {
		q := &simQP{h: h}
		q.Client, q.QP = &ClientBinding{}, verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: h.table, SQDepth: 1, RQDepth: 1, MaxSGE: 1, Sends: q, Recvs: q})
		w.refuseAttach(1, Attachment{QP: &q.QPBinding})
		w.flushes.after(w, &q.QPBinding, func(*worker) { ended++ })
	}
	for before := 0; ended < pairs; before = ended {
		if w.turn(); ended == before || ended-before > flushBudget {
			t.Fatalf("%d queue pairs ended in a turn, %d before it", ended-before, before)
		}
	}
	if len(w.flushes.of) != 0 || w.flushes.first != nil || w.flushes.last != nil {
		t.Errorf("%d queue pairs are left", len(w.flushes.of))
	}
}

// When a client ends, what its queue pairs have left is forgotten, and that of others is flushed in the same order.
func TestFlushesDrop(t *testing.T) {
	h := newSim(t, link.PipeConfig{}).hosts[0]
	w := h.w
	w.turn()
	w.flushes.left = 0
	clients := [2]*ClientBinding{{}, {}}
	var got []int
	for i := range 7 {
		q := &simQP{h: h}
		q.Client, q.QP = clients[i%2], verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: h.table, SQDepth: 1, RQDepth: 1, MaxSGE: 1, Sends: q, Recvs: q})
		q.QP.Error()
		w.flushes.deliver(w, &q.QPBinding)
		w.flushes.after(w, &q.QPBinding, func(*worker) { got = append(got, i) })
	}
	w.flushes.drop(w, clients[0])
	if want := []int{0, 2, 4, 6}; !slices.Equal(got, want) || len(w.flushes.of) != 3 {
		t.Errorf("dropped %v, %d are left; want %v", got, len(w.flushes.of), want)
	}
	w.turn()
	if want := []int{0, 2, 4, 6, 1, 3, 5}; !slices.Equal(got, want) || len(w.flushes.of) != 0 {
		t.Errorf("ended %v, %d are left; want %v", got, len(w.flushes.of), want)
	}
}

// orderedCQ checks that completions are published before the end of their connection is reported.
type orderedCQ struct {
	*simQP
	t       *testing.T
	pending bool
}

func (q *orderedCQ) Push(worker int, wc *verbs.WC) bool {
	q.pending = true
	return q.simQP.Push(worker, wc)
}

func (q *orderedCQ) Pending(int) bool { return q.pending }

func (q *orderedCQ) Flush(int, clock.Time) clock.Time {
	for _, f := range q.h.e.events.q {
		f(func(ev Event) {
			if ev.Kind == EventClosed && q.pending {
				q.t.Error("the end is reported before completions are published")
			}
		})
	}
	q.pending = false
	return 0
}

// TestEndAfterCompletions checks that a client that learns of the end of a connection finds all flushed completions.
func TestEndAfterCompletions(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], 4096), newSimQP(t, s.hosts[1], 4096)
	cq := &orderedCQ{simQP: qb, t: t}
	qb.SendCQ, qb.RecvCQ = cq, cq
	const recvs = 100
	for i := range recvs {
		qb.recvs = append(qb.recvs, verbs.RecvWR{ID: uint64(i), SGEs: qb.sge(0, 64)})
	}
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 1, ORD: 1})
	a.abort(s.hosts[0].w, errAborted)
	s.event(1, EventClosed)
	if len(qb.wcs) != recvs || cq.pending {
		t.Errorf("%d completions; some are unpublished: %v", len(qb.wcs), cq.pending)
	}
}
