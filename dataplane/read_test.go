package dataplane

import (
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
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
