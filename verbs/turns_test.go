package verbs

import (
	"testing"

	"github.com/iwarpd/iwarpd/rdmap"
)

// turns is a Turns whose marks pass when the test says so.
type turns struct{ marks, passed uint64 }

func (t *turns) Mark() uint64            { t.marks++; return t.marks }
func (t *turns) Passed(mark uint64) bool { return mark <= t.passed }

// TestInvalidateStores checks that an invalidation completes only when other workers do not store any more by its key,
// and what they have stored is in far memory. The QP's own stores precede it anyway.
func TestInvalidateStores(t *testing.T) {
	for _, own := range []bool{true, false} {
		a, _ := newFarPair(t)
		tu := new(turns)
		a.SetTurns(tu)
		w, err := a.table.AllocWindow(pdA)
		if err != nil {
			t.Fatal(err)
		}
		num := a.cfg.Num
		if !own {
			num += 8
		}
		if !a.table.bind(pdA, num, w.STag(), a.fmr.STag(), farBase, 64, RemoteWrite) {
			t.Fatal("not bound")
		}
		a.post(SendWR{ID: 1, Op: OpLocalInv, Flags: Signaled, Inv: w.STag()},
			SendWR{ID: 2, Op: rdmap.OpWrite, Flags: Signaled})
		a.turn(a.side, 1000)
		a.poll()
		if a.table.Lookup(w.STag()) != nil {
			t.Fatal("the window is valid")
		}
		if own {
			a.wantOutcomes(t, []outcome{{1, WCSuccess}, {2, WCSuccess}})
			continue
		}
		a.wantOutcomes(t, nil)
		if !a.Invalidates() {
			t.Error("nobody learns that it must be polled")
		}
		ended := false
		a.m.ops = append(a.m.ops, func() { ended = true }) // the other worker's, in the turn that ends
		tu.passed = 1
		a.poll()
		a.wantOutcomes(t, nil)
		for a.m.step() {
		}
		a.poll()
		a.wantOutcomes(t, []outcome{{1, WCSuccess}, {2, WCSuccess}})
		if !ended || a.Invalidates() {
			t.Error("it did not wait, or still does")
		}
	}
}
