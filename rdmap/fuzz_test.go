package rdmap

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// fuzzMemory is a fakeMemory whose STags stay valid, so that what was placed early could also have been placed in
// order.
type fuzzMemory struct{ *fakeMemory }

func (m fuzzMemory) Invalidate(stag uint32) *term.Error {
	if m.regions[stag] == nil {
		return term.ErrCannotInvalidate
	}
	return nil
}

func fuzzEnd() *end {
	e := newVictim()
	e.Init(Config{IRD: 2, ORD: 4, Early: 8}, fuzzMemory{e.mem})
	e.mem.recvs = append(e.mem.recvs, make([]byte, 200), nil)
	e.mem.regions[9] = &region{base: 0x2000, buf: make([]byte, 64)}
	for _, wr := range []WR{
		{ID: 1, Op: OpRead, Len: 16, SinkSTag: 9, SinkTO: 0x2000},
		{ID: 2, Op: OpFetchAdd},
		{ID: 3, Op: OpRead, SinkSTag: 9},
		{ID: 4, Op: OpRead, Len: 40, SinkSTag: 9, SinkTO: 0x2018},
	} {
		e.PostSend(&wr)
		e.poll(testMULPDU)
	}
	return e
}

// split splits fuzz input into ULPDUs: a length byte; a byte whose low bit says that the ULPDU is offered early and
// whose other bits give the position of its first marker; and the ULPDU.
func split(b []byte) (ulpdus [][]byte, early []bool, with []marked.Bytes) {
	for len(b) >= 2 && len(ulpdus) < 64 {
		n := min(int(b[0]), len(b)-2)
		ulpdus = append(ulpdus, b[2:2+n])
		early = append(early, b[1]&1 != 0)
		with = append(with, withMarkers(b[2:2+n], 1+int(b[1]>>1)))
		b = b[2+n:]
	}
	return ulpdus, early, with
}

func join(ulpdus ...[]byte) (b []byte) {
	for _, u := range ulpdus {
		b = append(append(b, byte(len(u)), 1), u...)
	}
	return b
}

// FuzzStream checks that no input causes a panic, and that early placement and markers do not change the result: the
// same error and Terminate, completions and answers.
func FuzzStream(f *testing.F) {
	for _, tt := range errorCases {
		f.Add(join(testenv.Unhex(f, tt.in)))
	}
	f.Add(join(testenv.Unhex(f, "c142 00000009 0000000000002000 01020304050607080910111213141516"), testenv.Unhex(f, hAnswer+"00000001 0102030405060708"),
		testenv.Unhex(f, "c142 00000009 0000000000000000"), testenv.Unhex(f, "8142 00000009 0000000000002018 0102"), testenv.Unhex(f, hSend+"aabb"),
		testenv.Unhex(f, "0145 00000000 00000000 00000002 00000000 aabb"), testenv.Unhex(f, "4145 00000000 00000000 00000002 00000002 aabb"),
		testenv.Unhex(f, hAtomic+"00000000 00000000 00000007 0000000000001000 0000000000000001 0000000000000000"+atomOnes),
		testenv.Unhex(f, "4141 00000000 00000001 00000002 00000000"+sink+"00000010 00000007 0000000000001000"), testenv.Unhex(f, hTerm+"01000700 0010")))
	f.Fuzz(func(t *testing.T, b []byte) {
		ulpdus, early, with := split(b)
		a, e := fuzzEnd(), fuzzEnd()
		placed := map[int]bool{}
		for i := len(ulpdus) - 1; i > 0; i-- {
			if early[i] {
				placed[i] = e.HandleEarlyMarked(serial.Num(i), with[i])
			}
		}
		for i, u := range ulpdus {
			want := a.HandleULPDU(u)
			var got *term.Error
			if placed[i] {
				got = e.DeliverEarly(serial.Num(i))
			} else {
				got = e.HandleMarked(with[i])
			}
			if got != want {
				t.Fatalf("ULPDU %d %x: %v, in order %v", i, u, got, want)
			}
			for range 3 {
				if x, y := a.poll(testMULPDU), e.poll(testMULPDU); len(x) != len(y) || len(x) > 0 && !bytes.Equal(x[:14], y[:14]) {
					t.Fatalf("after ULPDU %d: sends %x, in order %x", i, y, x)
				}
			}
			if want != nil && !a.TerminateSent() {
				t.Fatalf("ULPDU %d: %v, and no Terminate", i, want)
			}
		}
		if x, y := a.completions(), e.completions(); !cmp.Equal(x, y) {
			t.Fatalf("completions %+v, in order %+v", y, x)
		}
		a.Flush()
		seen := map[uint32]int{}
		for _, c := range append(a.completions(), e.completions()...) {
			if c.Kind == CompSend && c.Status == StatusFlushed {
				seen[c.ID]++
			}
		}
		for id, n := range seen {
			if n != 1 {
				t.Fatalf("work request %d was flushed %d times", id, n)
			}
		}
	})
}
