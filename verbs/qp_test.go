package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestVerbs does each operation once and looks at memory and completions.
func TestVerbs(t *testing.T) {
	a, b := newPair(t, 64<<10, QPConfig{})
	fill := func(s *side, seed byte) {
		for i := range s.mem {
			s.mem[i] = byte(i*7) + seed
		}
	}
	fill(a, 1)
	fill(b, 2)
	rkey := b.mr.STag()
	win, err := b.table.AllocWindow(pdA)
	if err != nil {
		t.Fatal(err)
	}
	bound := win.STag()
	b.post(SendWR{ID: 90, Op: OpBindMW, Flags: Signaled, RKey: bound, SGEs: []SGE{b.sge(0, 64)}, Access: RemoteWrite})
	run(a, b, 1400)
	if diff := cmp.Diff([]WC{{ID: 90, Op: WCBindMW, QP: 2}}, b.take()); diff != "" {
		t.Fatalf("bind (-want +got):\n%s", diff)
	}

	b.postRecv(
		RecvWR{ID: 50, SGEs: []SGE{b.sge(1000, 10), b.sge(3000, 0), b.sge(2000, 5000)}},
		RecvWR{ID: 51, SGEs: []SGE{b.sge(8000, 100)}},
		RecvWR{ID: 52}, RecvWR{ID: 53}, RecvWR{ID: 54},
	)
	word := func(s *side, off int) []byte { return s.mem[off : off+8] }
	binary.NativeEndian.PutUint64(word(b, 16000), 40)
	wantSend := append(append([]byte(nil), a.mem[0:1000]...), a.mem[5000:8000]...)
	wantWrite := append([]byte(nil), a.mem[9000:9700]...)
	wantRead := append([]byte(nil), b.mem[20000:26000]...)
	a.post(
		SendWR{ID: 1, Op: rdmap.OpSend, Flags: Signaled, SGEs: []SGE{a.sge(0, 1000), a.sge(5000, 3000)}},
		SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: []SGE{a.sge(9000, 700)}, RKey: rkey, Remote: sideBase + 12000},
		SendWR{ID: 3, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(30000, 6000)}, RKey: rkey, Remote: sideBase + 20000},
		SendWR{ID: 4, Op: rdmap.OpSendInv, Flags: Signaled | Inline | Solicited, Inline: []byte("inline data"), Inv: bound},
		SendWR{ID: 5, Op: rdmap.OpFetchAdd, Flags: Signaled, SGEs: []SGE{a.sge(40000, 8)}, RKey: rkey, Remote: sideBase + 16000, CompareAdd: 2},
		SendWR{ID: 6, Op: rdmap.OpCmpSwap, Flags: Signaled, SGEs: []SGE{a.sge(40008, 8)}, RKey: rkey, Remote: sideBase + 16000, CompareAdd: 42, Swap: 99, CompareMask: math.MaxUint64, SwapMask: math.MaxUint64},
		SendWR{ID: 7, Op: rdmap.OpImm, Flags: Signaled, Imm: 0x0102030405060708},
		SendWR{ID: 8, Op: rdmap.OpImm, Flags: Signaled | Solicited, Imm: 9},
		SendWR{ID: 9, Op: rdmap.OpSend, Flags: Signaled},
		SendWR{ID: 10, Op: rdmap.OpRead, Flags: Signaled | Fence},
	)
	run(a, b, 1400)

	wantA := []WC{
		{ID: 1, Op: WCSend, QP: 1},
		{ID: 3, Op: WCRead, QP: 1, Len: 6000},
		{ID: 4, Op: WCSend, QP: 1},
		{ID: 5, Op: WCFetchAdd, QP: 1, Len: 8},
		{ID: 6, Op: WCCmpSwap, QP: 1, Len: 8},
		{ID: 7, Op: WCImm, QP: 1},
		{ID: 8, Op: WCImm, QP: 1},
		{ID: 9, Op: WCSend, QP: 1},
		{ID: 10, Op: WCRead, QP: 1},
	}
	if diff := cmp.Diff(wantA, a.take()); diff != "" {
		t.Errorf("completions of A (-want +got):\n%s", diff)
	}
	wantB := []WC{
		{ID: 50, Op: WCRecv, QP: 2, Len: 4000},
		{ID: 51, Op: WCRecv, QP: 2, Len: 11, InvKey: bound, Flags: WCWithInv | WCSolicited},
		{ID: 52, Op: WCRecv, QP: 2, Imm: 0x0102030405060708, Flags: WCWithImm},
		{ID: 53, Op: WCRecv, QP: 2, Imm: 9, Flags: WCWithImm | WCSolicited},
		{ID: 54, Op: WCRecv, QP: 2},
	}
	if diff := cmp.Diff(wantB, b.take()); diff != "" {
		t.Errorf("completions of B (-want +got):\n%s", diff)
	}
	for _, c := range []struct {
		name      string
		got, want []byte
	}{
		{"Send, first piece", b.mem[1000:1010], wantSend[:10]},
		{"Send, last piece", b.mem[2000:5990], wantSend[10:]},
		{"Write", b.mem[12000:12700], wantWrite},
		{"Read", a.mem[30000:36000], wantRead},
		{"inline", b.mem[8000:8011], []byte("inline data")},
	} {
		if !bytes.Equal(c.got, c.want) {
			t.Errorf("%s: memory differs", c.name)
		}
	}
	for off, want := range map[int]uint64{40000: 40, 40008: 42} {
		if got := binary.NativeEndian.Uint64(word(a, off)); got != want {
			t.Errorf("atomic's result at %d: %d; want %d", off, got, want)
		}
	}
	if got := binary.NativeEndian.Uint64(word(b, 16000)); got != 99 {
		t.Errorf("target of the atomics: %d; want 99", got)
	}
	if win.Valid() {
		t.Error("the window is still valid after Send with Invalidate")
	}
	if a.State() != StateRTS || b.State() != StateRTS {
		t.Errorf("states %v, %v", a.State(), b.State())
	}
}

