package mpa

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// compose returns the FPDU of a ULPDU that begins at seq.
func compose(f *Framer, seq serial.Num, ulpdu []byte) []byte {
	dst := bytes.Repeat([]byte{0xaa}, f.Size(seq, len(ulpdu)))
	f.Begin(dst, seq, len(ulpdu))
	f.Write(ulpdu)
	return dst[:f.End()]
}

// figure5 and figure6 are the FPDUs of RFC 5044 section 4.4, byte for byte.
const (
	figure5 = "00000000 002a 4143 00000000 00000000 00000001 00000000" +
		"000000000000000000000000000000000000000000000000 52239983"
	figure6 = "002a 4143 00000000 00000000 00000002 00000000 00000014" +
		"000000000000000000000000000000000000000000000000 84925898"
)

func TestRFC5044Figures(t *testing.T) {
	var start serial.Num = 0xffff_fff0
	for _, tt := range []struct {
		name string
		seq  serial.Num
		msn  byte
		wire string
	}{
		{"figure 5", start, 1, figure5},
		{"figure 6", start + 0x1ec, 2, figure6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ulpdu := testenv.Unhex(t, "4143000000000000000000000000000000000000000000000000000000000000"+"00000000000000000000")
			ulpdu[13] = tt.msn
			wire := testenv.Unhex(t, tt.wire)
			var f Framer
			f.Init(true, true, start)
			if got := compose(&f, tt.seq, ulpdu); !bytes.Equal(got, wire) {
				t.Errorf("composed %x\nwant     %x", got, wire)
			}
			var r Receiver
			r.Init(true, true, start)
			r.next = tt.seq
			r.HandleStream(wire)
			var p FPDU
			if ok, err := r.PollFPDU(&p); !ok || err != nil || !bytes.Equal(joined(p.ULPDU), ulpdu) {
				t.Errorf("Next = %v, %v, ULPDU %x; want %x", ok, err, joined(p.ULPDU), ulpdu)
			}
		})
	}
}

// seeded returns a generator whose seed is logged and can be set by TEST_SEED.
func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	return testenv.Rand(t)
}

func randomBytes(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

// bitwiseCRC computes CRC32c from its definition, one bit at a time.
func bitwiseCRC(b []byte) uint32 {
	crc := ^uint32(0)
	for _, o := range b {
		crc ^= uint32(o)
		for range 8 {
			crc = crc>>1 ^ 0x82f63b78&-(crc&1)
		}
	}
	return ^crc
}

// reference composes an FPDU literally as RFC 5044 sections 4.1 to 4.4 say, four bytes at a time.
func reference(crc, markers bool, start, seq serial.Num, ulpdu []byte) []byte {
	body := binary.BigEndian.AppendUint16(nil, uint16(len(ulpdu)))
	body = append(body, ulpdu...)
	for len(body)%4 != 0 {
		body = append(body, 0)
	}
	var out []byte
	length := 0
	marker := func() {
		if !markers || uint32(seq-start+serial.Num(len(out)))%512 != 0 {
			return
		}
		if len(out) == 0 {
			length = 4
		}
		out = append(out, 0, 0)
		out = binary.BigEndian.AppendUint16(out, uint16(max(0, len(out)-2-length)))
	}
	for ; len(body) > 0; body = body[4:] {
		marker()
		out = append(out, body[:4]...)
	}
	marker()
	sum := uint32(0)
	if crc {
		sum = bitwiseCRC(out)
	}
	return binary.LittleEndian.AppendUint32(out, sum)
}

func TestFramerReference(t *testing.T) {
	rnd := seeded(t)
	sizes := []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 18, 42, 46, 488, 500, 501, 502, 503, 504, 505, 506, 507, 508, 509, 510, 511, 512, 513, 1014, 1015, 1018, 1442, 1454, 4090, 8942}
	for _, crc := range []bool{true, false} {
		for _, markers := range []bool{true, false} {
			for off := 0; off < 512; off += 4 { // each position of the first marker
				start := serial.Num(rnd.Uint32())
				seq := start + serial.Num(off) + 512*serial.Num(rnd.IntN(1<<20))
				var f Framer
				f.Init(crc, markers, start)
				n := sizes[rnd.IntN(len(sizes))]
				for _, n := range []int{n, rnd.IntN(1600), off, 506 - off} {
					if n < 0 {
						continue
					}
					ulpdu := randomBytes(rnd, n)
					want := reference(crc, markers, start, seq, ulpdu)
					dst := bytes.Repeat([]byte{0xaa}, len(want)+8)
					f.Begin(dst, seq, n)
					for rest := ulpdu; len(rest) > 0; {
						k := 1 + rnd.IntN(len(rest))
						f.Write(rest[:k])
						rest = rest[k:]
					}
					got := dst[:f.End()]
					if !bytes.Equal(got, want) {
						t.Fatalf("crc %v, markers %v, offset %d, %d bytes:\ngot  %x\nwant %x", crc, markers, off, n, got, want)
					}
					if got, want := pkt.Fold(f.Sum()), pkt.Fold(pkt.Sum(want, 0)); got != want {
						t.Fatalf("crc %v, markers %v, offset %d, %d bytes: sum %04x; want %04x", crc, markers, off, n, got, want)
					}
					if f.Size(seq, n) != len(want) {
						t.Fatalf("Size(%d, %d) = %d; want %d", off, n, f.Size(seq, n), len(want))
					}
					if !bytes.Equal(dst[len(want):], bytes.Repeat([]byte{0xaa}, 8)) {
						t.Fatalf("bytes behind the FPDU were written")
					}
				}
			}
		}
	}
}

