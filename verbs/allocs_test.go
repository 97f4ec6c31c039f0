package verbs

import (
	"crypto/rand"
	"fmt"
	"runtime"
	"testing"

	"github.com/iwarpd/iwarpd/rdmap"
)

// loop is a source that posts the same Write or Send forever.
type loop struct {
	wr SendWR
	n  int
}

func (l *loop) NextSend(wr *SendWR) bool {
	if l.n == 0 {
		return false
	}
	l.n--
	sges := append(wr.SGEs[:0], l.wr.SGEs...)
	*wr = l.wr
	wr.SGEs = sges
	return true
}

type loopRecv struct{ wr RecvWR }

func (l *loopRecv) NextRecv(wr *RecvWR) bool {
	wr.ID, wr.SGEs = l.wr.ID, append(wr.SGEs[:0], l.wr.SGEs...)
	return true
}

// TestNoAllocs checks that no work request and no message allocates.
func TestNoAllocs(t *testing.T) {
	for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpSend, rdmap.OpRead, rdmap.OpFetchAdd} {
		src, rcv := &loop{}, &loopRecv{}
		a := newSide(t, 1, 1<<16, QPConfig{SigAll: true, Sends: src})
		b := newSide(t, 2, 1<<16, QPConfig{Recvs: rcv})
		a.Start(rdmap.Config{IRD: 4, ORD: 4})
		b.Start(rdmap.Config{IRD: 4, ORD: 4})
		n := 5000
		if op == rdmap.OpFetchAdd {
			n = 8
		}
		src.wr = SendWR{Op: op, Flags: Signaled, SGEs: []SGE{a.sge(0, n)}, RKey: b.mr.STag(), Remote: sideBase}
		rcv.wr = RecvWR{SGEs: []SGE{b.sge(0, 100), b.sge(200, 6000)}}
		done := 0
		var wc WC
		step := func() {
			src.n = 8
			for busy := true; busy; {
				busy = a.turn(b, 1400)
				busy = b.turn(a, 1400) || busy
				for a.PollWC(&wc) {
					if wc.Status != WCSuccess {
						panic(fmt.Sprint(wc))
					}
					done++
				}
				for b.PollWC(&wc) {
				}
			}
		}
		step()
		if got := testing.AllocsPerRun(100, step); got != 0 {
			t.Errorf("op %v: %v allocations per 8 work requests", op, got)
		}
		if done != 102*8 {
			t.Errorf("op %v: %d completions; want %d", op, done, 102*8)
		}
	}
}

// script is a source that repeats a list of work requests.
type script struct {
	wrs []SendWR
	i   int
	n   int
}

func (l *script) NextSend(wr *SendWR) bool {
	if l.n == 0 {
		return false
	}
	l.n--
	sges := append(wr.SGEs[:0], l.wrs[l.i].SGEs...)
	*wr = l.wrs[l.i]
	wr.SGEs = sges
	l.i = (l.i + 1) % len(l.wrs)
	return true
}

// TestLocalOpsNoAllocs checks that registering, binding and invalidating by work request do not allocate.
func TestLocalOpsNoAllocs(t *testing.T) {
	src := &script{}
	a := newSide(t, 1, 4096, QPConfig{Sends: src})
	a.Start(rdmap.Config{})
	fast := registerFast(t, a.table, pdA, a.mem, LocalWrite)
	win := allocWindow(t, a.table, pdA)
	src.wrs = []SendWR{
		{Op: OpReg, Flags: Signaled, RKey: fast.STag(), SGEs: []SGE{{0, 64, 0}}, Access: LocalWrite},
		{Op: OpBindMW, Flags: Signaled, RKey: win.STag(), SGEs: []SGE{a.sge(0, 64)}, Access: RemoteRead},
		{Op: OpLocalInv, Flags: Signaled, Inv: fast.STag()},
		{Op: OpLocalInv, Flags: Signaled, Inv: win.STag()},
	}
	var wc WC
	if n := testing.AllocsPerRun(100, func() {
		src.n = 4
		if a.HandleSends(8) != 4 {
			panic("not all were taken")
		}
		for range 4 {
			if !a.PollWC(&wc) || wc.Status != WCSuccess {
				panic(fmt.Sprint(wc))
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{64, 1400} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			src := &loop{}
			x := newSide(b, 1, 1<<16, QPConfig{SigAll: true, Sends: src})
			y := newSide(b, 2, 1<<16, QPConfig{})
			x.Start(rdmap.Config{})
			y.Start(rdmap.Config{})
			src.wr = SendWR{Op: rdmap.OpWrite, SGEs: []SGE{x.sge(0, n)}, RKey: y.mr.STag(), Remote: sideBase}
			var wc WC
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				src.n = 1
				x.turn(y, 1460)
				if !x.PollWC(&wc) || wc.Status != WCSuccess {
					b.Fatal(wc)
				}
			}
		})
	}
}

// Start, which a worker calls between packets, allocates little: not the queues, which are megabytes.
func TestStartAllocatesLittle(t *testing.T) {
	q := NewQP(QPConfig{Num: 1, PD: pdA, Table: NewTable(rand.Reader), SQDepth: MaxDepth, RQDepth: MaxDepth})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	q.Start(rdmap.Config{IRD: 16, ORD: 16})
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 64<<10 {
		t.Errorf("%d bytes", n)
	}
	if q.State() != StateRTS {
		t.Errorf("state %v", q.State())
	}
}
