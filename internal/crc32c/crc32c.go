// Package crc32c is the CRC of MPA: CRC32c as hash/crc32 computes it, at the
// lengths of FPDUs in about a third of the time where the processor has
// carry-less multiplication of 512-bit vectors. In the same pass it takes the
// sum that TCP's checksum is made of, and copies.
package crc32c

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

var table = crc32.MakeTable(crc32.Castagnoli)

// Update returns the CRC32c of bytes whose CRC32c so far is crc, and p behind
// them.
func Update(crc uint32, p []byte) uint32 {
	if fits(p) {
		reg, _, _ := pass(nil, &p[0], len(p), ^crc, 0, 0)
		return ^reg
	}
	return crc32.Update(crc, table, p)
}

// Sum returns what Update returns, and pkt.Sum(p, 0).
func Sum(crc uint32, p []byte) (crc2, sum uint32) {
	switch {
	case fits(p):
		reg, even, odd := pass(nil, &p[0], len(p), ^crc, 0, 0)
		return ^reg, words(len(p), even, odd)
	case vectors && len(p) > 0 && len(p) < shortest:
		reg, le := short(&p[0], len(p), ^crc)
		return ^reg, pkt.Swap(le)
	}
	return crc32.Update(crc, table, p), pkt.Sum(p, 0)
}

// Copy copies p to dst, which must be as long and apart from it, and returns
// what Sum returns for the copy, even if p changes meanwhile.
func Copy(dst []byte, crc uint32, p []byte) (crc2, sum uint32) {
	dst = dst[:len(p)]
	if fits(p) {
		reg, even, odd := pass(&dst[0], &p[0], len(p), ^crc, 0, 0)
		return ^reg, words(len(p), even, odd)
	}
	copy(dst, p)
	return crc32.Update(crc, table, dst), pkt.Sum(dst, 0)
}

// Markers of RFC 5044 section 4.3, in bytes.
const (
	markerEvery = 512
	markerLen   = 4
	markerRun   = markerEvery - markerLen
)

// Mark copies p to dst with a marker in front of the byte at first, if there is one,
// and of each 508th behind that. The first marker says ptr, more than zero, and each
// other one 512 more. The lengths of p and first are multiples of four. It returns
// what Sum returns for the copy, and how long that is.
func Mark(dst []byte, crc uint32, p []byte, first, ptr int) (crc2, sum uint32, n int) {
	n = len(p) + markerLen*marked.Among(len(p), first)
	dst = dst[:n]
	if vectors && n >= fewest && n <= longest && n > first {
		reg, even, odd := pass(&dst[0], &p[0], n, ^crc, uint32(ptr), first)
		return ^reg, words(n, even, odd), n
	}
	for at := 0; ; ptr += markerEvery {
		k := copy(dst[at:], p[:min(first, len(p))])
		p, at, first = p[k:], at+k, markerRun
		if len(p) == 0 {
			break
		}
		binary.BigEndian.PutUint32(dst[at:], uint32(uint16(ptr)))
		at += markerLen
	}
	crc, sum = Sum(crc, dst)
	return crc, sum, n
}

// fewest is how many bytes Mark needs to do without a loop.
const fewest = 384

// Together is whether Sum takes no longer than pkt.Sum alone.
var Together bool = vectors

const (
	shortest = 64      // what pass needs, and the length from which it is faster
	longest  = 1 << 24 // to which its sums fit 32 bits
)

func fits(p []byte) bool { return vectors && len(p) >= shortest && len(p) <= longest }

// words makes a partial sum of what pass returns for n bytes.
func words(n int, even, odd uint32) uint32 {
	if n%2 == 1 {
		even, odd = odd, even
	}
	s := uint64(even)<<8 + uint64(odd)
	s = s>>32 + s&0xffffffff
	return uint32(s>>32 + s)
}
