package sctp

import (
	"encoding/binary"
	"errors"

	"github.com/iwarpd/iwarpd/internal/crc32c"
)

var be = binary.BigEndian

// HeaderLen is the length of the common header (RFC 9260 3.1).
const HeaderLen = 12

const chunkHeader = 4

// ChunkType is the type of a chunk (RFC 9260 3.2).
type ChunkType uint8

// The chunk types.
const (
	ChunkData ChunkType = iota
	ChunkInit
	ChunkInitAck
	ChunkSack
	ChunkHeartbeat
	ChunkHeartbeatAck
	ChunkAbort
	ChunkShutdown
	ChunkShutdownAck
	ChunkError
	ChunkCookieEcho
	ChunkCookieAck
	ChunkECNE
	ChunkCWR
	ChunkShutdownComplete

	ChunkPad ChunkType = 0x84 // RFC 4820
)

var chunkNames = [...]string{"DATA", "INIT", "INIT-ACK", "SACK", "HEARTBEAT", "HEARTBEAT-ACK", "ABORT", "SHUTDOWN",
	"SHUTDOWN-ACK", "ERROR", "COOKIE-ECHO", "COOKIE-ACK", "ECNE", "CWR", "SHUTDOWN-COMPLETE"}

func (t ChunkType) String() string {
	if int(t) < len(chunkNames) {
		return chunkNames[t]
	}
	if t == ChunkPad {
		return "PAD"
	}
	return "unknown"
}

// Actions that the top two bits of an unknown chunk or parameter type request (RFC 9260 3.2, 3.2.1).
const (
	unknownSkip   = 2 // continue with the next; otherwise stop
	unknownReport = 1 // report it to the sender
)

func (t ChunkType) unknown() uint8 { return uint8(t) >> 6 }

// Chunk flags.
const (
	flagEnd       = 0x01 // DATA
	flagBegin     = 0x02
	flagUnordered = 0x04
	flagImmediate = 0x08
	flagTag       = 0x01 // ABORT, SHUTDOWN COMPLETE: T, the tag is reflected
)

// Errors of the decoders.
var (
	errShort = errors.New("sctp: packet too short")
	errChunk = errors.New("sctp: bad chunk length")
	errParam = errors.New("sctp: bad parameter length")
)

// Header is the common header.
type Header struct {
	SrcPort, DstPort uint16
	Tag              uint32
}

// Decode reads the common header. It does not verify the checksum.
func (h *Header) Decode(b []byte) error {
	if len(b) < HeaderLen {
		return errShort
	}
	h.SrcPort, h.DstPort, h.Tag = be.Uint16(b), be.Uint16(b[2:]), be.Uint32(b[4:])
	return nil
}

// Append appends the header, with a checksum of 0.
func (h *Header) Append(b []byte) []byte {
	b = be.AppendUint16(b, h.SrcPort)
	b = be.AppendUint16(b, h.DstPort)
	b = be.AppendUint32(b, h.Tag)
	return append(b, 0, 0, 0, 0)
}

var zero4 [4]byte

func checksum(b []byte) uint32 {
	c := crc32c.Update(0, b[:8])
	c = crc32c.Update(c, zero4[:])
	return crc32c.Update(c, b[HeaderLen:])
}

// SetChecksum writes the CRC32c of the packet b, which has at least HeaderLen bytes (RFC 9260 6.8).
func SetChecksum(b []byte) { binary.LittleEndian.PutUint32(b[8:], checksum(b)) }

// Verify reports whether b is long enough for a packet and its CRC32c is correct.
func Verify(b []byte) bool {
	return len(b) >= HeaderLen && binary.LittleEndian.Uint32(b[8:]) == checksum(b)
}

// Chunk is a chunk in a packet. Body is its value, without header and padding.
type Chunk struct {
	Type  ChunkType
	Flags uint8
	Body  []byte
	Off   int // offset of the chunk's header in the packet
}

// raw returns the chunk in packet b, with its header and without padding.
func (c *Chunk) raw(b []byte) []byte { return b[c.Off : c.Off+chunkHeader+len(c.Body)] }

