package crc32c

import "golang.org/x/sys/cpu"

// vectors reports whether the processor and the kernel support the instructions that pass uses.
var vectors = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VBMI2 && cpu.X86.HasAVX512VNNI &&
	cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasBMI2 && cpu.X86.HasSSE42

// pass returns the CRC register after the n bytes at src, at least 64, from
// crc before them, and the sums of the bytes at even and at odd places, counted
// so that the last one is odd. If dst is not nil it copies them there; the
// results are those of the copy.
//
// If ptr is not zero, the bytes are those of src with markers among them: one that
// says ptr at next, and one that says 512 more at each 512th byte behind. n, 320 at least, and next are then multiples of four.
//
//go:noescape
func pass(dst, src *byte, n int, crc, ptr uint32, next int) (reg, even, odd uint32)

// short returns the CRC register after the n bytes at p, from crc before them, and
// their sum as little-endian words of 16 bits. It is for a few bytes.
//
//go:noescape
func short(p *byte, n int, crc uint32) (reg, sum uint32)
