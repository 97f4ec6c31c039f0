package rdmap

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestHandleEarly checks which out-of-order segments are placed early. The end awaits 16 bytes of STag 7 at 0x1000 by
// a Read, and has two receive buffers of 64 bytes.
func TestHandleEarly(t *testing.T) {
	send := func(msn, mo string) string { return "4143 00000000 00000000 " + msn + mo }
	tests := []struct {
		name string
		in   string
		want bool
	}{
		{"Write", "c140 00000007 0000000000001010 aabb", true},
		{"Write, not last", "8140 00000007 0000000000001010 aabb", true},
		{"Write of no bytes", "c140 00000000 0000000000000000", true},
		{"Write to no STag", "c140 00000006 0000000000001010 aabb", false},
		{"Write, TO wraps", "c140 00000007 ffffffffffffffff aabb", false},
		{"Read Response", "c142 00000007 0000000000001008 0102030405060708", true},
		{"Read Response of no bytes", "c142 00000007 0000000000001010", true},
		{"Read Response nobody awaits: STag", "c142 0000000a 0000000000001008 01", false},
		{"Read Response nobody awaits: an STag that is there", "c142 00000008 0000000000001008 01", false},
		{"Read Response nobody awaits: TO", "c142 00000007 0000000000001011 01", false},
		{"Read Response nobody awaits: length", "c142 00000007 000000000000100f 0102", false},
		{"Read Response nobody awaits: before", "c142 00000007 0000000000000fff 0102", false},
		{"Send", send("00000001", "00000000 aa"), true},
		{"Send, further on", send("00000001", "0000003f aa"), true},
		{"second Send", send("00000002", "00000000 aa"), true},
		{"Send of no bytes", send("00000002", "00000000"), true},
		{"Send without a buffer", send("00000003", "00000000 aa"), false},
		{"Send that is past", send("00000000", "00000000 aa"), false},
		{"Send far ahead", send("00000100", "00000000 aa"), false},
		{"Send too long", send("00000001", "00000040 aa"), false},
		{"Send with Invalidate", "4144 00000007 00000000 00000001 00000000 aa", true},
		{"Immediate Data", "4148 00000000 00000000 00000001 00000000 0102030405060708", false},
		{"Read Request", hRead + sink + "00000001 00000007 0000000000001000", false},
		{"Atomic Request", hAtomic + "00000000 00000000 00000007 0000000000001000 0000000000000001 0000000000000000" + atomOnes, false},
		{"Terminate", hTerm + "20020000", false},
		{"Atomic Response", hAnswer + "00000000 0000000000000000", false},
		{"opcode 12", "c14c 00000007 0000000000001010 aabb", false},
		{"RDMAP version", "c100 00000007 0000000000001010 aabb", false},
		{"DDP version", "c040 00000007 0000000000001010 aabb", false},
		{"wrong queue", "4143 00000000 00000001 00000001 00000000 aa", false},
		{"DDP version, untagged", "4043 00000000 00000000 00000001 00000000 aa", false},
		{"short", "c140", false},
		{"nothing", "", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newVictim()
			e.mem.recvs = append(e.mem.recvs, make([]byte, 64))
			e.post(t, WR{Op: OpFetchAdd})
			e.post(t, WR{Op: OpRead, Len: 16, SinkSTag: 7, SinkTO: 0x1000})
			e.poll(testMULPDU)
			e.poll(testMULPDU)
			in := testenv.Unhex(t, tt.in)
			for range 2 {
				if got := e.HandleEarly(1000, in); got != tt.want {
					t.Fatalf("HandleEarly = %v; want %v", got, tt.want)
				}
			}
			if e.Terminating() || len(e.completions()) != 0 || e.Stats().RxSegments != 0 {
				t.Error("it had an effect before its turn")
			}
			if !tt.want && e.mem.placed != 0 {
				t.Error("refused, but placed")
			}
			if n := e.early.n; tt.want != (n == 1) {
				t.Errorf("%d headers kept", n)
			}
		})
	}
}

// TestHandleEarlyAtomic checks that an outstanding atomic accepts no Read Response, not even an empty one.
func TestHandleEarlyAtomic(t *testing.T) {
	e := newVictim()
	e.post(t, WR{Op: OpFetchAdd})
	e.poll(testMULPDU)
	if e.HandleEarly(1000, testenv.Unhex(t, "c142 00000000 0000000000000000")) {
		t.Error("a Read Response that only an atomic could have asked for was taken early")
	}
}

