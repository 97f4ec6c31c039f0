// Package link defines the Link, one queue of an interface as a worker sees it,
// and two implementations that need no XDP: Pipe, an in-process wire that can
// be made bad, and Packet, an AF_PACKET socket. AF_XDP is in dataplane/xsk.
package link

import "time"

// MaxPieces is the most pieces that a received frame comes in: those of a super-frame,
// an IP packet of 64 KiB, in chunks of 4 KiB of which the first has headroom.
const MaxPieces = 18

// HeaderRoom is what a frame may have beyond the MTU: Ethernet and two tags.
const HeaderRoom = 14 + 2*4

// Frame is a received frame. Its bytes stay valid, and its owner's to change,
// until Release.
type Frame struct {
	Pieces [MaxPieces][]byte
	N      int // how many pieces

	// IDs is the Link's own record of where the pieces lie.
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

// Slot names a TX buffer: SlotSize contiguous bytes, owned by the worker
// between Alloc and Free.
type Slot uint32

// NoSlot is no slot.
const NoSlot Slot = ^Slot(0)

// Link is one queue of an interface. One worker uses it: nothing in it is safe
// for two goroutines. Methods that move frames never block and never allocate.
type Link interface {
	// Receive fills fs with up to len(fs) frames and returns how many.
	Receive(fs []Frame) int
	// Release gives a received frame back, as seen by others at the next Receive,
	// Flush or Wait. Each frame is released once.
	Release(f *Frame)
	// RxFrames is how many frames of the MTU there is memory for, those that are
	// to be received included.
	RxFrames() int

	// Alloc takes a free TX slot, the one freed last.
	Alloc() (Slot, bool)
	// Free gives a slot back. It must not be posted: see Reap.
	Free(Slot)
	// FreeSlots is how many slots Alloc can still give, Slots how many there
	// are, SlotSize how many bytes each has: at least MTU+HeaderRoom.
	FreeSlots() int
	Slots() int
	SlotSize() int
	// Bytes returns the whole slot.
	Bytes(Slot) []byte

	// Post queues bytes [off,off+n) of s as one frame, which must not change
	// until s is reaped. It returns false, and queues nothing, when the ring is
	// full or s is posted already: try after Flush and Reap. A frame longer
	// than MTU+HeaderRoom, or outside the slot, is counted in TxInvalid, not
	// sent, and reaped like any other.
	Post(s Slot, off, n int) bool
	// Flush hands what was posted to the kernel, or to the peer. It never
	// sleeps; what the kernel did not take now it takes at a later Flush.
	Flush()
	// Reap fills done with slots whose posted frame the link has finished
	// with, and returns how many. Each Post that returned true is reaped
	// exactly once.
	Reap(done []Slot) int

	// Wait sleeps until a frame can be received, wakefd is readable, or timeout
	// has passed. It reports whether wakefd is readable. A negative timeout is
	// none; wakefd -1 is none.
	Wait(timeout time.Duration, wakefd int) (woken bool)

	// MTU is the largest IP packet that the link carries.
	MTU() int
	// Stats fills in the counters, which only ever grow.
	Stats(*Stats)
	// Close releases everything; slots and frames are gone.
	Close() error
}

// Stats are the counters of a Link.
type Stats struct {
	RxFrames, RxBytes uint64
	TxFrames, TxBytes uint64 // posted and taken by the link

	RxDropped    uint64 // lost for another reason than the two below
	RxRingFull   uint64 // lost because the worker did not receive in time
	RxFillEmpty  uint64 // lost, or made to wait, because no RX buffer was free
	RxInvalid    uint64 // chains too long, descriptors out of range
	TxInvalid    uint64 // frames of an impossible length, or refused by the kernel
	TxRingFull   uint64 // Posts that returned false
	TxErrors     uint64 // system calls that failed otherwise than by asking to try again
	Kicks        uint64 // system calls made to send
	Wakes        uint64 // Waits that really slept
	TxIncomplete uint64 // Flushes that left frames in the ring
}
