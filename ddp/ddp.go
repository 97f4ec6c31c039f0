// Package ddp is Direct Data Placement (RFC 5041): the headers of tagged and untagged segments, the segmentation of messages, and the
// tracking of untagged queues. It does not access user memory and does no I/O: it determines where a payload belongs, and its caller places
// it.
package ddp

import (
	"encoding/binary"
	"errors"
)

// Header lengths in bytes (RFC 5041 sections 4.2, 4.3).
const (
	TaggedLen   = 14
	UntaggedLen = 18

	// MaxHeader has room for an untagged header followed by the largest RDMAP header: 52 bytes, an Atomic Request or a full Terminate.
	MaxHeader = UntaggedLen + 52
)

// MinMULPDU is the smallest MULPDU that a lower layer may offer (RFC 5044 section 3). Every control message of RDMAP fits in it.
const MinMULPDU = 128

// Queue numbers of untagged messages (RFC 5040 section 4.1, RFC 7306 section
// 10.2).
const (
	QNSend           = 0
	QNReadRequest    = 1 // and Atomic Requests
	QNTerminate      = 2
	QNAtomicResponse = 3
)

// FirstMSN is the message sequence number of the first message on each queue
// (RFC 5041 section 4.3).
const FirstMSN = 1

// The control byte (RFC 5041 section 4.1). Its four reserved bits are sent as zero and not checked.
const (
	ctrlTagged  = 0x80
	ctrlLast    = 0x40
	ctrlVersion = 0x03
	version     = 0x01
)

// ErrShort means that a segment is shorter than its header.
var ErrShort = errors.New("ddp: segment shorter than its header")

var be = binary.BigEndian

// IsTagged reports whether seg starts with a tagged header. It is false for an empty segment.
func IsTagged(seg []byte) bool { return len(seg) > 0 && seg[0]&ctrlTagged != 0 }

// HeaderLen returns the length of the DDP header that the T bit in the first byte of seg indicates.
func HeaderLen(seg []byte) int {
	if IsTagged(seg) {
		return TaggedLen
	}
	return UntaggedLen
}
