package verbs

import (
	"crypto/rand"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestSRQ checks that two QPs take receives from one queue, and that ERROR of one QP does not affect the queue.
func TestSRQ(t *testing.T) {
	var shared recvs
	a1, b1 := newPair(t, 4096, QPConfig{})
	a2, b2 := newPair(t, 4096, QPConfig{})
	for _, b := range []*side{b1, b2} {
		b.cfg.Recvs, b.cfg.Shared = &shared, true
	}
	for i := range uint64(6) {
		shared.q = append(shared.q, RecvWR{ID: i})
	}
	for _, a := range []*side{a1, a2} {
		a.post(SendWR{ID: 1, Op: rdmap.OpSend}, SendWR{ID: 2, Op: rdmap.OpSend})
	}
	run(a1, b1, 1000)
	run(a2, b2, 1000)
	b1.Error()
	run(a1, b1, 1000)
	got := [][]outcome{outcomes(b1.take()), outcomes(b2.take())}
	want := [][]outcome{{{0, WCSuccess}, {1, WCSuccess}}, {{2, WCSuccess}, {3, WCSuccess}}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	if len(shared.q) != 2 {
		t.Errorf("%d receives are left", len(shared.q))
	}
}

// TestSRQOutOfOrder checks that a Send out of order takes no receives that other QPs need.
func TestSRQOutOfOrder(t *testing.T) {
	for _, far := range []bool{false, true} {
		shared := recvs{q: make([]RecvWR, 64)}
		q := NewQP(QPConfig{Num: 1, PD: pdA, Table: NewTable(rand.Reader), MaxSGE: 1, Recvs: &shared, Shared: true})
		q.Start(rdmap.Config{})
		h := ddp.Untagged{Last: true, ULP: 0x43, MSN: firstMSN}
		if far {
			h.MSN += 40
		}
		if placed := q.Stream().HandleEarly(1, h.Append(nil)); placed == far || far && len(shared.q) != 64 {
			t.Errorf("MSN %d: placed %v, %d receives left", h.MSN, placed, len(shared.q))
		}
	}
}
