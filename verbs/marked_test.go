package verbs

import (
	"bytes"
	"crypto/rand"
	"testing"

	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestPlaceMarked checks that a receive gets the bytes without the markers, however its SGEs divide them.
func TestPlaceMarked(t *testing.T) {
	const n, base = 2000, 0x1000
	mem, payload, with := make([]byte, n), make([]byte, n), make([]byte, n+40)
	rand.Read(payload)
	tb := NewTable(rand.Reader)
	mr := mustRegister(t, tb, pdA, mem, base, accessRW)
	for first := 4; first <= 508; first += 4 {
		for _, cut := range []uint32{1, 3, 500, 508, 511, 600, 1999} {
			r := &recvs{q: []RecvWR{{ID: 1, SGEs: []SGE{
				{Addr: base, Len: cut, LKey: mr.STag()}, {Addr: base + uint64(cut), Len: n - cut, LKey: mr.STag()},
			}}}}
			q := NewQP(QPConfig{Num: 1, PD: pdA, Table: tb, MaxSGE: 2, Recvs: r})
			q.Start(rdmap.Config{})
			id, _, ok := q.Recv(firstMSN)
			if !ok {
				t.Fatal("no receive")
			}
			clear(mem)
			_, _, size := crc32c.Mark(with, 0, payload, first, 4)
			if err := q.Place(&rdmap.Placement{Kind: rdmap.PlaceRecv, Recv: id}, marked.Bytes{B: with[:size], First: first}); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(mem, payload) {
				t.Fatalf("markers from %d, cut at %d: other bytes are placed", first, cut)
			}
			if got := q.Stats().BytesPlaced; got != n {
				t.Fatalf("BytesPlaced = %d; want %d", got, n)
			}
		}
	}
}
