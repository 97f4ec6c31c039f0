package dataplane

import (
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// A loadQP posts the same work request repeatedly and counts completions, so that the benchmark itself allocates
// nothing.
type loadQP struct {
	*simQP
	wr   verbs.SendWR
	left int
	done int
}

func (q *loadQP) NextSend(wr *verbs.SendWR) bool {
	if q.left == 0 {
		return false
	}
	q.left--
	sges := append(wr.SGEs[:0], q.wr.SGEs...)
	*wr = q.wr
	wr.SGEs = sges
	return true
}

func (q *loadQP) Push(_ int, wc *verbs.WC) bool {
	if wc.Status != verbs.WCSuccess {
		panic(wc.Status)
	}
	q.done++
	return true
}

func newLoad(tb testing.TB, cfg link.PipeConfig, p mpa.Params, op rdmap.Op, size int) (*sim, *stream, *loadQP) {
	s := newSim(tb, cfg)
	a, qa := s.newLoad(p, op, size)
	return s, a, qa
}

func (s *sim) newLoad(p mpa.Params, op rdmap.Op, size int) (*stream, *loadQP) {
	tb := s.t
	a, b := s.open()
	qa, qb := &loadQP{simQP: newSimQP(tb, s.hosts[0], max(size, 4096))}, newSimQP(tb, s.hosts[1], max(size, 4096))
	qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: qa.h.table, SQDepth: 256, MaxSGE: 1, SigAll: true, Sends: qa, Recvs: qa})
	qa.SendCQ, qa.RecvCQ = qa, qa
	qa.wr = verbs.SendWR{Op: op, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000}
	s.attach(a, b, qa.simQP, qb, p)
	s.limit = 1 << 62
	return a, qa
}

func (s *sim) load(a *stream, q *loadQP, n int) {
	q.left, q.done = n, 0
	s.hosts[0].w.mark(a.lane)
	for q.done < n {
		if !s.step() {
			s.t.Fatal("at rest")
		}
	}
}

var loads = []struct {
	op   rdmap.Op
	size int
}{
	{rdmap.OpWrite, 64}, {rdmap.OpWrite, 1 << 20}, {rdmap.OpRead, 64}, {rdmap.OpRead, 1 << 20},
}

// TestSteadyStateAllocatesNothing covers the whole path through both hosts, from the work request to the completion.
func TestSteadyStateAllocatesNothing(t *testing.T) {
	oneGoroutine(t)
	run := func(name string, pipe link.PipeConfig, markers bool) {
		for _, l := range loads {
			l.size = min(l.size, 64<<10)
			t.Run(fmt.Sprintf("%v/%d/%s", l.op, l.size, name), func(t *testing.T) {
				p := mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers, IRD: 16, ORD: 16}
				s, a, q := newLoad(t, pipe, p, l.op, l.size)
				s.load(a, q, 400)
				if n := testing.AllocsPerRun(20, func() { s.load(a, q, 10) }); n != 0 {
					t.Errorf("%v allocations in 10 work requests; want 0", n)
				}
			})
		}
	}
	run("markers=false", link.PipeConfig{}, false)
	run("markers=true", link.PipeConfig{}, true)
	run("super-frames", link.PipeConfig{Super: link.SuperWhole}, false)
}

// BenchmarkPipe moves data between two workers in one goroutine. The time includes the work of both hosts.
func BenchmarkPipe(b *testing.B) {
	for _, mtu := range []int{1500, 9000} {
		for _, l := range loads {
			b.Run(fmt.Sprintf("%v/%d/mtu=%d", l.op, l.size, mtu), func(b *testing.B) {
				s, a, q := newLoad(b, link.PipeConfig{MTU: mtu}, mpa.Params{CRC: true, IRD: 16, ORD: 16}, l.op, l.size)
				s.load(a, q, 64)
				b.SetBytes(int64(l.size))
				b.ReportAllocs()
				b.ResetTimer()
				s.load(a, q, b.N)
			})
		}
	}
}
