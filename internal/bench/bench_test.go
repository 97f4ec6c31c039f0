// Package bench measures the whole stack as an application drives it: work
// requests through the shared-memory rings, verbs, RDMAP, DDP, MPA and TCP of
// two nodes that are joined by the in-process wire, in one goroutine. What one
// operation costs here is the processor time of both ends, without a kernel.
//
//	go test -bench . -benchmem ./internal/bench
package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const (
	depth  = 64
	region = 2 << 20
)

// A side is one queue pair with its memory.
type side struct {
	pd  *iwarp.PD
	cq  *iwarp.CQ
	qp  *iwarp.QP
	mr  *iwarp.MR
	wcs [depth]iwarp.WC
	sge [1]iwarp.SGE
	wr  iwarp.SendWR
	rr  iwarp.RecvWR
}

func newSide(tb testing.TB, ctx context.Context, d *iwarp.Device) *side {
	tb.Helper()
	s := &side{}
	var err error
	if s.pd, err = d.AllocPD(ctx); err != nil {
		tb.Fatal(err)
	}
	if s.cq, err = d.CreateCQ(ctx, 4*depth); err != nil {
		tb.Fatal(err)
	}
	if s.mr, err = s.pd.Alloc(ctx, region, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite); err != nil {
		tb.Fatal(err)
	}
	s.qp, err = d.CreateQP(ctx, iwarp.QPConfig{PD: s.pd, SendCQ: s.cq, RecvCQ: s.cq, SendDepth: depth, RecvDepth: depth, MaxSGE: 1})
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// A wire is two nodes with a connection.
type wire struct {
	tb   testing.TB
	a, b *side
	addr uint64 // of b's region
	rkey uint32
}

func newWire(tb testing.TB, mtu int) *wire {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	na, nb, err := embed.Pair(embed.PairConfig{Pipe: link.PipeConfig{MTU: mtu}, InlineProgress: true})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		na.Close()
		nb.Close()
	})
	w := &wire{tb: tb, a: newSide(tb, ctx, na.Device()), b: newSide(tb, ctx, nb.Device())}
	ln, err := nb.Device().Listen(ctx, nb.Addr().String()+":7174", nil)
	if err != nil {
		tb.Fatal(err)
	}
	accepted := make(chan error, 1)
	go func() {
		req, err := ln.Request(ctx)
		if err == nil {
			offer := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, w.b.mr.Base()), w.b.mr.RKey())
			_, err = req.Accept(ctx, w.b.qp, &iwarp.Config{PrivateData: offer})
		}
		accepted <- err
	}()
	info, err := w.a.qp.Connect(ctx, nb.Addr().String()+":7174", nil)
	if err != nil {
		tb.Fatal(err)
	}
	if err := <-accepted; err != nil {
		tb.Fatal(err)
	}
	if !info.CRC {
		tb.Fatal("CRC32c is off: this would measure another protocol")
	}
	w.addr, w.rkey = binary.BigEndian.Uint64(info.PrivateData), binary.BigEndian.Uint32(info.PrivateData[8:])
	return w
}

// run does n operations of size bytes, at most depth of them at a time, each
// with its completion.
func (w *wire) run(op iwarp.Op, size, n int) {
	posted, done, received := 0, 0, 0
	for done < n || (op == iwarp.OpSend && received < n) {
		finished := done
		if op == iwarp.OpSend {
			finished = min(done, received) // each has its receive posted before it
		}
		for ; posted < n && posted-finished < depth/2; posted++ {
			if op == iwarp.OpSend {
				w.b.sge[0] = w.b.mr.SGE(0, size)
				w.b.rr = iwarp.RecvWR{SGEs: w.b.sge[:]}
				if err := w.b.qp.PostRecv(&w.b.rr); err != nil {
					w.tb.Fatal(err)
				}
			}
			w.a.sge[0] = w.a.mr.SGE(0, size)
			w.a.wr = iwarp.SendWR{Op: op, Flags: iwarp.Signaled, SGEs: w.a.sge[:], RKey: w.rkey, Remote: w.addr}
			if err := w.a.qp.PostSend(&w.a.wr); err != nil {
				w.tb.Fatal(err)
			}
		}
		done += w.poll(w.a)
		received += w.poll(w.b)
	}
}

func (w *wire) poll(s *side) int {
	n := s.cq.Poll(s.wcs[:])
	for i := range s.wcs[:n] {
		if s.wcs[i].Status != iwarp.WCSuccess {
			w.tb.Fatalf("%v: %v", s.wcs[i].Op, s.wcs[i].Status)
		}
	}
	return n
}

var ops = []struct {
	name string
	op   iwarp.Op
	size int
}{
	{"write/64", iwarp.OpWrite, 64}, {"write/64KiB", iwarp.OpWrite, 64 << 10}, {"write/1MiB", iwarp.OpWrite, 1 << 20},
	{"read/64", iwarp.OpRead, 64}, {"read/64KiB", iwarp.OpRead, 64 << 10}, {"read/1MiB", iwarp.OpRead, 1 << 20},
	{"send/64", iwarp.OpSend, 64}, {"send/16KiB", iwarp.OpSend, 16 << 10},
}

// TestNothingAllocates holds for both ends together: posting, transfer,
// completion, and receives.
func TestNothingAllocates(t *testing.T) {
	for _, mtu := range []int{1500, 9000} {
		for _, o := range ops {
			if testenv.Race && (o.size > 4096 || mtu > 1500) {
				continue
			}
			t.Run(fmt.Sprintf("%s/mtu%d", o.name, mtu), func(t *testing.T) {
				w := newWire(t, mtu)
				w.run(o.op, o.size, 4*depth) // buffers reach their size
				// What the control plane still does after set-up may fall into one
				// measurement, not into all; the average is rounded down.
				n := 0.0
				for range 5 {
					if n = testing.AllocsPerRun(20, func() { w.run(o.op, o.size, 5) }); n == 0 {
						break
					}
				}
				if n != 0 {
					t.Errorf("%v allocations in 5 operations; want 0", n)
				}
			})
		}
	}
}

// TestDataArrives checks that run moves the contents of the memory.
func TestDataArrives(t *testing.T) {
	w := newWire(t, 1500)
	a, b := w.a.mr.Bytes(), w.b.mr.Bytes()
	for i := range a {
		a[i] = byte(i * 13)
	}
	w.run(iwarp.OpWrite, 100_000, 3)
	if string(a[:100_000]) != string(b[:100_000]) {
		t.Error("written bytes differ")
	}
	for i := range b {
		b[i] = byte(i*29 + 1)
	}
	w.run(iwarp.OpRead, 100_000, 3)
	if string(a[:100_000]) != string(b[:100_000]) {
		t.Error("read bytes differ")
	}
	for i := range a {
		a[i] = byte(i * 31)
	}
	w.run(iwarp.OpSend, 5000, 3)
	if string(a[:5000]) != string(b[:5000]) {
		t.Error("sent bytes differ")
	}
}

func BenchmarkPair(b *testing.B) {
	for _, mtu := range []int{1500, 9000} {
		for _, o := range ops {
			b.Run(fmt.Sprintf("%s/mtu%d", o.name, mtu), func(b *testing.B) {
				w := newWire(b, mtu)
				w.run(o.op, o.size, 4*depth)
				b.SetBytes(int64(o.size))
				b.ReportAllocs()
				b.ResetTimer()
				w.run(o.op, o.size, b.N)
			})
		}
	}
}
