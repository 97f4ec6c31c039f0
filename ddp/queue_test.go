package ddp

import (
	"bytes"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// RFC 5041 section 7.1, untagged checks 2 to 5.
func TestQueueCheck(t *testing.T) {
	tests := []struct {
		name string
		h    Untagged
		n    int
		want *term.Error
	}{
		{"fits", Untagged{MSN: 1}, 100, nil},
		{"fits behind", Untagged{MSN: 1, MO: 40}, 60, nil},
		{"second buffer", Untagged{MSN: 2, MO: 199}, 1, nil},
		{"one too long", Untagged{MSN: 1}, 101, term.ErrTooLong},
		{"one too long behind", Untagged{MSN: 1, MO: 40}, 61, term.ErrTooLong},
		{"at the end", Untagged{MSN: 1, MO: 100}, 1, term.ErrTooLong},
		{"MO outside", Untagged{MSN: 1, MO: 101}, 1, term.ErrInvalidMO},
		{"MO far outside", Untagged{MSN: 1, MO: 0xffffffff}, 60000, term.ErrInvalidMO},
		{"MO outside, no bytes", Untagged{MSN: 1, MO: 101}, 0, nil},
		{"no buffer", Untagged{MSN: 3}, 1, term.ErrNoBuffer},
		{"no buffer, no bytes", Untagged{MSN: 4}, 0, term.ErrNoBuffer},
		{"past", Untagged{MSN: 0}, 1, term.ErrMSNRange},
		{"ahead of the window", Untagged{MSN: 5}, 1, term.ErrMSNRange},
		{"far", Untagged{MSN: 0x80000001}, 1, term.ErrMSNRange},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var q Queue
			q.Init(4)
			q.Supply(10, 100)
			q.Supply(11, 200)
			b, err := q.Check(&tt.h, tt.n)
			if err != tt.want {
				t.Errorf("Check = %v; want %v", err, tt.want)
			}
			if err == nil && b.ID != 9+uint32(tt.h.MSN) {
				t.Errorf("buffer %d", b.ID)
			}
		})
	}
}

func TestQueueAccept(t *testing.T) {
	type seg struct {
		mo   uint32
		n    int
		last bool
	}
	tests := []struct {
		name string
		segs []seg
		want *term.Error // of the last one
	}{
		{"one", []seg{{0, 50, true}}, nil},
		{"no bytes", []seg{{0, 0, true}}, nil},
		{"three", []seg{{0, 30, false}, {30, 30, false}, {60, 5, true}}, nil},
		{"increasing order is only a SHOULD", []seg{{30, 30, false}, {0, 30, false}, {60, 5, true}}, nil},
		{"a hole", []seg{{0, 30, false}, {40, 5, true}}, term.ErrInvalidMO},
		{"first bytes missing", []seg{{4, 46, true}}, term.ErrInvalidMO},
		{"in reverse", []seg{{50, 10, false}, {30, 20, false}, {10, 20, false}, {0, 10, false}, {60, 0, true}}, nil},
		{"last in reverse", []seg{{30, 30, false}, {0, 30, false}, {0, 0, true}}, term.ErrInvalidMO},
		{"no bytes anywhere", []seg{{70, 0, false}, {0, 30, false}, {30, 5, true}}, nil},
		{"twice the same", []seg{{0, 30, false}, {0, 30, false}}, term.ErrInvalidMO},
		{"twice the same, later", []seg{{40, 10, false}, {40, 10, false}}, term.ErrInvalidMO},
		{"into the next", []seg{{20, 10, false}, {0, 21, false}}, term.ErrInvalidMO},
		{"twice some, and a hole of as many bytes", []seg{{0, 8, false}, {0, 8, false}}, term.ErrInvalidMO},
		{"around, and a hole of as many bytes", []seg{{20, 8, false}, {16, 20, false}}, term.ErrInvalidMO},
		{"every second", []seg{{2, 1, false}, {4, 1, false}, {6, 1, false}, {8, 1, false}, {10, 1, false}, {12, 1, false},
			{14, 1, false}, {16, 1, false}, {18, 1, false}}, term.ErrInvalidMO},
		{"last is not the highest", []seg{{30, 30, false}, {0, 30, true}}, term.ErrInvalidMO},
		{"last is not the highest, and there is a hole", []seg{{40, 10, false}, {0, 30, true}}, term.ErrInvalidMO},
		{"each after the one before, without the first", []seg{{30, 20, false}, {50, 10, false}, {0, 30, false}, {60, 0, true}}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var q Queue
			q.Init(4)
			q.Supply(10, 100)
			for i, s := range tt.segs {
				err := q.Accept(&Untagged{MSN: 1, MO: s.mo, Last: s.last}, s.n)
				if want := tt.want; i < len(tt.segs)-1 && err != nil || i == len(tt.segs)-1 && err != want {
					t.Fatalf("segment %d: %v; want %v at the end", i, err, want)
				}
			}
		})
	}
	var q Queue
	q.Init(4)
	q.Supply(10, 100)
	q.Supply(11, 100)
	if err := q.Accept(&Untagged{MSN: 2, Last: true}, 0); err != term.ErrMSNRange {
		t.Errorf("Accept of the second message first: %v; want %v", err, term.ErrMSNRange)
	}
}

