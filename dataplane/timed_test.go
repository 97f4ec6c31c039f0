package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/histogram"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestTimes checks that Reads over a wire of 3 ms in each direction are counted with at
// least 6 ms, and so are round trips, over both transports.
func TestTimes(t *testing.T) {
	const way, reads = 3 * time.Millisecond, 5
	for _, overSCTP := range []bool{false, true} {
		wire := impair.Config{Delay: way}
		s := newSim(t, link.PipeConfig{AtoB: wire, BtoA: wire})
		qa, qb := newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64)
		a := s.connect(overSCTP, qa, qb)
		w := s.hosts[0].w
		for i := range reads {
			s.post(a, qa, verbs.SendWR{ID: uint64(i), Op: rdmap.OpRead, SGEs: qa.sge(0, 10), RKey: qb.reg.STag(), Remote: 0x10000})
			s.until("a Read", func() bool { return len(qa.wcs) == i+1 })
		}
		for name, h := range map[string]*histogram.Histogram{"completions": &w.times.completions, "round trips": &w.times.rtts} {
			c := h.Counts()
			if name == "completions" && c.Total() != reads || c.Total() == 0 {
				t.Errorf("SCTP %v: %d %s", overSCTP, c.Total(), name)
			}
			for i, n := range c.Buckets {
				if n > 0 && histogram.Bound(i) < 2*way {
					t.Errorf("SCTP %v: %d %s of at most %v", overSCTP, n, name, histogram.Bound(i))
				}
			}
			if mean := c.Sum / time.Duration(max(c.Total(), 1)); mean < 2*way || mean > 100*way {
				t.Errorf("SCTP %v: %s take %v on average; want some more than %v", overSCTP, name, mean, 2*way)
			}
		}
	}
}
