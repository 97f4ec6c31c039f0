package crc32c

import (
	"encoding/hex"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// Vectors: RFC 3720 appendix B.4, whose octets are those of the wire.
func TestVectors(t *testing.T) {
	up, down := make([]byte, 32), make([]byte, 32)
	ones := make([]byte, 32)
	for i := range up {
		up[i], down[i], ones[i] = byte(i), byte(31-i), 0xff
	}
	for _, tt := range []struct {
		name, want string
		in         []byte
	}{
		{"zeros", "aa36918a", make([]byte, 32)},
		{"ones", "43aba862", ones},
		{"up", "4e79dd46", up},
		{"down", "5cdb3f11", down},
	} {
		crc := Update(0, tt.in)
		if got := hex.EncodeToString([]byte{byte(crc), byte(crc >> 8), byte(crc >> 16), byte(crc >> 24)}); got != tt.want {
			t.Errorf("%s: %s; want %s", tt.name, got, tt.want)
		}
	}
}

func TestEveryLength(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, 3100)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	for n := 0; n <= 3000; n++ {
		at := n % 67
		crc := rnd.Uint32()
		if got, want := Update(crc, b[at:at+n]), crc32.Update(crc, table, b[at:at+n]); got != want {
			t.Fatalf("%d octets at %d from %08x: %08x; want %08x", n, at, crc, got, want)
		}
	}
}

// Each single bit, so that no constant is wrong only now and then.
func TestEveryBit(t *testing.T) {
	for _, n := range []int{128, 255, 256, 511, 700, 1452} {
		b := make([]byte, n)
		for i := range 8 * n {
			b[i/8] ^= 1 << (i % 8)
			if got, want := Update(0, b), crc32.Update(0, table, b); got != want {
				t.Fatalf("bit %d of %d octets: %08x; want %08x", i, n, got, want)
			}
			b[i/8] = 0
		}
	}
}

func FuzzUpdate(f *testing.F) {
	f.Add(uint32(0), []byte("123456789"))
	f.Add(uint32(0xffffffff), make([]byte, 600))
	f.Fuzz(func(t *testing.T, crc uint32, b []byte) {
		if got, want := Update(crc, b), crc32.Update(crc, table, b); got != want {
			t.Fatalf("%08x; want %08x", got, want)
		}
	})
}

func BenchmarkUpdate(b *testing.B) {
	for _, s := range []struct {
		name string
		n    int
	}{{"64", 64}, {"128", 128}, {"256", 256}, {"1452", 1452}, {"8944", 8944}} {
		p := make([]byte, s.n)
		b.Run(s.name, func(b *testing.B) {
			b.SetBytes(int64(s.n))
			for b.Loop() {
				Update(0, p)
			}
		})
		b.Run(s.name+"/std", func(b *testing.B) {
			b.SetBytes(int64(s.n))
			for b.Loop() {
				crc32.Update(0, table, p)
			}
		})
	}
}
