package crc32c

import "hash/crc32"

// shortest is the length from which folding is the faster way.
const shortest = 128

var folds = canFold()

func update(crc uint32, p []byte) uint32 {
	if len(p) >= shortest && folds {
		return ^fold(^crc, p)
	}
	return crc32.Update(crc, table, p)
}

// fold returns the CRC register after p, at least 64 octets, from crc before it.
//
//go:noescape
func fold(crc uint32, p []byte) uint32

func cpuid(leaf, sub uint32) (eax, ebx, ecx, edx uint32)
func xgetbv() uint32

// canFold reports whether processor and kernel have what fold uses.
func canFold() bool {
	const (
		pclmulqdq = 1 << 1  // leaf 1, ECX
		sse42     = 1 << 20 // leaf 1, ECX
		osxsave   = 1 << 27 // leaf 1, ECX
		avx       = 1 << 28 // leaf 1, ECX

		avx512f    = 1 << 16 // leaf 7, EBX
		vpclmulqdq = 1 << 10 // leaf 7, ECX

		// XMM, YMM, opmask, and both halves of ZMM are saved.
		state = 1<<1 | 1<<2 | 1<<5 | 1<<6 | 1<<7
	)
	if most, _, _, _ := cpuid(0, 0); most < 7 {
		return false
	}
	const need1 = pclmulqdq | sse42 | osxsave | avx
	if _, _, c, _ := cpuid(1, 0); c&need1 != need1 || xgetbv()&state != state {
		return false
	}
	_, b, c, _ := cpuid(7, 0)
	return b&avx512f != 0 && c&vpclmulqdq != 0
}
