package rdmap

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/ddp"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestOpcodeRegistry checks the registry of RDMAP Message Operation Codes: RFC 6580 section 3.4, with the additions
// of RFC 7306 section 10.1. Any other opcode is unexpected, including the experimental one.
func TestOpcodeRegistry(t *testing.T) {
	registry := []struct {
		name   string
		opcode uint8
		code   uint8
		queue  uint8 // noQueue: tagged
		op     Op    // of queue 0
	}{
		{"RDMA Write", opcodeWrite, 0x0, noQueue, 0},
		{"RDMA Read Request", opcodeReadRequest, 0x1, 1, 0},
		{"RDMA Read Response", opcodeReadResponse, 0x2, noQueue, 0},
		{"Send", opcodeSend, 0x3, 0, OpSend},
		{"Send with Invalidate", opcodeSendInv, 0x4, 0, OpSendInv},
		{"Send with Solicited Event", opcodeSendSE, 0x5, 0, OpSendSE},
		{"Send with Solicited Event and Invalidate", opcodeSendSEInv, 0x6, 0, OpSendSEInv},
		{"Terminate", opcodeTerminate, 0x7, 2, 0},
		{"Immediate Data", opcodeImm, 0x8, 0, OpImm},
		{"Immediate Data with Solicited Event", opcodeImmSE, 0x9, 0, OpImmSE},
		{"Atomic Request", opcodeAtomicRequest, 0xa, 1, 0},
		{"Atomic Response", opcodeAtomicResponse, 0xb, 3, 0},
	}
	for i, r := range registry {
		if r.opcode != r.code || r.code != uint8(i) {
			t.Errorf("%s is %#x; want %#x", r.name, r.opcode, r.code)
		}
		if opcodeQueue[i] != r.queue || sendOps[i] != r.op {
			t.Errorf("%s: queue %d, operation %v; want %d, %v", r.name, opcodeQueue[i], sendOps[i], r.queue, r.op)
		}
		if r.op != 0 && sendOpcodes[r.op] != r.code {
			t.Errorf("%v has opcode %#x; want %#x", r.op, sendOpcodes[r.op], r.code)
		}
	}
	for code := len(registry); code < 16; code++ {
		if opcodeQueue[code] != noQueue || sendOps[code] != 0 {
			t.Errorf("opcode %#x has queue %d, operation %v", code, opcodeQueue[code], sendOps[code])
		}
		for qn := range 4 {
			seg := []byte{0x41, 0x40 | byte(code), 0, 0, 0, 0, 0, 0, 0, byte(qn), 0, 0, 0, 1, 0, 0, 0, 0}
			if err := newVictim().HandleULPDU(seg); err != term.ErrOpcode {
				t.Errorf("opcode %#x on queue %d: %v; want %v", code, qn, err, term.ErrOpcode)
			}
		}
		seg := []byte{0xc1, 0x40 | byte(code), 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0x10, 0}
		if err := newVictim().HandleULPDU(seg); err != term.ErrOpcode {
			t.Errorf("opcode %#x, tagged: %v; want %v", code, err, term.ErrOpcode)
		}
	}
}

