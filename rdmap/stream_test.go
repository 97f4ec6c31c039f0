package rdmap

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
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
		t.Error("written or sent bytes differ")
	}
	if !bytes.Equal(a.mem.regions[9].buf[1:][:400], data[0x10:][:400]) {
		t.Error("bytes read differ")
	}
	if got := be.Uint64(b.mem.regions[7].buf); got != 9 || a.mem.results[3] != 0 || a.mem.results[4] != 5 {
		t.Errorf("atomics left %d and returned %v; want 9, 0 and 5", got, a.mem.results)
	}
	if !b.mem.regions[7].gone {
		t.Error("the STag is still valid")
	}
}

func ids(cs []Completion) (ids []uint32) {
	for _, c := range cs {
		ids = append(ids, c.ID)
	}
	return ids
}

// TestCompletionOrder checks that an outstanding Read delays later completions but not the sending (RFC 5040 section
// 5.5, rules 15 and 19).
func TestCompletionOrder(t *testing.T) {
	a, b := newPair(Config{IRD: 1, ORD: 1})
	b.mem.regions[7] = &region{buf: make([]byte, 300), write: true, read: true}
	a.mem.regions[9] = &region{buf: make([]byte, 300)}
	b.mem.recvs = [][]byte{nil}
	a.mem.sources[1] = make([]byte, 300)
	a.post(t, WR{ID: 1, Op: OpWrite, Len: 300, STag: 7})
	a.post(t, WR{ID: 2, Op: OpRead, Len: 300, STag: 7, SinkSTag: 9})
	a.post(t, WR{ID: 3, Op: OpSend})
	for i := range 3 {
		if cs := a.completions(); len(cs) != 0 {
			t.Fatalf("%d segments composed of 3 and the Write has completed", i)
		}
		b.HandleULPDU(a.poll(testMULPDU))
	}
	if got := ids(a.completions()); !cmp.Equal(got, []uint32{1}) {
		t.Fatalf("Write composed: completions of %v; want 1", got)
	}
	b.HandleULPDU(a.poll(testMULPDU))
	b.HandleULPDU(a.poll(testMULPDU))
	if cs := b.completions(); len(cs) != 1 {
		t.Errorf("the Send behind the Read was not delivered: %+v", cs)
	}
	for i := range 3 {
		if cs := a.completions(); len(cs) != 0 {
			t.Fatalf("%d segments of the Response are in, and there are %+v", i, cs)
		}
		a.HandleULPDU(b.poll(testMULPDU))
	}
	if got := ids(a.completions()); !cmp.Equal(got, []uint32{2, 3}) {
		t.Errorf("Response delivered: completions of %v; want 2 and 3", got)
	}
}

// TestFence checks that a fenced work request waits for the earlier Reads and atomics, and for nothing else.
func TestFence(t *testing.T) {
	for _, first := range []WR{{Op: OpRead, SinkSTag: 9}, {Op: OpFetchAdd, STag: 7}} {
		a, b := newPair(Config{IRD: 2, ORD: 2})
		b.mem.regions[7] = &region{buf: make([]byte, 300), write: true, read: true}
		a.post(t, first)
		a.post(t, WR{Op: OpWrite})
		a.post(t, WR{Op: OpWrite, Fence: true})
		request, write := a.poll(testMULPDU), a.poll(testMULPDU)
		if request == nil || write == nil {
			t.Fatalf("%v: a Write without a fence was held back", first.Op)
		}
		if p := a.poll(testMULPDU); p != nil || a.Sendable() {
			t.Fatalf("%v: the fence let %x through", first.Op, p)
		}
		b.HandleULPDU(request)
		a.HandleULPDU(b.poll(testMULPDU))
		if a.poll(testMULPDU) == nil {
			t.Errorf("%v: answered, and the fence still holds", first.Op)
		}
		a.post(t, WR{Op: OpSend, Fence: true})
		if a.poll(testMULPDU) == nil {
			t.Errorf("%v: a fence with nothing to wait for holds", first.Op)
		}
	}
}

