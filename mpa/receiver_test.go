package mpa

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/term"
)

// sent is an FPDU of a stream made for a test.
type sent struct {
	seq   serial.Num // of ULPDU_Length
	begin int        // offset in the stream, leading marker included
	ulpdu []byte
}

// stream composes the FPDUs of ULPDUs with the given sizes.
func stream(rnd *rand.Rand, crc, markers bool, start serial.Num, sizes ...int) (wire []byte, fpdus []sent) {
	var f Framer
	f.Init(crc, markers, start)
	for _, n := range sizes {
		seq := start + serial.Num(len(wire))
		s := sent{f.lengthAt(seq), len(wire), randomBytes(rnd, n)}
		wire = append(wire, compose(&f, seq, s.ulpdu)...)
		fpdus = append(fpdus, s)
	}
	return wire, fpdus
}

// joined returns a copy of o without markers.
func joined(o marked.Bytes) []byte {
	b := make([]byte, o.Len())
	o.CopyTo(b)
	return b
}

// collect takes all FPDUs from r, compares them with want, and returns the rest of want.
func collect(t testing.TB, r *Receiver, want []sent) []sent {
	t.Helper()
	var f FPDU
	for {
		ok, err := r.PollFPDU(&f)
		if err != nil {
			t.Fatalf("Next: %v", err)
		}
		if !ok {
			return want
		}
		if len(want) == 0 {
			t.Fatalf("an FPDU at %d that was never sent", f.Seq)
		}
		if f.Seq != want[0].seq || f.Placed || !bytes.Equal(joined(f.ULPDU), want[0].ulpdu) {
			t.Fatalf("FPDU at %d of %d bytes, placed %v; want the one at %d of %d bytes",
				f.Seq, f.ULPDU.Len(), f.Placed, want[0].seq, len(want[0].ulpdu))
		}
		want = want[1:]
	}
}

func randomSize(rnd *rand.Rand) int {
	switch rnd.IntN(8) {
	case 0:
		return rnd.IntN(4)
	case 1:
		return 490 + rnd.IntN(40)
	case 2:
		return rnd.IntN(9000)
	case 3:
		if rnd.IntN(20) == 0 {
			return MaxMULPDU - rnd.IntN(20)
		}
		return 1442
	}
	return rnd.IntN(100)
}

func TestReceiverRandomCuts(t *testing.T) {
	rnd := seeded(t)
	var r Receiver
	for range 400 {
		crc, markers, start := rnd.IntN(2) == 0, rnd.IntN(2) == 0, serial.Num(rnd.Uint32())
		if rnd.IntN(4) == 0 {
			start = -serial.Num(rnd.IntN(4000)) // the sequence wraps soon
		}
		sizes := make([]int, 1+rnd.IntN(30))
		for i := range sizes {
			sizes[i] = randomSize(rnd)
		}
		wire, want := stream(rnd, crc, markers, start, sizes...)
		r.Init(crc, markers, start)
		most := []int{1, 8, 600, 3000, 100_000}[rnd.IntN(5)]
		if most == 1 {
			most = max(1, len(wire)/20_000)
		}
		for len(wire) > 0 {
			n := min(1+rnd.IntN(most), len(wire))
			if next := r.header(r.next, wire); rnd.IntN(2) == 0 && r.Held() == 0 && next != 0 {
				n = min(next, len(wire))
			}
			seg := bytes.Clone(wire[:n])
			if n > crcLen && rnd.IntN(2) == 0 {
				r.HandleSummed(seg, crc32c.Update(0, seg[:n-crcLen]))
			} else {
				r.HandleStream(seg)
			}
			want = collect(t, &r, want)
			for i := range seg { // the frame is reused
				seg[i] = 0xee
			}
			wire = wire[n:]
		}
		if len(want) != 0 || r.Held() != 0 {
			t.Fatalf("%d FPDUs are missing, %d bytes held", len(want), r.Held())
		}
	}
}