// NextChunk reads the chunk at offset off of packet b. next is the offset of the following chunk, or len(b) or more if there is none. It
// returns errChunk for a length that exceeds the packet.
func NextChunk(b []byte, off int, c *Chunk) (next int, err error) {
	if off < 0 || len(b)-off < chunkHeader {
		return off, errChunk
	}
	n := int(be.Uint16(b[off+2:]))
	if n < chunkHeader || n > len(b)-off {
		return off, errChunk
	}
	*c = Chunk{Type: ChunkType(b[off]), Flags: b[off+1], Body: b[off+chunkHeader : off+n], Off: off}
	return off + pad4(n), nil
}

func pad4(n int) int { return (n + 3) &^ 3 }

// beginChunk appends a chunk header, whose length endChunk fills in.
func beginChunk(b []byte, t ChunkType, flags uint8) ([]byte, int) {
	return append(b, byte(t), flags, 0, 0), len(b)
}

// endChunk sets the length of the chunk that begins at offset at, and pads it.
func endChunk(b []byte, at int) []byte {
	n := len(b) - at
	be.PutUint16(b[at+2:], uint16(n))
	return append(b, zero4[:pad4(n)-n]...)
}

func appendChunk(b []byte, t ChunkType, flags uint8, body []byte) []byte {
	b, at := beginChunk(b, t, flags)
	return endChunk(append(b, body...), at)
}

// paramType is the type of a parameter (RFC 9260 3.3.2, RFC 5061 4.2).
type paramType uint16

// The parameter types.
const (
	paramHeartbeatInfo      paramType = 1
	paramIPv4               paramType = 5
	paramIPv6               paramType = 6
	paramStateCookie        paramType = 7
	paramUnrecognized       paramType = 8
	paramCookiePreservative paramType = 9
	paramHostName           paramType = 11
	paramAddressTypes       paramType = 12
	paramECN                paramType = 0x8000
	paramAdaptation         paramType = 0xC006
)

func (t paramType) unknown() uint8 { return uint8(t >> 14) }

// param is a parameter or an error cause; both have the same form.
type param struct {
	Type paramType
	Body []byte
	raw  []byte
}

// nextParam reads the parameter at the start of b and returns what follows it. It returns errParam if b is too short for it.
func nextParam(b []byte, p *param) (rest []byte, err error) {
	if len(b) < 4 {
		return nil, errParam
	}
	n := int(be.Uint16(b[2:]))
	if n < 4 || n > len(b) {
		return nil, errParam
	}
	*p = param{Type: paramType(be.Uint16(b)), Body: b[4:n], raw: b[:n]}
	return b[min(pad4(n), len(b)):], nil
}

func appendParam(b []byte, t paramType, body []byte) []byte {
	b = be.AppendUint16(b, uint16(t))
	b = be.AppendUint16(b, uint16(4+len(body)))
	b = append(b, body...)
	return append(b, zero4[:pad4(len(body))-len(body)]...)
}

// causeCode is the code of an error cause (RFC 9260 3.3.10).
type causeCode uint16

// The error causes.
const (
	causeInvalidStream causeCode = iota + 1
	causeMissingParam
	causeStaleCookie
	causeOutOfResource
	causeUnresolvable
	causeUnknownChunk
	causeInvalidParam
	causeUnknownParams
	causeNoUserData
	causeShuttingDown
	causeRestartAddresses
	causeUserAbort
	causeProtocol
)

var causeNames = [...]string{"no cause", "invalid stream identifier", "missing mandatory parameter", "stale cookie",
	"out of resource", "unresolvable address", "unrecognized chunk type", "invalid mandatory parameter",
	"unrecognized parameters", "no user data", "cookie received while shutting down",
	"restart with new addresses", "user-initiated abort", "protocol violation"}

func (c causeCode) String() string {
	if int(c) < len(causeNames) {
		return causeNames[c]
	}
	return "unknown cause"
}

func appendCause(b []byte, c causeCode, info []byte) []byte {
	return appendParam(b, paramType(c), info)
}