// TestORD checks that no more than ORD requests are outstanding; later work waits, since work requests are sent in
// order (RFC 5040 sections 5.5, rule 13, and 6.1).
func TestORD(t *testing.T) {
	for ord := 1; ord <= 5; ord++ {
		a, b := newPair(Config{IRD: 5, ORD: ord})
		b.mem.regions[7] = &region{buf: make([]byte, 300), read: true}
		for i := range 12 {
			wr := WR{ID: uint32(i), Op: OpRead}
			if i%2 == 1 {
				wr = WR{ID: uint32(i), Op: OpFetchAdd, STag: 7}
			}
			a.post(t, wr)
		}
		a.post(t, WR{Op: OpWrite})
		for done := 0; done < 12; {
			var out [][]byte
			for p := a.poll(testMULPDU); p != nil; p = a.poll(testMULPDU) {
				out = append(out, p)
			}
			if want := min(ord, 12-done); len(out) != want && !(done+ord >= 12 && len(out) == want+1) {
				t.Fatalf("ORD %d, %d done: %d requests leave; want %d", ord, done, len(out), want)
			}
			for _, p := range out {
				b.give(t, p)
			}
			for p := b.poll(testMULPDU); p != nil; p = b.poll(testMULPDU) {
				a.give(t, p)
				done++
			}
		}
		if cs := a.completions(); len(cs) != 13 {
			t.Errorf("ORD %d: %d completions; want 13", ord, len(cs))
		}
	}
}

// TestBadWR checks that an invalid work request ends in a completion, in its turn, and not in a Terminate.
func TestBadWR(t *testing.T) {
	const top = ^uint64(0)
	bad := []WR{
		{}, {Op: OpTerminate}, {Op: 99},
		{Op: OpWrite, TO: top, Len: 2},
		{Op: OpRead, TO: top, Len: 2},
		{Op: OpRead, SinkTO: top, Len: 2},
		{Op: OpFetchAdd, TO: top - 6},
	}
	e := newEnd(Config{ORD: 1})
	for i, wr := range bad {
		wr.ID = uint32(i)
		e.post(t, wr)
	}
	cs := e.completions() // before anything is sent
	for i, c := range cs {
		if c.Status != StatusBadWR || c.ID != uint32(i) {
			t.Errorf("%+v: completion %+v; want a bad work request", bad[i], c)
		}
	}
	if len(cs) != len(bad) || e.Terminating() || e.Sendable() {
		t.Errorf("%d completions of %d, Terminating %v, Sendable %v", len(cs), len(bad), e.Terminating(), e.Sendable())
	}

	e = newEnd(Config{ORD: 0})
	e.post(t, WR{ID: 1, Op: OpSend})
	e.post(t, WR{ID: 2, Op: OpRead})
	e.post(t, WR{ID: 3, Op: OpCmpSwap})
	e.post(t, WR{ID: 4, Op: OpSend})
	if cs := e.completions(); len(cs) != 0 {
		t.Errorf("the Send is not composed and there are %+v", cs)
	}
	for e.poll(testMULPDU) != nil {
	}
	want := []Completion{{ID: 1, Op: OpSend}, {ID: 2, Op: OpRead, Status: StatusBadWR},
		{ID: 3, Op: OpCmpSwap, Status: StatusBadWR, Len: 8}, {ID: 4, Op: OpSend}}
	if d := cmp.Diff(want, e.completions()); d != "" {
		t.Errorf("a Read at ORD 0 (-want +got):\n%s", d)
	}
	if got := e.Stats().BadWRs; got != 2 {
		t.Errorf("BadWRs = %d; want 2", got)
	}
}

// TestBadWRFirst checks that good work requests are sent in order after bad ones that failed at the head of the
// queue.
func TestBadWRFirst(t *testing.T) {
	e := newEnd(Config{MaxWR: 4})
	for i := range uint32(3) {
		e.post(t, WR{ID: i})
	}
	if n := len(e.completions()); n != 3 {
		t.Fatalf("%d completions; want 3", n)
	}
	for i := range byte(4) {
		e.post(t, WR{Op: OpImm, Imm: [8]byte{i}})
	}
	for i := range byte(4) {
		if p := e.poll(testMULPDU); p == nil || p[ddp.UntaggedLen] != i {
			t.Errorf("%d leaves as %x", i, p)
		}
	}
}

