package verbs

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/rdmap"
)

// TestRTRTakesNoReceive checks that the Send that only reports that its sender is ready has a message number, but
// consumes no receive and has no completion.
func TestRTRTakesNoReceive(t *testing.T) {
	for _, rtr := range []rdmap.Op{rdmap.OpSend, rdmap.OpWrite, rdmap.OpRead} {
		a, b := newPair(t, 4096, QPConfig{})
		a.Stream().SendRTR(rtr)
		b.Stream().ExpectRTR(rtr)
		b.postRecv(RecvWR{ID: 50, SGEs: []SGE{b.sge(0, 64)}}, RecvWR{ID: 51, SGEs: []SGE{b.sge(64, 64)}})
		for i := range uint64(2) {
			a.post(SendWR{ID: i, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.sge(0, 10)}})
		}
		run(a, b, 1400)
		want := []outcome{{50, WCSuccess}, {51, WCSuccess}}
		if diff := cmp.Diff(want, outcomes(b.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("%v (-want +got):\n%s", rtr, diff)
		}
		if diff := cmp.Diff([]outcome{{0, WCSuccess}, {1, WCSuccess}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("%v: sender (-want +got):\n%s", rtr, diff)
		}
	}
}
