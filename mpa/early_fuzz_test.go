package mpa

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

func FuzzEarly(f *testing.F) {
	rnd := rand.New(rand.NewPCG(1, 1))
	for _, sizes := range [][]int{{600, 600, 600}, {20, 20, 20, 1400, 20}, {505, 505, 505}} {
		b, fpdus := stream(rnd, true, true, 100, sizes...)
		f.Add(b, uint16(fpdus[1].begin), uint16(fpdus[2].begin), true)
		f.Add(b, uint16(fpdus[1].begin), uint16(fpdus[2].begin), false)
		f.Add(b, uint16(fpdus[2].begin), uint16(len(b)), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, from, to uint16, crc bool) {
		// Part of the bytes arrive out of order, then all of them in order except those that were placed.
		i, j := min(int(from), len(b)), min(int(to), len(b))
		if i >= j {
			return
		}
		var r, plain Receiver
		r.Init(crc, true, 100)
		plain.Init(crc, true, 100)
		placed := map[serial.Num][]byte{}
		var p, q FPDU
		r.HandleEarly(100+serial.Num(i), b[i:j])
		for r.PollEarly(&p) {
			placed[p.Seq] = joined(p.ULPDU)
			r.MarkPlaced(p.Seq)
		}
		pieces := []piece{{0, i, b[:i]}, {i, j, b[i:j]}, {j, len(b), b[j:]}}
		if r.EarlyWhole() {
			pieces[1].data = nil
		}
		plain.HandleStream(b)
		for _, x := range pieces {
			if x.from == x.to {
				continue
			}
			if x.data == nil {
				r.HandleSkipped(x.to - x.from)
			} else {
				r.HandleStream(x.data)
			}
			for {
				ok, _ := r.PollFPDU(&p)
				if !ok {
					break
				}
				// The in-order result is right; early must give the same or end in an error.
				if ok, err := plain.PollFPDU(&q); !ok {
					t.Fatalf("an FPDU at %d that is not there in order: %v", p.Seq, err)
				}
				if p.Seq != q.Seq {
					t.Fatalf("FPDU at %d; want %d", p.Seq, q.Seq)
				}
				ulpdu := joined(p.ULPDU)
				if p.Placed {
					ulpdu = placed[p.Seq]
				}
				if !bytes.Equal(ulpdu, joined(q.ULPDU)) {
					t.Fatalf("FPDU at %d differs from that in order", p.Seq)
				}
			}
		}
		if ok, err := plain.PollFPDU(&q); r.err == nil && (ok || err != nil) {
			t.Fatalf("in order goes on with %v, %v", ok, err)
		}
	})
}

// FuzzReorder reads a script with the sizes of some FPDUs, and then which bytes arrive and whether the FPDUs found
// in them are placed. In the end all bytes must have arrived in order.
func FuzzReorder(f *testing.F) {
	f.Add([]byte{3, 75, 75, 75, 20, 40, 1, 40, 80, 0, 60, 100, 1}, true)
	f.Add([]byte{6, 3, 3, 3, 180, 3, 3, 128, 90, 1, 20, 60, 1, 100, 130, 1}, false)
	f.Fuzz(func(t *testing.T, script []byte, crc bool) {
		if len(script) == 0 {
			return
		}
		n := min(int(script[0])%12+1, len(script)-1)
		sizes := make([]int, n)
		for i, b := range script[1 : 1+n] {
			sizes[i] = int(b) * 8
		}
		script = script[1+n:]
		w := newWorld(t, rand.New(rand.NewPCG(1, 2)), crc, 0xfffffe00, sizes...)
		for i := 0; i+3 <= len(script) && i < 3*200; i += 3 {
			from := len(w.stream) * int(script[i]) / 256
			to := len(w.stream) * int(script[i+1]) / 256
			if script[i+2]&2 != 0 { // at FPDU boundaries
				from, to = w.fpdus[int(script[i])%len(w.fpdus)].begin, w.end(int(script[i+1])%len(w.fpdus))
			}
			if from < to {
				w.arrive(from, to, func() bool { return script[i+2]&1 != 0 })
			}
		}
		w.arrive(0, len(w.stream), always)
		w.finish()
	})
}
