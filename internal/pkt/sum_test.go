package pkt

import (
	"math/rand/v2"
	"testing"
)

// slowSum is RFC 1071, Section 4.1, to the letter.
func slowSum(b []byte) uint16 {
	var s uint64
	for i := 0; i+1 < len(b); i += 2 {
		s += uint64(b[i])<<8 | uint64(b[i+1])
	}
	if len(b)%2 == 1 {
		s += uint64(b[len(b)-1]) << 8
	}
	for s>>16 != 0 {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

func TestSumRFC1071(t *testing.T) {
	b := []byte{0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7} // Section 3
	if got := Fold(Sum(b, 0)); got != 0xddf2 {
		t.Errorf("sum %#x, want 0xddf2", got)
	}
}

func TestUDPChecksum(t *testing.T) {
	for _, tt := range []struct {
		sum  uint32
		want uint16
	}{{0, 0xffff}, {1, 0xfffe}, {0xfffe, 1}, {0xffff, 0xffff}, {0x1fffe, 0xffff}, {0x10000, 0xfffe}} {
		if got := UDPChecksum(tt.sum); got != tt.want {
			t.Errorf("UDPChecksum(%#x) = %#x, want %#x", tt.sum, got, tt.want)
		}
	}
}

// same compares one's complement numbers, where 0 and 0xffff are both zero.
func same(a, b uint16) bool { return a == b || a%0xffff == b%0xffff }

func TestSumEveryLengthAndAlignment(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	random, ones := make([]byte, 512), make([]byte, 512)
	for i := range random {
		random[i] = byte(r.Uint32())
		ones[i] = 0xff // carries everywhere
	}
	for _, buf := range [][]byte{random, ones, make([]byte, 512)} {
		for off := range 9 {
			for n := range len(buf) - off {
				b := buf[off : off+n]
				got, want := Fold(Sum(b, 0)), slowSum(b)
				if !same(got, want) {
					t.Fatalf("offset %d length %d: %#x, want %#x", off, n, got, want)
				}
				cut := n / 3
				var s uint32
				if cut%2 == 0 {
					s = Sum(b[cut:], Sum(b[:cut], 0))
				} else {
					s = SumSwap(b[cut:], Sum(b[:cut], 0))
				}
				if !same(Fold(s), want) {
					t.Fatalf("offset %d length %d cut at %d: %#x, want %#x", off, n, cut, Fold(s), want)
				}
			}
		}
	}
}

func TestFoldLargePartialSums(t *testing.T) {
	if got := Fold(0xffffffff); got != 0xffff {
		t.Errorf("Fold(2^32-1) = %#x", got)
	}
	if got := Sum([]byte{0xff, 0xff}, 0xffffffff); Fold(got) != 0xffff {
		t.Errorf("Sum on a full partial sum folds to %#x", Fold(got))
	}
}

func FuzzSum(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint8(1))
	f.Fuzz(func(t *testing.T, b []byte, at uint8) {
		want := slowSum(b)
		if got := Fold(Sum(b, 0)); !same(got, want) {
			t.Fatalf("%#x, want %#x", got, want)
		}
		cut := min(int(at), len(b)) &^ 1
		if got := Fold(Sum(b[cut:], Sum(b[:cut], 0))); !same(got, want) {
			t.Fatalf("cut at %d: %#x, want %#x", cut, got, want)
		}
	})
}

func BenchmarkSum(b *testing.B) {
	for _, n := range []int{20, 64, 1448, 8948} {
		buf := make([]byte, n)
		b.Run(name(n), func(b *testing.B) {
			b.SetBytes(int64(n))
			b.ReportAllocs()
			var s uint32
			for range b.N {
				s = Sum(buf, s)
			}
			sink = s
		})
	}
}

var sink uint32

func name(n int) string {
	return map[int]string{20: "20", 64: "64", 1448: "1448", 8948: "8948"}[n]
}
