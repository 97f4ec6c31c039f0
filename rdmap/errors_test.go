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

// Fields of a Terminate besides its three codes (RFC 5040 figure 10).
const (
	noHeader = iota
	ddpHeader
	ddpAndRead
)

// terminateFor returns the ULPDU of the Terminate for a segment.
func terminateFor(e *term.Error, headers int, seg []byte) []byte {
	b, _ := hex.DecodeString("414700000000" + "00000002" + "00000001" + "00000000")
	b = append(b, e.Layer<<4|e.Type, e.Code)
	switch headers {
	case noHeader:
		return append(b, 0, 0)
	case ddpHeader:
		b = append(b, 0xc0, 0)
	case ddpAndRead:
		b = append(b, 0xe0, 0)
	}
	n := ddp.HeaderLen(seg)
	b = be.AppendUint16(b, uint16(len(seg)))
	b = append(b, seg[:n]...)
	if headers == ddpAndRead {
		b = append(b, seg[n:n+readRequestLen]...)
	}
	return b
}

// Pieces of segments.
const (
	hSend    = "4143 00000000 00000000 00000001 00000000 "
	hRead    = "4141 00000000 00000001 00000001 00000000 "
	hAtomic  = "414a 00000000 00000001 00000001 00000000 "
	hAnswer  = "414b 00000000 00000003 00000001 00000000 "
	hTerm    = "4147 00000000 00000002 00000001 00000000 "
	sink     = "00000009 0000000000002000 "
	atomOnes = "0000000000000000 ffffffffffffffff "
)

