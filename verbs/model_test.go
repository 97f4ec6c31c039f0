package verbs

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestModel moves random batches of every verb in both directions and compares all memory with a model after each
// batch. Each operation of a batch has its own part of memory on both sides, so that the batch has one outcome.
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
				// Operation k of side s uses part s*perBatch+k, so that no two operations touch the same memory.
				lo := (s*perBatch + k) * stretch
				for range 64 { // new data to move
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

// modelOp posts one random operation of me and applies it to the model.
func modelOp(rng *rand.Rand, id uint64, me, peer *side, mine, theirs []byte, lo int, wcs, peerWCs *[]WC) {
	half := len(mine) / 2
	wr := SendWR{ID: id, RKey: peer.mr.STag()}
	wc := WC{ID: id, QP: me.cfg.Num}
	// Up to 16 pieces of the first half of the part are read. Data is written to the second half.
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
		r := WC{ID: id, Op: WCRecv, QP: peer.cfg.Num, Len: uint32(len(data))}
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
		for total := 0; ; { // divide the list where the data was divided
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
		wr.Op, wc.Op = rdmap.OpSend, WCSend
		if op == rdmap.OpSendSE {
			wr.Flags = Solicited
		}
		if rng.IntN(3) == 0 {
			data = data[:min(len(data), 256)]
			wr.SGEs, wr.Inline = nil, bytes.Clone(data)
			wr.Flags |= Inline
		}
		recv(op)
	case rdmap.OpImm, rdmap.OpImmSE:
		wr.Op, wr.SGEs, wr.Imm, wc.Op = rdmap.OpImm, nil, rng.Uint64(), WCImm
		if op == rdmap.OpImmSE {
			wr.Flags = Solicited
		}
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
