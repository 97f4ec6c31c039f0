package verbs

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
)

// TestVerbs does each operation once and checks memory and completions.
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
	win := allocWindow(t, b.table, pdA)
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

// TestInvalidateIgnored checks that a Send with Invalidate passes its 32 bits on, whatever they are, where it is to invalidate nothing, and
// that the peer may do the rest that it may. It invalidates where a client names only rights.
func TestInvalidateIgnored(t *testing.T) {
	a, b := newPair(t, 64, QPConfig{})
	bound := allocWindow(t, b.table, pdA).STag()
	b.post(SendWR{Op: OpBindMW, RKey: bound, SGEs: []SGE{b.sge(0, 64)}, Access: RemoteWrite})
	run(a, b, 1400)
	b.Permit(RemoteWrite | IgnoreInvalidate)
	b.postRecv(RecvWR{ID: 1}, RecvWR{ID: 2}, RecvWR{ID: 3})
	a.post(
		SendWR{Op: rdmap.OpSendInv, Inv: bound},
		SendWR{Op: rdmap.OpSendInv, Flags: Solicited, Inv: 0},
		SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: bound, Remote: sideBase},
		SendWR{Op: rdmap.OpSend},
	)
	run(a, b, 1400)
	want := []WC{
		{ID: 1, Op: WCRecv, QP: 2, InvKey: bound, Flags: WCWithInv},
		{ID: 2, Op: WCRecv, QP: 2, Flags: WCWithInv | WCSolicited},
		{ID: 3, Op: WCRecv, QP: 2},
	}
	if diff := cmp.Diff(want, b.take()); diff != "" {
		t.Errorf("completions (-want +got):\n%s", diff)
	}
	b.Permit(RemoteWrite)
	b.postRecv(RecvWR{ID: 4})
	a.post(SendWR{Op: rdmap.OpSendInv, Inv: bound}, SendWR{Op: rdmap.OpWrite, SGEs: []SGE{a.sge(0, 8)}, RKey: bound, Remote: sideBase})
	run(a, b, 1400)
	if b.State() != StateTerminate {
		t.Errorf("state %v after a Write to a window that the peer has invalidated", b.State())
	}
}

// TestStats checks the counters after a success, a refusal and a flush.
func TestStats(t *testing.T) {
	a, b := newPair(t, 64, QPConfig{SQDepth: 3, RQDepth: 5})
	if c := a.Config(); c.SQDepth != 4 || c.RQDepth != 8 || c.PD != pdA || c.Num != 1 {
		t.Errorf("made of %+v", c)
	}
	b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 8)}}, RecvWR{ID: 61})
	a.post(
		SendWR{ID: 1, Op: rdmap.OpSend, SGEs: []SGE{a.sge(0, 8)}},
		SendWR{ID: 2, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: 99},
		SendWR{ID: 3, Op: rdmap.OpSend},
	)
	a.HandleSends(8)
	if taken, retired := a.Taken(), a.Retired(); taken != 3 || retired != 0 {
		t.Errorf("%d taken, %d retired", taken, retired)
	}
	run(a, b, 1000)
	a.Error()
	b.Error()
	run(a, b, 1000)
	if diff := cmp.Diff(Stats{Sends: 3, Completions: 1, LocalErrors: 1}, a.Stats()); diff != "" {
		t.Errorf("sender (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Stats{Recvs: 1, Completions: 2, Flushed: 1, ProtectionErrors: 1, BytesPlaced: 8}, b.Stats()); diff != "" {
		t.Errorf("receiver (-want +got):\n%s", diff)
	}
}

func TestVendor(t *testing.T) {
	for _, e := range []*term.Error{term.ErrRDMAPLocal, term.ErrMPACRC, term.ErrReadAccess, term.ErrTooLong} {
		for _, remote := range []bool{false, true} {
			wc := WC{Status: WCFlushErr, Vendor: vendor(e, remote)}
			if got, r := wc.Terminate(); got != e || r != remote {
				t.Errorf("%v, remote %v: %v, %v", e, remote, got, r)
			}
		}
	}
	wc := WC{Vendor: vendor(nil, true)}
	if e, _ := wc.Terminate(); wc.Vendor != 0 || e != nil {
		t.Errorf("none: %#x", wc.Vendor)
	}
	for _, w := range []WC{{}, {Flags: WCWithImm}, {Flags: WCSolicited}, {Status: WCLocLenErr}} {
		if w.Wakes() != (w.Flags == WCSolicited || w.Status != 0) {
			t.Errorf("%+v wakes: %v", w, w.Wakes())
		}
	}
}

// TestFlush checks that ERROR flushes what is in flight, what waits in the queues, and what is posted later, each once
// and in order.
func TestFlush(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SQDepth: 2})
	for i := range uint64(5) {
		a.post(SendWR{ID: i, Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase})
		a.postRecv(RecvWR{ID: 100 + i})
	}
	a.HandleSends(64)
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
	a.wantOutcomes(t, want)
	a.post(SendWR{ID: 7, Op: OpInvalid})
	a.postRecv(RecvWR{ID: 107})
	if a.HandleSends(64) != 0 {
		t.Error("HandleSends in ERROR took a work request")
	}
	a.poll()
	a.wantOutcomes(t, []outcome{{7, WCFlushErr}, {107, WCFlushErr}})
}