// TestSendQueueFull checks that the send queue holds MaxWR requests and that a slot is free once its completion is
// polled.
func TestSendQueueFull(t *testing.T) {
	e := newEnd(Config{MaxWR: 4})
	for range 20 {
		for range 4 {
			e.post(t, WR{Op: OpWrite})
		}
		if e.PostSend(&WR{Op: OpWrite}) {
			t.Fatal("a fifth was taken")
		}
		for e.poll(testMULPDU) != nil {
		}
		if e.PostSend(&WR{Op: OpWrite}) {
			t.Fatal("a fifth was taken before the first was polled")
		}
		if n := len(e.completions()); n != 4 {
			t.Fatalf("%d completions; want 4", n)
		}
	}
}

// TestFlush checks that Flush completes everything once: work that waits, is half sent, or awaits a response, and
// receives that were taken.
func TestFlush(t *testing.T) {
	e := newVictim()
	e.mem.recvs = [][]byte{make([]byte, 64), make([]byte, 64), make([]byte, 64)}
	e.mem.sources[2] = make([]byte, 300)
	e.post(t, WR{ID: 1, Op: OpRead})
	e.post(t, WR{ID: 2, Op: OpSend, Len: 300})
	e.post(t, WR{ID: 3, Op: OpWrite})
	e.poll(testMULPDU)
	e.poll(testMULPDU)
	e.HandleULPDU(testenv.Unhex(t, hSend+"aa"))
	e.HandleULPDU(testenv.Unhex(t, "0143 00000000 00000000 00000002 00000000 aa"))
	if !e.HandleEarly(77, testenv.Unhex(t, "4143 00000000 00000000 00000003 00000000 bb")) {
		t.Fatal("not placed early")
	}
	e.HandleULPDU(testenv.Unhex(t, "4141 00000000 00000001 00000001 00000000"+sink+"00000001 00000007 0000000000001000"))
	e.Flush()
	e.Flush()
	want := []Completion{
		{ID: 1, Op: OpRead, Status: StatusFlushed}, {ID: 2, Op: OpSend, Status: StatusFlushed, Len: 300}, {ID: 3, Op: OpWrite, Status: StatusFlushed},
		{Kind: CompRecv, ID: 0, Op: OpSend, Len: 1},
		{Kind: CompRecv, ID: 1, Status: StatusFlushed}, {Kind: CompRecv, ID: 2, Status: StatusFlushed},
	}
	if d := cmp.Diff(want, e.completions()); d != "" {
		t.Errorf("completions (-want +got):\n%s", d)
	}
	if b := e.poll(testMULPDU); b != nil || e.Sendable() {
		t.Errorf("after Flush it sends %x", b)
	}
	if err := e.HandleULPDU(testenv.Unhex(t, "c140 00000007 0000000000001000 aa")); err != nil || e.mem.regions[7].buf[0] != 0 {
		t.Errorf("after Flush a Write was taken, or is an error: %v", err)
	}
	e.post(t, WR{ID: 9, Op: OpWrite})
	if d := cmp.Diff([]Completion{{ID: 9, Op: OpWrite, Status: StatusFlushed}}, e.completions()); d != "" {
		t.Errorf("posted after Flush (-want +got):\n%s", d)
	}
	if s := e.Stats(); s.Flushed != 6 || s.RxDropped != 1 {
		t.Errorf("Flushed %d, RxDropped %d; want 6 and 1", s.Flushed, s.RxDropped)
	}

	// A queued Terminate is still sent.
	e = newVictim()
	e.Fail(term.ErrMPACRC)
	e.Flush()
	if !e.Sendable() || e.poll(testMULPDU) == nil || e.Sendable() {
		t.Error("the Terminate was not sent after Flush")
	}
}