// TestWire compares each message with its bytes on the wire: control bytes of RFC 5040 figure 4 and RFC 7306 figure
// 2, headers of RFC 5040 section 4.4 and RFC 7306 sections 5.2.1, 5.2.2 and 6.2.
func TestWire(t *testing.T) {
	const maskFF = "ffffffffffffffff"
	tests := []struct {
		name string
		wr   WR
		want string
	}{
		{"Write", WR{Op: OpWrite, Len: 2, STag: 0x01020304, TO: 0x05060708090a0b0c},
			"c140 01020304 05060708090a0b0c 6869"},
		{"Write of no bytes", WR{Op: OpWrite}, "c140 00000000 0000000000000000"},
		{"Read", WR{Op: OpRead, Len: 0x64, STag: 0x01020304, TO: 0x05060708090a0b0c, SinkSTag: 0x11121314, SinkTO: 0x15161718191a1b1c},
			"4141 00000000 00000001 00000001 00000000 11121314 15161718191a1b1c 00000064 01020304 05060708090a0b0c"},
		{"Send", WR{Op: OpSend, Len: 2, Inv: 9}, "4143 00000000 00000000 00000001 00000000 6869"},
		{"Send of no bytes", WR{Op: OpSend}, "4143 00000000 00000000 00000001 00000000"},
		{"Send with Invalidate", WR{Op: OpSendInv, Len: 2, Inv: 0xaabbccdd}, "4144 aabbccdd 00000000 00000001 00000000 6869"},
		{"Send with SE", WR{Op: OpSendSE, Len: 2, Inv: 9}, "4145 00000000 00000000 00000001 00000000 6869"},
		{"Send with SE and Invalidate", WR{Op: OpSendSEInv, Len: 2, Inv: 0xaabbccdd}, "4146 aabbccdd 00000000 00000001 00000000 6869"},
		{"Immediate Data", WR{Op: OpImm, Inv: 9, Imm: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}},
			"4148 00000000 00000000 00000001 00000000 0102030405060708"},
		{"Immediate Data with SE", WR{Op: OpImmSE, Imm: [8]byte{1, 2, 3, 4, 5, 6, 7, 8}},
			"4149 00000000 00000000 00000001 00000000 0102030405060708"},
		{"FetchAdd", WR{Op: OpFetchAdd, STag: 0x01020304, TO: 0x05060708090a0b0c, Add: 0x2122232425262728, AddMask: 0x3132333435363738, Cmp: 9, CmpMask: 9, Swap: 9},
			"414a 00000000 00000001 00000001 00000000 00000000 00000000 01020304 05060708090a0b0c 2122232425262728 3132333435363738 0000000000000000 " + maskFF},
		{"CmpSwap", WR{Op: OpCmpSwap, STag: 0x01020304, TO: 0x05060708090a0b0c, Swap: 0x2122232425262728, SwapMask: 0x3132333435363738,
			Cmp: 0x4142434445464748, CmpMask: 0x5152535455565758, Add: 9, AddMask: 9},
			"414a 00000000 00000001 00000001 00000000 00000002 00000000 01020304 05060708090a0b0c 2122232425262728 3132333435363738 4142434445464748 5152535455565758"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnd(Config{ORD: 1})
			e.mem.sources[0] = []byte("hi")
			e.post(t, tt.wr)
			got := e.poll(testMULPDU)
			if want := testenv.Unhex(t, tt.want); !bytes.Equal(got, want) {
				t.Errorf("got\n%x; want\n%x", got, want)
			}
			if more := e.poll(testMULPDU); more != nil {
				t.Errorf("and then %x", more)
			}
		})
	}
}

// TestWireResponses checks that a response copies the sink from the request uninterpreted and returns the atomic's
// identifier.
func TestWireResponses(t *testing.T) {
	e := newEnd(Config{IRD: 3})
	e.mem.regions[0x01020304] = &region{base: 0x1000, buf: fill(make([]byte, 200), 3), read: true}
	be.PutUint64(e.mem.regions[0x01020304].buf, 0xfffffffffffffffe)
	for _, in := range []string{
		"4141 00000000 00000001 00000001 00000000 ffffffff fffffffffffffff0 00000003 01020304 0000000000001000",
		"414a 00000000 00000001 00000002 00000000 00000000 deadbeef 01020304 0000000000001000 0000000000000005 0000000000000000 0000000000000000 ffffffffffffffff",
		"4141 00000000 00000001 00000003 00000000 00000000 0000000000000000 00000000 00000000 ffffffffffffffff",
	} {
		if err := e.HandleULPDU(testenv.Unhex(t, in)); err != nil {
			t.Fatalf("%s: %v", in, err)
		}
	}
	for _, out := range []string{
		"c142 ffffffff fffffffffffffff0 ffffff",
		"414b 00000000 00000003 00000001 00000000 deadbeef fffffffffffffffe",
		"c142 00000000 0000000000000000",
	} {
		if got, want := e.poll(testMULPDU), testenv.Unhex(t, out); !bytes.Equal(got, want) {
			t.Errorf("got\n%x; want\n%x", got, want)
		}
	}
	if got := be.Uint64(e.mem.regions[0x01020304].buf); got != 3 {
		t.Errorf("the sum is %#x; want 3", got)
	}
}