// TestModel moves random batches of every verb both ways and compares all memory
// with a model after each batch. Each operation of a batch has a stretch of
// memory of its own on both sides, so that the batch has one outcome.
func TestModel(t *testing.T) {
	rng := testenv.Rand(t)
	const stretch, perBatch = 8192, 8
	a, b := newPair(t, 2*perBatch*stretch, QPConfig{SQDepth: 4, RQDepth: 16, SigAll: true})
	sides := [2]*side{a, b}
	model := [2][]byte{bytes.Clone(a.mem), bytes.Clone(b.mem)}
	id := uint64(0)
	for range 300 {
		mulpdu := 128 + rng.IntN(1400)
		var want [2][]WC
		for s := range 2 {
			for k := range 1 + rng.IntN(perBatch) {
				id++
				me, peer := sides[s], sides[1-s]
				// Stretches s*perBatch+k: the one's operations never meet the other's.
				lo := (s*perBatch + k) * stretch
				for range 64 { // new content to move
					p := lo + rng.IntN(stretch)
					v := byte(rng.Uint32())
					me.mem[p], model[s][p] = v, v
				}
				modelOp(rng, id, me, peer, model[s][lo:lo+stretch], model[1-s][lo:lo+stretch], lo, &want[s], &want[1-s])
			}
		}
		run(a, b, mulpdu)
		for s, me := range sides {
			var sq, rq, wantSQ, wantRQ []WC
			split := func(wcs []WC, sq, rq *[]WC) {
				for _, w := range wcs {
					if w.IsRecv() {
						*rq = append(*rq, w)
					} else {
						*sq = append(*sq, w)
					}
				}
			}
			split(me.take(), &sq, &rq)
			split(want[s], &wantSQ, &wantRQ)
			if diff := cmp.Diff(wantSQ, sq); diff != "" {
				t.Fatalf("send completions of side %d (-want +got):\n%s", s, diff)
			}
			if diff := cmp.Diff(wantRQ, rq); diff != "" {
				t.Fatalf("receive completions of side %d (-want +got):\n%s", s, diff)
			}
			if !bytes.Equal(me.mem, model[s]) {
				for i := range me.mem {
					if me.mem[i] != model[s][i] {
						t.Fatalf("memory of side %d differs first at %d (stretch %d)", s, i, i/stretch)
					}
				}
			}
		}
	}
}

// modelOp posts one random operation of me and does it in the model.
func modelOp(rng *rand.Rand, id uint64, me, peer *side, mine, theirs []byte, lo int, wcs, peerWCs *[]WC) {
	half := len(mine) / 2
	wr := SendWR{ID: id, RKey: peer.mr.STag()}
	wc := WC{ID: id, QP: me.Num()}
	// Up to 16 pieces of the first half of the stretch are read; what is
	// written goes to the second half.
	var data []byte
	for range rng.IntN(17) {
		off := rng.IntN(half)
		n := rng.IntN(min(300, half-off+1))
		wr.SGEs = append(wr.SGEs, me.sge(lo+off, n))
		data = append(data, mine[off:off+n]...)
	}
	recv := func(op rdmap.Op) {
		var sges []SGE
		left, off := data, half
		for len(left) > 0 || rng.IntN(3) == 0 && len(sges) < 15 {
			n := rng.IntN(500)
			if len(sges) >= 12 {
				n = len(left) + 5
			}
			sges = append(sges, peer.sge(lo+off, n))
			left = left[copy(theirs[off:off+n], left):]
			off += n
		}
		peer.postRecv(RecvWR{ID: id, SGEs: sges})
		r := WC{ID: id, Op: WCRecv, QP: peer.Num(), Len: uint32(len(data))}
		switch op {
		case rdmap.OpSendSE, rdmap.OpImmSE:
			r.Flags = WCSolicited
		}
		if op == rdmap.OpImm || op == rdmap.OpImmSE {
			r.Len, r.Imm = 0, wr.Imm
			r.Flags |= WCWithImm
		}
		*peerWCs = append(*peerWCs, r)
	}
	switch op := []rdmap.Op{rdmap.OpWrite, rdmap.OpRead, rdmap.OpSend, rdmap.OpSendSE, rdmap.OpImm, rdmap.OpImmSE, rdmap.OpFetchAdd, rdmap.OpCmpSwap}[rng.IntN(8)]; op {
	case rdmap.OpWrite:
		off := half + rng.IntN(half-min(len(data), half)+1)
		data = data[:min(len(data), half)]
		for total := 0; ; { // cut the list where the data was cut
			total = 0
			for _, g := range wr.SGEs {
				total += int(g.Len)
			}
			if total <= len(data) {
				break
			}
			data = data[:total-int(wr.SGEs[len(wr.SGEs)-1].Len)]
			wr.SGEs = wr.SGEs[:len(wr.SGEs)-1]
		}
		wr.Op, wr.Remote, wc.Op = op, sideBase+uint64(lo+off), WCWrite
		copy(theirs[off:], data)
	case rdmap.OpRead:
		n := rng.IntN(half)
		off, from := half+rng.IntN(half-n), rng.IntN(half-n)
		wr.Op, wr.SGEs, wr.Remote = op, []SGE{me.sge(lo+off, n)}, sideBase+uint64(lo+from)
		wc.Op, wc.Len = WCRead, uint32(n)
		copy(mine[off:off+n], theirs[from:])
	case rdmap.OpSend, rdmap.OpSendSE:
		wr.Op, wc.Op = op, WCSend
		if rng.IntN(3) == 0 {
			data = data[:min(len(data), 256)]
			wr.SGEs, wr.Inline, wr.Flags = nil, bytes.Clone(data), Inline
		}
		recv(op)
	case rdmap.OpImm, rdmap.OpImmSE:
		wr.Op, wr.SGEs, wr.Imm, wc.Op = op, nil, rng.Uint64(), WCImm
		data = nil
		recv(op)
	case rdmap.OpFetchAdd, rdmap.OpCmpSwap:
		res, target := half+8*rng.IntN(half/8), half+8*rng.IntN(half/8)
		wr.Op, wr.SGEs, wr.Remote = op, []SGE{me.sge(lo+res, 8)}, sideBase+uint64(lo+target)
		old := binary.NativeEndian.Uint64(theirs[target:])
		now := old
		wc.Op, wc.Len = WCFetchAdd, 8
		if op == rdmap.OpFetchAdd {
			wr.CompareAdd = rng.Uint64()
			now += wr.CompareAdd
		} else {
			wc.Op = WCCmpSwap
			wr.CompareAdd, wr.Swap, wr.SwapMask = old, rng.Uint64(), rng.Uint64()
			wr.CompareMask = rng.Uint64()
			now = old&^wr.SwapMask | wr.Swap&wr.SwapMask
			if rng.IntN(2) == 0 && wr.CompareMask != 0 {
				wr.CompareAdd = ^old
				now = old
			}
		}
		binary.NativeEndian.PutUint64(theirs[target:], now)
		binary.NativeEndian.PutUint64(mine[res:], old)
	}
	me.post(wr)
	*wcs = append(*wcs, wc)
}