// errorCases is every check of RFC 5041 section 7.1, RFC 5040 section 7.2 and RFC
// 7306 section 8.2. Each is one segment to an end that has STag 7 (256 bytes
// from 0x1000, all rights), 8 (no rights), 10 (another stream's), one receive
// buffer of 64 bytes, IRD 1.
var errorCases = []struct {
	name    string
	in      string
	want    *term.Error
	headers int
}{
	// RFC 5041 section 7.1, tagged.
	{"tagged: STag unknown", "c140 00000006 0000000000001000 aa", term.ErrInvalidSTag, ddpHeader},
	{"tagged: STag 0", "c140 00000000 0000000000001000 aa", term.ErrInvalidSTag, ddpHeader},
	{"tagged: no right to write", "c140 00000008 0000000000001000 aa", term.ErrInvalidSTag, ddpHeader},
	{"tagged: STag of another stream", "c140 0000000a 0000000000001000 aa", term.ErrSTagStream, ddpHeader},
	{"tagged: TO below", "c140 00000007 0000000000000fff aa", term.ErrBounds, ddpHeader},
	{"tagged: TO above", "c140 00000007 0000000000001101 aa", term.ErrBounds, ddpHeader},
	{"tagged: end above", "c140 00000007 00000000000010ff aabb", term.ErrBounds, ddpHeader},
	{"tagged: TO wraps", "c140 00000007 ffffffffffffffff aabb", term.ErrTOWrap, ddpHeader},
	{"tagged: version 0", "c040 00000007 0000000000001000 aa", term.ErrTaggedVersion, ddpHeader},
	{"tagged: version 2", "c240 00000007 0000000000001000 aa", term.ErrTaggedVersion, ddpHeader},
	{"tagged: version 3", "c340 00000007 0000000000001000", term.ErrTaggedVersion, ddpHeader},
	{"tagged: not the last segment", "8140 00000006 0000000000001000 aa", term.ErrInvalidSTag, ddpHeader},

	// RFC 5041 section 7.1, untagged.
	{"untagged: QN 4", "4143 00000000 00000004 00000001 00000000 aa", term.ErrInvalidQN, ddpHeader},
	{"untagged: QN 2^32-1", "4143 00000000 ffffffff 00000001 00000000", term.ErrInvalidQN, ddpHeader},
	{"untagged: QN 4 and RDMAP version 0", "4103 00000000 00000004 00000001 00000000 aa", term.ErrInvalidQN, ddpHeader},
	{"untagged: MSN 0", "4143 00000000 00000000 00000000 00000000 aa", term.ErrMSNRange, ddpHeader},
	{"untagged: MSN 2 first", "4143 00000000 00000000 00000002 00000000 aa", term.ErrMSNRange, ddpHeader},
	{"untagged: MSN far", "4143 00000000 00000000 80000001 00000000 aa", term.ErrMSNRange, ddpHeader},
	{"untagged: MO outside", "4143 00000000 00000000 00000001 00000041 aa", term.ErrInvalidMO, ddpHeader},
	{"untagged: MO leaves a hole", "4143 00000000 00000000 00000001 00000001 aa", term.ErrInvalidMO, ddpHeader},
	{"untagged: message too long", hSend + strings.Repeat("aa", 65), term.ErrTooLong, ddpHeader},
	{"untagged: MO and length too long", "0143 00000000 00000000 00000001 00000040 aa", term.ErrTooLong, ddpHeader},
	{"untagged: version 0", "4043 00000000 00000000 00000001 00000000 aa", term.ErrUntaggedVersion, ddpHeader},
	{"untagged: version 2", "4243 00000000 00000000 00000001 00000000", term.ErrUntaggedVersion, ddpHeader},
	{"untagged: version 3", "4343 00000000 00000000 00000001 00000000", term.ErrUntaggedVersion, ddpHeader},
	{"queue 1: MSN", "4141 00000000 00000001 00000002 00000000" + sink + "00000000 00000000 0000000000000000", term.ErrMSNRange, ddpHeader},
	{"queue 1: MO", "4141 00000000 00000001 00000001 00000001" + sink + "00000000 00000000 0000000000000000", term.ErrInvalidMO, ddpHeader},
	{"queue 1: too long", hRead + strings.Repeat("aa", 53), term.ErrTooLong, ddpHeader},
	{"queue 2: MSN", "4147 00000000 00000002 00000000 00000000 20020000", term.ErrMSNRange, ddpHeader},
	{"queue 2: MO", "4147 00000000 00000002 00000001 00000004 20020000", term.ErrInvalidMO, ddpHeader},
	{"queue 2: too long", hTerm + strings.Repeat("00", 65), term.ErrTooLong, ddpHeader},
	{"queue 3: nothing asked for", hAnswer + "00000000 0000000000000000", term.ErrNoBuffer, ddpHeader},
	{"queue 3: nothing asked for, MSN", "414b 00000000 00000003 00000007 00000000 00000000 0000000000000000", term.ErrNoBuffer, ddpHeader},
	{"queue 3: too long", hAnswer + strings.Repeat("00", 13), term.ErrTooLong, ddpHeader},

	// RFC 5040 section 7.2: version and opcode.
	{"RDMAP version 0, tagged", "c100 00000007 0000000000001000 aa", term.ErrRDMAPVersion, ddpHeader},
	{"RDMAP version 2, tagged", "c180 00000007 0000000000001000 aa", term.ErrRDMAPVersion, ddpHeader},
	{"RDMAP version 0, untagged", "4103 00000000 00000000 00000001 00000000 aa", term.ErrRDMAPVersion, ddpHeader},
	{"RDMAP version 3, untagged", "41c1 00000000 00000001 00000001 00000000" + sink + "00000000 00000000 0000000000000000", term.ErrRDMAPVersion, ddpHeader},
	{"RDMAP version 0, atomic", "410a 00000000 00000001 00000001 00000000" + strings.Repeat("00", 52), term.ErrRDMAPVersion, ddpHeader},
	{"RDMAP version 2, Immediate Data", "4188 00000000 00000000 00000001 00000000 0000000000000000", term.ErrRDMAPVersion, ddpHeader},
	{"opcode 12, tagged", "c14c 00000007 0000000000001000 aa", term.ErrOpcode, ddpHeader},
	{"opcode 15, tagged", "c14f 00000007 0000000000001000 aa", term.ErrOpcode, ddpHeader},
	{"Send, tagged", "c143 00000007 0000000000001000 aa", term.ErrOpcode, ddpHeader},
	{"Terminate, tagged", "c147 00000007 0000000000001000 aa", term.ErrOpcode, ddpHeader},
	{"opcode 12, untagged", "414c 00000000 00000000 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"opcode 13, untagged", "414d 00000000 00000001 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"opcode 14, untagged", "414e 00000000 00000002 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"opcode 15, untagged", "414f 00000000 00000003 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"Write, untagged", "4140 00000000 00000000 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"Read Response, untagged", "4142 00000000 00000000 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"Send on queue 1", "4143 00000000 00000001 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"Send with Invalidate on queue 2", "4144 00000000 00000002 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"Send with SE on queue 3", "4145 00000000 00000003 00000001 00000000 aa", term.ErrOpcode, ddpHeader},
	{"Read Request on queue 0", "4141 00000000 00000000 00000001 00000000" + sink + "00000001 00000007 0000000000001000", term.ErrOpcode, ddpHeader},
	{"Terminate on queue 0", "4147 00000000 00000000 00000001 00000000 20020000", term.ErrOpcode, ddpHeader},
	{"Atomic Request on queue 0", "414a 00000000 00000000 00000001 00000000" + strings.Repeat("00", 52), term.ErrOpcode, ddpHeader},
	{"Atomic Response on queue 1", "414b 00000000 00000001 00000001 00000000 00000000 0000000000000000", term.ErrOpcode, ddpHeader},
	{"Immediate Data on queue 1", "4148 00000000 00000001 00000001 00000000 0000000000000000", term.ErrOpcode, ddpHeader},
	{"Read Response nobody asked for", "c142 00000007 0000000000001000 aa", term.ErrOpcode, ddpHeader},
	{"Read Response of no bytes nobody asked for", "c142 00000000 0000000000000000", term.ErrOpcode, ddpHeader},

	// RFC 5040 section 7.2: Read Request and Invalidate.
	{"Read: STag unknown", hRead + sink + "00000001 00000006 0000000000001000", term.ErrReadSTag, ddpAndRead},
	{"Read: no right to read", hRead + sink + "00000001 00000008 0000000000001000", term.ErrReadAccess, ddpAndRead},
	{"Read: STag of another stream", hRead + sink + "00000001 0000000a 0000000000001000", term.ErrReadSTagStream, ddpAndRead},
	{"Read: TO below", hRead + sink + "00000001 00000007 0000000000000fff", term.ErrReadBounds, ddpAndRead},
	{"Read: TO above", hRead + sink + "00000001 00000007 0000000000001101", term.ErrReadBounds, ddpAndRead},
	{"Read: end above", hRead + sink + "00000101 00000007 0000000000001000", term.ErrReadBounds, ddpAndRead},
	{"Read: TO wraps", hRead + sink + "00000002 00000007 ffffffffffffffff", term.ErrReadTOWrap, ddpAndRead},
	{"Read Request cut short", hRead + sink + "00000001 00000007 00000000000010", term.ErrOperation, ddpHeader},
	{"Read Request with payload", hRead + sink + "00000001 00000007 0000000000001000 aa", term.ErrOperation, ddpHeader},
	{"Invalidate of an unknown STag", "4144 00000006 00000000 00000001 00000000 aa", term.ErrCannotInvalidate, ddpHeader},
	{"Invalidate with SE of an unknown STag", "4146 00000006 00000000 00000001 00000000", term.ErrCannotInvalidate, ddpHeader},
	{"Invalidate, and too long", "4144 00000007 00000000 00000001 00000000" + strings.Repeat("aa", 65), term.ErrTooLong, ddpHeader},
	{"Terminate cut short", hTerm + "200200", term.ErrOperation, ddpHeader},

	// RFC 7306 section 8.2.
	{"Atomic not aligned", hAtomic + "00000000 00000000 00000007 0000000000001001 0000000000000001 0000000000000000" + atomOnes, term.ErrStream, ddpHeader},
	{"Atomic, STag unknown", hAtomic + "00000002 00000000 00000006 0000000000001000 0000000000000001 0000000000000000" + atomOnes, term.ErrReadSTag, ddpHeader},
	{"Atomic, no right", hAtomic + "00000000 00000000 00000008 0000000000001000 0000000000000001 0000000000000000" + atomOnes, term.ErrReadAccess, ddpHeader},
	{"Atomic out of bounds", hAtomic + "00000000 00000000 00000007 00000000000010f9 0000000000000001 0000000000000000" + atomOnes, term.ErrReadBounds, ddpHeader},
	{"Atomic operation 1", hAtomic + "00000001 00000000 00000007 0000000000001000 0000000000000001 0000000000000000" + atomOnes, term.ErrOpcode, ddpHeader},
	{"Atomic operation 15", hAtomic + "0000000f 00000000 00000007 0000000000001000 0000000000000001 0000000000000000" + atomOnes, term.ErrOpcode, ddpHeader},
	{"Atomic Request cut short", hAtomic + strings.Repeat("00", 51), term.ErrOperation, ddpHeader},
	{"Atomic Response cut short", hAnswer + strings.Repeat("00", 11), term.ErrOperation, ddpHeader},
	{"Immediate Data of 7 bytes", "4148 00000000 00000000 00000001 00000000 00000000000000", term.ErrOperation, ddpHeader},
	{"Immediate Data of 9 bytes", "4149 00000000 00000000 00000001 00000000 000000000000000000", term.ErrOperation, ddpHeader},
	{"Immediate Data in two segments", "0148 00000000 00000000 00000001 00000000 0000000000000000", term.ErrOperation, ddpHeader},
	{"Immediate Data: MSN 0", "4148 00000000 00000000 00000000 00000000 0000000000000000", term.ErrMSNRange, ddpHeader},
	{"Immediate Data: MSN 2 first", "4149 00000000 00000000 00000002 00000000 0000000000000000", term.ErrMSNRange, ddpHeader},
	{"Immediate Data with an offset", "4148 00000000 00000000 00000001 00000008 0000000000000000", term.ErrInvalidMO, ddpHeader},

	// Too short for a header, so the Terminate contains none.
	{"no bytes", "", term.ErrOperation, noHeader},
	{"one byte, tagged", "c1", term.ErrOperation, noHeader},
	{"13 bytes, tagged", "c140 00000007 00000000000010", term.ErrOperation, noHeader},
	{"17 bytes, untagged", "4143 00000000 00000000 00000001 000000", term.ErrOperation, noHeader},
}

