package verbs

import (
	"crypto/rand"
	"runtime/debug"
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
