// Package link defines Link, one queue of an interface as seen by a worker, and the
// implementations that need no XDP: Pipe, an in-process wire that can be impaired, Packet, an
// AF_PACKET socket, and None, which carries nothing. AF_XDP is in dataplane/xsk.
package link

import "time"

// MaxPieces is the maximum number of pieces of a received frame. A super-frame of 64 KiB has as
// many in chunks of 4 KiB, the first of which has headroom.
const MaxPieces = 18

// HeaderRoom is the maximum length of the headers before the IP packet: Ethernet and two tags.
const HeaderRoom = 14 + 2*4

// The least and the largest MTU of a Link. The least is the size that every host must accept (RFC 791, Section 3.2); an
// FPDU fits in it.
const MinMTU, MaxMTU = 576, 9216

// MTUOn returns the MTU of Links on an interface with the given MTU. Packets that are sent there may have to be
// shorter.
func MTUOn(interfaceMTU int) int { return min(max(interfaceMTU, MinMTU), MaxMTU) }

// Frame is a received frame. Its bytes are valid, and may be modified by its owner, until
// Release.
type Frame struct {
	Pieces [MaxPieces][]byte
	N      int // number of pieces

	// IDs locate the pieces, for use by the Link.
	IDs [MaxPieces]uint64
}

// Len returns the number of bytes of the frame.
func (f *Frame) Len() int {
	n := 0
	for _, p := range f.Pieces[:f.N] {
		n += len(p)
	}
	return n
}

// Slot identifies a TX buffer: SlotSize contiguous bytes, owned by the worker between Alloc and
// Free.
type Slot uint32

// NoSlot is an invalid Slot.
const NoSlot Slot = ^Slot(0)

// Link is one queue of an interface. It is not safe for concurrent use. Methods that move
// frames never block and never allocate.
type Link interface {
	// Receive fills fs with up to len(fs) frames and returns how many.
	Receive(fs []Frame) int
	// Hold prepares a received frame for being kept, maybe for long, while others are received.
	// It may move the frame to other pieces.
	Hold(f *Frame)
	// Release releases a received frame. The link reuses its memory by the next Receive, Flush
	// or Wait. Each frame must be released once.
	Release(f *Frame)
	// RxFrames returns the number of frames of the MTU that fit in the receive memory.
	RxFrames() int

	// Alloc allocates a TX slot, preferably the one freed last.
	Alloc() (Slot, bool)
	// Free frees a slot. It must not be posted; see Reap.
	Free(Slot)
	// FreeSlots returns the number of free slots, Slots the total number, and SlotSize
	// their length in bytes, at least MTU+HeaderRoom.
	FreeSlots() int
	Slots() int
	SlotSize() int
	// Bytes returns the bytes of a slot.
	Bytes(Slot) []byte

	// Post queues the bytes [off,off+n) of s as a frame. They must not change until s is
	// reaped. Post returns false, and queues nothing, if the ring is full or s is already
	// posted: try again after Flush and Reap. A frame that is longer than MTU+HeaderRoom, or
	// not within the slot, is counted in TxInvalid; it is not sent, but reaped like any other.
	Post(s Slot, off, n int) bool
	// Flush passes the posted frames to the kernel or the peer. It never sleeps; frames
	// that the kernel does not accept are passed at a later Flush.
	Flush()
	// Reap fills done with slots whose posted frame the link no longer needs, and returns
	// their number. Each Post that returned true is reaped exactly once.
	Reap(done []Slot) int

	// Wait waits until a frame can be received, wakefd is readable, or the timeout has
	// elapsed. It reports whether wakefd is readable. A negative timeout means none; wakefd
	// may be -1.
	Wait(timeout time.Duration, wakefd int) (woken bool)

	// MTU returns the length of the largest IP packet that the link can carry.
	MTU() int
	// Stats stores the counters, which never decrease.
	Stats(*Stats)
	// Close closes the link. All slots and frames become invalid.
	Close() error
}

// Stats are the counters of a Link.
type Stats struct {
	RxFrames, RxBytes uint64
	TxFrames, TxBytes uint64 // posted and accepted by the link

	RxDropped    uint64 // lost for other reasons
	RxRingFull   uint64 // lost because the RX ring was full
	RxFillEmpty  uint64 // lost or delayed because no RX buffer was free
	RxInvalid    uint64 // chains that are too long, invalid descriptors
	TxInvalid    uint64 // invalid frames, or refused by the kernel
	TxRingFull   uint64 // Posts that returned false
	TxErrors     uint64 // system calls that failed, except with EAGAIN
	Kicks        uint64 // system calls made to send
	Wakes        uint64 // calls of Wait that slept
	TxIncomplete uint64 // Flushes that left frames in the ring
}

// Add adds the counters of o.
func (s *Stats) Add(o *Stats) {
	s.RxFrames += o.RxFrames
	s.RxBytes += o.RxBytes
	s.TxFrames += o.TxFrames
	s.TxBytes += o.TxBytes
	s.RxDropped += o.RxDropped
	s.RxRingFull += o.RxRingFull
	s.RxFillEmpty += o.RxFillEmpty
	s.RxInvalid += o.RxInvalid
	s.TxInvalid += o.TxInvalid
	s.TxRingFull += o.TxRingFull
	s.TxErrors += o.TxErrors
	s.Kicks += o.Kicks
	s.Wakes += o.Wakes
	s.TxIncomplete += o.TxIncomplete
}
