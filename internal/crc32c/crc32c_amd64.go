package crc32c

import (
	"math/bits"

	"golang.org/x/sys/cpu"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// vectors reports whether the processor and the kernel support the instructions that pass uses.
var vectors = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VBMI2 && cpu.X86.HasAVX512VNNI &&
	cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasBMI2 && cpu.X86.HasSSE42

// laned reports whether the processor has the instructions of inBlocks.
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

// folds are the constants that move 128 bits over 64, 48, 32 and 16 bytes: one for their first half, one for the other.
var folds = [4][2]uint64{{shifts[9], shifts[8]}, {shifts[7], shifts[6]}, {shifts[5], shifts[4]}, {shifts[3], shifts[2]}}

// folding reports whether inProduct is faster than inLanes on this processor, if it needs either. Most take one cycle for the CRC instruction; a Zen 1
// takes three, and two for a multiplication.
var folding = !vectors && laned && cpu.X86.HasAVX && least(inProduct) < least(inLanes)

// least returns the least number of ticks that a call of f takes.
func least(f func(dst *byte, p []byte, reg uint32) (int, uint32, uint64)) uint64 {
	p := make([]byte, 3*longestLane)
	n := ^uint64(0)
	for range 5 {
		began := ticks()
		f(nil, p, 0)
		n = min(n, ticks()-began)
	}
	return n
}

// ticks returns the processor's time-stamp counter.
func ticks() uint64

// inLanes processes the first n bytes of p, which has at least 24: it returns the CRC register after them, from reg before them, and the
// sum of their little-endian words of 64 bits. If dst is not nil it copies the bytes there. The CRC instruction has a latency of three
// cycles, so it runs in three lanes.
func inLanes(dst *byte, p []byte, reg uint32) (n int, reg2 uint32, sum uint64) {
	k := 8 * min(len(p)/24, longestLane/8)
	reg, sum = lanes(dst, &p[0], k, reg, shifts[k/8], shifts[k/4])
	return 3 * k, reg, sum
}

// inProduct is like inLanes for at least 64 bytes, by carry-less multiplication.
func inProduct(dst *byte, p []byte, reg uint32) (n int, reg2 uint32, sum uint64) {
	n = len(p) &^ 63
	reg, sum = fold(dst, &p[0], n, reg, &folds)
	return n, reg, sum
}

// inBlocks computes Sum of p, or Copy of it if dst is not nil, on processors without the vector
// instructions of pass.
func inBlocks(dst, p []byte, crc uint32) (crc2, sum uint32) {
	reg, le := ^crc, uint64(0)
	for len(p) >= shortest {
		var d *byte
		if dst != nil {
			d = &dst[0]
		}
		var n int
		var s, carry uint64
		if folding {
			n, reg, s = inProduct(d, p, reg)
		} else {
			n, reg, s = inLanes(d, p, reg)
		}
		le, carry = bits.Add64(le, s, 0)
		le += carry
		if p = p[n:]; dst != nil {
			dst = dst[n:]
		}
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

// fold returns the CRC register after the n bytes at src, from crc before them, and the sum of their little-endian
// words of 64 bits. n is a multiple of 64 and not 0, k is folds. If dst is not nil it copies the bytes there.
//
//go:noescape
func fold(dst, src *byte, n int, crc uint32, k *[4][2]uint64) (reg uint32, sum uint64)