// TestFairness checks that responses and the send queue get equal bytes while both wait, and that messages are not
// interleaved.
func TestFairness(t *testing.T) {
	for _, size := range []struct{ write, read uint32 }{{1000, 1000}, {50000, 400}, {64, 30000}} {
		e := newEnd(Config{IRD: 1000, MaxWR: 1000})
		e.mem.regions[7] = &region{buf: make([]byte, size.read), read: true}
		e.mem.sources[0] = make([]byte, size.write)
		post := func() { e.post(t, WR{Op: OpWrite, Len: size.write, STag: 1}) }
		msn := uint32(0)
		request := func() {
			msn++
			h := ddp.Untagged{Last: true, ULP: control(opcodeReadRequest), QN: 1, MSN: serial.Num(msn)}
			r := readRequest{size: size.read, srcSTag: 7}
			e.give(t, r.append(h.Append(nil)))
		}
		var moved [16]int
		open := byte(0xff)
		for range 20000 {
			post()
			request()
			e.completions()
			p := e.poll(testMULPDU)
			op := p[1] & ctrlOpcode
			if open != 0xff && op != open {
				t.Fatalf("%v: opcode %d inside a message of opcode %d", size, op, open)
			}
			open = op
			if p[0]&0x40 != 0 {
				open = 0xff
			}
			moved[op] += len(p)
			if len(e.slots) == int(e.tail-e.head) || len(e.resps) == int(e.respTail-e.respHead)+24 {
				break
			}
		}
		w, r := moved[opcodeWrite], moved[opcodeReadResponse]
		if limit := int(max(size.write, size.read)) * 5 / 4; w-r > limit || r-w > limit || w == 0 || r == 0 {
			t.Errorf("%v: %d bytes of Writes, %d of Responses", size, w, r)
		}
	}
}

// TestFairnessAfterIdle checks that what one side sent while the other was idle is not held against it later.
func TestFairnessAfterIdle(t *testing.T) {
	e := newEnd(Config{IRD: 10})
	e.mem.regions[7] = &region{buf: make([]byte, 100), read: true}
	e.mem.sources[0] = make([]byte, 100000)
	msn := serial.Num(0)
	request := func() {
		msn++
		h := ddp.Untagged{Last: true, ULP: control(opcodeReadRequest), QN: 1, MSN: msn}
		e.give(t, (&readRequest{size: 100, srcSTag: 7}).append(h.Append(nil)))
	}
	drain := func() (opcodes []byte) {
		for p := e.poll(testMULPDU); p != nil; p = e.poll(testMULPDU) {
			if p[0]&0x40 != 0 {
				opcodes = append(opcodes, p[1]&ctrlOpcode)
			}
		}
		return opcodes
	}
	for _, reads := range []int{0, 3} {
		e.post(t, WR{Op: OpWrite, Len: 100000})
		for range reads {
			request()
		}
		drain()
		for range 6 {
			request()
			e.post(t, WR{Op: OpWrite, Len: 100})
		}
		if got, want := drain(), []byte{2, 0, 2, 0, 2, 0, 2, 0, 2, 0, 2, 0}; !bytes.Equal(got, want) {
			t.Errorf("after a Write and %d Reads: opcodes %v; want %v", reads, got, want)
		}
	}
}

// TestMSNWrap checks that MSNs start at 1 and wrap (RFC 5041 section 4.3).
func TestMSNWrap(t *testing.T) {
	e := newEnd(Config{ORD: 4})
	for i := range e.msn {
		e.msn[i] = 0xffffffff
	}
	for _, want := range []string{"ffffffff", "00000000", "00000001"} {
		for _, op := range []Op{OpSend, OpFetchAdd} {
			e.post(t, WR{Op: op})
			if p := e.poll(testMULPDU); !bytes.Equal(p[10:14], testenv.Unhex(t, want)) {
				t.Errorf("%v: MSN %x; want %s", op, p[10:14], want)
			}
		}
	}
}

// TestReceiveRingGrows checks that no completion of a receive is lost while the caller does not poll.
func TestReceiveRingGrows(t *testing.T) {
	e := newEnd(Config{MaxRecv: 4})
	for i := range 50 {
		e.mem.recvs = append(e.mem.recvs, make([]byte, 8))
		if i == 3 {
			e.completions() // so that the ring does not start at index 0
		}
		h := ddp.Untagged{Last: true, ULP: control(opcodeSend), MSN: serial.Num(i + 1)}
		e.give(t, h.Append(nil))
	}
	cs := e.completions()
	for i, c := range cs {
		if c.ID != uint32(i+3) {
			t.Fatalf("completion %d is of buffer %d", i, c.ID)
		}
	}
	if len(cs) != 47 {
		t.Errorf("%d completions; want 47", len(cs))
	}
}