// TestBadWR posts a good Read, the bad work request, and a good Send behind it:
// the Read completes, the bad one tells why, the rest is flushed, and the peer
// gets a Terminate.
func TestBadWR(t *testing.T) {
	many := make([]SGE, 17)
	tests := []struct {
		name string
		wr   func(a, b *side) SendWR
		want WCStatus
		op   WCOp
	}{
		{"undecodable", func(a, b *side) SendWR { return SendWR{Op: OpInvalid} }, WCLocQPOpErr, WCSend},
		{"terminate", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpTerminate} }, WCLocQPOpErr, WCSend},
		{"opcode 0", func(a, b *side) SendWR { return SendWR{} }, WCLocQPOpErr, WCSend},
		{"17 SGEs", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpSend, SGEs: many} }, WCLocQPOpErr, WCSend},
		{"inline too long", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, Flags: Inline, Inline: make([]byte, 257)}
		}, WCLocQPOpErr, WCSend},
		{"inline and SGEs", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, Flags: Inline, SGEs: []SGE{a.sge(0, 1)}}
		}, WCLocQPOpErr, WCSend},
		{"inline Read", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpRead, Flags: Inline} }, WCLocQPOpErr, WCRead},
		{"Read of two sinks", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 1), a.sge(8, 1)}, RKey: b.mr.STag(), Remote: sideBase}
		}, WCLocQPOpErr, WCRead},
		{"atomic without SGE", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpFetchAdd} }, WCLocQPOpErr, WCFetchAdd},
		{"atomic of 4", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpCmpSwap, SGEs: []SGE{a.sge(0, 4)}}
		}, WCLocLenErr, WCCmpSwap},
		{"Imm with SGE", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpImm, SGEs: []SGE{a.sge(0, 4)}}
		}, WCLocQPOpErr, WCImm},
		{"lkey 0", func(a, b *side) SendWR { return SendWR{Op: rdmap.OpSend, SGEs: []SGE{{sideBase, 1, 0}}} }, WCLocProtErr, WCSend},
		{"lkey of the peer", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, SGEs: []SGE{{sideBase, 1, b.mr.STag()}}}
		}, WCLocProtErr, WCSend},
		{"second SGE out of bounds", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8), a.sge(len(a.mem)-1, 2)}, RKey: b.mr.STag(), Remote: sideBase}
		}, WCLocProtErr, WCWrite},
		{"Read sink not writable", func(a, b *side) SendWR {
			r, _ := a.table.Register(pdA, a.mem, 0, 0)
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{{0, 8, r.STag()}}, RKey: b.mr.STag(), Remote: sideBase}
		}, WCLocProtErr, WCRead},
		{"over 2^31-1 octets", func(a, b *side) SendWR {
			huge, _ := a.table.Register(pdA, make([]byte, 1<<28), 0, 0) // never touched
			wr := SendWR{Op: rdmap.OpWrite, RKey: b.mr.STag(), Remote: sideBase}
			for range 8 {
				wr.SGEs = append(wr.SGEs, SGE{0, 1 << 28, huge.STag()})
			}
			return wr
		}, WCLocLenErr, WCWrite},
		{"local invalidate of a plain region", func(a, b *side) SendWR {
			return SendWR{Op: OpLocalInv, Inv: a.mr.STag()}
		}, WCLocAccessErr, WCLocalInv},
		{"local invalidate with SGE", func(a, b *side) SendWR {
			return SendWR{Op: OpLocalInv, SGEs: []SGE{a.sge(0, 8)}}
		}, WCLocQPOpErr, WCLocalInv},
		{"bind of a region", func(a, b *side) SendWR {
			return SendWR{Op: OpBindMW, RKey: a.mr.STag(), SGEs: []SGE{a.sge(0, 8)}, Access: RemoteRead}
		}, WCMWBindErr, WCBindMW},
		{"registration of a plain region", func(a, b *side) SendWR {
			return SendWR{Op: OpReg, RKey: a.mr.STag(), SGEs: []SGE{{0, 8, 0}}, Access: RemoteRead}
		}, WCMWBindErr, WCReg},
		{"registration without SGE", func(a, b *side) SendWR { return SendWR{Op: OpReg} }, WCLocQPOpErr, WCReg},
		{"remote address wraps", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: math.MaxUint64 - 3}
		}, WCLocQPOpErr, WCWrite},
		{"inline Write wraps", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, Flags: Inline, Inline: []byte("12345678"), RKey: b.mr.STag(), Remote: math.MaxUint64 - 3}
		}, WCLocQPOpErr, WCWrite},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPair(t, 4096, QPConfig{})
			a.postRecv(RecvWR{ID: 70}, RecvWR{ID: 71})
			bad := tt.wr(a, b)
			bad.ID = 2
			a.post(
				SendWR{ID: 1, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(0, 64)}, RKey: b.mr.STag(), Remote: sideBase},
				bad,
				SendWR{ID: 3, Op: rdmap.OpSend},
			)
			run(a, b, 1000)
			if a.State() != StateTerminate || !errors.Is(a.Err(), term.ErrRDMAPLocal) {
				t.Errorf("state %v, error %v", a.State(), a.Err())
			}
			if b.State() != StateTerminate || remoteErr(b.QP) != term.ErrRDMAPLocal {
				t.Errorf("peer: state %v, error %v", b.State(), b.Err())
			}
			a.Error()
			run(a, b, 1000)
			got := a.take()
			want := []outcome{{1, WCSuccess}, {2, tt.want}, {3, WCFlushErr}, {70, WCFlushErr}, {71, WCFlushErr}}
			if diff := cmp.Diff(want, outcomes(got), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("completions (-want +got):\n%s", diff)
			}
			if len(got) > 1 && got[1].Op != tt.op {
				t.Errorf("opcode of the completion: %v; want %v", got[1].Op, tt.op)
			}
			if len(got) > 1 {
				if e, remote := got[1].Terminate(); e != term.ErrRDMAPLocal || remote {
					t.Errorf("vendor error %#x", got[1].Vendor)
				}
			}
		})
	}
}