func newVictim() *end {
	e := newEnd(Config{IRD: 1, ORD: 2})
	for stag, r := range map[uint32]*region{7: {write: true, read: true}, 8: {}, 10: {write: true, read: true, other: true}} {
		r.base, r.buf = 0x1000, make([]byte, 256)
		e.mem.regions[stag] = r
	}
	e.mem.recvs = [][]byte{make([]byte, 64)}
	return e
}

func TestErrors(t *testing.T) {
	for _, tt := range errorCases {
		t.Run(tt.name, func(t *testing.T) {
			e := newVictim()
			in := testenv.Unhex(t, tt.in)
			err := e.HandleULPDU(in)
			if err == nil { // an atomic is checked in its turn
				if e.Terminating() {
					t.Error("no error, but the stream is terminating")
				}
			} else if err != tt.want {
				t.Fatalf("HandleULPDU = %v; want %v", err, tt.want)
			}
			wantTerminate(t, e, tt.want, terminateFor(tt.want, tt.headers, in))
			// Only the last segment can reveal a hole or ask to invalidate.
			if e.mem.placed > 0 && tt.want != term.ErrInvalidMO && tt.want != term.ErrCannotInvalidate {
				t.Error("something was placed")
			}
			for stag, r := range e.mem.regions {
				if !bytes.Equal(r.buf, make([]byte, 256)) || r.gone {
					t.Errorf("STag %d was written to, or invalidated", stag)
				}
			}
		})
	}
}