// TestCapturedRping replays the first round of rping between two soft-iWARPs in peer-to-peer mode (Linux 6.1,
// captured) with two Streams, which must send the bytes of the capture.
func TestCapturedRping(t *testing.T) {
	const (
		ping = "72646d612d70696e672d303a204142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f60" +
			"6162636465666768696a6b6c6d6e6f70717200"
		source = "00005593db82f3703161820000000040"
		sink   = "00005593db82f5501dc13f0000000040"
	)
	client, server := newPair(Config{IRD: 1, ORD: 1})
	client.mem.regions[0x31618200] = &region{base: 0x5593db82f370, buf: testenv.Unhex(t, ping), read: true}
	client.mem.regions[0x1dc13f00] = &region{base: 0x5593db82f550, buf: make([]byte, 64), write: true}
	server.mem.regions[0x08bfe000] = &region{base: 0x56012fa0ef30, buf: make([]byte, 64)}
	for range 2 {
		client.mem.recvs = append(client.mem.recvs, make([]byte, 16))
		server.mem.recvs = append(server.mem.recvs, make([]byte, 16))
	}
	client.SendRTR(OpWrite)
	server.ExpectRTR(OpWrite)

	var id uint32
	post := func(e *end, wr WR, data string) {
		id++
		wr.ID = id
		e.mem.sources[id] = testenv.Unhex(t, data)
		e.post(t, wr)
	}
	carry := func(from, to *end, want string) {
		t.Helper()
		b := from.poll(1442)
		if !bytes.Equal(b, testenv.Unhex(t, want)) {
			t.Fatalf("sent\n%x; in the capture it was\n%s", b, want)
		}
		to.give(t, b)
	}
	carry(client, server, "c140 00000001 0000000000000000")
	post(client, WR{Op: OpSend, Len: 16}, source)
	carry(client, server, "4143 00000000 00000000 00000001 00000000"+source)
	post(server, WR{Op: OpRead, Len: 64, STag: 0x31618200, TO: 0x5593db82f370, SinkSTag: 0x08bfe000, SinkTO: 0x56012fa0ef30}, "")
	carry(server, client, "4141 00000000 00000001 00000001 00000000 08bfe000 000056012fa0ef30 00000040 31618200 00005593db82f370")
	carry(client, server, "c142 08bfe000 000056012fa0ef30"+ping)
	post(server, WR{Op: OpSend, Len: 16}, strings.Repeat("00", 16))
	carry(server, client, "4143 00000000 00000000 00000001 00000000"+strings.Repeat("00", 16))
	post(client, WR{Op: OpSend, Len: 16}, sink)
	carry(client, server, "4143 00000000 00000000 00000002 00000000"+sink)
	post(server, WR{Op: OpWrite, Len: 64, STag: 0x1dc13f00, TO: 0x5593db82f550}, ping)
	carry(server, client, "c140 1dc13f00 00005593db82f550"+ping)
	post(server, WR{Op: OpSend, Len: 16}, strings.Repeat("00", 16))
	carry(server, client, "4143 00000000 00000000 00000002 00000000"+strings.Repeat("00", 16))

	if !bytes.Equal(client.mem.regions[0x1dc13f00].buf, testenv.Unhex(t, ping)) || !bytes.Equal(server.mem.recvs[1], testenv.Unhex(t, sink)) {
		t.Error("the bytes did not arrive")
	}
	for name, e := range map[string]*end{"client": client, "server": server} {
		for _, c := range e.completions() {
			if c.Status != StatusOK {
				t.Errorf("%s: %+v", name, c)
			}
		}
	}
}

