// Package ddp is Direct Data Placement (RFC 5041): the headers of tagged and
// untagged segments, the cutting of a message into segments, and the tracking
// of untagged queues. It touches no user memory and does no I/O: it says where
// a payload belongs, and its user places it.
package ddp

import (
	"encoding/binary"
	"errors"
)

// Header lengths in octets (RFC 5041 sections 4.2, 4.3).
const (
	TaggedLen   = 14
	UntaggedLen = 18

	// MaxHeader has room for an untagged header and the largest header that
	// RDMAP puts behind it: 52 octets, an Atomic Request or a full Terminate.
	MaxHeader = UntaggedLen + 52
)

// MinMULPDU is the smallest MULPDU that a lower layer may offer (RFC 5044
// section 3). Every control message of RDMAP fits in it whole.
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

// The control octet (RFC 5041 section 4.1). Its four reserved bits are sent as
// zero and not checked.
const (
	ctrlTagged  = 0x80
	ctrlLast    = 0x40
	ctrlVersion = 0x03
	version     = 0x01
)

// ErrShort means that a segment ends before its header does.
var ErrShort = errors.New("ddp: segment shorter than its header")

var be = binary.BigEndian

// IsTagged reports whether seg starts with a tagged header. An empty segment
// does not.
func IsTagged(seg []byte) bool { return len(seg) > 0 && seg[0]&ctrlTagged != 0 }

// HeaderLen returns the length of the DDP header that the T bit of seg's first
// octet announces.
func HeaderLen(seg []byte) int {
	if IsTagged(seg) {
		return TaggedLen
	}
	return UntaggedLen
}
