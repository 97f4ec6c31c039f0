package mpa

import "github.com/iwarpd/iwarpd/internal/serial"

// Limits and sizes of FPDUs, in bytes (RFC 5044 sections 3, 4.1 and 4.3).
const (
	MinMULPDU = 128
	MaxMULPDU = 64768

	lengthLen   = 2
	crcLen      = 4
	markerLen   = 4
	markerEvery = 512
	markerRun   = markerEvery - markerLen // bytes of FPDU between two markers

	// maxBody is the largest FPDU, without markers, that a 16-bit ULPDU_Length allows. Senders stop at MaxMULPDU; receivers need not
	// object.
	maxBody = (lengthLen+0xFFFF+3)&^3 + crcLen
	// maxFPDU is the same with markers.
	maxFPDU = maxBody + markerLen*((maxBody+markerRun-1)/markerRun)
)

// bodyLen returns the size of an FPDU without markers.
func bodyLen(ulpdu int) int { return (lengthLen+ulpdu+3)&^3 + crcLen }

// layout determines the marker positions of a half connection.
type layout struct {
	markers bool
	start   serial.Num // sequence number of the first FPDU, and of the first marker
}

// toMarker returns the distance from seq to the next marker position: zero if seq is one (RFC 5044 section 4.3).
func (l *layout) toMarker(seq serial.Num) int {
	return int(uint32(l.start-seq) % markerEvery)
}

// rawLen returns the size in the TCP stream of an FPDU that begins at seq and has body bytes without markers. A marker directly before it
// belongs to it, one directly after it to the next FPDU.
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
