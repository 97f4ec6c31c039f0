package rdmap

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVerbs(t *testing.T) {
	a, b := newPair(Config{IRD: 2, ORD: 2})
	b.mem.regions[7] = &region{base: 0x1000, buf: make([]byte, 1000), write: true, read: true}
	a.mem.regions[9] = &region{base: 0x2000, buf: make([]byte, 1000)}
	for range 8 {
		b.mem.recvs = append(b.mem.recvs, make([]byte, 600))
	}
	data := fill(make([]byte, 500), 1)
	for id := range uint32(8) {
		a.mem.sources[id] = data
	}
	a.post(t, WR{ID: 0, Op: OpWrite, Len: 500, STag: 7, TO: 0x1010})
	a.post(t, WR{ID: 1, Op: OpSend, Len: 500})
	a.post(t, WR{ID: 2, Op: OpRead, Len: 400, STag: 7, TO: 0x1020, SinkSTag: 9, SinkTO: 0x2001})
	a.post(t, WR{ID: 3, Op: OpFetchAdd, STag: 7, TO: 0x1000, Add: 5})
	a.post(t, WR{ID: 4, Op: OpCmpSwap, STag: 7, TO: 0x1000, Cmp: 5, CmpMask: ^uint64(0), Swap: 9, SwapMask: ^uint64(0)})
	a.post(t, WR{ID: 5, Op: OpImmSE, Imm: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}})
	a.post(t, WR{ID: 6, Op: OpSendSEInv, Inv: 7, Fence: true})
	a.post(t, WR{ID: 7, Op: OpSendSE, Len: 1})
	pump(t, a, b, testMULPDU)

	want := []Completion{
		{ID: 0, Op: OpWrite, Len: 500}, {ID: 1, Op: OpSend, Len: 500}, {ID: 2, Op: OpRead, Len: 400},
		{ID: 3, Op: OpFetchAdd, Len: 8}, {ID: 4, Op: OpCmpSwap, Len: 8}, {ID: 5, Op: OpImmSE, Len: 8},
		{ID: 6, Op: OpSendSEInv}, {ID: 7, Op: OpSendSE, Len: 1},
	}
	if d := cmp.Diff(want, a.completions()); d != "" {
		t.Errorf("completions of the sender (-want +got):\n%s", d)
	}
	want = []Completion{
		{Kind: CompRecv, ID: 0, Op: OpSend, Len: 500},
		{Kind: CompRecv, ID: 1, Op: OpImmSE, Imm: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}, Solicited: true},
		{Kind: CompRecv, ID: 2, Op: OpSendSEInv, InvSTag: 7, Solicited: true},
		{Kind: CompRecv, ID: 3, Op: OpSendSE, Len: 1, Solicited: true},
	}
	if d := cmp.Diff(want, b.completions()); d != "" {
		t.Errorf("completions of the receiver (-want +got):\n%s", d)
	}
	if !bytes.Equal(b.mem.regions[7].buf[0x10:][:500], data) || !bytes.Equal(b.mem.recvs[0][:500], data) {
		t.Error("written or sent octets differ")
	}
	if !bytes.Equal(a.mem.regions[9].buf[1:][:400], data[0x10:][:400]) {
		t.Error("octets read differ")
	}
	if got := be.Uint64(b.mem.regions[7].buf); got != 9 || a.mem.results[3] != 0 || a.mem.results[4] != 5 {
		t.Errorf("atomics left %d and returned %v; want 9, 0 and 5", got, a.mem.results)
	}
	if !b.mem.regions[7].gone {
		t.Error("the STag is still valid")
	}
}
