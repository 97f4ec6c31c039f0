package crc32c

import "golang.org/x/sys/cpu"

// vectors reports whether processor and kernel have what pass uses.
var vectors = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VBMI2 && cpu.X86.HasAVX512VNNI &&
	cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasBMI2 && cpu.X86.HasSSE42

// pass returns the CRC register after the n octets at src, at least 64, from
// crc before them, and the sums of the octets at even and at odd places, counted
// so that the last one is odd. If dst is not nil it copies them there; the
// results are those of the copy.
//
//go:noescape
func pass(dst, src *byte, n int, crc uint32) (reg, even, odd uint32)