func TestFeedSummed(t *testing.T) {
	rnd := seeded(t)
	wire, want := stream(rnd, true, false, 0, 1442, 18, 700)
	two, three := want[1].begin, want[2].begin
	sum := func(b []byte) uint32 { return crc32c.Update(0, b[:len(b)-crcLen]) }
	bad := bytes.Clone(wire)
	bad[700] ^= 4
	for _, tt := range []struct {
		name string
		feed func(r *Receiver)
		ok   bool
	}{
		{"one FPDU", func(r *Receiver) { r.HandleSummed(wire[:two], sum(wire[:two])) }, true},
		{"one FPDU, corrupt", func(r *Receiver) { r.HandleSummed(bad[:two], sum(bad[:two])) }, false},
		{"one FPDU, its sum is another's", func(r *Receiver) { r.HandleSummed(wire[:two], 7) }, false},
		{"two FPDUs", func(r *Receiver) { r.HandleSummed(wire[:three], sum(wire[:three])) }, true},
		{"two FPDUs, corrupt", func(r *Receiver) { r.HandleSummed(bad[:three], sum(bad[:three])) }, false},
		{"its end", func(r *Receiver) {
			r.HandleStream(wire[:100])
			r.PollFPDU(new(FPDU))
			r.HandleSummed(wire[100:two], sum(wire[100:two]))
		}, true},
		{"its corrupt end", func(r *Receiver) {
			r.HandleStream(bad[:100])
			r.PollFPDU(new(FPDU))
			r.HandleSummed(bad[100:two], sum(bad[100:two]))
		}, false},
		{"a corrupt one behind another", func(r *Receiver) {
			r.next = -serial.Num(len(wire) - two)
			b := append(bytes.Clone(wire[two:]), bad[:two]...)
			r.HandleSummed(b, sum(b))
			r.PollFPDU(new(FPDU))
			r.PollFPDU(new(FPDU))
		}, false},
	} {
		var r Receiver
		r.Init(true, false, 0)
		tt.feed(&r)
		var f FPDU
		ok, err := r.PollFPDU(&f)
		if tt.ok != ok || ok != (err == nil) || !ok && err != term.ErrMPACRC {
			t.Errorf("%s: %v, %v; want %v", tt.name, ok, err, tt.ok)
		}
		if ok && !bytes.Equal(joined(f.ULPDU), want[0].ulpdu) {
			t.Errorf("%s: the ULPDU is another", tt.name)
		}
	}
}

// TestReceiverEverySplit tests each FPDU at each offset to the markers, split at each byte.
func TestReceiverEverySplit(t *testing.T) {
	rnd := seeded(t)
	for _, markers := range []bool{true, false} {
		for off := 0; off < 512; off += 4 {
			if !markers && off > 0 {
				break
			}
			start := -serial.Num(off) - 40 // the sequence wraps within the FPDU
			seq := start + serial.Num(off)
			for _, n := range []int{0, 1, 2, 3, 18, 19, 506 - off, 520} {
				if n < 0 {
					continue
				}
				var f Framer
				f.Init(true, markers, start)
				want := []sent{{f.lengthAt(seq), 0, randomBytes(rnd, n)}}
				wire := compose(&f, seq, want[0].ulpdu)
				for cut := range len(wire) {
					var r Receiver
					r.Init(true, markers, start)
					r.next = seq
					r.HandleStream(wire[:cut])
					if left := collect(t, &r, want); len(left) != 1 {
						t.Fatalf("offset %d, %d bytes: FPDU complete with %d of %d bytes", off, n, cut, len(wire))
					}
					r.HandleStream(wire[cut:])
					if left := collect(t, &r, want); len(left) != 0 {
						t.Fatalf("offset %d, %d bytes, cut at %d: no FPDU", off, n, cut)
					}
					if (r.buf != nil) != (cut > 0) {
						t.Fatalf("cut at %d: %d bytes of buffer", cut, len(r.buf))
					}
				}
			}
		}
	}
}

func TestReceiverNoCopy(t *testing.T) {
	rnd := seeded(t)
	wire, want := stream(rnd, true, false, 9, 100, 200, 300)
	var r Receiver
	r.Init(true, false, 9)
	r.HandleStream(wire)
	var f FPDU
	for _, w := range want {
		if ok, err := r.PollFPDU(&f); !ok || err != nil || &f.ULPDU.B[0] != &wire[w.begin+lengthLen] {
			t.Fatalf("Next = %v, %v, or the ULPDU was copied", ok, err)
		}
		if cap(f.ULPDU.B) != len(w.ulpdu) {
			t.Errorf("a ULPDU of %d bytes has room for %d", len(w.ulpdu), cap(f.ULPDU.B))
		}
	}

	// Nor with markers.
	wire, want = stream(rnd, true, true, 9, 100, 2000, 3000)
	r.Init(true, true, 9)
	r.HandleStream(wire)
	for _, w := range want {
		at := w.seq.Sub(9) + lengthLen
		if ok, err := r.PollFPDU(&f); !ok || err != nil || &f.ULPDU.B[0] != &wire[at] || !bytes.Equal(joined(f.ULPDU), w.ulpdu) {
			t.Fatalf("Next = %v, %v, or the ULPDU was copied, or is another", ok, err)
		}
	}
}

