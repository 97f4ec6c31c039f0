package verbs

import (
	"runtime"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestAtomicWaits checks that an atomic does not touch memory while another one is in progress, on any QP and region
// (RFC 7306 section 5.3).
func TestAtomicWaits(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{})
	a.Start(rdmap.Config{})
	a.mem[0] = 7
	a.table.atomics.Lock() // as the other atomic does
	done := make(chan uint64, 1)
	go func() {
		old, _ := a.Atomic(a.mr.STag(), sideBase, &rdmap.AtomicOp{Op: rdmap.OpFetchAdd, Data: 1})
		done <- old
	}()
	for !blocked("sync.Mutex.Lock", "verbs.(*QP).Atomic") {
		select {
		case old := <-done:
			t.Fatalf("it is done, of %d, during another one", old)
		default:
			runtime.Gosched()
		}
	}
	a.mem[0] = 9
	a.table.atomics.Unlock()
	if old := <-done; old != 9 || a.mem[0] != 10 {
		t.Errorf("of %d it makes %d; want 9 and 10", old, a.mem[0])
	}
}

// blocked reports whether a goroutine is blocked in function f, for the reason at the top of its stack.
func blocked(reason, f string) bool {
	b := make([]byte, 1<<20)
	for g := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
		head, calls, _ := strings.Cut(g, "\n")
		if strings.Contains(head, "["+reason) && strings.Contains(calls, f) {
			return true
		}
	}
	return false
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