// TestFramerPut compares FPDUs of Put with the reference.
func TestFramerPut(t *testing.T) {
	rnd := seeded(t)
	for _, crc := range []bool{true, false} {
		var f Framer
		f.Init(crc, false, 100)
		for n := range 1600 {
			hdr, payload := randomBytes(rnd, 14+rnd.IntN(6)), randomBytes(rnd, n)
			want := reference(crc, false, 100, 100, append(hdr[:len(hdr):len(hdr)], payload...))
			dst := bytes.Repeat([]byte{0xaa}, len(want)+8)
			sum := f.Put(dst, hdr, payload)
			if got := dst[:len(want)]; !bytes.Equal(got, want) {
				t.Fatalf("crc %v, %d and %d bytes:\ngot  %x\nwant %x", crc, len(hdr), n, got, want)
			}
			if got, want := pkt.Fold(sum), pkt.Fold(pkt.Sum(want, 0)); got != want {
				t.Fatalf("crc %v, %d and %d bytes: sum %04x; want %04x", crc, len(hdr), n, got, want)
			}
			if !bytes.Equal(dst[len(want):], bytes.Repeat([]byte{0xaa}, 8)) {
				t.Fatal("bytes behind the FPDU were written")
			}
		}
	}
}

func TestMULPDU(t *testing.T) {
	for _, tt := range []struct {
		emss           int
		plain, markers int
	}{
		{0, 128, 128}, {64, 128, 128}, {127, 128, 128},
		{134, 128, 128}, {135, 128, 128}, {136, 130, 128}, {139, 130, 128}, {140, 134, 130},
		{536, 530, 522},
		{1024, 1018, 1010}, {1025, 1018, 1006},
		{1448, 1442, 1430}, {1460, 1454, 1442}, {1461, 1454, 1442}, {1463, 1454, 1442},
		{8948, 8942, 8870},
		{65495, 64768, 64768}, {1 << 20, 64768, 64768},
	} {
		var f Framer
		for _, m := range []struct {
			on   bool
			want int
		}{{false, tt.plain}, {true, tt.markers}} {
			f.Init(true, m.on, 1)
			if got := f.MULPDU(tt.emss); got != m.want {
				t.Errorf("MULPDU(%d), markers %v = %d; want %d", tt.emss, m.on, got, m.want)
			}
		}
	}
}

// TestMULPDUFits checks that an FPDU of MULPDU bytes fits in a segment wherever its markers fall.
func TestMULPDUFits(t *testing.T) {
	for _, markers := range []bool{false, true} {
		var f Framer
		f.Init(true, markers, 100)
		for emss := 140; emss < 9100; emss++ {
			n := f.MULPDU(emss)
			for off := 0; off < 512; off += 4 {
				if s := f.Size(100+serial.Num(off), n); s > emss {
					t.Fatalf("markers %v, EMSS %d, offset %d: MULPDU %d makes an FPDU of %d", markers, emss, off, n, s)
				}
			}
		}
	}
}

func TestFramerMisuse(t *testing.T) {
	var f Framer
	f.Init(true, false, 0)
	for name, do := range map[string]func(){
		"too long":       func() { f.Begin(make([]byte, maxFPDU), 0, 0x10000) },
		"negative":       func() { f.Begin(make([]byte, maxFPDU), 0, -1) },
		"too many":       func() { f.Begin(make([]byte, 64), 0, 3); f.Write(make([]byte, 4)) },
		"too few":        func() { f.Begin(make([]byte, 64), 0, 3); f.Write(make([]byte, 2)); f.End() },
		"put too much":   func() { f.Put(make([]byte, maxFPDU), make([]byte, 14), make([]byte, 0x10000-14)) },
		"no room in dst": func() { f.Begin(make([]byte, 8), 0, 10); f.Write(make([]byte, 10)); f.End() },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			do()
		}()
	}
}
