package verbs

import (
	"runtime"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestAtomicWaits checks that atomics of two QPs, which have the same word in different regions, do not touch it while another atomic is in
// progress (RFC 7306 sections 5 and 5.3), and then take turns.
func TestAtomicWaits(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{})
	a.Start(rdmap.Config{})
	b := NewQP(QPConfig{Num: 2, PD: pdA, Table: a.table})
	b.Start(rdmap.Config{})
	again := mustRegister(t, a.table, pdA, a.mem, 0, accessRW)
	a.mem[0] = 7
	a.table.atomics.Lock() // as the other atomic does
	done := make(chan uint64, 2)
	add := func(q *QP, stag uint32, to uint64) {
		old, _ := q.Atomic(stag, to, &rdmap.AtomicOp{Op: rdmap.OpFetchAdd, Data: 1})
		done <- old
	}
	go add(a.QP, a.mr.STag(), sideBase)
	go add(b, again.STag(), 0)
	for blocked("sync.Mutex.Lock", "verbs.(*QP).Atomic") < 2 {
		select {
		case old := <-done:
			t.Fatalf("one is done, of %d, during another one", old)
		default:
			runtime.Gosched()
		}
	}
	a.mem[0] = 9
	a.table.atomics.Unlock()
	if x, y := <-done, <-done; min(x, y) != 9 || max(x, y) != 10 || a.mem[0] != 11 {
		t.Errorf("of %d and %d they make %d; want 9, 10 and 11", x, y, a.mem[0])
	}
}

// blocked returns how many goroutines are blocked in function f, for the reason at the top of their stacks.
func blocked(reason, f string) (n int) {
	b := make([]byte, 1<<20)
	for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
		head, calls, _ := strings.Cut(g, "\n")
		if strings.Contains(head, "["+reason) && strings.Contains(calls, f) {
			n++
		}
	}
	return n
}

// TestCmpSwapAlignment checks that the target of a CmpSwap must be aligned like that of a FetchAdd, and that it stays
// unchanged otherwise (RFC 7306 section 5.1.2).
func TestCmpSwapAlignment(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{})
	a.Start(rdmap.Config{})
	swap := rdmap.AtomicOp{Op: rdmap.OpCmpSwap, Data: ^uint64(0), Mask: ^uint64(0), CmpMask: ^uint64(0)}
	for off := range uint64(57) {
		clear(a.mem)
		want := term.ErrStream
		if off%8 == 0 {
			want = nil
		}
		if _, err := a.Atomic(a.mr.STag(), sideBase+off, &swap); err != want {
			t.Errorf("CmpSwap at %d: %v; want %v", off, err, want)
		}
		if changed := a.mem[off] != 0; changed != (want == nil) {
			t.Errorf("CmpSwap at %d: memory changed: %v", off, changed)
		}
	}
}
