// Package shm is the shared memory between the daemon and its clients: send, receive and completion rings, doorbell pages and client
// memory, all in memfds. docs/api.md specifies the layouts; the constants of this file are those of that document, and a test compares
// them.
//
// Each ring has one producer and one consumer. The daemon creates the memfd and seals its size; the client maps it. The daemon never trusts
// what a client may have written: indices are masked, counts are bounded, and an entry is copied once before it is validated.
package shm

import (
	"errors"
	"fmt"
)

// The header at the start of every memfd. All fields are little-endian. The header does not change once the client has the memfd, and the
// daemon never reads it.
const (
	HeaderSize = 4096

	Magic   = 0x474e495250524157 // "WARPRING" in memory
	Version = 1

	HdrMagic     = 0  // u64
	HdrVersion   = 8  // u32
	HdrKind      = 12 // u32
	HdrEntries   = 16 // u32, of each ring; doorbells: bits
	HdrStride    = 20 // u32, bytes of an entry
	HdrRings     = 24 // u32
	HdrRingSize  = 28 // u32, bytes from one ring to the next
	HdrMaxSGE    = 32 // u32
	HdrMaxInline = 36 // u32
	HdrArm       = 2048
	HdrOverruns  = 2112
)

// Kinds of memfd.
const (
	KindSQ        = 1
	KindRQ        = 2
	KindCQ        = 3
	KindDoorbells = 4
)

// A ring: two indices, each in its own pair of cache lines (adjacent lines are fetched in pairs), and the entries. Ring i starts at
// HeaderSize + i times the ring size at HdrRingSize.
const (
	RingProducer = 0   // u32
	RingConsumer = 128 // u32
	RingEntries  = 256
)

// A send WQE.
const (
	SQEFixed = 64

	SQEID          = 0  // u64
	SQEOpcode      = 8  // u8
	SQEFlags       = 9  // u8
	SQENumSGE      = 10 // u16
	SQEInlineLen   = 12 // u32
	SQERemote      = 16 // u64
	SQERKey        = 24 // u32
	SQEInv         = 28 // u32
	SQEImm         = 32 // u64
	SQECompareAdd  = 32 // u64
	SQESwap        = 40 // u64
	SQEAccess      = 40 // u32
	SQECompareMask = 48 // u64
	SQESwapMask    = 56 // u64
)

// A receive WQE.
const (
	RQEFixed = 16

	RQEID     = 0 // u64
	RQENumSGE = 8 // u16
)

// An SGE.
const (
	SGESize = 16

	SGEAddr = 0  // u64
	SGELen  = 8  // u32
	SGELKey = 12 // u32
)

// A CQE.
const (
	CQESize = 64

	CQEID     = 0  // u64
	CQEStatus = 8  // u32
	CQEOpcode = 12 // u32
	CQELen    = 16 // u32
	CQEQP     = 20 // u32
	CQEFlags  = 24 // u32
	CQEInvKey = 28 // u32
	CQEImm    = 32 // u64
	CQEVendor = 40 // u32
)

// A doorbell page starts at HeaderSize.
const (
	PageSize     = 4096
	BellSleeping = 0   // u32
	BellReceived = 64  // u32
	BellBits     = 128 // u64 each
	MaxBells     = (PageSize - BellBits) * 8
)

// Arm values of a CQ.
const (
	ArmNone      = 0
	ArmNext      = 1
	ArmSolicited = 2
)

// Opcodes of send WQEs: libibverbs' IBV_WR_* where it has them.
const (
	WRWrite    = 0
	WRSend     = 2
	WRRead     = 4
	WRCmpSwap  = 5
	WRFetchAdd = 6
	WRLocalInv = 7
	WRBindMW   = 8
	WRSendInv  = 9
	WRImm      = 64
	WRReg      = 65
)

// Limits of the Create functions.
const (
	MaxEntries   = 1 << 16 // entries of a ring of a work queue
	MaxCQEntries = 1 << 18 // entries of a ring of a completion queue
	MaxWorkers   = 256
)

// Errors.
var (
	ErrFull   = errors.New("shm: ring full")
	ErrFreed  = errors.New("shm: the daemon has freed the ring")
	ErrWR     = errors.New("shm: work request does not fit the ring")
	ErrLayout = errors.New("shm: not a memfd of iwarpd's, or of another version")
	ErrMemory = errors.New("shm: memory cannot be shared safely")
)

func align(n, to int) int { return (n + to - 1) &^ (to - 1) }

// pow2 rounds n up to a power of two.
func pow2(n int) int {
	p := 1
	for p < n {
		p <<= 1
	}
	return p
}

func sqStride(maxSGE, maxInline int) int {
	return align(SQEFixed+max(maxSGE*SGESize, maxInline), 64)
}

func rqStride(maxSGE int) int { return align(RQEFixed+maxSGE*SGESize, 64) }

func ringSize(entries, stride int) int { return align(RingEntries+entries*stride, 4096) }

func checkRange(what string, v, limit int) error {
	if v < 1 || v > limit {
		return fmt.Errorf("shm: %s %d is not in 1..%d", what, v, limit)
	}
	return nil
}
