package dataplane

import (
	"fmt"
	"hash/crc32"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// A freeQP is a loadQP for a worker that runs by itself.
type freeQP struct {
	*simQP
	wr         verbs.SendWR
	left, done atomic.Int64
}

func (q *freeQP) NextSend(wr *verbs.SendWR) bool {
	if q.left.Load() == 0 {
		return false
	}
	q.left.Add(-1)
	sges := append(wr.SGEs[:0], q.wr.SGEs...)
	*wr = q.wr
	wr.SGEs = sges
	return true
}

func (q *freeQP) Push(int, *verbs.WC) bool { q.done.Add(1); return true }

// BenchmarkPipeRatio moves 1 MiB messages between two workers that run by
// themselves, over a pipe that itself copies nothing, and reports their time per message as a multiple of one copy plus
// one CRC32c (hash/crc32) of as many octets. The limit is 1.6, and 1.1 for what
// markers add (x-none); it needs two idle CPUs.
func BenchmarkPipeRatio(b *testing.B) {
	const size = 1 << 20
	for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpRead} {
		for _, mtu := range []int{1500, 9000} {
			none := 0.0
			for _, markers := range []bool{false, true} {
				b.Run(fmt.Sprintf("%v/mtu=%d/markers=%v", op, mtu, markers), func(b *testing.B) {
					s, a, q := newFree(b, link.PipeConfig{MTU: mtu, ChunkSize: 16 << 10, Slots: 2048, RxFrames: 2048, TxRing: 2048, Lend: true}, markers, op, size)
					run := func(n int) {
						q.done.Store(0)
						q.left.Store(int64(n))
						s.hosts[0].e.onConn(a.id, func(w *worker, c *conn) { w.mark(c) })
						for q.done.Load() < int64(n) {
							runtime.Gosched()
						}
					}
					run(20)
					base := copyAndCRC(size)
					b.SetBytes(size)
					b.ReportAllocs()
					b.ResetTimer()
					start := clock.Now()
					run(b.N)
					per := float64(clock.Now().Sub(start).Nanoseconds()) / float64(b.N)
					b.StopTimer()
					b.ReportMetric(per/base, "x-copy+crc")
					if !markers {
						none = per
					} else {
						b.ReportMetric(per/none, "x-none")
					}
				})
			}
		}
	}
}

// copyAndCRC is the time in ns of one copy and one CRC32c of size octets that
// are in no cache near.
func copyAndCRC(size int) float64 {
	const many = 32
	src, dst := make([]byte, many*size), make([]byte, many*size)
	best := 0.0
	table := crc32.MakeTable(crc32.Castagnoli)
	for range 5 {
		start := clock.Now()
		for i := range many {
			d := dst[i*size:][:size]
			copy(d, src[i*size:][:size])
			crc32.Update(0, table, d)
		}
		if t := float64(clock.Now().Sub(start).Nanoseconds()) / many; best == 0 || t < best {
			best = t
		}
	}
	return best
}

func newFree(b *testing.B, cfg link.PipeConfig, markers bool, op rdmap.Op, size int) (*sim, *conn, *freeQP) {
	s := &sim{t: b, now: clock.Now(), real: true}
	s.make(b, cfg)
	a, c := s.open()
	qa, qb := &freeQP{simQP: newSimQP(b, s.hosts[0], size)}, newSimQP(b, s.hosts[1], size)
	qa.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: qa.h.table, SQDepth: 32, MaxSGE: 1, SigAll: true, Sends: qa, Recvs: qa})
	qa.SendCQ, qa.RecvCQ = qa, qa
	qa.wr = verbs.SendWR{Op: op, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000}
	s.attach(a, c, qa.simQP, qb, mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers, IRD: 16, ORD: 16})
	for _, h := range s.hosts {
		h.e.Start()
		b.Cleanup(func() {
			h.e.Stop()
			h.link.Close()
		})
	}
	return s, a, qa
}