// The queue against a map, from a few MSNs before the wrap.
func TestQueueWrap(t *testing.T) {
	var q Queue
	q.Init(5) // 8
	q.head, q.tail = 0xfffffff0, 0xfffffff0
	want := map[serial.Num]uint32{}
	id := uint32(0)
	for step := range 200 {
		for range step%8 + 1 {
			if !q.InWindow(q.Tail()) {
				break
			}
			want[q.Tail()] = id
			q.Supply(id, id*10)
			id++
		}
		for m := q.Head(); m != q.Tail(); m++ {
			if b, err := q.Check(&Untagged{MSN: m}, 0); err != nil || b.ID != want[m] || b.Size != b.ID*10 {
				t.Fatalf("MSN %#x: buffer %+v, %v; want %d", m, b, err, want[m])
			}
		}
		for range step%5 + 1 {
			head := q.Head()
			b, ok := q.Pop()
			if !ok {
				break
			}
			if b.ID != want[head] {
				t.Fatalf("Pop of %#x: %d; want %d", head, b.ID, want[head])
			}
			delete(want, head)
		}
	}
	if q.Head() >= 0xfffffff0 {
		t.Fatal("the MSN never wrapped")
	}
	for {
		if _, ok := q.Pop(); !ok {
			break
		}
	}
	head := q.Head()
	if q.Skip(); q.Head() != head+1 || q.Tail() != head+1 {
		t.Errorf("after Skip of %d: head %d, tail %d", head, q.Head(), q.Tail())
	}
}

func TestAssembler(t *testing.T) {
	msg := []byte("0123456789ab")
	var a Assembler
	reset := func() {
		a.Init(len(msg))
	}
	accept := func(msn serial.Num, mo uint32, last bool, p []byte) ([]byte, bool, *term.Error) {
		return a.Accept(&Untagged{MSN: msn, MO: mo, Last: last}, p)
	}

	reset()
	if m, done, err := accept(1, 0, true, msg); !done || err != nil || !bytes.Equal(m, msg) || &m[0] != &msg[0] {
		t.Errorf("one segment: %q, %v, %v; want it uncopied", m, done, err)
	}
	if a.next != 2 {
		t.Errorf("Next = %d; want 2", a.next)
	}
	if m, done, err := accept(2, 0, false, msg[:5]); done || err != nil {
		t.Errorf("first of three: %q, %v, %v", m, done, err)
	}
	if m, done, err := accept(2, 5, false, nil); done || err != nil {
		t.Errorf("second of three: %q, %v, %v", m, done, err)
	}
	if m, done, err := accept(2, 5, true, msg[5:]); !done || err != nil || !bytes.Equal(m, msg) {
		t.Errorf("last of three: %q, %v, %v", m, done, err)
	}
	if m, done, err := accept(3, 0, true, nil); !done || err != nil || len(m) != 0 {
		t.Errorf("no bytes: %q, %v, %v", m, done, err)
	}

	for _, tt := range []struct {
		name string
		msn  serial.Num
		mo   uint32
		n    int
		want *term.Error
	}{
		{"MSN ahead", 2, 0, 1, term.ErrMSNRange},
		{"MSN behind", 0, 0, 1, term.ErrMSNRange},
		{"MO not 0", 1, 1, 1, term.ErrInvalidMO},
		{"too long", 1, 0, len(msg) + 1, term.ErrTooLong},
	} {
		reset()
		if _, _, err := accept(tt.msn, tt.mo, true, make([]byte, tt.n)); err != tt.want {
			t.Errorf("%s: %v; want %v", tt.name, err, tt.want)
		}
	}

	// What is too long may be so only with what came before.
	reset()
	if _, _, err := accept(1, 0, false, msg[:5]); err != nil {
		t.Fatal(err)
	}
	if _, _, err := accept(1, 5, true, make([]byte, len(msg)-4)); err != term.ErrTooLong {
		t.Errorf("too long by the second segment: %v; want %v", err, term.ErrTooLong)
	}

	// The number wraps, and what has it again is past.
	reset()
	a.next = 0xffffffff
	for _, msn := range []serial.Num{0xffffffff, 0, 1} {
		if _, done, err := accept(msn, 0, true, msg); !done || err != nil {
			t.Errorf("MSN %#x: %v, %v", msn, done, err)
		}
		if _, _, err := accept(msn, 0, true, msg); err != term.ErrMSNRange {
			t.Errorf("MSN %#x once more: %v; want %v", msn, err, term.ErrMSNRange)
		}
	}
}

func TestNoAllocs(t *testing.T) {
	var q Queue
	q.Init(64)
	var a Assembler
	a.Init(52)
	var s Segmenter
	var buf [MaxHeader]byte
	payload := make([]byte, 28)
	if n := testing.AllocsPerRun(100, func() {
		s.StartUntagged(0x43, 0, 0, q.Head(), 3000)
		q.Supply(1, 3000)
		for s.Active() {
			hdr, _, n, _ := s.Next(buf[:0], 1500)
			var h Untagged
			if _, err := h.Decode(hdr); err != nil {
				t.Fatal(err)
			}
			if _, err := q.Check(&h, n); err != nil {
				t.Fatal(err)
			}
			if err := q.Accept(&h, n); err != nil {
				t.Fatal(err)
			}
		}
		q.Pop()
		a.Accept(&Untagged{MSN: a.next, Last: true}, payload)
	}); n != 0 {
		t.Errorf("%v allocations; want none", n)
	}
}
