package crc32c

import (
	"math/bits"

	"golang.org/x/sys/cpu"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// vectors reports whether the processor and the kernel support the instructions that pass uses.
var vectors = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VBMI2 && cpu.X86.HasAVX512VNNI &&
	cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasBMI2 && cpu.X86.HasSSE42

// laned reports whether the processor has the instructions of inLanes.
var laned = cpu.X86.HasSSE42 && cpu.X86.HasPCLMULQDQ

// pass returns the CRC register after the n bytes at src, at least 64, given crc before them,
// and the sums of the bytes at even and at odd places, counted so that the last one is odd. If
// dst is not nil it copies the bytes there; the results are those of the copy.
//
// If ptr is not zero, pass inserts markers among the bytes of src: one with the value ptr at
// next, and one with a value 512 greater every 512 bytes after it. n, which is at least 320,
// and next are then multiples of four.
//
//go:noescape
func pass(dst, src *byte, n int, crc, ptr uint32, next int) (reg, even, odd uint32)

// short returns the CRC register after the n bytes at p, from crc before them, and
// their sum as little-endian words of 16 bits. It is for a few bytes.
//
//go:noescape
func short(p *byte, n int, crc uint32) (reg, sum uint32)

// longestLane is the maximum length of a lane in bytes, a multiple of 8.
const longestLane = 1024

// shifts[i] is x^(64*i-33) modulo the polynomial, bit-reflected. lanes multiplies by it to move
// a CRC register over 8*i bytes.
var shifts = func() (t [2*longestLane/8 + 1]uint64) {
	const polynomial = 0x82f63b78
	v := uint32(1) << 31 // 1
	for n, i := 0, 1; i < len(t); n++ {
		if n == 64*i-33 {
			t[i] = uint64(v)
			i++
		}
		v = v>>1 ^ polynomial&-(v&1)
	}
	return t
}()

// inLanes computes Sum of p, or Copy of it if dst is not nil, on processors without the vector
// instructions of pass. The CRC instruction has a latency of three cycles, so it runs in three
// lanes.
func inLanes(dst, p []byte, crc uint32) (crc2, sum uint32) {
	reg, le := ^crc, uint64(0)
	for len(p) >= shortest {
		k := 8 * min(len(p)/24, longestLane/8)
		var d *byte
		if dst != nil {
			d = &dst[0]
			dst = dst[3*k:]
		}
		var s, carry uint64
		reg, s = lanes(d, &p[0], k, reg, shifts[k/8], shifts[k/4])
		le, carry = bits.Add64(le, s, 0)
		le += carry
		p = p[3*k:]
	}
	le = le>>32 + le&0xffffffff
	sum = pkt.Swap(uint32(le>>32 + le))
	if len(p) > 0 {
		if dst != nil {
			p = dst[:copy(dst, p)]
		}
		var s uint32
		reg, s = short(&p[0], len(p), reg)
		sum = pkt.Add(sum, pkt.Swap(s))
	}
	return ^reg, sum
}

// lanes returns the CRC register after three lanes of k bytes each at src, from crc before them,
// and the sum of their little-endian words of 64 bits. k is a multiple of 8 and not 0. one and two
// are the shifts by k and 2k bytes. If dst is not nil it copies the bytes there.
//
//go:noescape
func lanes(dst, src *byte, k int, crc uint32, one, two uint64) (reg uint32, sum uint64)
