package pkt

import (
	"encoding/binary"
	"math/bits"
)

// Sum adds b, as big-endian 16-bit words, to the partial sum initial (RFC 1071). An odd last byte
// is the high half of a word. The result is again a partial sum: the pieces of a message may be
// summed one after another if each starts at an even offset. SumSwap is for those that do not.
func Sum(b []byte, initial uint32) uint32 {
	return Add(initial, uint32(bits.ReverseBytes16(sumLE(b))))
}

// SumSwap is Sum for a piece that starts at an odd offset of the whole.
func SumSwap(b []byte, initial uint32) uint32 {
	return Add(initial, uint32(sumLE(b)))
}

// Fold reduces a partial sum to 16 bits. It does not complement: a checksum field is ^Fold(sum),
// and the Fold of a valid message, including checksum and pseudo-header, is 0xffff.
func Fold(sum uint32) uint16 {
	sum = sum>>16 + sum&0xffff
	return uint16(sum>>16 + sum)
}

// Checksum returns ^Fold(sum), the value of a TCP checksum field.
func Checksum(sum uint32) uint16 { return ^Fold(sum) }

// UDPChecksum is Checksum for a UDP checksum field, where all ones replace 0, which means no
// checksum (RFC 768).
func UDPChecksum(sum uint32) uint16 {
	if c := Checksum(sum); c != 0 {
		return c
	}
	return 0xffff
}

// Add returns the sum of two partial sums of pieces at even offsets.
func Add(a, b uint32) uint32 {
	s, c := bits.Add32(a, b, 0)
	return s + c
}

// Swap converts the partial sum of a piece to that of the same piece at an odd offset.
func Swap(sum uint32) uint32 { return uint32(bits.ReverseBytes16(Fold(sum))) }

// SumHeader is Sum optimized for short headers. len(b) must be a multiple of four.
func SumHeader(b []byte, initial uint32) uint32 { return Add(initial, reduce(words32(b))) }

// words32 returns the sum of the 32-bit words in b, to be passed to reduce. For a header it is
// faster than Sum.
func words32(b []byte) (sum uint64) {
	for ; len(b) >= 4; b = b[4:] {
		sum += uint64(be.Uint32(b))
	}
	return sum
}

// reduce converts a sum of 32-bit words to a partial sum: 2^16 is 1 modulo 2^16-1.
func reduce(sum uint64) uint32 {
	sum = sum>>32 + sum&0xffffffff
	return uint32(sum>>32 + sum)
}

// sumLE sums b as little-endian words. One's complement addition commutes with byte swapping (RFC
// 1071, Section 2(B)), and loads in the machine's byte order are free.
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
	// At most three bytes are left. 2^32 is 1 modulo 2^16-1.
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
