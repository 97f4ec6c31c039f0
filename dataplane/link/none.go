package link

import "time"

// NoFrames is the part of a Link over which no frames go.
type NoFrames struct{}

// Receive returns 0.
func (NoFrames) Receive([]Frame) int { return 0 }

// Hold does nothing.
func (NoFrames) Hold(*Frame) {}

// Release does nothing.
func (NoFrames) Release(*Frame) {}

// RxFrames returns 0.
func (NoFrames) RxFrames() int { return 0 }

// Post returns false.
func (NoFrames) Post(Slot, int, int) bool { return false }

// Flush does nothing.
func (NoFrames) Flush() {}

// Reap returns 0.
func (NoFrames) Reap([]Slot) int { return 0 }

// None is the Link of a queue whose interface is gone: nothing arrives, and there are
// no TX slots.
type None struct {
	NoFrames
	poll Poller
	mtu  int
}

// NewNone returns a None with the given MTU.
func NewNone(mtu int) *None { return &None{mtu: mtu} }

// Alloc returns no slot.
func (*None) Alloc() (Slot, bool) { return NoSlot, false }

// Free does nothing.
func (*None) Free(Slot) {}

// FreeSlots returns 0.
func (*None) FreeSlots() int { return 0 }

// Slots returns 0.
func (*None) Slots() int { return 0 }

// SlotSize returns the size of a slot for the MTU.
func (n *None) SlotSize() int { return n.mtu + HeaderRoom }

// Bytes returns nil.
func (*None) Bytes(Slot) []byte { return nil }

// Wait implements Link.
func (n *None) Wait(timeout time.Duration, wakefd int) bool { return n.poll.Wait(timeout, -1, wakefd) }

// MTU implements Link.
func (n *None) MTU() int { return n.mtu }

// Stats counts nothing.
func (*None) Stats(*Stats) {}

// Close does nothing.
func (*None) Close() error { return nil }

var _ Link = (*None)(nil)