// TestDeliverEarlyErrors checks that the error of an early segment is reported when its turn comes, with the
// Terminate that the segment would have caused.
func TestDeliverEarlyErrors(t *testing.T) {
	tests := []struct {
		name string
		in   string
		want *term.Error
	}{
		{"second Send first", "4143 00000000 00000000 00000002 00000000 aa", term.ErrMSNRange},
		{"a hole in a Send", "4143 00000000 00000000 00000001 00000004 aa", term.ErrInvalidMO},
		{"Invalidate fails", "4144 00000006 00000000 00000001 00000000 aa", term.ErrCannotInvalidate},
		{"a hole in a Read Response", "c142 00000007 0000000000001008 0102030405060708", term.ErrBounds},
		{"response to the second Read first", "c142 00000007 0000000000001080 01", term.ErrBounds},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newVictim()
			e.mem.recvs = append(e.mem.recvs, make([]byte, 64))
			e.post(t, WR{Op: OpRead, Len: 16, SinkSTag: 7, SinkTO: 0x1000})
			e.post(t, WR{Op: OpRead, Len: 1, SinkSTag: 7, SinkTO: 0x1080})
			e.poll(testMULPDU)
			e.poll(testMULPDU)
			in := testenv.Unhex(t, tt.in)
			if !e.HandleEarly(1000, in) {
				t.Fatal("refused")
			}
			if err := e.DeliverEarly(1000); err != tt.want {
				t.Fatalf("DeliverEarly = %v; want %v", err, tt.want)
			}
			wantTerminate(t, e, tt.want, terminateFor(tt.want, ddpHeader, in))
		})
	}

	e := newVictim()
	if err := e.DeliverEarly(5); err != term.ErrRDMAPLocal {
		t.Errorf("DeliverEarly of what was never placed: %v; want %v", err, term.ErrRDMAPLocal)
	}
	if err := e.DeliverEarly(5); err != nil {
		t.Errorf("DeliverEarly after the end: %v; want it dropped", err)
	}
}

// TestEarlyReversed delivers the segments of three Sends and a Write in reverse order.
func TestEarlyReversed(t *testing.T) {
	a, b := newPair(Config{})
	b.mem.regions[7] = &region{buf: make([]byte, 1000), write: true}
	data := fill(make([]byte, 500), 9)
	for i := range uint32(3) {
		a.mem.sources[i] = data[i:]
		a.post(t, WR{ID: i, Op: OpSend, Len: 400 + i})
		b.mem.recvs = append(b.mem.recvs, make([]byte, 500))
	}
	a.mem.sources[3] = data
	a.post(t, WR{ID: 3, Op: OpWrite, Len: 500, STag: 7, TO: 100})
	var segs [][]byte
	for p := a.poll(testMULPDU); p != nil; p = a.poll(testMULPDU) {
		segs = append(segs, p)
	}
	for i := len(segs) - 1; i > 0; i-- {
		if !b.HandleEarly(serial.Num(i), segs[i]) {
			t.Fatalf("segment %d refused", i)
		}
	}
	if got := b.mem.regions[7].buf[100:600]; !bytes.Equal(got, data) {
		t.Error("the Write is not placed")
	}
	b.give(t, segs[0])
	for i := range segs[1:] {
		if err := b.DeliverEarly(serial.Num(i + 1)); err != nil {
			t.Fatalf("segment %d: %v", i+1, err)
		}
	}
	cs := b.completions()
	if len(cs) != 3 {
		t.Fatalf("completions %+v", cs)
	}
	for i, c := range cs {
		if c.ID != uint32(i) || c.Len != uint32(400+i) || !bytes.Equal(b.mem.recvs[i][:c.Len], data[i:][:c.Len]) {
			t.Errorf("Send %d: %+v", i, c)
		}
	}
	if s := b.Stats(); s.RxEarlyPlaced != uint64(len(segs)-1) || s.RxWrites != 1 || s.RxSends != 3 {
		t.Errorf("counters %+v", s)
	}
}

