package verbs

import (
	"crypto/rand"
	"runtime/debug"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestFault checks that memory that cannot be touched panics, as a worker expects, and leaves the table usable.
func TestFault(t *testing.T) {
	none := testenv.Mmap(t, 4096, unix.PROT_NONE)
	tb := NewTable(rand.Reader)
	bad := mustRegister(t, tb, pdA, none, 0, accessRW)
	good := mustRegister(t, tb, pdA, make([]byte, 8), 0, accessRW)
	q := NewQP(QPConfig{Num: 1, PD: pdA, Table: tb})
	q.Start(rdmap.Config{})
	add := rdmap.AtomicOp{Op: rdmap.OpFetchAdd, Data: 1}
	faults := func(f func()) (did bool) {
		defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
		defer func() { did = recover() != nil }()
		f()
		return false
	}
	if !faults(func() { q.Atomic(bad.STag(), 0, &add) }) {
		t.Error("an atomic on memory without access did not fault")
	}
	if !faults(func() {
		q.Place(&rdmap.Placement{Kind: rdmap.PlaceTagged, STag: bad.STag(), Op: rdmap.OpWrite}, marked.Bytes{B: []byte{1}})
	}) {
		t.Error("a Write to memory without access did not fault")
	}
	if !faults(func() {
		q.Place(&rdmap.Placement{Kind: rdmap.PlaceTagged, STag: bad.STag(), Op: rdmap.OpWrite}, marked.Bytes{B: make([]byte, 2000), First: 100})
	}) {
		t.Error("a Write with markers to memory without access did not fault")
	}
	for want := range uint64(2) {
		if old, err := q.Atomic(good.STag(), 0, &add); old != want || err != nil {
			t.Errorf("atomic after the fault: %d, %v; want %d", old, err, want)
		}
	}
}

// TestAtomicsAreAtomic lets four workers add to one word through two regions.
func TestAtomicsAreAtomic(t *testing.T) {
	const workers, each = 4, 2000
	tb := NewTable(rand.Reader)
	mem := make([]byte, 16)
	stags := []uint32{mustRegister(t, tb, pdA, mem, 0, accessRW).STag(), mustRegister(t, tb, pdA, mem, 0x100, accessRW).STag()}
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			q := NewQP(QPConfig{Num: uint32(w), PD: pdA, Table: tb})
			q.Start(rdmap.Config{})
			add := rdmap.AtomicOp{Op: rdmap.OpFetchAdd, Data: 1}
			for range each {
				if _, err := q.Atomic(stags[w%2], uint64(w%2)*0x100+8, &add); err != nil {
					panic(err)
				}
			}
		})
	}
	wg.Wait()
	q := NewQP(QPConfig{Num: 9, PD: pdA, Table: tb})
	if got, err := q.Atomic(stags[0], 8, &rdmap.AtomicOp{Op: rdmap.OpFetchAdd}); got != workers*each || err != nil {
		t.Errorf("sum %d, %v; want %d", got, err, workers*each)
	}
}
