package dataplane

import (
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// headroom is the room before the payload in a TX slot: Ethernet 14, two VLAN tags 8, IPv6 40,
// TCP with options 60, rounded up.
const headroom = 128

// minHeaders is the length of the IPv4 and TCP headers without options.
const minHeaders = 20 + 20

// slotReserve is the number of TX slots reserved for ACKs, retransmissions and connection
// set-up.
const slotReserve = 64

// slotState is a worker's state of a TX slot. A slot is free if it is neither owned nor posted.
type slotState struct {
	owned  bool   // by a tcp.Conn or sctp.Assoc, until acknowledged
	posted bool   // until the kernel has sent it
	sum    uint32 // partial checksum of the payload, for retransmissions
	n      int    // payload bytes

	sid     uint16 // SCTP: the stream
	control bool   // SCTP: a session control message
}

// txPath is the sending side of a worker: slots and scratch space.
type txPath struct {
	past   link.Stats // counters of earlier links
	slots  []slotState
	record link.Slot // record being composed, or link.NoSlot; freed after a fault
	done   [reapBudget]link.Slot
	out    tcp.Out
	super  superTx
	tapped pkt.Flow             // flow of the SCTP frames about to be posted
	parts  [verbs.MaxSGE][]byte // pieces of the payload being composed
}

// freeSlots returns the number of TX slots available to records. The rest is for ACKs,
// retransmissions and connection set-up.
func (w *worker) freeSlots() int { return w.link.FreeSlots() - slotReserve + 1 }

// setupSlot returns a TX slot for connection set-up. It may use half of the reserve.
func (w *worker) setupSlot() (link.Slot, bool) {
	if w.link.FreeSlots() <= min(slotReserve/2, w.link.Slots()/4) {
		return link.NoSlot, false
	}
	return w.link.Alloc()
}

// recordSlot returns a TX slot for a record, until push or freeRecord.
func (w *worker) recordSlot() (link.Slot, bool) {
	s, ok := w.link.Alloc()
	w.record = s
	return s, ok
}

// freeRecord returns an unused slot of recordSlot.
func (w *worker) freeRecord() {
	if w.record != link.NoSlot {
		w.link.Free(w.record)
		w.record = link.NoSlot
	}
}

// spareSlot returns a TX slot that is free again once it is sent.
func (w *worker) spareSlot() (link.Slot, bool) {
	s, ok := w.link.Alloc()
	if !ok {
		w.stats.TxNoSlot++
	}
	return s, ok
}

// disown frees a slot of l that the peer has acknowledged.
func (w *worker) disown(l *lane, s link.Slot) {
	w.sched.Disown(&l.member)
	st := &w.slots[s]
	st.owned = false
	if !st.posted {
		w.link.Free(s)
	}
}

// postFrame posts n bytes at offset off of slot s as a frame of flow, which may be nil. If
// there is no room the frame is lost, as on the wire.
func (w *worker) postFrame(flow *pkt.Flow, s link.Slot, off, n int) {
	if w.taps != nil {
		w.tapOut(flow, w.link.Bytes(s)[off:off+n])
	}
	slot := &w.slots[s]
	if !w.link.Post(s, off, n) {
		w.link.Flush()
		w.reap()
		if !w.link.Post(s, off, n) {
			w.stats.TxRingFull++
			if !slot.owned && !slot.posted {
				w.link.Free(s)
			}
			return
		}
	}
	slot.posted = true
	w.stats.TxFrames++
	w.stats.TxBytes += uint64(n)
}

// reap frees the slots that the kernel has finished with.
func (w *worker) reap() int {
	total := 0
	for {
		n := w.link.Reap(w.done[:])
		for _, s := range w.done[:n] {
			st := &w.slots[s]
			st.posted = false
			if !st.owned {
				w.link.Free(s)
			}
		}
		total += n
		if n < len(w.done) {
			return total
		}
	}
}
