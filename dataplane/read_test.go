package dataplane

import (
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestReadFrames checks that small Reads, one after the other, take one frame of each side and no ACKs of their own,
// and two turns of the initiator and one of the target that have work.
func TestReadFrames(t *testing.T) {
	const reads = 100
	s, a, q := newLoad(t, link.PipeConfig{MTU: 1500}, mpa.Params{CRC: true, IRD: 16, ORD: 16}, rdmap.OpRead, 64)
	for range 64 { // past the first segments, which are acknowledged at once
		s.load(a, q, 1)
	}
	var before [2]uint64
	for i, h := range s.hosts {
		before[i] = h.w.stats.TxFrames
	}
	for range reads {
		q.left, q.done = 1, 0
		s.hosts[0].w.mark(a.lane)
		for _, i := range []int{0, 1, 0} {
			s.hosts[i].w.turn()
			s.now += 5000
		}
		if q.done != 1 {
			t.Fatal("a Read is not complete after three turns")
		}
	}
	for i, h := range s.hosts {
		if n := h.w.stats.TxFrames - before[i]; n != reads {
			t.Errorf("host %d has sent %d frames for %d Reads", i, n, reads)
		}
	}
}

// BenchmarkReadTurns measures the turns of small Reads, one after the other, by the time of the best twentieth: from the doorbell to the
// request's frame, from there to the response's, and from there to the completion.
func BenchmarkReadTurns(b *testing.B) {
	s, a, q := newLoad(b, link.PipeConfig{MTU: 1500}, mpa.Params{CRC: true, IRD: 16, ORD: 16}, rdmap.OpRead, 64)
	s.load(a, q, 64)
	var times [4][]float64
	b.ResetTimer()
	for range b.N {
		q.left, q.done = 1, 0
		s.hosts[0].w.mark(a.lane)
		for i, host := range []int{0, 1, 0, 1} { // the last one has no work
			start := clock.Now()
			s.hosts[host].w.turn()
			times[i] = append(times[i], float64(clock.Now()-start))
			s.now += 2500
		}
		if q.done != 1 {
			b.Fatal("a Read is not complete after three turns")
		}
	}
	b.StopTimer()
	for i, unit := range []string{"ns-request", "ns-response", "ns-completion", "ns-idle"} {
		b.ReportMetric(sorted(times[i], len(times[i])/20), unit)
	}
}
