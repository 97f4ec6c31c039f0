package mpa

import "github.com/iwarpd/iwarpd/internal/serial"

// Limits and sizes of FPDUs, in octets (RFC 5044 sections 3, 4.1 and 4.3).
const (
	MinMULPDU = 128
	MaxMULPDU = 64768

	lengthLen   = 2
	crcLen      = 4
	markerLen   = 4
	markerEvery = 512
	markerRun   = markerEvery - markerLen // octets of FPDU between two markers

	// maxBody is the largest FPDU that a 16-bit ULPDU_Length can announce,
	// without markers. Senders stop at MaxMULPDU; receivers need not object.
	maxBody = (lengthLen+0xFFFF+3)&^3 + crcLen
	// MaxFPDU is the same with markers.
	MaxFPDU = maxBody + markerLen*((maxBody+markerRun-1)/markerRun)
)

// bodyLen returns the size of an FPDU without markers.
func bodyLen(ulpdu int) int { return (lengthLen+ulpdu+3)&^3 + crcLen }

// layout says where the markers of a half connection lie.
type layout struct {
	markers bool
	start   serial.Num // of the first FPDU: the first marker's place
}

// toMarker returns the distance from seq to the next place of a marker: zero
// if seq is one (RFC 5044 section 4.3).
func (l *layout) toMarker(seq serial.Num) int {
	return int(uint32(l.start-seq) % markerEvery)
}

// rawLen returns the size in the TCP stream of an FPDU of body octets without
// markers that begins at seq. A marker right before it belongs to it, one right
// behind it to the next.
func (l *layout) rawLen(seq serial.Num, body int) int {
	if !l.markers {
		return body
	}
	d := l.toMarker(seq)
	if body <= d {
		return body
	}
	return body + markerLen*((body-d+markerRun-1)/markerRun)
}
