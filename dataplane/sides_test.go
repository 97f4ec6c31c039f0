package dataplane

import (
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
)

// BenchmarkSides is BenchmarkPipeRatio with both workers in one goroutine, taking turns, and also with super-frames. It reports the time of each
// (host0 initiates) for 1 MiB, also as a multiple of one copy plus one CRC32c. Each message is timed, and the best 5
// % is reported, so that results can be compared on a busy machine.
func BenchmarkSides(b *testing.B) {
	const size = 1 << 20
	base := newBaseline(size)
	for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpRead} {
		for _, mtu := range []int{1500, 9000} {
			for _, how := range []string{"plain", "markers", "super"} {
				b.Run(fmt.Sprintf("%v/mtu=%d/%s", op, mtu, how), func(b *testing.B) {
					markers := how == "markers"
					p := mpa.Params{CRC: true, SendMarkers: markers, RecvMarkers: markers, IRD: 16, ORD: 16}
					cfg := link.PipeConfig{MTU: mtu, ChunkSize: 16 << 10, Slots: 2048, RxFrames: 2048, TxRing: 2048, Lend: true}
					if how == "super" {
						cfg.Super, cfg.Lend = link.SuperWhole, false
					}
					s, a, q := newLoad(b, cfg, p, op, size)
					s.load(a, q, 64)
					b.ReportAllocs()
					b.ResetTimer()
					var one []float64
					var sides [2][]float64
					for i := range b.N {
						if i%4 == 0 {
							one = append(one, base.one(i))
						}
						var sum [2]clock.Time
						q.left, q.done = 1, 0
						s.hosts[0].w.mark(a.lane)
						for q.done < 1 {
							for i, h := range s.hosts {
								start := clock.Now()
								h.w.turn()
								sum[i] += clock.Now() - start
							}
							s.now += 1000
						}
						for i := range sides {
							sides[i] = append(sides[i], float64(sum[i]))
						}
					}
					b.StopTimer()
					for i, side := range sides {
						best := sorted(side, len(side)/20)
						b.ReportMetric(best/1000, fmt.Sprintf("us-host%d", i))
						b.ReportMetric(best/sorted(one, len(one)/20), fmt.Sprintf("x-host%d", i))
					}
				})
			}
		}
	}
}