// wantTerminate checks that e sends the Terminate and nothing after it, and ignores further input.
func wantTerminate(t *testing.T, e *end, err *term.Error, want []byte) {
	t.Helper()
	got := e.poll(testMULPDU)
	if !bytes.Equal(got, want) {
		t.Errorf("Terminate\n%x; want\n%x", got, want)
	}
	if e.Err() != err || !e.Terminating() || !e.TerminateSent() {
		t.Errorf("Err %v, Terminating %v, TerminateSent %v; want %v and true", e.Err(), e.Terminating(), e.TerminateSent(), err)
	}
	if ev, ok := e.PollEvent(); !ok || ev != EventFailed {
		t.Errorf("event %v, %v; want failed", ev, ok)
	}
	if ev, ok := e.PollEvent(); ok {
		t.Errorf("and another event: %v", ev)
	}
	e.post(t, WR{Op: OpSend})
	if more := e.poll(testMULPDU); more != nil {
		t.Errorf("after the Terminate it sent %x", more)
	}
	placed, dropped := e.mem.placed, e.Stats().RxDropped
	if err := e.HandleULPDU(testenv.Unhex(t, "c140 00000007 0000000000001000 aa")); err != nil || e.mem.placed != placed {
		t.Errorf("a Write after the error: %v, %d placements more", err, e.mem.placed-placed)
	}
	if e.HandleEarly(1, testenv.Unhex(t, "c140 00000007 0000000000001000 aa")) {
		t.Error("a Write was placed early after the error")
	}
	if got := e.Stats().RxDropped - dropped; got != 1 {
		t.Errorf("RxDropped grew by %d; want 1", got)
	}
}

