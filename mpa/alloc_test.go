package mpa

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

func TestNoAllocation(t *testing.T) {
	rnd := seeded(t)
	src, dst := make([]byte, 9000), make([]byte, 10_000)
	var f Framer
	f.Init(true, true, 0)
	seq := serial.Num(0)
	check := func(name string, do func()) {
		t.Helper()
		do() // buffers grow at first use
		if n := testing.AllocsPerRun(100, do); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
	check("Framer", func() {
		n := f.MULPDU(8948)
		f.Begin(dst, seq, n)
		f.Write(src[:18])
		f.Write(src[18:n])
		seq = seq.Add(f.End())
	})

	sizes := make([]int, 512)
	for i := range sizes {
		sizes[i] = 1400
	}
	n := 0 // FPDUs in order
	var p FPDU
	drain := func(r *Receiver) {
		for {
			if ok, _ := r.PollFPDU(&p); !ok {
				return
			}
			n++
		}
	}
	for _, markers := range []bool{false, true} {
		data, _ := stream(rnd, true, markers, 0, sizes...)
		var r Receiver
		for _, cut := range []int{100_000, 1448, 500} {
			check("Receiver", func() {
				n = 0
				r.Init(true, markers, 0)
				for rest := data; len(rest) > 0; {
					k := min(cut, len(rest))
					r.HandleStream(rest[:k])
					rest = rest[k:]
					drain(&r)
				}
			})
			if n != len(sizes) {
				t.Fatalf("%d FPDUs of %d", n, len(sizes))
			}
		}
	}

	w := newWorld(t, rnd, true, 0, sizes...)
	segs := w.segments(1448)
	placed := 0
	check("Receiver ahead of order", func() {
		n, placed = 0, 0
		w.r.Init(true, true, 0)
		for _, s := range segs[1:] {
			w.r.HandleEarly(serial.Num(s[0]), w.stream[s[0]:s[1]])
			for w.r.PollEarly(&p) {
				w.r.MarkPlaced(p.Seq)
				placed++
			}
		}
		w.r.HandleStream(w.stream[:segs[0][1]])
		drain(w.r)
		for _, s := range segs[1:] {
			w.r.HandleSkipped(s[1] - s[0])
			drain(w.r)
		}
	})
	if placed != 511 || n != 512 {
		t.Errorf("%d FPDUs placed, %d in order; want 511 and 512", placed, n)
	}

	wire, err := frameVectors[8].f.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	check("Decode", func() { _, _, err = Decode(wire) })
	if err != nil {
		t.Error(err)
	}
}