// TestEarlyLimit checks that the table of early segments is bounded and may be disabled.
func TestEarlyLimit(t *testing.T) {
	in := testenv.Unhex(t, "c140 00000007 0000000000001000 aa")
	for _, limit := range []int{1, 2, 3, 100} {
		e := newVictim()
		e.Init(Config{Early: limit}, e.mem)
		for i := range limit {
			if !e.HandleEarly(serial.Num(i), in) {
				t.Fatalf("limit %d: segment %d refused", limit, i)
			}
		}
		if e.HandleEarly(serial.Num(limit), in) {
			t.Errorf("limit %d: one more was taken", limit)
		}
		if !e.HandleEarly(0, in) {
			t.Errorf("limit %d: one that is there was refused when it came again", limit)
		}
		if err := e.DeliverEarly(0); err != nil {
			t.Fatal(err)
		}
		if !e.HandleEarly(serial.Num(limit), in) {
			t.Errorf("limit %d: refused although there is room again", limit)
		}
	}
	e := newVictim()
	e.Init(Config{Early: -1}, e.mem)
	if e.HandleEarly(0, in) {
		t.Error("placed early although that is off")
	}
}

// TestEarlyWindow checks that at most a window of messages is open at once, so that a peer cannot take all receive
// buffers with one segment each.
func TestEarlyWindow(t *testing.T) {
	e := newVictim()
	for range 300 {
		e.mem.recvs = append(e.mem.recvs, make([]byte, 8))
	}
	send := func(msn uint32) []byte {
		h := ddp.Untagged{Last: true, ULP: control(opcodeSend), MSN: serial.Num(msn)}
		return h.Append(nil)
	}
	if e.HandleEarly(1, send(recvWindow+1)) || e.mem.taken != 0 {
		t.Errorf("a message behind the window: %d buffers taken", e.mem.taken)
	}
	if !e.HandleEarly(1, send(recvWindow)) || e.mem.taken != recvWindow {
		t.Errorf("the last of the window: %d buffers taken; want %d", e.mem.taken, recvWindow)
	}
	e.give(t, send(1))
	if !e.HandleEarly(2, send(recvWindow+1)) {
		t.Error("the window did not move")
	}
}

// TestEarlySharedRecvs checks that a peer cannot take receives that other streams need too with segments out of order.
func TestEarlySharedRecvs(t *testing.T) {
	e := newEnd(Config{SharedRecvs: true})
	e.mem.recvs = [][]byte{make([]byte, 8), make([]byte, 8), make([]byte, 8)}
	send := func(msn serial.Num) []byte {
		h := ddp.Untagged{Last: true, ULP: control(opcodeSend), MSN: msn}
		return h.Append(nil)
	}
	if e.HandleEarly(1, send(2)) || e.mem.taken != 0 {
		t.Errorf("%d receives taken for a message after the next", e.mem.taken)
	}
	if !e.HandleEarly(2, send(1)) || e.mem.taken != 1 {
		t.Errorf("%d receives taken for the next message; want 1", e.mem.taken)
	}
	if err := e.DeliverEarly(2); err != nil {
		t.Fatal(err)
	}
	if err := e.HandleULPDU(send(2)); err != nil || e.mem.taken != 2 {
		t.Errorf("in order: %v, %d receives taken", err, e.mem.taken)
	}
}

// TestEarlyTable compares the table with a map.
func TestEarlyTable(t *testing.T) {
	r := testenv.Rand(t)
	for range 50 {
		var table earlyTable
		limit := r.IntN(40) + 1
		table.limit = limit
		want := map[serial.Num]int{}
		base := serial.Num(r.Uint32())
		step := []int{1, 24, 1460, 1 << 27}[r.IntN(4)]
		for range 2000 {
			key := base.Add(r.IntN(64) * step)
			if r.IntN(2) == 0 && table.room(key) {
				n := r.IntN(100)
				table.put(key, nil, n)
				want[key] = n
			} else {
				e, ok := table.take(key)
				if n, has := want[key]; ok != has || ok && (e.key != key || int(e.segLen) != n) {
					t.Fatalf("take(%d) = %+v, %v; want %d, %v", key, e, ok, n, has)
				}
				delete(want, key)
			}
			if table.n != len(want) || table.n > limit {
				t.Fatalf("%d entries; want %d, at most %d", table.n, len(want), limit)
			}
		}
	}
}