// TestStats follows the counters through a success, a refusal and a flush.
func TestStats(t *testing.T) {
	a, b := newPair(t, 64, QPConfig{SQDepth: 3, RQDepth: 5})
	if c := a.Config(); c.SQDepth != 4 || c.RQDepth != 8 || a.PD() != pdA || a.Num() != 1 {
		t.Errorf("made of %+v", c)
	}
	b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 8)}}, RecvWR{ID: 61})
	a.post(
		SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 8)}},
		SendWR{ID: 2, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: 99},
		SendWR{ID: 3, Op: rdmap.OpSend},
	)
	a.PullSend(8)
	if s, r := a.Outstanding(); s != 3 || r != 0 {
		t.Errorf("outstanding %d and %d", s, r)
	}
	run(a, b, 1000)
	a.Error()
	b.Error()
	run(a, b, 1000)
	if diff := cmp.Diff(Stats{Sends: 3, Completions: 1, LocalErrors: 1}, a.Stats()); diff != "" {
		t.Errorf("sender (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Stats{Recvs: 1, Completions: 2, Flushed: 1, ProtectionErrors: 1, OctetsPlaced: 8}, b.Stats()); diff != "" {
		t.Errorf("receiver (-want +got):\n%s", diff)
	}
}

func TestVendor(t *testing.T) {
	for _, e := range []*term.Error{term.ErrRDMAPLocal, term.ErrMPACRC, term.ErrReadAccess, term.ErrTooLong} {
		for _, remote := range []bool{false, true} {
			wc := WC{Status: WCFlushErr, Vendor: Vendor(e, remote)}
			if got, r := wc.Terminate(); got != e || r != remote {
				t.Errorf("%v, remote %v: %v, %v", e, remote, got, r)
			}
		}
	}
	wc := WC{Vendor: Vendor(nil, true)}
	if e, _ := wc.Terminate(); wc.Vendor != 0 || e != nil {
		t.Errorf("none: %#x", wc.Vendor)
	}
	for _, w := range []WC{{}, {Flags: WCWithImm}, {Flags: WCSolicited}, {Status: WCLocLenErr}} {
		if w.Wakes() != (w.Flags == WCSolicited || w.Status != 0) {
			t.Errorf("%+v wakes: %v", w, w.Wakes())
		}
	}
}

