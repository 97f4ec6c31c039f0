package pkt

import (
	"encoding/binary"
	"math/bits"
)

// Sum adds b, as big-endian 16-bit words, to the partial sum initial (RFC
// 1071). A last odd byte counts as the high half of a word. The result is a
// partial sum too: sums of pieces compose while each piece starts at an even
// offset of the whole; for one at an odd offset see SumSwap.
func Sum(b []byte, initial uint32) uint32 {
	return Add(initial, uint32(bits.ReverseBytes16(sumLE(b))))
}

// SumSwap is Sum for a piece that starts at an odd offset of the whole.
func SumSwap(b []byte, initial uint32) uint32 {
	return Add(initial, uint32(sumLE(b)))
}

// Fold reduces a partial sum to 16 bits. It does not complement: a checksum
// field is ^Fold(sum), and Fold of a correct message, checksum and
// pseudo-header included, is 0xffff.
func Fold(sum uint32) uint16 {
	sum = sum>>16 + sum&0xffff
	return uint16(sum>>16 + sum)
}

// Checksum is ^Fold(sum): what goes in a TCP checksum field.
func Checksum(sum uint32) uint16 { return ^Fold(sum) }

// UDPChecksum is Checksum for a UDP checksum field, in which 0 means none: all ones stand
// for it (RFC 768).
func UDPChecksum(sum uint32) uint16 {
	if c := Checksum(sum); c != 0 {
		return c
	}
	return 0xffff
}

// Add is the partial sum of two pieces, each at an even offset of the whole.
func Add(a, b uint32) uint32 {
	s, c := bits.Add32(a, b, 0)
	return s + c
}

// Swap turns the partial sum of a piece into what it is at an odd offset.
func Swap(sum uint32) uint32 { return uint32(bits.ReverseBytes16(Fold(sum))) }

// SumHeader is Sum for the few bytes of a header, a multiple of four of them.
func SumHeader(b []byte, initial uint32) uint32 { return Add(initial, reduce(words32(b))) }

// words32 sums the words of 32 bits in b, which for a header is faster than Sum.
// It is for reduce.
func words32(b []byte) (sum uint64) {
	for ; len(b) >= 4; b = b[4:] {
		sum += uint64(be.Uint32(b))
	}
	return sum
}

// reduce makes a partial sum of a sum of 32-bit words: 2^16 is 1 modulo
// 2^16-1.
func reduce(sum uint64) uint32 {
	sum = sum>>32 + sum&0xffffffff
	return uint32(sum>>32 + sum)
}

// sumLE sums b as little-endian words: one's complement addition commutes with
// swapping the bytes of every word (RFC 1071, Section 2(B)), and loads in the
// machine's own order are free.
func sumLE(b []byte) uint16 {
	le := binary.LittleEndian
	var s, c uint64
	for len(b) >= 64 {
		s, c = bits.Add64(s, le.Uint64(b[0:8]), c)
		s, c = bits.Add64(s, le.Uint64(b[8:16]), c)
		s, c = bits.Add64(s, le.Uint64(b[16:24]), c)
		s, c = bits.Add64(s, le.Uint64(b[24:32]), c)
		s, c = bits.Add64(s, le.Uint64(b[32:40]), c)
		s, c = bits.Add64(s, le.Uint64(b[40:48]), c)
		s, c = bits.Add64(s, le.Uint64(b[48:56]), c)
		s, c = bits.Add64(s, le.Uint64(b[56:64]), c)
		b = b[64:]
	}
	for len(b) >= 8 {
		s, c = bits.Add64(s, le.Uint64(b), c)
		b = b[8:]
	}
	var last uint64
	if len(b) >= 4 {
		last = uint64(le.Uint32(b))
		b = b[4:]
	}
	// At most three bytes are left, and 2^32 is 1 modulo 2^16-1.
	if len(b) >= 2 {
		last += uint64(le.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		last += uint64(b[0])
	}
	s, c = bits.Add64(s, last, c)
	s, c = bits.Add64(s, 0, c)
	s += c
	s = s>>32 + s&0xffffffff
	s = s>>32 + s&0xffffffff
	return Fold(uint32(s))
}
