package marked

import "golang.org/x/sys/cpu"

// vectors reports whether the processor and the kernel support the instructions that join uses.
var vectors = cpu.X86.HasAVX512F

// join copies n bytes from the size bytes at src, which have markers among them: one
// at first, 1 to 508, and one at each 512th byte from there. runs is how
// many times 508 bytes stand behind a marker, at least one. dst and src must not overlap.
//
//go:noescape
func join(dst, src *byte, n, size, first, runs int)