// TestTerminateBytes compares Terminates with bytes composed by hand from RFC 5040 section 4.8.
func TestTerminateBytes(t *testing.T) {
	const head = "4147 00000000 00000002 00000001 00000000 "
	write := "c140 00000007 0000000000001101 aa"
	read := hRead + sink + "00000001 00000006 0000000000001000"
	tests := []struct {
		name string
		err  *term.Error
		seg  string
		want string
	}{
		{"bounds violation of a Write", term.ErrBounds, write, head + "1101c000 000f c140 00000007 0000000000001101"},
		{"invalid STag of a Read Request", term.ErrReadSTag, read,
			head + "0100e000 002e " + hRead + sink + "00000001 00000006 0000000000001000"},
		{"a DDP error of a Read Request", term.ErrMSNRange, read, head + "1203c000 002e" + hRead},
		{"an operation error of a Read Request", term.ErrStream, read, head + "0207c000 002e" + hRead},
		{"a protection error of an Atomic Request", term.ErrReadSTag, hAtomic + strings.Repeat("00", 52), head + "0100c000 0046" + hAtomic},
		{"CRC", term.ErrMPACRC, write, head + "20020000"},
		{"no RTR", term.ErrMPARTR, "", head + "20070000"},
		{"local catastrophic, RDMAP", term.ErrRDMAPLocal, write, head + "00000000"},
		{"local catastrophic, DDP", term.ErrDDPLocal, write, head + "10000000"},
		{"protection error with no segment", term.ErrReadSTag, "", head + "01000000"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newVictim()
			if seg := testenv.Unhex(t, tt.seg); len(seg) > 0 {
				e.failSegment(tt.err, seg, len(seg))
			}
			e.Fail(tt.err)
			e.Fail(term.ErrGlobal) // only the first error counts
			wantTerminate(t, e, tt.err, testenv.Unhex(t, tt.want))
		})
	}
}

// TestTerminateLongSegment checks the DDP Segment Length for a segment of the largest size.
func TestTerminateLongSegment(t *testing.T) {
	e := newVictim()
	in := append(testenv.Unhex(t, "c140 00000006 0000000000001000"), make([]byte, 64768-14)...)
	e.HandleULPDU(in)
	wantTerminate(t, e, term.ErrInvalidSTag, terminateFor(term.ErrInvalidSTag, ddpHeader, in))
}

// TestErrorsOfResources sends messages without a receive buffer, and a second Read at IRD 1.
func TestErrorsOfResources(t *testing.T) {
	e := newVictim()
	e.mem.recvs = nil
	in := testenv.Unhex(t, hSend)
	if err := e.HandleULPDU(in); err != term.ErrNoBuffer {
		t.Errorf("Send without a buffer: %v; want %v", err, term.ErrNoBuffer)
	}
	wantTerminate(t, e, term.ErrNoBuffer, terminateFor(term.ErrNoBuffer, ddpHeader, in))

	for _, second := range []string{
		"4141 00000000 00000001 00000002 00000000" + sink + "00000001 00000007 0000000000001000",
		"4141 00000000 00000001 00000002 00000000" + sink + "00000000 00000000 0000000000000000",
		"414a 00000000 00000001 00000002 00000000" + strings.Repeat("00", 52),
	} {
		e = newVictim()
		if err := e.HandleULPDU(testenv.Unhex(t, hRead+sink+"00000001 00000007 0000000000001000")); err != nil {
			t.Fatalf("Read within IRD: %v", err)
		}
		in = testenv.Unhex(t, second)
		if err := e.HandleULPDU(in); err != term.ErrStream {
			t.Errorf("one request more than IRD: %v; want %v", err, term.ErrStream)
		}
		wantTerminate(t, e, term.ErrStream, terminateFor(term.ErrStream, ddpHeader, in))
	}

	e = newEnd(Config{})
	if err := e.HandleULPDU(testenv.Unhex(t, hRead+sink+"00000000 00000000 0000000000000000")); err != term.ErrStream {
		t.Errorf("Read at IRD 0: %v; want %v", err, term.ErrStream)
	}
}

