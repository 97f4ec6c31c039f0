package marked

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// put returns p with a marker in front of the byte at first and of each 508th behind.
func put(p []byte, first int) Bytes {
	if first >= len(p) {
		return Bytes{B: bytes.Clone(p)}
	}
	b := bytes.Clone(p[:first])
	for rest := p[first:]; len(rest) > 0; {
		n := min(run, len(rest))
		b = append(append(b, 0xaa, 0xaa, 0xaa, 0xaa), rest[:n]...)
		rest = rest[n:]
	}
	return Bytes{b, first}
}

func random(n int) []byte {
	rnd := rand.New(rand.NewPCG(5, 6))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

// check compares the methods of o with what it was made of.
func check(t *testing.T, o Bytes, want []byte) {
	t.Helper()
	if o.Len() != len(want) {
		t.Fatalf("%d bytes, markers from %d: Len = %d; want %d", len(o.B), o.First, o.Len(), len(want))
	}
	const room = 300
	rest := bytes.Repeat([]byte{0x5a}, room)
	n := len(want)
	for _, n := range []int{n, n / 2} {
		dst := append(append(bytes.Clone(rest), make([]byte, n)...), rest...)
		o.CopyTo(dst[room : room+n])
		if !bytes.Equal(dst[room:room+n], want[:n]) || !bytes.Equal(dst[:room], rest) || !bytes.Equal(dst[room+n:], rest) {
			t.Fatalf("CopyTo of %d bytes of %d, markers from %d, is not exact", n, len(want), o.First)
		}
	}
}

func TestBytes(t *testing.T) {
	b := random(70_000)
	rnd := rand.New(rand.NewPCG(7, 8))
	try := func(n, first int) {
		t.Helper()
		p := b[n%67:][:n]
		o := put(p, first)
		check(t, o, p)
		for _, skip := range []int{min(first, n), max(n-1, 0), n, rnd.IntN(n + 1)} {
			check(t, o.After(skip), p[skip:])
		}
	}
	for n := range 1600 {
		try(n, 1+rnd.IntN(560))
		try(n, max(n, 1))
		try(n, max(n-1, 1))
	}
	for first := 1; first <= 512; first++ {
		try(1430, first)
	}
	for range 20 {
		try(rnd.IntN(len(b)-67), 4+4*rnd.IntN(140))
	}
	check(t, Bytes{}, nil)
	check(t, Bytes{First: 8}, nil)
	check(t, Bytes{b[:8], 8}, b[:8])
	check(t, Bytes{b[:8], 100}, b[:8])
}

func TestAmong(t *testing.T) {
	for _, tt := range []struct{ n, first, want int }{
		{0, 0, 0}, {1, 0, 1}, {508, 0, 1}, {509, 0, 2}, {4, 4, 0}, {5, 4, 1}, {512, 4, 1}, {513, 4, 2},
	} {
		if got := Among(tt.n, tt.first); got != tt.want {
			t.Errorf("Among(%d, %d) = %d; want %d", tt.n, tt.first, got, tt.want)
		}
	}
}

// Nothing in front of the bytes or behind them is touched.
func TestEdges(t *testing.T) {
	mid := testenv.Page(t)
	src := random(len(mid))
	for n := 0; n < 1200; n += 3 {
		for _, first := range []int{1, 4, 60, 61, 508, 512} {
			want := src[:n]
			o := put(want, first)
			for _, p := range [][]byte{mid[:n], mid[len(mid)-n:]} {
				if o.CopyTo(p); !bytes.Equal(p, want) {
					t.Fatalf("CopyTo of %d bytes, markers from %d, is not exact", n, first)
				}
			}
			for _, p := range [][]byte{mid[:len(o.B)], mid[len(mid)-len(o.B):]} {
				copy(p, o.B)
				got := make([]byte, n)
				if (Bytes{p, o.First}).CopyTo(got); !bytes.Equal(got, want) {
					t.Fatalf("CopyTo of %d bytes, markers from %d, is not exact", n, first)
				}
			}
		}
	}
}

func FuzzBytes(f *testing.F) {
	f.Add(uint16(4), uint16(7), []byte("123456789"))
	f.Add(uint16(508), uint16(700), make([]byte, 1400))
	f.Fuzz(func(t *testing.T, first, skip uint16, p []byte) {
		o := put(p, 1+int(first))
		n := min(int(skip), len(p))
		check(t, o, p)
		check(t, o.After(n), p[n:])
	})
}

func BenchmarkCopyTo(b *testing.B) {
	for _, n := range []int{512, 1434, 8914} {
		dst := make([]byte, n)
		p := put(make([]byte, n+512), 512)
		b.Run(fmt.Sprintf("%d/markers", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				p.First = p.First*5%512 | 4
				p.CopyTo(dst)
			}
		})
		b.Run(fmt.Sprintf("%d/none", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				Bytes{B: p.B}.CopyTo(dst)
			}
		})
	}
}
