package marked

import "golang.org/x/sys/cpu"

// vectors reports whether the processor and the kernel support the instructions that join uses.
var vectors = cpu.X86.HasAVX512F

// join copies n bytes from the size bytes at src, which contain markers: one at first, which is
// 1 to 508, and one every 512 bytes from there. runs is the number of markers that are followed
// by 508 bytes, at least one. dst and src must not overlap.
//
//go:noescape
func join(dst, src *byte, n, size, first, runs int)