func TestMULPDUTooSmall(t *testing.T) {
	e := newEnd(Config{})
	e.post(t, WR{Op: OpWrite})
	if p := e.poll(127); p != nil {
		t.Errorf("MULPDU below the minimum: %x", p)
	}
	if e.poll(128) == nil {
		t.Error("nothing at the minimum")
	}
}

// TestSourceError checks that a payload that cannot be read is replaced by a Terminate (RFC 5040 section 7.1, rule
// 1), and that the one for a Read shows how far the Read had come (section 4.8).
func TestSourceError(t *testing.T) {
	for _, segments := range []int{1, 2, 3} { // the last segment is the third
		e := newVictim()
		e.mem.sources[5] = make([]byte, 300)
		e.post(t, WR{ID: 4, Op: OpRead})
		e.post(t, WR{ID: 5, Op: OpSend, Len: 300})
		e.post(t, WR{ID: 6, Op: OpSend})
		e.poll(testMULPDU)
		var seg Segment
		for range segments {
			if !e.PollFilling(testMULPDU, testMULPDU, &seg) {
				t.Fatal("nothing to send")
			}
		}
		e.SourceError(&seg, term.ErrRDMAPLocal)
		wantTerminate(t, e, term.ErrRDMAPLocal, terminateFor(term.ErrRDMAPLocal, noHeader, nil))
		e.Flush()
		cs := e.completions()
		if len(cs) != 4 || cs[0].Status != StatusFlushed || cs[1].Status != StatusLocalProtection || cs[2].Status != StatusFlushed {
			t.Errorf("segment %d: %+v", segments, cs)
		}
	}

	request := testenv.Unhex(t, "4141 00000000 00000001 00000001 00000000 00000009 fffffffffffff000 000000fa 00000007 0000000000001000")
	for segments, rest := range []string{
		"00000009 fffffffffffff000 000000fa 00000007 0000000000001000",
		"00000009 fffffffffffff072 00000088 00000007 0000000000001072",
		"00000009 fffffffffffff0e4 00000016 00000007 00000000000010e4",
	} {
		e := newVictim()
		e.give(t, request)
		var seg Segment
		for range segments + 1 {
			if !e.PollFilling(testMULPDU, testMULPDU, &seg) {
				t.Fatal("nothing to send")
			}
		}
		e.SourceError(&seg, term.ErrReadSTag)
		want := terminateFor(term.ErrReadSTag, ddpHeader, request)
		want[ddp.UntaggedLen+2] |= hdrRDMA
		wantTerminate(t, e, term.ErrReadSTag, append(want, testenv.Unhex(t, rest)...))
	}

	// A work request has already completed and its slot is in use by another one.
	e := newEnd(Config{MaxWR: 1})
	e.mem.sources[1] = make([]byte, 8)
	e.post(t, WR{ID: 1, Op: OpSend, Len: 8})
	var seg Segment
	e.PollFilling(testMULPDU, testMULPDU, &seg)
	e.completions()
	e.post(t, WR{ID: 2, Op: OpSend})
	e.SourceError(&seg, term.ErrRDMAPLocal)
	if cs := e.completions(); len(cs) != 0 {
		t.Errorf("the next work request completes as %+v", cs)
	}

	e = newVictim() // after the end of the stream it has no effect
	e.Fail(term.ErrMPACRC)
	e.SourceError(&Segment{}, term.ErrRDMAPLocal)
	if e.Err() != term.ErrMPACRC {
		t.Errorf("Err = %v; want the first error", e.Err())
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		OpWrite.String(): "write", OpTerminate.String(): "terminate", Op(0).String(): "unknown", Op(200).String(): "unknown",
		StatusOK.String(): "ok", StatusRemoteOp.String(): "remote operation error", Status(99).String(): "unknown",
		Event(0).String(): "unknown",
	} {
		if got != want {
			t.Errorf("%q; want %q", got, want)
		}
	}
	for op := OpWrite; op <= OpTerminate; op++ {
		if op.String() == "unknown" {
			t.Errorf("operation %d has no name", op)
		}
		if op.HasResponse() != (op == OpRead || op == OpFetchAdd || op == OpCmpSwap) {
			t.Errorf("HasResponse of %v", op)
		}
	}
}