// TestEndlessPoster checks that the queue of a client that never stops posting is flushed in pieces.
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

// TestRecvOrder checks that receives are given by message number, as many as there are slots, and across the wrap of
// the number.
func TestRecvOrder(t *testing.T) {
	for _, head := range []serial.Num{firstMSN, 0xfffffffe, 0xffffffff} {
		a := newSide(t, 1, 4096, QPConfig{RQDepth: 4})
		a.Start(rdmap.Config{})
		a.rqHead, a.rqTail = head, head
		a.stats.Recvs = 100 // no RTR was sent
		for i := range uint64(8) {
			a.postRecv(RecvWR{ID: i, SGEs: []SGE{a.sge(0, int(i))}})
		}
		for _, i := range []int{3, 0, 2, 1, 3} {
			id, size, ok := a.Recv(head.Add(i))
			if !ok || size != uint32(i) || a.rq[id].id != uint64(i) {
				t.Errorf("from %#x, message %d: slot %d of %d bytes, %v", head, i, id, size, ok)
			}
		}
		for _, i := range []int{-1, 4, 5, -4, 1 << 30} {
			if _, _, ok := a.Recv(head.Add(i)); ok {
				t.Errorf("from %#x, message %d has a receive", head, i)
			}
		}
		if len(a.r.q) != 4 {
			t.Errorf("%d receives left; want 4", len(a.r.q))
		}
	}
}

// TestRecvHuge checks that a receive may be larger than the largest message.
func TestRecvHuge(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{MaxSGE: 32})
	a.Start(rdmap.Config{})
	huge := mustRegister(t, a.table, pdA, make([]byte, 1<<28), 0, LocalWrite) // never touched
	var wr RecvWR
	for range 16 {
		wr.SGEs = append(wr.SGEs, SGE{0, 1 << 28, huge.STag()})
	}
	a.postRecv(wr)
	if _, size, ok := a.Recv(firstMSN); !ok || size != 1<<32-1 {
		t.Errorf("size %#x, %v; want all that 32 bits can say", size, ok)
	}
}

// TestEmptySGEs checks that an SGE of length 0 refers to no memory, in sends and in receives.
func TestEmptySGEs(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	copy(a.mem, "0123456789")
	none := SGE{Addr: 1, LKey: 0xdead00}
	b.postRecv(RecvWR{ID: 1, SGEs: []SGE{none, b.sge(0, 4), none, none, b.sge(100, 6), none}})
	a.post(SendWR{ID: 2, Op: rdmap.OpSend, SGEs: []SGE{none, a.sge(0, 3), none, a.sge(3, 7), none}})
	run(a, b, 1000)
	if string(b.mem[:4]) != "0123" || string(b.mem[100:106]) != "456789" {
		t.Errorf("received %q and %q", b.mem[:4], b.mem[100:106])
	}
	b.wantOutcomes(t, []outcome{{1, WCSuccess}})
}

// TestLongestMessage checks that a message may have 2^31-1 bytes.
func TestLongestMessage(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{})
	huge := mustRegister(t, a.table, pdA, make([]byte, 1<<28), 0, 0) // never touched
	wr := SendWR{ID: 1, Op: rdmap.OpWrite, RKey: b.mr.STag(), Remote: sideBase}
	for range 8 {
		wr.SGEs = append(wr.SGEs, SGE{0, 1 << 28, huge.STag()})
	}
	wr.SGEs[7].Len--
	a.post(wr)
	if a.HandleSends(1); a.Err() != nil || a.poll() {
		t.Errorf("refused: %v, %+v", a.Err(), a.take())
	}
}

// TestFetchAddFields checks that the mask of a FetchAdd, which divides the word into fields, is the work request's
// SwapMask.
func TestFetchAddFields(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	binary.NativeEndian.PutUint64(b.mem, 0x00000001_ffffffff)
	a.post(SendWR{ID: 1, Op: rdmap.OpFetchAdd, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase,
		CompareAdd: 0x00000001_00000001, SwapMask: 0x80000000_80000000, CompareMask: 1})
	run(a, b, 1000)
	if got := binary.NativeEndian.Uint64(b.mem); got != 0x00000002_00000000 {
		t.Errorf("two fields of 32 bits become %#x", got)
	}
}

// TestAtomicResultRefused checks that an atomic is not begun when there is no memory for its result.
func TestAtomicResultRefused(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	readOnly := mustRegister(t, a.table, pdA, a.mem, 0, 0)
	a.post(SendWR{ID: 1, Op: rdmap.OpFetchAdd, SGEs: []SGE{{0, 8, readOnly.STag()}}, RKey: b.mr.STag(), Remote: sideBase, CompareAdd: 1})
	run(a, b, 1000)
	a.wantOutcomes(t, []outcome{{1, WCLocProtErr}})
	if b.mem[0] != 0 {
		t.Error("the peer's memory has changed")
	}
}

