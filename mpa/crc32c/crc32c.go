// Package crc32c is the CRC of MPA: CRC32c as hash/crc32 computes it, at the
// lengths of FPDUs in about a third of the time where the processor has
// carry-less multiplication of 512-bit vectors. In the same pass it takes the
// sum that TCP's checksum is made of, and copies.
package crc32c

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

var table = crc32.MakeTable(crc32.Castagnoli)

// Update returns the CRC32c of octets whose CRC32c so far is crc, and p behind
// them.
func Update(crc uint32, p []byte) uint32 {
	if fits(p) {
		reg, _, _ := pass(nil, &p[0], len(p), ^crc, 0)
		return ^reg
	}
	return crc32.Update(crc, table, p)
}

// Sum returns what Update returns, and pkt.Sum(p, 0).
func Sum(crc uint32, p []byte) (crc2, sum uint32) {
	if fits(p) {
		reg, even, odd := pass(nil, &p[0], len(p), ^crc, 0)
		return ^reg, words(len(p), even, odd)
	}
	return crc32.Update(crc, table, p), pkt.Sum(p, 0)
}

// Copy copies p to dst, which must be as long and apart from it, and returns
// what Sum returns for the copy, even if p changes meanwhile.
func Copy(dst []byte, crc uint32, p []byte) (crc2, sum uint32) {
	dst = dst[:len(p)]
	if fits(p) {
		reg, even, odd := pass(&dst[0], &p[0], len(p), ^crc, 0)
		return ^reg, words(len(p), even, odd)
	}
	copy(dst, p)
	return crc32.Update(crc, table, dst), pkt.Sum(dst, 0)
}

// Markers of RFC 5044 section 4.3, in octets.
const (
	markerEvery = 512
	markerLen   = 4
	markerRun   = markerEvery - markerLen
)

// Mark is Copy of p, a multiple of 508 octets, to dst with a marker in front of
// each 508. The first marker says ptr, more than zero, and each other one 512
// more.
func Mark(dst []byte, crc uint32, p []byte, ptr int) (crc2, sum uint32) {
	n := len(p) / markerRun
	dst, p = dst[:n*markerEvery], p[:n*markerRun]
	if fits(dst) {
		reg, even, odd := pass(&dst[0], &p[0], len(dst), ^crc, uint32(ptr))
		return ^reg, words(len(dst), even, odd)
	}
	for i := range n {
		d := dst[i*markerEvery:]
		binary.BigEndian.PutUint32(d, uint32(uint16(ptr+i*markerEvery)))
		copy(d[markerLen:markerEvery], p[i*markerRun:])
	}
	return Sum(crc, dst)
}

// Unmark copies from p to dst as many runs of 508 octets as fit in dst, leaving
// out the four octets behind each, and returns how many runs that was. dst and p
// may be of one buffer, dst at least four octets ahead.
func Unmark(dst, p []byte) int {
	n := min(len(dst)/markerRun, (len(p)+markerLen)/markerEvery)
	if vectors && n > 0 {
		join(&dst[0], &p[0], n)
		return n
	}
	for i := range n {
		copy(dst[i*markerRun:][:markerRun], p[i*markerEvery:])
	}
	return n
}

// Together is whether Sum takes no longer than pkt.Sum alone.
var Together bool = vectors

const (
	shortest = 64      // what pass needs, and the length from which it is faster
	longest  = 1 << 24 // to which its sums fit 32 bits
)

func fits(p []byte) bool { return vectors && len(p) >= shortest && len(p) <= longest }

// words makes a partial sum of what pass returns for n octets.
func words(n int, even, odd uint32) uint32 {
	if n%2 == 1 {
		even, odd = odd, even
	}
	s := uint64(even)<<8 + uint64(odd)
	s = s>>32 + s&0xffffffff
	return uint32(s>>32 + s)
}