// TestCapturedSegmentation compares the segmentation of 65,536 bytes with that of soft-iWARP in perftest captures.
func TestCapturedSegmentation(t *testing.T) {
	e := newEnd(Config{IRD: 1})
	buf := make([]byte, 65536)
	e.mem.sources[0] = buf
	e.mem.regions[0xba82de00] = &region{base: 0x7ff02b005000, buf: buf, read: true}
	tests := []struct {
		name        string
		do          func()
		first, last string
		count       int
	}{
		{"Write", func() { e.post(t, WR{Op: OpWrite, Len: 65536, STag: 0x18ada100, TO: 0x7ffa4e7c0000}) },
			"814018ada10000007ffa4e7c0000", "c14018ada10000007ffa4e7cfb04", 46},
		{"Read Response", func() {
			e.give(t, testenv.Unhex(t, "4141000000000000000100000001000000003944500000007fd7ff83b00000010000ba82de0000007ff02b005000"))
		}, "81423944500000007fd7ff83b000", "c1423944500000007fd7ff84ab04", 46},
		{"Send", func() { e.post(t, WR{Op: OpSend, Len: 65536}) },
			"014300000000000000000000000100000000", "41430000000000000000000000010000ffe0", 47},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.do()
			var b [][]byte
			for p := e.poll(1442); p != nil; p = e.poll(1442) {
				b = append(b, p[:ddp.HeaderLen(p)])
			}
			if len(b) != tt.count || hex.EncodeToString(b[0]) != tt.first || hex.EncodeToString(b[len(b)-1]) != tt.last {
				t.Errorf("%d segments from %x to %x; want %d from %s to %s", len(b), b[0], b[len(b)-1], tt.count, tt.first, tt.last)
			}
		})
	}
}

// TestAtomicApply compares AtomicOp.Apply with the pseudocode of RFC 7306 sections 5.1.1 and 5.1.2, bit by bit.
func TestAtomicApply(t *testing.T) {
	reference := func(a *AtomicOp, old uint64) uint64 {
		if a.Op == OpCmpSwap {
			if (a.Cmp^old)&a.CmpMask != 0 {
				return old
			}
			var v uint64
			for bit := range 64 {
				from := old
				if a.Mask>>bit&1 == 1 {
					from = a.Data
				}
				v |= from & (1 << bit)
			}
			return v
		}
		var v, carry uint64
		for bit := range 64 {
			sum := carry + old>>bit&1 + a.Data>>bit&1
			v |= sum & 1 << bit
			carry = sum >> 1 & ^(a.Mask >> bit & 1) & 1
		}
		return v
	}
	values := []uint64{0, 1, 2, 0x7fffffffffffffff, 0x8000000000000000, 0xffffffffffffffff, 0x00ff00ff00ff00ff, 0xff00ff00ff00ff00,
		0x8080808080808080, 0x8000000080000000, 0x0123456789abcdef, 0xfedcba9876543210, 0x5555555555555555}
	for _, old := range values {
		for _, data := range values {
			for _, mask := range values {
				for _, op := range []AtomicOp{
					{Op: OpFetchAdd, Data: data, Mask: mask},
					{Op: OpCmpSwap, Data: data, Mask: mask, Cmp: old, CmpMask: ^uint64(0)},
					{Op: OpCmpSwap, Data: data, Mask: mask, Cmp: data, CmpMask: 0xff},
					{Op: OpCmpSwap, Data: data, Mask: mask, Cmp: data},
				} {
					if got, want := op.Apply(old), reference(&op, old); got != want {
						t.Fatalf("%+v of %#x = %#x; want %#x", op, old, got, want)
					}
				}
			}
		}
	}
	carry := AtomicOp{Op: OpFetchAdd, Data: 0x00000001_00000001, Mask: 0x80000000_80000000}
	if got := carry.Apply(0xffffffff_ffffffff); got != 0 {
		t.Errorf("two fields of 32 bits: %#x; want 0", got)
	}
}
