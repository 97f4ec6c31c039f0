package mpa

import (
	"encoding/binary"
	"math/bits"

	"github.com/iwarpd/iwarpd/internal/crc32c"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// sumStep is how many bytes CRC and sum may lag behind the copy: enough to run at full speed, and few enough that the bytes are still in
// the L1 cache.
const sumStep = 4096

// Lengths from which copy, CRC and sum are done in one pass: without markers, and with at least one.
const (
	inOne     = 512
	markInOne = 128
)

// Framer builds the FPDUs of one half connection directly in the send buffer. For each FPDU call Begin, then Write until the ULPDU is
// complete, then End. Init must be called before use.
type Framer struct {
	layout
	crc bool

	dst    []byte
	at     int    // bytes of dst written
	summed int    // bytes of dst included in c and sum
	c      uint32 // CRC32c so far
	sum    uint32 // partial sum of TCP's checksum so far
	next   int    // index in dst of the next marker
	length int    // index in dst of ULPDU_Length
	left   int    // bytes of the ULPDU not yet written
}

// noMarker is an offset that no FPDU reaches.
const noMarker = maxFPDU + 1

// Init prepares f for a half connection whose first FPDU begins at start. If crc is false the CRC field is zero.
func (f *Framer) Init(crc, markers bool, start serial.Num) {
	*f = Framer{layout: layout{markers: markers, start: start}, crc: crc}
}

// Markers reports whether the FPDUs have markers.
func (f *Framer) Markers() bool { return f.markers }

// Put writes an FPDU whose ULPDU is hdr and payload to the front of dst, and returns its partial sum (see pkt.Sum). It does in one step what
// Begin, Write and End do; there must be no markers.
func (f *Framer) Put(dst, hdr, payload []byte) (sum uint32) {
	at := lengthLen + len(hdr)
	end := at + len(payload)
	if f.markers || end-lengthLen > 0xFFFF {
		panic("mpa: Put with markers, or of a ULPDU longer than its length field can say")
	}
	binary.BigEndian.PutUint16(dst, uint16(end-lengthLen))
	copy(dst[lengthLen:], hdr)
	body := (end + 3) &^ 3
	if !f.crc {
		copy(dst[at:], payload)
		clear(dst[end:body])
		binary.LittleEndian.PutUint32(dst[body:], 0)
		return pkt.Sum(dst[:body], 0)
	}
	c, sum := crc32c.Sum(0, dst[:at])
	c, s := crc32c.Copy(dst[at:end], c, payload)
	if at%2 == 1 {
		s = pkt.Swap(s)
	}
	sum = pkt.Add(sum, s)
	if end < body {
		clear(dst[end:body])
		c = crc32c.Update(c, dst[end:body])
	}
	binary.LittleEndian.PutUint32(dst[body:], c)
	return pkt.Add(sum, bits.ReverseBytes32(c))
}

// MULPDU returns the size in bytes of the largest ULPDU whose FPDU fits in a TCP segment of emss bytes, however many markers it contains.
// It is at least 128 and at most 64768 (RFC 5044 sections 3 and 4.5). Only if emss is less than 140 may an FPDU of that size need more than
// one segment.
func (f *Framer) MULPDU(emss int) int {
	n := emss - (lengthLen + crcLen + emss%4)
	if f.markers {
		n -= markerLen * ((emss + markerEvery - 1) / markerEvery)
	}
	return min(max(n, MinMULPDU), MaxMULPDU)
}

// Size returns the size in bytes of an FPDU that begins at seq and carries a ULPDU of the given length.
func (f *Framer) Size(seq serial.Num, ulpdu int) int {
	return f.rawLen(seq, bodyLen(ulpdu))
}

// Begin starts an FPDU in dst, whose first byte is sent at seq. ulpdu is the length of the ULPDU, 0 to 65535; dst must have room for
// Size(seq, ulpdu) bytes.
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

// marker writes a marker.
func (f *Framer) marker(ptr int) {
	binary.BigEndian.PutUint32(f.dst[f.at:], uint32(uint16(ptr)))
	f.at += markerLen
	f.next += markerEvery
}

// Write appends the next bytes of the ULPDU. It panics if they exceed the length given to Begin.
func (f *Framer) Write(p []byte) {
	if len(p) > f.left {
		panic("mpa: more bytes than the FPDU announced")
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

// sumUp adds to CRC and sum the bytes written but not yet included.
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

// summedUp sets the CRC of everything written and adds sum, the partial sum of the new bytes.
func (f *Framer) summedUp(c, sum uint32) {
	if f.summed%2 == 1 {
		sum = pkt.Swap(sum)
	}
	f.c, f.sum, f.summed = c, pkt.Add(f.sum, sum), f.at
}

// End appends padding and CRC and returns the size of the FPDU in bytes. It panics if the ULPDU is not complete.
func (f *Framer) End() int {
	if f.left != 0 {
		panic("mpa: fewer bytes than the FPDU announced")
	}
	for (f.at-f.length)%4 != 0 {
		f.dst[f.at] = 0
		f.at++
	}
	if f.at == f.next { // a marker between PAD and CRC belongs to this FPDU (RFC 5044 section 4.4)
		f.marker(f.at - f.length)
	}
	f.sumUp()
	// The reflected CRC32c is sent low byte first (RFC 5044 figure 5).
	binary.LittleEndian.PutUint32(f.dst[f.at:], f.c)
	f.sum = pkt.Add(f.sum, bits.ReverseBytes32(f.c))
	f.dst = nil
	return f.at + crcLen
}

// Sum returns the partial sum (see pkt.Sum) of the FPDU completed by End.
func (f *Framer) Sum() uint32 { return f.sum }
