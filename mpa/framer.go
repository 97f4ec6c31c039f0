package mpa

import (
	"encoding/binary"
	"math/bits"

	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// sumStep is how far CRC and sum may lag behind the copy: far enough for them to
// run at speed, near enough that their octets are still in the L1 cache.
const sumStep = 4096

// From which length copy, CRC and sum are made in one pass: without markers, and with
// one at least.
const (
	inOne     = 512
	markInOne = 128
)

// Framer composes the FPDUs of one half connection, each straight in the buffer
// that it is sent from. For each FPDU call Begin, Write until the whole ULPDU
// is there, and End. The zero Framer is not ready; Init makes it so.
type Framer struct {
	layout
	crc bool

	dst    []byte
	at     int    // octets of dst written
	summed int    // octets of dst in c and sum
	c      uint32 // CRC32c so far
	sum    uint32 // partial sum of TCP's checksum so far
	next   int    // index in dst of the next marker
	length int    // index in dst of ULPDU_Length
	left   int    // octets of the ULPDU still to be written
}

// noMarker is a place in an FPDU that is never reached.
const noMarker = MaxFPDU + 1

// Init prepares f for a half connection whose first FPDU begins at start. With
// crc off the CRC field is zero.
func (f *Framer) Init(crc, markers bool, start serial.Num) {
	*f = Framer{layout: layout{markers: markers, start: start}, crc: crc}
}

// MULPDU returns the size in octets of the largest ULPDU whose FPDU fits in a
// TCP segment of emss octets whatever number of markers it holds, but at least
// 128 and at most 64768 (RFC 5044 sections 3 and 4.5). Only below an EMSS of
// 140 an FPDU of that size may need more than one segment.
func (f *Framer) MULPDU(emss int) int {
	n := emss - (lengthLen + crcLen + emss%4)
	if f.markers {
		n -= markerLen * ((emss + markerEvery - 1) / markerEvery)
	}
	return min(max(n, MinMULPDU), MaxMULPDU)
}

// Size returns the octets that the FPDU of a ULPDU of the given length takes
// when it begins at seq.
func (f *Framer) Size(seq serial.Num, ulpdu int) int {
	return f.rawLen(seq, bodyLen(ulpdu))
}

// Begin starts an FPDU in dst, whose first octet is sent at seq. ulpdu is the
// ULPDU's length, 0 to 65535; dst must have room for Size(seq, ulpdu) octets.
func (f *Framer) Begin(dst []byte, seq serial.Num, ulpdu int) {
	if uint(ulpdu) > 0xFFFF {
		panic("mpa: ULPDU longer than its length field can say")
	}
	f.dst, f.at, f.summed, f.c, f.sum, f.left = dst, 0, 0, 0, 0, ulpdu
	f.length, f.next = 0, noMarker
	if f.markers {
		f.next = f.toMarker(seq)
		if f.next == 0 {
			f.length = markerLen
			f.marker(0)
		}
	}
	binary.BigEndian.PutUint16(dst[f.at:], uint16(ulpdu))
	f.at += lengthLen
}

// marker writes the marker that is due.
func (f *Framer) marker(ptr int) {
	binary.BigEndian.PutUint32(f.dst[f.at:], uint32(uint16(ptr)))
	f.at += markerLen
	f.next += markerEvery
}

// Write adds the next octets of the ULPDU. It panics if they are more than were
// announced.
func (f *Framer) Write(p []byte) {
	if len(p) > f.left {
		panic("mpa: more octets than the FPDU announced")
	}
	f.left -= len(p)
	for len(p) > 0 {
		if first := f.next - f.at; f.crc && first < len(p) && first%4 == 0 && len(p) >= markInOne {
			n := len(p) &^ 3
			f.sumUp()
			c, sum, size := crc32c.Mark(f.dst[f.at:], f.c, p[:n], first, f.next-f.length)
			p = p[n:]
			f.at += size
			f.next += (f.at - f.next + markerEvery - 1) / markerEvery * markerEvery
			f.summedUp(c, sum)
			continue
		}
		if f.at == f.next {
			f.marker(f.at - f.length)
		}
		n := min(len(p), f.next-f.at)
		if f.crc && n >= inOne {
			f.sumUp()
			c, sum := crc32c.Copy(f.dst[f.at:f.at+n], f.c, p[:n])
			f.at += n
			f.summedUp(c, sum)
		} else {
			n = min(n, sumStep)
			copy(f.dst[f.at:f.at+n], p)
			f.at += n
			if f.at-f.summed >= sumStep {
				f.sumUp()
			}
		}
		p = p[n:]
	}
}

// sumUp takes what is written and not yet in CRC and sum.
func (f *Framer) sumUp() {
	b := f.dst[f.summed:f.at]
	switch {
	case len(b) == 0:
	case f.crc:
		f.summedUp(crc32c.Sum(f.c, b))
	default:
		f.summedUp(0, pkt.Sum(b, 0))
	}
}

// summedUp notes the CRC of all that is written and the sum of what is new.
func (f *Framer) summedUp(c, sum uint32) {
	if f.summed%2 == 1 {
		sum = pkt.Swap(sum)
	}
	f.c, f.sum, f.summed = c, pkt.Add(f.sum, sum), f.at
}

// End adds pad and CRC and returns the size of the FPDU in octets. It panics if
// the ULPDU is not complete.
func (f *Framer) End() int {
	if f.left != 0 {
		panic("mpa: fewer octets than the FPDU announced")
	}
	for (f.at-f.length)%4 != 0 {
		f.dst[f.at] = 0
		f.at++
	}
	if f.at == f.next { // between PAD and CRC: this FPDU's (RFC 5044 section 4.4)
		f.marker(f.at - f.length)
	}
	f.sumUp()
	// Reflected CRC32c goes out low octet first (RFC 5044 figure 5).
	binary.LittleEndian.PutUint32(f.dst[f.at:], f.c)
	f.sum = pkt.Add(f.sum, bits.ReverseBytes32(f.c))
	f.dst = nil
	return f.at + crcLen
}

// Sum returns the partial sum (see pkt.Sum) of the FPDU that End has completed.
func (f *Framer) Sum() uint32 { return f.sum }