// TestNoORD: a stream that may have no Read outstanding refuses one.
func TestNoORD(t *testing.T) {
	a, b := newSide(t, 1, 64, QPConfig{}), newSide(t, 2, 64, QPConfig{})
	a.Start(rdmap.Config{})
	b.Start(rdmap.Config{})
	a.post(SendWR{ID: 1, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase})
	run(a, b, 1000)
	if diff := cmp.Diff([]outcome{{1, WCLocQPOpErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
}

// TestRemoteErrors provokes each refusal by the peer's checks.
func TestRemoteErrors(t *testing.T) {
	tests := []struct {
		name string
		wr   func(a, b *side) SendWR
		want *term.Error
		st   WCStatus
	}{
		{"Write, STag", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag() ^ 1, Remote: sideBase}
		}, term.ErrInvalidSTag, WCSuccess},
		{"Write, bounds", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase - 1}
		}, term.ErrBounds, WCSuccess},
		{"Write, no right", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdA, b.mem, sideBase, LocalWrite|RemoteRead)
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrInvalidSTag, WCSuccess},
		{"Write, PD", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdB, b.mem, sideBase, accessRW)
			return SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrSTagStream, WCSuccess},
		{"Read, STag", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: 12345, Remote: sideBase}
		}, term.ErrReadSTag, WCRemAccessErr},
		{"Read, bounds", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase + uint64(len(b.mem)) - 7}
		}, term.ErrReadBounds, WCRemAccessErr},
		{"Read, no right", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdA, b.mem, sideBase, LocalWrite|RemoteWrite)
			return SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrReadAccess, WCRemAccessErr},
		{"atomic, no right", func(a, b *side) SendWR {
			r, _ := b.table.Register(pdA, b.mem, sideBase, LocalWrite|RemoteWrite)
			return SendWR{Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: r.STag(), Remote: sideBase}
		}, term.ErrReadAccess, WCRemAccessErr},
		{"atomic, not aligned", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase + 4}
		}, term.ErrStream, WCRemOpErr},
		{"Send, no receive", func(a, b *side) SendWR {
			b.r.q = nil
			return SendWR{Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 8)}}
		}, term.ErrNoBuffer, WCSuccess},
		{"Send, too long", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 101)}}
		}, term.ErrTooLong, WCSuccess},
		{"Send with Invalidate of a plain region", func(a, b *side) SendWR {
			return SendWR{Op: rdmap.OpSendInv, Inv: b.mr.STag()}
		}, term.ErrOpInvalidate, WCSuccess},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPair(t, 4096, QPConfig{SigAll: true})
			b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 100)}})
			before := bytes.Clone(b.mem)
			wr := tt.wr(a, b)
			wr.ID = 1
			a.post(wr)
			run(a, b, 1000)
			if got := remoteErr(a.QP); got != tt.want {
				t.Errorf("Terminate: %v; want %v", got, tt.want)
			}
			a.Error()
			b.Error()
			run(a, b, 1000)
			if diff := cmp.Diff([]outcome{{1, tt.st}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("completions (-want +got):\n%s", diff)
			}
			if !bytes.Equal(b.mem, before) {
				t.Error("the peer's memory has changed")
			}
			if a.State() != StateError || b.State() != StateError {
				t.Errorf("states %v, %v", a.State(), b.State())
			}
		})
	}
}

// TestGatherFails deregisters memory after the work request was taken, and
// after the Read Request was accepted.
func TestGatherFails(t *testing.T) {
	t.Run("send", func(t *testing.T) {
		a, b := newPair(t, 8192, QPConfig{})
		b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 8192)}})
		a.post(SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 8192)}}, SendWR{ID: 2, Op: rdmap.OpSend})
		a.PullSend(2)
		if err := a.table.Deregister(a.mr); err != nil {
			t.Fatal(err)
		}
		run(a, b, 1000)
		a.Error()
		b.Error()
		run(a, b, 1000)
		want := []outcome{{1, WCLocProtErr}, {2, WCFlushErr}}
		if diff := cmp.Diff(want, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("completions (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]outcome{{60, WCFlushErr}}, outcomes(b.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("completions of the peer (-want +got):\n%s", diff)
		}
		if a.fails != 1 || remoteErr(b.QP) != term.ErrRDMAPLocal {
			t.Errorf("%d Gathers failed, Terminate %v", a.fails, remoteErr(b.QP))
		}
	})
	t.Run("read response", func(t *testing.T) {
		a, b := newPair(t, 8192, QPConfig{})
		a.post(SendWR{ID: 1, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8192)}, RKey: b.mr.STag(), Remote: sideBase})
		a.turn(b, 1000)
		if err := b.table.Deregister(b.mr); err != nil {
			t.Fatal(err)
		}
		run(a, b, 1000)
		a.Error()
		run(a, b, 1000)
		if diff := cmp.Diff([]outcome{{1, WCRemAccessErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("completions (-want +got):\n%s", diff)
		}
		if b.fails != 1 || remoteErr(a.QP) != term.ErrReadSTag {
			t.Errorf("%d Gathers failed, Terminate %v", b.fails, remoteErr(a.QP))
		}
	})
}