// resum appends the correct CRC to an FPDU whose bytes were changed.
func resum(fpdu []byte) {
	n := len(fpdu) - 4
	binary.LittleEndian.PutUint32(fpdu[n:], bitwiseCRC(fpdu[:n]))
}

func TestReceiverErrors(t *testing.T) {
	const start = 1000
	rnd := seeded(t)
	for _, tt := range []struct {
		name   string
		crc    bool
		mark   bool
		sizes  []int
		change func(b []byte) // of the stream
		before int            // FPDUs delivered before the error
		err    *term.Error
	}{
		{"CRC wrong", true, false, []int{40, 40, 40}, func(b []byte) { b[48+46] ^= 1 }, 1, term.ErrMPACRC},
		{"payload wrong", true, false, []int{40}, func(b []byte) { b[10] ^= 0x80 }, 0, term.ErrMPACRC},
		{"pad not zero and not in the CRC", true, false, []int{41}, func(b []byte) { b[43] = 1 }, 0, term.ErrMPACRC},
		{"pad not zero but in the CRC", true, false, []int{41}, func(b []byte) { b[43] = 1; resum(b) }, 1, nil},
		{"pad not zero, CRC off: soft-iWARP", false, false, []int{51}, func(b []byte) { b[53], b[54] = 1, 0x40 }, 1, nil},
		{"CRC off, CRC field random", false, false, []int{40}, func(b []byte) { b[45] = 9 }, 1, nil},
		{"length changed, CRC on", true, false, []int{40}, func(b []byte) { b[1] = 36 }, 0, term.ErrMPACRC},
		{"first marker not zero", true, true, []int{40}, func(b []byte) { b[3] = 4; resum(b) }, 0, term.ErrMPAMarker},
		{"first marker not zero, CRC off", false, true, []int{40}, func(b []byte) { b[3] = 4 }, 0, term.ErrMPAMarker},
		{"first marker not zero, CRC wrong", true, true, []int{40}, func(b []byte) { b[3] = 4 }, 0, term.ErrMPACRC},
		{"low bits of a marker", true, true, []int{40}, func(b []byte) { b[3] = 3; resum(b) }, 1, nil},
		{"reserved half of a marker", true, true, []int{40}, func(b []byte) { b[0], b[1] = 0xff, 1; resum(b) }, 1, nil},
		{"second marker wrong", true, true, []int{600}, func(b []byte) { b[515] = 0; resum(b) }, 0, term.ErrMPAMarker},
		{"second marker right", true, true, []int{600}, func(b []byte) { b[515] |= 1; resum(b) }, 1, nil},
		{"third marker wrong", true, true, []int{1200}, func(b []byte) { b[1026] ^= 2; resum(b) }, 0, term.ErrMPAMarker},
		{"marker between pad and CRC wrong", true, true, []int{505}, func(b []byte) { b[515] ^= 4; resum(b) }, 0, term.ErrMPAMarker},
		{"marker between pad and CRC right", true, true, []int{505}, func(b []byte) {}, 1, nil},
		{"marker between pad and CRC wrong, another within", true, true, []int{1013}, func(b []byte) { b[1027] ^= 4; resum(b) }, 0, term.ErrMPAMarker},
		{"marker between pad and CRC right, another within", true, true, []int{1013}, func(b []byte) { b[1027] ^= 3; resum(b) }, 1, nil},
		{"markers missing", true, true, []int{40}, func(b []byte) { b[3] = 8; resum(b) }, 0, term.ErrMPAMarker},
		{"length zero", true, false, []int{0, 40}, func(b []byte) {}, 2, nil},
		{"longest that can be announced", true, true, []int{0xffff}, func(b []byte) {}, 1, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wire, want := stream(rnd, tt.crc, tt.mark, start, tt.sizes...)
			tt.change(wire)
			for _, step := range []int{len(wire), 100, 7} {
				var r Receiver
				r.Init(tt.crc, tt.mark, start)
				var f FPDU
				var err *term.Error
				n := 0
				for rest := wire; len(rest) > 0; {
					k := min(step, len(rest))
					r.HandleStream(rest[:k])
					rest = rest[k:]
					for {
						var ok bool
						if ok, err = r.PollFPDU(&f); !ok {
							break
						}
						if !bytes.Equal(joined(f.ULPDU), want[n].ulpdu) {
							t.Fatalf("step %d: ULPDU %d is wrong", step, n)
						}
						n++
					}
				}
				if n != tt.before || err != tt.err {
					t.Errorf("step %d: %d FPDUs, then %v; want %d, then %v", step, n, err, tt.before, tt.err)
				}
				if tt.err == nil {
					continue
				}
				good, _ := stream(rnd, tt.crc, false, start, 20)
				r.HandleStream(good)
				if ok, err := r.PollFPDU(&f); ok || err != tt.err {
					t.Errorf("step %d: an FPDU after the error: %v, %v", step, ok, err)
				}
				ahead, fs := stream(rnd, tt.crc, tt.mark, start, 600, 600)
				r.HandleEarly(fs[1].seq, ahead[fs[1].begin:])
				if r.PollEarly(&f) || r.EarlyWhole() {
					t.Errorf("step %d: an FPDU ahead of order after the error", step)
				}
			}
		})
	}
}

