package mpa

import (
	"fmt"
	"hash/crc32"
	"testing"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// The benchmarks move a message of 1 MiB in FPDUs that fill segments, through as many slots as a window holds. For
// comparison, BenchmarkCopyAndCRC copies the same bytes once and computes one CRC over them, in pieces of the same
// size.

const (
	benchMessage = 1 << 20
	benchSlots   = 256
)

// header is the DDP and RDMAP header before the payload of a Write.
var header [14]byte

func benchSizes(b *testing.B, run func(b *testing.B, emss int)) {
	for _, emss := range []int{1460, 8948} {
		b.Run(fmt.Sprintf("emss=%d", emss), func(b *testing.B) { run(b, emss) })
	}
}

func BenchmarkCopyAndCRC(b *testing.B) {
	benchSizes(b, func(b *testing.B, emss int) {
		src, dst := make([]byte, benchMessage), make([]byte, benchSlots*emss)
		n := emss - 6 - len(header)
		b.SetBytes(benchMessage)
		for b.Loop() {
			slot := 0
			for rest := src; len(rest) > 0; {
				k := min(n, len(rest))
				d := dst[slot*emss:][:k]
				copy(d, rest)
				benchSum = crc32.Update(0, castagnoli, d)
				rest = rest[k:]
				slot = (slot + 1) % benchSlots
			}
		}
	})
}

// place copies the payload of a Write to dst and returns its length.
func place(dst []byte, f *FPDU) int {
	p := f.ULPDU.After(len(header))
	n := p.Len()
	p.CopyTo(dst[:n])
	return n
}

// castagnoli is the table of the standard library's CRC, to which ours is compared.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var benchSum uint32

func benchFramer(b *testing.B, crc, markers bool) {
	benchSizes(b, func(b *testing.B, emss int) {
		src, dst := make([]byte, benchMessage), make([]byte, benchSlots*emss)
		var f Framer
		f.Init(crc, markers, 77)
		seq := serial.Num(77)
		b.SetBytes(benchMessage)
		b.ReportAllocs()
		for b.Loop() {
			slot := 0
			for rest := src; len(rest) > 0; {
				k := min(f.MULPDU(emss)-len(header), len(rest))
				f.Begin(dst[slot*emss:], seq, k+len(header))
				f.Write(header[:])
				f.Write(rest[:k])
				seq = seq.Add(f.End())
				rest = rest[k:]
				slot = (slot + 1) % benchSlots
			}
		}
	})
}

func BenchmarkFramer(b *testing.B)        { benchFramer(b, true, false) }
func BenchmarkFramerMarkers(b *testing.B) { benchFramer(b, true, true) }
func BenchmarkFramerNoCRC(b *testing.B)   { benchFramer(b, false, false) }

// benchReceiver checks FPDUs in slots and copies the payload out.
func benchReceiver(b *testing.B, crc, markers bool, cut int) {
	benchSizes(b, func(b *testing.B, emss int) {
		dst := make([]byte, benchMessage)
		var f Framer
		var r Receiver
		f.Init(crc, markers, 0)
		// 512 FPDUs return the markers to their initial position.
		n := f.MULPDU(emss)
		slots := make([][]byte, benchSlots)
		seq := serial.Num(0)
		for i := range slots {
			slots[i] = compose(&f, seq, make([]byte, n))
			seq = seq.Add(len(slots[i]))
		}
		r.Init(crc, markers, 0)
		b.SetBytes(int64(benchSlots * (n - len(header))))
		b.ReportAllocs()
		for b.Loop() {
			to := 0
			r.next = 0
			for _, s := range slots {
				for len(s) > 0 {
					k := len(s)
					if cut > 0 {
						k = min(cut, k)
					}
					r.HandleStream(s[:k])
					s = s[k:]
					var p FPDU
					for {
						ok, err := r.PollFPDU(&p)
						if err != nil {
							b.Fatal(err)
						}
						if !ok {
							break
						}
						to += place(dst[to:], &p)
						if to > len(dst)-emss {
							to = 0
						}
					}
				}
			}
		}
	})
}

func BenchmarkReceiver(b *testing.B)        { benchReceiver(b, true, false, 0) }
func BenchmarkReceiverMarkers(b *testing.B) { benchReceiver(b, true, true, 0) }
func BenchmarkReceiverNoCRC(b *testing.B)   { benchReceiver(b, false, false, 0) }
func BenchmarkReceiverCut(b *testing.B)     { benchReceiver(b, true, false, 1000) }

// BenchmarkEarly finds, checks and copies out FPDUs after a gap, then passes them in order. BenchmarkReceiverMarkers
// shows the work for in-order FPDUs.
func BenchmarkEarly(b *testing.B) {
	benchSizes(b, func(b *testing.B, emss int) {
		dst := make([]byte, emss)
		var f Framer
		var r Receiver
		f.Init(true, true, 0)
		n := f.MULPDU(emss)
		slots := make([][]byte, 1+benchSlots)
		seq := serial.Num(0)
		for i := range slots {
			slots[i] = compose(&f, seq, make([]byte, n))
			seq = seq.Add(len(slots[i]))
		}
		r.Init(true, true, 0)
		b.SetBytes(int64(benchSlots * (n - len(header))))
		b.ReportAllocs()
		for b.Loop() {
			r.Init(true, true, 0)
			seq := serial.Num(len(slots[0]))
			var p FPDU
			for _, s := range slots[1:] {
				r.HandleEarly(seq, s)
				seq = seq.Add(len(s))
				for r.PollEarly(&p) {
					place(dst, &p)
					r.MarkPlaced(p.Seq)
				}
				if !r.EarlyWhole() {
					b.Fatal("a segment is not whole")
				}
			}
			r.HandleStream(slots[0])
			for ok := true; ok; {
				ok, _ = r.PollFPDU(&p)
			}
			for _, s := range slots[1:] {
				r.HandleSkipped(len(s))
				for ok := true; ok; {
					ok, _ = r.PollFPDU(&p)
				}
			}
			if r.next != seq {
				b.Fatal("FPDUs are missing")
			}
		}
	})
}
