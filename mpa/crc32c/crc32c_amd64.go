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
// If ptr is not zero, n is a multiple of 512, and the octets are those of src
// with a marker in front of each 508: ptr, then 512 more each time.
//
//go:noescape
func pass(dst, src *byte, n int, crc, ptr uint32) (reg, even, odd uint32)

// join copies n pieces, at least one, of 508 octets from places that are 512
// octets apart. dst and src may overlap if dst is the lower by four at least.
//
//go:noescape
func join(dst, src *byte, n int)
