package rdmap

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestRTR checks that the RTR is sent first, uses no work request and completes nothing, and that an ordinary message
// may follow (RFC 6581 section 9.2).
func TestRTR(t *testing.T) {
	tests := []struct {
		kind Op
		wire string
		next string // the Send after it
		back string // the answer to it
	}{
		{OpSend, "4143 00000000 00000000 00000001 00000000", "4143 00000000 00000000 00000002 00000000", ""},
		{OpWrite, "c140 00000001 0000000000000000", "4143 00000000 00000000 00000001 00000000", ""},
		{OpRead, "4141 00000000 00000001 00000001 00000000 00000001 0000000000000000 00000000 00000001 0000000000000000",
			"4143 00000000 00000000 00000001 00000000", "c142 00000001 0000000000000000"},
	}
	for _, tt := range tests {
		for _, depth := range []int{0, 1} {
			a, b := newPair(Config{IRD: depth, ORD: depth})
			b.mem.recvs = [][]byte{make([]byte, 8)}
			b.ExpectRTR(tt.kind)
			a.post(t, WR{ID: 1, Op: OpSend})
			a.SendRTR(tt.kind)
			if !a.Sendable() {
				t.Errorf("%v: nothing to send", tt.kind)
			}
			rtr := a.poll(testMULPDU)
			if !bytes.Equal(rtr, testenv.Unhex(t, tt.wire)) {
				t.Errorf("%v: sent %x; want %s", tt.kind, rtr, tt.wire)
			}
			if err := b.HandleULPDU(rtr); err != nil {
				t.Fatalf("%v: %v", tt.kind, err)
			}
			if b.mem.taken != 0 {
				t.Errorf("%v: it took a receive buffer", tt.kind)
			}
			if answer := b.poll(testMULPDU); !bytes.Equal(answer, testenv.Unhex(t, tt.back)) {
				t.Errorf("%v: answered by %x; want %s", tt.kind, answer, tt.back)
			} else if answer != nil {
				if err := a.HandleULPDU(answer); err != nil {
					t.Errorf("%v: %v", tt.kind, err)
				}
			}
			if cs := a.completions(); len(cs) != 0 {
				t.Errorf("%v: completions %+v", tt.kind, cs)
			}
			next := a.poll(testMULPDU)
			if !bytes.Equal(next, testenv.Unhex(t, tt.next)) {
				t.Errorf("%v: then %x; want %s", tt.kind, next, tt.next)
			}
			if err := b.HandleULPDU(next); err != nil {
				t.Errorf("%v: %v", tt.kind, err)
			}
			if cs := b.completions(); len(cs) != 1 || cs[0].ID != 0 {
				t.Errorf("%v: the Send after it completes as %+v", tt.kind, cs)
			}
			if depth > 0 { // the Read used up an MSN of queue 1, or none
				a.mem.regions[9] = &region{}
				a.post(t, WR{ID: 2, Op: OpRead, SinkSTag: 9})
				pump(t, a, b, testMULPDU)
				if cs := a.completions(); len(cs) != 2 || a.Terminating() || b.Terminating() {
					t.Errorf("%v: a Read after it: %+v", tt.kind, cs)
				}
			}
		}
	}
}

// TestRTRExpected checks the first messages other than an RTR where one is expected.
func TestRTRExpected(t *testing.T) {
	rtrRead := hRead + "00000000 0000000000000000 00000000 00000001 0000000000000000"
	tests := []struct {
		name   string
		expect Op
		in     string
		noIRD  bool // the IRD is 0, as a Read that is an RTR needs none
		err    *term.Error
		taken  int // receive buffers
		nextTo string
	}{
		{"FPDU of no bytes as Send", OpSend, "", false, nil, 0, hSend},
		{"FPDU of no bytes as Write", OpWrite, "", false, term.ErrOperation, 0, ""},
		{"siw's Read", OpRead, rtrRead, true, nil, 0, hSend},
		{"a Write for a Send", OpSend, "c140 00000001 0000000000000000", false, nil, 0, hSend},
		{"a Read for a Write", OpWrite, rtrRead, true, nil, 0, hSend},
		{"a Send for a Write", OpWrite, hSend, false, nil, 1, "4143 00000000 00000000 00000002 00000000"},
		{"a Send with bytes", OpSend, hSend + "aa", false, nil, 1, "4143 00000000 00000000 00000002 00000000"},
		{"a Send with SE", OpSend, "4145 00000000 00000000 00000001 00000000", false, nil, 1, "4143 00000000 00000000 00000002 00000000"},
		{"a Write with bytes", OpWrite, "c140 00000007 0000000000001000 aa", false, nil, 0, hSend},
		{"a Read with bytes", OpRead, hRead + sink + "00000001 00000007 0000000000001000", false, nil, 0, hSend},
		{"a Send at an offset", OpSend, "4143 00000000 00000000 00000001 00000004", false, term.ErrInvalidMO, 1, ""},
		{"a Read at an offset", OpRead, "4141 00000000 00000001 00000001 00000004" + rtrRead[len(hRead):], false, term.ErrInvalidMO, 0, ""},
		{"a Read that is not the last segment", OpRead, "01" + rtrRead[2:], false, nil, 0, hSend},
		{"a Write that is not the last segment", OpWrite, "8140 00000001 0000000000000000", false, nil, 0, hSend},
		{"a Read Response of no bytes", OpWrite, "c142 00000001 0000000000000000", false, term.ErrOpcode, 0, ""},
		{"a Send on a wrong MSN", OpSend, "4143 00000000 00000000 00000002 00000000", false, term.ErrMSNRange, 0, ""},
		{"a Write of a wrong version", OpWrite, "c040 00000001 0000000000000000", false, term.ErrTaggedVersion, 0, ""},
		{"a Send of a wrong version", OpSend, "4103 00000000 00000000 00000001 00000000", false, term.ErrRDMAPVersion, 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newVictim()
			e.mem.recvs = append(e.mem.recvs, make([]byte, 64))
			if tt.noIRD {
				e.ird = 0
			}
			e.ExpectRTR(tt.expect)
			if e.HandleEarly(5, testenv.Unhex(t, hSend)) {
				t.Error("something was placed early before the RTR")
			}
			if err := e.HandleULPDU(testenv.Unhex(t, tt.in)); err != tt.err {
				t.Fatalf("HandleULPDU = %v; want %v", err, tt.err)
			}
			if tt.err != nil {
				return
			}
			if e.mem.taken != tt.taken {
				t.Errorf("%d receive buffers taken; want %d", e.mem.taken, tt.taken)
			}
			// Only the first message can be an RTR.
			if err := e.HandleULPDU(testenv.Unhex(t, tt.nextTo)); err != nil || e.mem.taken != tt.taken+1 {
				t.Errorf("the next Send: %v, %d buffers taken", err, e.mem.taken)
			}
			if ev, ok := e.PollEvent(); ok {
				t.Errorf("an event: %v", ev)
			}
		})
	}
}