// TestAtomicAlignment checks that the alignment of the address counts, and not that of the tagged offset, and that a
// refused atomic changes nothing.
func TestAtomicAlignment(t *testing.T) {
	a := newSide(t, 1, 64, QPConfig{})
	a.Start(rdmap.Config{})
	odd := mustRegister(t, a.table, pdA, a.mem, 0x1003, accessRW)
	add := rdmap.AtomicOp{Op: rdmap.OpFetchAdd, Data: 1}
	for to := uint64(0x1003); to <= 0x1003+56; to++ {
		before := slices.Clone(a.mem)
		_, err := a.Atomic(odd.STag(), to, &add)
		if want := (to-0x1003)%8 == 0; (err == nil) != want || err != nil && err != term.ErrStream {
			t.Errorf("atomic at %#x: %v", to, err)
		}
		if bytes.Equal(a.mem, before) != (err != nil) {
			t.Errorf("atomic at %#x, which returned %v: %x was %x", to, err, a.mem, before)
		}
	}
}

// TestLocalOps checks that a local operation waits for what was posted before it, and that what is posted later
// waits for it.
func TestLocalOps(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	fast := registerFast(t, a.table, pdA, a.mem, LocalWrite|RemoteRead)
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

// TestHeldLooksOnce checks that a held local operation looks at each earlier work request once, not again with each completion that is
// polled.
func TestHeldLooksOnce(t *testing.T) {
	const writes = 100
	a, b := newPair(t, 4096, QPConfig{SQDepth: 128, SigAll: true})
	fast := registerFast(t, a.table, pdA, a.mem, LocalWrite)
	read := SendWR{Op: rdmap.OpRead, SGEs: []SGE{a.sge(0, 8)}, RKey: b.mr.STag(), Remote: sideBase}
	a.post(read)
	for range writes {
		a.post(SendWR{Op: rdmap.OpWrite, RKey: b.mr.STag(), Remote: sideBase})
	}
	a.post(read, SendWR{Op: OpReg, RKey: fast.STag(), SGEs: []SGE{{0, 64, 0}}})
	for a.turn(b, 1000) {
	}
	respond := func() { // to one Read
		var seg rdmap.Segment
		if !b.Stream().PollFilling(1000, 1000, &seg) {
			t.Fatal("no response")
		}
		parts, _ := b.Gather(&seg.Src, seg.Len, nil)
		a.Stream().HandleULPDU(append(seg.Hdr[:seg.HdrLen:seg.HdrLen], parts[0]...))
	}
	respond()
	var wc WC
	if !a.PollWC(&wc) {
		t.Fatal("no completion")
	}
	seen := a.sendSlot(writes / 2) // it is complete, and not yet polled
	seen.done = false
	if a.releaseHeld() || a.heldFor != writes+1 {
		t.Errorf("it is at work request %d, want %d, whose response it awaits", a.heldFor, writes+1)
	}
	seen.done = true
	a.poll()
	respond()
	a.poll()
	if n := len(a.take()); n != writes+2 || !fast.Valid() {
		t.Errorf("%d more completions, want %d", n, writes+2)
	}
}

// TestPendingSegment checks that a segment that was taken from the stream and not yet gathered delays its completion
// and the local operation after it.
func TestPendingSegment(t *testing.T) {
	a, b := newPair(t, 4096, QPConfig{SigAll: true})
	b.postRecv(RecvWR{ID: 60, SGEs: []SGE{b.sge(0, 100)}})
	fast := registerFast(t, a.table, pdA, a.mem, LocalWrite)
	tag := fast.STag()
	a.post(
		SendWR{ID: 1, Op: OpReg, RKey: tag, SGEs: []SGE{{0, 64, 0}}},
		SendWR{ID: 2, Op: rdmap.OpSend, SGEs: []SGE{{0, 64, tag}}},
		SendWR{ID: 3, Op: OpLocalInv, Inv: tag},
	)
	a.HandleSends(8)
	var seg rdmap.Segment
	if !a.Stream().PollFilling(1000, 1000, &seg) {
		t.Fatal("no segment")
	}
	a.HandleSends(8)
	a.poll()
	a.wantOutcomes(t, []outcome{{1, WCSuccess}})
	if _, ok := a.Gather(&seg.Src, seg.Len, nil); !ok {
		t.Fatal("the memory was taken away under the segment")
	}
	a.HandleSends(8)
	a.poll()
	a.wantOutcomes(t, []outcome{{2, WCSuccess}, {3, WCSuccess}})
	// A segment that is never gathered is flushed.
	a.post(SendWR{ID: 4, Op: rdmap.OpSend, Flags: Inline, Inline: []byte("x")})
	a.HandleSends(8)
	a.Stream().PollFilling(1000, 1000, &seg)
	a.Error()
	a.poll()
	a.wantOutcomes(t, []outcome{{4, WCFlushErr}})
}

// TestUnsignaled checks that unsignaled successes have no completion, and that order and errors are unchanged.
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