// TestErrorsOfResponses sends responses that do not answer the oldest request.
func TestErrorsOfResponses(t *testing.T) {
	read := WR{ID: 1, Op: OpRead, Len: 16, STag: 1, SinkSTag: 7, SinkTO: 0x1000}
	add := WR{ID: 2, Op: OpFetchAdd, STag: 1}
	good := "8142 00000007 0000000000001000 0102030405060708"
	tests := []struct {
		name   string
		wr     WR
		before string
		in     string
		want   *term.Error
		status Status
	}{
		{"another STag", read, "", "c142 00000008 0000000000001000 aa", term.ErrInvalidSTag, StatusFlushed},
		{"another TO", read, "", "c142 00000007 0000000000001001 aa", term.ErrBounds, StatusFlushed},
		{"TO back", read, good, "c142 00000007 0000000000001000 0102030405060708", term.ErrBounds, StatusFlushed},
		{"a hole", read, good, "c142 00000007 0000000000001009 01020304050607", term.ErrBounds, StatusFlushed},
		{"too long", read, good, "c142 00000007 0000000000001008 010203040506070809", term.ErrBounds, StatusFlushed},
		{"too long, and not the last", read, good, "8142 00000007 0000000000001008 010203040506070809", term.ErrBounds, StatusFlushed},
		{"too short", read, "", "c142 00000007 0000000000001000 aa", term.ErrBounds, StatusFlushed},
		{"no bytes", read, "", "c142 00000007 0000000000001000", term.ErrBounds, StatusFlushed},
		{"atomic's answer", read, "", hAnswer + "00000000 0000000000000000", term.ErrOpcode, StatusFlushed},
		{"read's answer", add, "", "c142 00000007 0000000000001000 aa", term.ErrOpcode, StatusFlushed},
		{"another identifier", add, "", hAnswer + "00000001 0000000000000000", term.ErrOperation, StatusFlushed},
		{"MSN 2", add, "", "414b 00000000 00000003 00000002 00000000 00000000 0000000000000000", term.ErrMSNRange, StatusFlushed},
		{"the sink is gone", WR{ID: 1, Op: OpRead, Len: 1, SinkSTag: 99}, "", "c142 00000063 0000000000000000 aa", term.ErrInvalidSTag, StatusLocalProtection},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newVictim()
			e.post(t, tt.wr)
			e.poll(testMULPDU)
			if tt.before != "" {
				e.give(t, testenv.Unhex(t, tt.before))
			}
			in := testenv.Unhex(t, tt.in)
			if err := e.HandleULPDU(in); err != tt.want {
				t.Errorf("HandleULPDU = %v; want %v", err, tt.want)
			}
			wantTerminate(t, e, tt.want, terminateFor(tt.want, ddpHeader, in))
			e.Flush()
			if cs := e.completions(); len(cs) != 2 || cs[0].Status != tt.status || cs[1].Status != StatusFlushed {
				t.Errorf("completions %+v; want %v and then flushed", cs, tt.status)
			}
		})
	}
}

