package dataplane

import (
	"fmt"
	"hash/crc32"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// A freeQP is a loadQP for a worker that runs by itself.
type freeQP struct {
	*loadQP
	todo  int
	start clock.Time
	took  chan time.Duration // duration of each run
}

func (q *freeQP) Push(int, *verbs.WC) bool {
	if q.todo--; q.todo == 0 {
		q.took <- clock.Now().Sub(q.start)
	}
	return true
}

// run moves n messages and returns how long that took on the worker's clock.
func (q *freeQP) run(c *stream, n int) time.Duration {
	q.h.e.onStream(c.id, func(w *worker, c *stream) {
		q.left, q.todo, q.start = n, n, clock.Now()
		w.mark(c.lane)
	})
	return <-q.took
}

// BenchmarkPipeRatio moves 1 MiB messages between two workers that run by
// themselves, over a pipe that itself copies nothing, and reports their time per
// message as a multiple of one copy plus one CRC32c (hash/crc32) of as many
// bytes: the median of rounds, in each of which both are taken. The limit is
// 1.6 at either MTU, and 1.1 for what markers add (x-none).
//
// It needs two idle CPUs. x-best is for a machine that has them only now and
// then: the tenth best round.
func BenchmarkPipeRatio(b *testing.B) {
	const (
		size  = 1 << 20
		round = 32
	)
	base := newBaseline(size)
	for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpRead} {
		for _, mtu := range []int{1500, 9000} {
			none := 0.0
			for _, markers := range []bool{false, true} {
				b.Run(fmt.Sprintf("%v/mtu=%d/markers=%v", op, mtu, markers), func(b *testing.B) {
					_, a, q := newFree(b, link.PipeConfig{MTU: mtu, ChunkSize: 16 << 10, Slots: 2048, RxFrames: 2048, TxRing: 2048, Lend: true}, markers, op, size)
					q.run(a, round)
					b.SetBytes(size)
					b.ReportAllocs()
					b.ResetTimer()
					var ratios []float64
					for left := b.N; left > 0; left -= round {
						b.StopTimer()
						one := 0.0
						for i := range baselines {
							one += base.one(i) / baselines
						}
						b.StartTimer()
						n := min(left, round)
						ratios = append(ratios, float64(q.run(a, n))/float64(n)/one)
					}
					b.StopTimer()
					median := sorted(ratios, len(ratios)/2)
					b.ReportMetric(median, "x-copy+crc")
					b.ReportMetric(sorted(ratios, len(ratios)/10), "x-best")
					if !markers {
						none = median
					} else {
						b.ReportMetric(median/none, "x-none")
					}
				})
			}
		}
	}
}

// A baseline measures one copy and one CRC32c of bytes that are not cached.
type baseline struct {
	size     int
	src, dst []byte
}

const baselines = 32 // together larger than any cache

func newBaseline(size int) *baseline {
	b := &baseline{size, make([]byte, baselines*size), make([]byte, baselines*size)}
	for i := range baselines {
		b.one(i)
	}
	return b
}

// sorted returns element i of v after sorting.
func sorted(v []float64, i int) float64 {
	slices.Sort(v)
	return v[i]
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// one returns the nanoseconds for buffer i.
func (b *baseline) one(i int) float64 {
	at := i % baselines * b.size
	start := clock.Now()
	copy(b.dst[at:][:b.size], b.src[at:])
	crc32.Update(0, castagnoli, b.dst[at:][:b.size])
	return float64(clock.Now().Sub(start))
}

func newFree(b *testing.B, cfg link.PipeConfig, markers bool, op rdmap.Op, size int) (*sim, *stream, *freeQP) {
	s := &sim{t: b, now: clock.Now(), real: true}
	s.make(b, cfg)
	a, c := s.open()
	qa, qb := &freeQP{loadQP: &loadQP{simQP: newSimQP(b, s.hosts[0], size)}, took: make(chan time.Duration, 1)}, newSimQP(b, s.hosts[1], size)
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
