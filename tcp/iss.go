package tcp

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// issTick is the period in nanoseconds of the clock in initial sequence numbers: 4 microseconds (RFC 6528 section 3), so that it wraps
// after 4.7 hours.
const issTick = 4000

func issClock(now clock.Time) uint32 { return uint32(uint64(now) / issTick) }

// ISS returns the initial sequence number of a connection that starts now: a clock plus a keyed function of the flow (RFC 6528, RFC 9293
// MUST-8 and SHLD-1). The secret is random and kept for the life of the process.
func ISS(secret [16]byte, f pkt.Flow, now clock.Time) serial.Num {
	return serial.Num(issClock(now) + flowHash(&secret, &f, 0)[0])
}

// flowHash is a keyed hash of a flow and a salt.
func flowHash(secret *[16]byte, f *pkt.Flow, salt uint64) (h [2]uint32) {
	var b [60]byte
	copy(b[0:], secret[:])
	copy(b[16:], f.Local[:])
	copy(b[32:], f.Remote[:])
	binary.BigEndian.PutUint16(b[48:], f.LocalPort)
	binary.BigEndian.PutUint16(b[50:], f.RemotePort)
	binary.BigEndian.PutUint64(b[52:], salt)
	sum := sha256.Sum256(b[:])
	h[0] = binary.BigEndian.Uint32(sum[0:])
	h[1] = binary.BigEndian.Uint32(sum[4:])
	return h
}