// TestBadReceive: a message meets a receive that cannot take it.
func TestBadReceive(t *testing.T) {
	tests := []struct {
		name string
		wr   func(b *side) RecvWR
		want WCStatus
	}{
		{"lkey", func(b *side) RecvWR { return RecvWR{SGEs: []SGE{{sideBase, 100, 0}}} }, WCLocProtErr},
		{"second piece out of bounds", func(b *side) RecvWR {
			return RecvWR{SGEs: []SGE{b.sge(0, 4), b.sge(len(b.mem), 100)}}
		}, WCLocProtErr},
		{"not writable", func(b *side) RecvWR {
			r, _ := b.table.Register(pdA, b.mem, 0, RemoteRead)
			return RecvWR{SGEs: []SGE{{0, 100, r.STag()}}}
		}, WCLocProtErr},
		{"17 SGEs", func(b *side) RecvWR { return RecvWR{SGEs: make([]SGE, 17)} }, WCLocQPOpErr},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newPair(t, 4096, QPConfig{})
			wr := tt.wr(b)
			wr.ID = 60
			b.postRecv(wr, RecvWR{ID: 61})
			a.post(SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 50)}})
			run(a, b, 1000)
			b.Error()
			run(a, b, 1000)
			want := []outcome{{60, tt.want}, {61, WCFlushErr}}
			if diff := cmp.Diff(want, outcomes(b.take()), cmp.AllowUnexported(outcome{})); diff != "" {
				t.Errorf("completions (-want +got):\n%s", diff)
			}
			if remoteErr(a.QP) == nil {
				t.Error("the sender has no Terminate")
			}
		})
	}
}

