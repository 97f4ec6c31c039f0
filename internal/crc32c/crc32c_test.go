package crc32c

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// Vectors: RFC 3720 appendix B.4, whose bytes are those of the wire.
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

// check compares all functions with hash/crc32 and pkt.Sum, for p between
// bytes that nobody may write.
func check(t *testing.T, crc uint32, p []byte) {
	t.Helper()
	want := crc32.Update(crc, table, p)
	if got := Update(crc, p); got != want {
		t.Fatalf("Update(%08x, %d bytes) = %08x; want %08x", crc, len(p), got, want)
	}
	sum := pkt.Fold(pkt.Sum(p, 0))
	if got, s := Sum(crc, p); got != want || pkt.Fold(s) != sum {
		t.Fatalf("Sum(%08x, %d bytes) = %08x, %04x; want %08x, %04x", crc, len(p), got, pkt.Fold(s), want, sum)
	}
	const room = 70
	dst, rest := make([]byte, room+len(p)+room), bytes.Repeat([]byte{0x5a}, room)
	copy(dst, rest)
	copy(dst[room+len(p):], rest)
	if got, s := Copy(dst[room:room+len(p)], crc, p); got != want || pkt.Fold(s) != sum {
		t.Fatalf("Copy(%08x, %d bytes) = %08x, %04x; want %08x, %04x", crc, len(p), got, pkt.Fold(s), want, sum)
	}
	if !bytes.Equal(dst[room:room+len(p)], p) || !bytes.Equal(dst[:room], rest) || !bytes.Equal(dst[room+len(p):], rest) {
		t.Fatalf("Copy of %d bytes is not exact", len(p))
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
		check(t, rnd.Uint32(), b[at:at+n])
	}
	// All ones carry everywhere.
	for _, n := range []int{64, 65, 1448, 65537, longest, longest + 1} {
		check(t, 0, bytes.Repeat([]byte{0xff}, n))
	}
}

// checkMarkers compares Mark with its definition.
func checkMarkers(t *testing.T, crc uint32, first, ptr int, p []byte) {
	t.Helper()
	var want []byte
	n := len(p)
	for i := range n {
		if i >= first && (i-first)%markerRun == 0 {
			want = binary.BigEndian.AppendUint32(want, uint32(uint16(ptr+(i-first)/markerRun*markerEvery)))
		}
		want = append(want, p[i])
	}
	const room = 300
	rest := bytes.Repeat([]byte{0x5a}, room)
	dst := append(append(bytes.Clone(rest), make([]byte, len(want))...), rest...)
	got, s, size := Mark(dst[room:], crc, p, first, ptr)
	if size != len(want) || !bytes.Equal(dst[room:room+size], want) || !bytes.Equal(dst[:room], rest) || !bytes.Equal(dst[room+size:], rest) {
		t.Fatalf("Mark of %d bytes, %d from %d, is not exact", n, ptr, first)
	}
	if got != crc32.Update(crc, table, want) || pkt.Fold(s) != pkt.Fold(pkt.Sum(want, 0)) {
		t.Fatalf("Mark of %d bytes, %d from %d: %08x, %04x; want %08x, %04x", n, ptr, first, got, pkt.Fold(s), crc32.Update(crc, table, want), pkt.Fold(pkt.Sum(want, 0)))
	}
}

func TestMarkers(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	b := make([]byte, 70_000)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	for n := 0; n < 1600; n += 4 {
		for range 2 {
			checkMarkers(t, rnd.Uint32(), 4*rnd.IntN(140), 4+4*rnd.IntN(500), b[n%67:][:n])
		}
		checkMarkers(t, rnd.Uint32(), n, 4, b[:n])
		checkMarkers(t, rnd.Uint32(), n+4, 4, b[:n])
	}
	for first := 0; first <= 512; first += 4 {
		checkMarkers(t, rnd.Uint32(), first, 65000, b[first%5:][:1428])
	}
	for range 20 {
		n := 4 * rnd.IntN(len(b)/4)
		checkMarkers(t, rnd.Uint32(), 4*rnd.IntN(140), 4+4*rnd.IntN(500), b[:n])
	}
}

// Nothing in front of the bytes or behind them is touched.
func TestEdges(t *testing.T) {
	mid := testenv.Page(t)
	for i := range mid {
		mid[i] = byte(i * 7)
	}
	src := bytes.Clone(mid)
	for n := range 700 {
		check(t, 0, mid[:n])
		check(t, 0, mid[len(mid)-n:])
		Copy(mid[:n], 0, src[:n])
		Copy(mid[len(mid)-n:], 0, src[len(mid)-n:])
		if n%4 != 0 {
			continue
		}
		for _, first := range []int{0, 60, 508} {
			size := n + markerLen*marked.Among(n, first)
			for _, p := range [][]byte{mid[:n], mid[len(mid)-n:]} {
				Mark(make([]byte, size), 0, p, first, 4)
			}
			for _, p := range [][]byte{mid[:size], mid[len(mid)-size:]} {
				Mark(p, 0, src[:n], first, 4)
			}
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
				t.Fatalf("bit %d of %d bytes: %08x; want %08x", i, n, got, want)
			}
			b[i/8] = 0
		}
	}
}

func FuzzUpdate(f *testing.F) {
	f.Add(uint32(0), []byte("123456789"))
	f.Add(uint32(0xffffffff), make([]byte, 600))
	f.Fuzz(func(t *testing.T, crc uint32, p []byte) {
		check(t, crc, p)
		checkMarkers(t, crc, 4*int(crc>>16%200), 1+int(crc%0xffff), p[:len(p)&^3])
	})
}

func BenchmarkUpdate(b *testing.B) {
	for _, n := range []int{64, 84, 128, 256, 1448, 8948} {
		p, dst, with := bytes.Repeat([]byte{1}, n+4096)[4096:], bytes.Repeat([]byte{1}, n+4096)[4096:], bytes.Repeat([]byte{1}, 4096+n+n/8)[4096:]
		first := 4
		for _, f := range []struct {
			name string
			f    func()
		}{
			{"Update", func() { Update(0, p) }},
			{"Sum", func() { Sum(0, p) }},
			{"Copy", func() { Copy(dst, 0, p) }},
			{"Mark", func() { first = first * 5 % 512; Mark(with, 0, p, first, 4) }},
			{"std", func() { crc32.Update(0, table, p) }},
			{"std+sum", func() { crc32.Update(0, table, p); pkt.Sum(p, 0) }},
			{"copy+std+sum", func() { copy(dst, p); crc32.Update(0, table, dst); pkt.Sum(dst, 0) }},
		} {
			b.Run(fmt.Sprintf("%d/%s", n, f.name), func(b *testing.B) {
				b.SetBytes(int64(n))
				for b.Loop() {
					f.f()
				}
			})
		}
	}
}

// BenchmarkCold passes over FPDUs of memory that does not fit in the cache.
func BenchmarkCold(b *testing.B) {
	mem := bytes.Repeat([]byte{1}, 128<<20)
	dst := make([]byte, 64<<10)
	for _, n := range []int{1448, 8948} {
		for _, f := range []struct {
			name string
			f    func(p []byte)
		}{
			{"Sum", func(p []byte) { Sum(0, p) }},
			{"Copy", func(p []byte) { Copy(dst, 0, p) }},
		} {
			b.Run(fmt.Sprintf("%d/%s", n, f.name), func(b *testing.B) {
				b.SetBytes(int64(n))
				at := 0
				for b.Loop() {
					f.f(mem[at : at+n])
					if at += n; at+n > len(mem) {
						at = 0
					}
				}
			})
		}
	}
}