// TestReceiverMemory checks that a length field alone does not make the receiver buffer more than has arrived.
func TestReceiverMemory(t *testing.T) {
	var r Receiver
	r.Init(true, false, 0)
	var f FPDU
	r.HandleStream([]byte{0xff, 0xff, 1, 2})
	if ok, err := r.PollFPDU(&f); ok || err != nil {
		t.Fatalf("Next = %v, %v", ok, err)
	}
	if cap(r.buf) > 2048 {
		t.Errorf("four bytes take a buffer of %d", cap(r.buf))
	}
	for range 70 { // the CRC at the end is wrong
		r.HandleStream(make([]byte, 1000))
		if _, err := r.PollFPDU(&f); err != nil {
			break
		}
	}
	if r.err != term.ErrMPACRC {
		t.Errorf("Next: %v; want a CRC error", r.err)
	}
	if cap(r.buf) > maxFPDU {
		t.Errorf("the buffer has grown to %d bytes", cap(r.buf))
	}
}

func FuzzReceiver(f *testing.F) {
	rnd := rand.New(rand.NewPCG(1, 1))
	for _, sizes := range [][]int{{0}, {1, 2, 3}, {505, 18}, {1442}, {46, 600, 46}} {
		for _, markers := range []bool{false, true} {
			b, _ := stream(rnd, true, markers, 0xffffff00, sizes...)
			f.Add(b, markers, true, uint16(7))
			f.Add(b, markers, false, uint16(500))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte, markers, crc bool, step uint16) {
		var whole, cut Receiver
		whole.Init(crc, markers, 0xffffff00)
		cut.Init(crc, markers, 0xffffff00)
		var a, c FPDU
		var got [][]byte
		whole.HandleStream(b)
		for total := 0; ; {
			ok, _ := whole.PollFPDU(&a)
			if !ok {
				break
			}
			if total += a.ULPDU.Len(); total > len(b) {
				t.Fatal("more bytes out than in")
			}
			got = append(got, joined(a.ULPDU))
		}
		for rest := b; len(rest) > 0; {
			n := min(int(step)+1, len(rest))
			cut.HandleStream(rest[:n])
			rest = rest[n:]
			for {
				ok, _ := cut.PollFPDU(&c)
				if !ok {
					break
				}
				if len(got) == 0 || !bytes.Equal(got[0], joined(c.ULPDU)) {
					t.Fatal("the cuts change the result")
				}
				got = got[1:]
			}
		}
		if len(got) != 0 || whole.err != cut.err {
			t.Fatalf("the cuts change the result: %d FPDUs missing, %v, %v", len(got), whole.err, cut.err)
		}
	})
}