// TestFlush: ERROR flushes what is under way, what waits in the queues, and
// what is posted later, each once and in order.
func TestFlush(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SQDepth: 2})
	for i := range uint64(5) {
		a.post(SendWR{ID: i, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase})
		a.postRecv(RecvWR{ID: 100 + i})
	}
	a.PullSend(64)
	a.Error()
	a.Error()
	a.poll()
	if a.Err() != nil || a.Stream().Terminating() {
		t.Errorf("flushing made an error of its own: %v", a.Err())
	}
	want := []outcome{}
	for _, base := range []uint64{0, 100} {
		for i := range uint64(5) {
			want = append(want, outcome{base + i, WCFlushErr})
		}
	}
	if diff := cmp.Diff(want, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	a.post(SendWR{ID: 7, Op: OpInvalid})
	a.postRecv(RecvWR{ID: 107})
	if a.PullSend(64) != 0 {
		t.Error("PullSend in ERROR took a work request")
	}
	a.poll()
	if diff := cmp.Diff([]outcome{{7, WCFlushErr}, {107, WCFlushErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("posted in ERROR (-want +got):\n%s", diff)
	}
}

// TestEndlessPoster: a client that posts without end is flushed in pieces.
func TestEndlessPoster(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{SQDepth: 8, RQDepth: 8, Sends: &loop{n: math.MaxInt}, Recvs: &loopRecv{}})
	a.Start(rdmap.Config{})
	a.Error()
	var wc WC
	for round := range 3 {
		n := 0
		for ; n < 1000 && a.PollWC(&wc); n++ {
		}
		if n != 16 {
			t.Errorf("round %d: %d completions at a stretch; want 16", round, n)
		}
	}
}

// TestZeroLengthErrors: errors without an octet moved end the QP as well.
func TestZeroLengthErrors(t *testing.T) {
	t.Run("receive", func(t *testing.T) {
		a, b := newPair(t, 64, QPConfig{})
		b.postRecv(RecvWR{ID: 60, SGEs: make([]SGE, 17)})
		a.post(SendWR{ID: 1, Op: rdmap.OpSend})
		run(a, b, 1000)
		if diff := cmp.Diff([]outcome{{60, WCLocQPOpErr}}, outcomes(b.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("completions (-want +got):\n%s", diff)
		}
		if b.State() != StateTerminate || remoteErr(a.QP) != term.ErrRDMAPLocal {
			t.Errorf("state %v, Terminate %v", b.State(), remoteErr(a.QP))
		}
	})
	t.Run("atomic result", func(t *testing.T) {
		a, b := newPair(t, 64, QPConfig{})
		a.post(SendWR{ID: 1, Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase})
		a.PullSend(1)
		if err := a.table.Deregister(a.mr); err != nil {
			t.Fatal(err)
		}
		run(a, b, 1000)
		if diff := cmp.Diff([]outcome{{1, WCLocProtErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
			t.Errorf("completions (-want +got):\n%s", diff)
		}
		if a.State() != StateTerminate || remoteErr(b.QP) != term.ErrRDMAPLocal {
			t.Errorf("state %v, Terminate %v", a.State(), remoteErr(b.QP))
		}
	})
}

// TestErrorBeforeStart: a QP that never had a stream flushes too.
func TestErrorBeforeStart(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{})
	a.post(SendWR{ID: 1, Op: rdmap.OpSend})
	a.postRecv(RecvWR{ID: 2})
	if a.State() != StateIdle || a.PullSend(8) != 0 || a.poll() {
		t.Error("an idle QP does something")
	}
	a.Error()
	a.Start(rdmap.Config{})
	a.poll()
	if diff := cmp.Diff([]outcome{{1, WCFlushErr}, {2, WCFlushErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	if a.State() != StateError || a.Err() != nil {
		t.Errorf("state %v, error %v", a.State(), a.Err())
	}
}

// TestClosing: what was taken goes on, what comes later is flushed, behind it.
func TestClosing(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{})
	win, err := a.table.AllocWindow(pdA)
	if err != nil {
		t.Fatal(err)
	}
	a.post(
		SendWR{ID: 1, Op: rdmap.OpRead, Flags: Signaled, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase},
		SendWR{ID: 9, Op: OpBindMW, Flags: Signaled, RKey: win.STag(), SGEs: []SGE{a.sge(0, 8)}, Access: RemoteRead},
	)
	a.PullSend(2)
	a.Close()
	a.post(SendWR{ID: 2, Op: rdmap.OpSend, Flags: Signaled})
	if a.poll() || a.Idle() || a.State() != StateClosing {
		t.Error("a completion came too early")
	}
	run(a, b, 1000)
	if diff := cmp.Diff([]outcome{{1, WCSuccess}, {9, WCSuccess}, {2, WCFlushErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	if !a.Idle() {
		t.Error("not idle")
	}
}

// TestLocalOps: a local operation waits for what was posted before it, and what
// comes after waits for it.
func TestLocalOps(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	fast, err := a.table.RegisterFast(pdA, a.mem, LocalWrite|RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	tag := fast.STag()&^0xff | 1
	copy(b.mem, "hello, fast registration")
	a.post(
		SendWR{ID: 1, Op: OpReg, RKey: tag, Remote: 0x5000, SGEs: []SGE{{512, 64, 0}}, Access: LocalWrite},
		SendWR{ID: 2, Op: rdmap.OpRead, SGEs: []SGE{{0x5000, 24, tag}}, RKey: b.mr.STag(), Remote: sideBase},
		SendWR{ID: 3, Op: OpLocalInv, Inv: tag},
		SendWR{ID: 4, Op: OpReg, RKey: tag + 1, Remote: 0x6000, SGEs: []SGE{{512, 64, 0}}, Access: RemoteRead},
	)
	run(a, b, 1000)
	want := []WC{{ID: 1, Op: WCReg, QP: 1}, {ID: 2, Op: WCRead, QP: 1, Len: 24}, {ID: 3, Op: WCLocalInv, QP: 1}, {ID: 4, Op: WCReg, QP: 1}}
	if diff := cmp.Diff(want, a.take()); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	if !bytes.Equal(a.mem[512:536], b.mem[:24]) {
		t.Error("the Read went elsewhere")
	}
	if a.table.Lookup(tag) != nil || a.table.Lookup(tag+1) != fast {
		t.Error("keys")
	}
}

// TestPendingSegment: a segment that was taken from the stream and not gathered
// holds back its completion and the local operation behind it.
func TestPendingSegment(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 100)}})
	fast, err := a.table.RegisterFast(pdA, a.mem, LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	tag := fast.STag()
	a.post(
		SendWR{ID: 1, Op: OpReg, RKey: tag, SGEs: []SGE{{0, 64, 0}}},
		SendWR{ID: 2, Op: rdmap.OpSend, SGEs: []SGE{{0, 64, tag}}},
		SendWR{ID: 3, Op: OpLocalInv, Inv: tag},
	)
	a.PullSend(8)
	var seg rdmap.Segment
	if !a.Stream().PollSegment(1000, &seg) {
		t.Fatal("no segment")
	}
	a.PullSend(8)
	a.poll()
	if diff := cmp.Diff([]outcome{{1, WCSuccess}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("before Gather (-want +got):\n%s", diff)
	}
	if _, ok := a.Gather(&seg.Src, seg.Len, nil); !ok {
		t.Fatal("the memory was taken away under the segment")
	}
	a.PullSend(8)
	a.poll()
	if diff := cmp.Diff([]outcome{{2, WCSuccess}, {3, WCSuccess}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("after Gather (-want +got):\n%s", diff)
	}
	// A segment that is never gathered is flushed.
	a.post(SendWR{ID: 4, Op: rdmap.OpSend, Flags: Inline, Inline: []byte("x")})
	a.PullSend(8)
	a.Stream().PollSegment(1000, &seg)
	a.Error()
	a.poll()
	if diff := cmp.Diff([]outcome{{4, WCFlushErr}}, outcomes(a.take()), cmp.AllowUnexported(outcome{})); diff != "" {
		t.Errorf("in ERROR (-want +got):\n%s", diff)
	}
}

// TestSRQ: two QPs take from one queue; ERROR of one leaves it alone.
func TestSRQ(t *testing.T) {
	var shared recvs
	srq := NewSRQ(&shared)
	a1, b1 := newPair(t, 4096, QPConfig{})
	a2, b2 := newPair(t, 4096, QPConfig{})
	for _, b := range []*side{b1, b2} {
		b.cfg.SRQ = srq
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
	if srq.Taken() != 4 || len(shared.q) != 2 {
		t.Errorf("taken %d, left %d", srq.Taken(), len(shared.q))
	}
}

func (s *recvs) Posted() int { return len(s.q) }

func TestSRQLimit(t *testing.T) {
	shared := &recvs{q: make([]RecvWR, 5)}
	srq := NewSRQ(shared)
	var wr RecvWR
	take := func() bool {
		if !srq.NextRecv(&wr) {
			t.Fatal("empty")
		}
		return srq.PollLimit()
	}
	if take() {
		t.Error("not armed")
	}
	srq.SetLimit(3)
	if take() || !take() || srq.PollLimit() || take() {
		t.Error("the event comes when 2 are left, once")
	}
	srq.SetLimit(1)
	srq.SetLimit(0)
	if take() {
		t.Error("disarmed")
	}
}

// loop is a source that posts the same Write or Send for ever.
type loop struct {
	wr SendWR
	n  int
}

func (l *loop) NextSend(wr *SendWR) bool {
	if l.n == 0 {
		return false
	}
	l.n--
	sges := append(wr.SGEs[:0], l.wr.SGEs...)
	*wr = l.wr
	wr.SGEs = sges
	return true
}

type loopRecv struct{ wr RecvWR }

func (l *loopRecv) NextRecv(wr *RecvWR) bool {
	wr.ID, wr.SGEs = l.wr.ID, append(wr.SGEs[:0], l.wr.SGEs...)
	return true
}

// TestNoAllocs: no work request and no message allocates.
func TestNoAllocs(t *testing.T) {
	for _, op := range []rdmap.Op{rdmap.OpWrite, rdmap.OpSend, rdmap.OpRead, rdmap.OpFetchAdd} {
		src, rcv := &loop{}, &loopRecv{}
		a := newSide(t, 1, 1<<16, QPConfig{SigAll: true, Sends: src})
		b := newSide(t, 2, 1<<16, QPConfig{Recvs: rcv})
		a.Start(rdmap.Config{IRD: 4, ORD: 4})
		b.Start(rdmap.Config{IRD: 4, ORD: 4})
		n := 5000
		if op == rdmap.OpFetchAdd {
			n = 8
		}
		src.wr = SendWR{Op: op, Flags: Signaled, SGEs: []SGE{a.sge(0, n)}, RKey: b.mr.STag(), Remote: sideBase}
		rcv.wr = RecvWR{SGEs: []SGE{b.sge(0, 100), b.sge(200, 6000)}}
		done := 0
		var wc WC
		step := func() {
			src.n = 8
			for busy := true; busy; {
				busy = a.turn(b, 1400)
				busy = b.turn(a, 1400) || busy
				for a.PollWC(&wc) {
					if wc.Status != WCSuccess {
						panic(fmt.Sprint(wc))
					}
					done++
				}
				for b.PollWC(&wc) {
				}
			}
		}
		step()
		if got := testing.AllocsPerRun(100, step); got != 0 {
			t.Errorf("op %v: %v allocations per 8 work requests", op, got)
		}
		if done != 102*8 {
			t.Errorf("op %v: %d completions; want %d", op, done, 102*8)
		}
	}
}

// script is a source that repeats a list of work requests.
type script struct {
	wrs []SendWR
	i   int
	n   int
}

func (l *script) NextSend(wr *SendWR) bool {
	if l.n == 0 {
		return false
	}
	l.n--
	sges := append(wr.SGEs[:0], l.wrs[l.i].SGEs...)
	*wr = l.wrs[l.i]
	wr.SGEs = sges
	l.i = (l.i + 1) % len(l.wrs)
	return true
}

// TestLocalOpsNoAllocs: registering, binding and invalidating by work request
// is as cheap as it should be.
func TestLocalOpsNoAllocs(t *testing.T) {
	src := &script{}
	a := newSide(t, 1, 4096, QPConfig{Sends: src})
	a.Start(rdmap.Config{})
	fast, err := a.table.RegisterFast(pdA, a.mem, LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	win, err := a.table.AllocWindow(pdA)
	if err != nil {
		t.Fatal(err)
	}
	src.wrs = []SendWR{
		{Op: OpReg, Flags: Signaled, RKey: fast.STag(), SGEs: []SGE{{0, 64, 0}}, Access: LocalWrite},
		{Op: OpBindMW, Flags: Signaled, RKey: win.STag(), SGEs: []SGE{a.sge(0, 64)}, Access: RemoteRead},
		{Op: OpLocalInv, Flags: Signaled, Inv: fast.STag()},
		{Op: OpLocalInv, Flags: Signaled, Inv: win.STag()},
	}
	var wc WC
	if n := testing.AllocsPerRun(100, func() {
		src.n = 4
		if a.PullSend(8) != 4 {
			panic("not all were taken")
		}
		for range 4 {
			if !a.PollWC(&wc) || wc.Status != WCSuccess {
				panic(fmt.Sprint(wc))
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestUnsignaled: success is silent, order and errors are not.
func TestUnsignaled(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SQDepth: 4})
	var ids []uint64
	for i := range uint64(40) {
		wr := SendWR{ID: i, Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase}
		if i%7 == 3 {
			wr.Flags = Signaled
			ids = append(ids, i)
		}
		a.post(wr)
	}
	run(a, b, 1000)
	var got []uint64
	for _, w := range a.take() {
		got = append(got, w.ID)
	}
	if !slices.Equal(got, ids) {
		t.Errorf("completions %v; want %v", got, ids)
	}
}

func BenchmarkWrite(b *testing.B) {
	for _, n := range []int{64, 1400} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			src := &loop{}
			x := newSide(b, 1, 1<<16, QPConfig{SigAll: true, Sends: src})
			y := newSide(b, 2, 1<<16, QPConfig{})
			x.Start(rdmap.Config{})
			y.Start(rdmap.Config{})
			src.wr = SendWR{Op: rdmap.OpWrite, SGEs: []SGE{x.sge(0, n)}, RKey: y.mr.STag(), Remote: sideBase}
			var wc WC
			b.SetBytes(int64(n))
			b.ReportAllocs()
			for b.Loop() {
				src.n = 1
				x.turn(y, 1460)
				if !x.PollWC(&wc) || wc.Status != WCSuccess {
					b.Fatal(wc)
				}
			}
		})
	}
}