// TestZeroLength checks that STag and offset of zero-length messages are not verified (RFC 5041 section 5.2, RFC 5040
// section 5.2.1).
func TestZeroLength(t *testing.T) {
	e := newVictim()
	for _, in := range []string{
		"c140 00000000 0000000000000000",
		"c140 deadbeef ffffffffffffffff",
		"8140 deadbeef ffffffffffffffff", // a segment of no bytes that is not the last
		"c140 00000007 0000000000001000 aa",
		hRead + "deadbeef ffffffffffffffff 00000000 deadbeef ffffffffffffffff",
		hSend,
	} {
		if err := e.HandleULPDU(testenv.Unhex(t, in)); err != nil {
			t.Fatalf("%s: %v", in, err)
		}
	}
	if got, want := e.poll(testMULPDU), testenv.Unhex(t, "c142 deadbeef ffffffffffffffff"); !bytes.Equal(got, want) {
		t.Errorf("answer to the Read %x; want %x", got, want)
	}
	if cs := e.completions(); len(cs) != 1 || cs[0].Len != 0 || cs[0].Kind != CompRecv {
		t.Errorf("completions %+v; want a receive of no bytes: it takes a buffer", cs)
	}
	if s := e.Stats(); s.RxWrites != 3 || s.RxReadRequests != 1 || s.RxSends != 1 {
		t.Errorf("counters %+v", s)
	}
}

// TestReservedIgnored checks that reserved bits and unused fields are ignored.
func TestReservedIgnored(t *testing.T) {
	e := newVictim()
	for _, in := range []string{
		"fd70 00000007 0000000000001000 aa",
		"7d73 deadbeef 00000000 00000001 00000000 aa",
		"7d71 deadbeef 00000001 00000001 00000000" + sink + "00000000 00000000 0000000000000000",
	} {
		if err := e.HandleULPDU(testenv.Unhex(t, in)); err != nil {
			t.Errorf("%s: %v", in, err)
		}
	}
	if cs := e.completions(); len(cs) != 1 || cs[0].InvSTag != 0 {
		t.Errorf("completions %+v; want a Send that invalidates nothing", cs)
	}
	e.poll(testMULPDU)
	e.give(t, testenv.Unhex(t, "7d7a deadbeef 00000001 00000002 00000000 fffffff0 00000005 00000007 0000000000001000 0000000000000001 0000000000000000 ffffffffffffffff 0000000000000000"))
	if got, want := e.poll(testMULPDU), testenv.Unhex(t, hAnswer+"00000005 aa00000000000000"); !bytes.Equal(got, want) {
		t.Errorf("answer to the atomic %x; want %x", got, want)
	}
}

// TestErrorOfSegmentedRequest checks that the Terminate for a Read Request in two segments has the DDP header of the
// second segment and the whole request.
func TestErrorOfSegmentedRequest(t *testing.T) {
	e := newVictim()
	e.give(t, testenv.Unhex(t, "0141 00000000 00000001 00000001 00000000 00000009 00000000"))
	second := testenv.Unhex(t, "4141 00000000 00000001 00000001 00000008 00002000 00000001 00000006 0000000000001000")
	if err := e.HandleULPDU(second); err != term.ErrReadSTag {
		t.Fatalf("HandleULPDU = %v; want %v", err, term.ErrReadSTag)
	}
	wantTerminate(t, e, term.ErrReadSTag, testenv.Unhex(t, "4147 00000000 00000002 00000001 00000000 0100e000 0026"+
		"4141 00000000 00000001 00000001 00000008"+sink+"00000001 00000006 0000000000001000"))
}

// TestParts checks that no message is delivered whose segments leave a hole or belong to different messages, since the
// receive buffer may have the bytes of another message there.
func TestParts(t *testing.T) {
	const part, last, eight = "0143 00000000 00000000 00000001 ", "4143 00000000 00000000 00000001 ", "0102030405060708"
	for name, in := range map[string][]string{
		"the first bytes twice instead of the next": {part + "00000000" + eight, part + "00000000" + eight, last + "00000010" + eight},
		"Immediate Data in a Send":                  {part + "00000000" + eight, "4148 00000000 00000000 00000001 00000000" + eight},
	} {
		e := newVictim()
		var err *term.Error
		for _, seg := range in {
			if err == nil {
				err = e.HandleULPDU(testenv.Unhex(t, seg))
			}
		}
		if cs := e.completions(); err != term.ErrInvalidMO || len(cs) != 0 {
			t.Errorf("%s: %v, completions %+v; want %v", name, err, cs, term.ErrInvalidMO)
		}
	}
}
