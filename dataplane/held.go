package dataplane

import (
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/tcp"
)

// heldTable holds the frames of out-of-order segments, indexed by the tcp.Bufs of received
// segments.
type heldTable struct {
	frames    []heldFrame
	free      []tcp.Buf
	used      int        // see cost
	holders   []*tcpConn // connections with held frames, each at its tcpConn.holder
	whole     int        // bytes of reassembled packets
	reclaimed uint64     // turn in which frames were last reclaimed
}

type heldFrame struct {
	frame link.Frame
	off   int           // offset of the segment's payload in the frame
	ring  *handoff.Ring // nil if it is a frame of the link, or
	whole bool          // reassembled
	cost  int
}

func (h *heldTable) init(n int) {
	h.frames = make([]heldFrame, n)
	h.free = make([]tcp.Buf, 0, n)
	for i := n - 1; i >= 0; i-- {
		h.free = append(h.free, tcp.Buf(i))
	}
}

// room returns the number of frames that can still be held.
func (h *heldTable) room() int { return len(h.frames) - h.used }

// next returns the handle that the next call of take returns. There is one if there is room.
func (h *heldTable) next() tcp.Buf { return h.free[len(h.free)-1] }

// take returns a handle that is in use until it is appended to free.
func (h *heldTable) take() tcp.Buf {
	b := h.next()
	h.free = h.free[:len(h.free)-1]
	return b
}

// dismiss removes c, which holds no frame any more, from the holders.
func (h *heldTable) dismiss(c *tcpConn) {
	n := len(h.holders) - 1
	last := h.holders[n]
	h.holders[c.holder], last.holder = last, c.holder
	h.holders[n], h.holders = nil, h.holders[:n]
}

// cost returns the number of MTU-sized frames that f counts as.
func (w *worker) cost(f *link.Frame) int { return (f.Len()-1)/(w.link.MTU()+link.HeaderRoom) + 1 }

// canHold reports whether the frame f, with data out of order, can be held. To make room for it, another connection may
// have to give up frames.
func (c *tcpConn) canHold(w *worker, f *rxFrame) bool {
	cost := w.cost(f.Frame)
	switch {
	case f.ring != nil && !f.ring.MayKeep(), f.whole && w.held.whole+f.Len() > maxWhole:
		return false
	case w.held.room() < cost && c.wantsHeld(w):
		w.reclaim()
	}
	return w.held.room() >= cost
}

// hold keeps the out-of-order segment in f.
func (c *tcpConn) hold(w *worker, f *rxFrame, r tcp.Input) {
	buf := w.held.take()
	h := &w.held.frames[buf]
	h.frame, h.off, h.ring, h.whole, h.cost = *f.Frame, f.off, f.ring, f.whole, w.cost(f.Frame)
	w.held.used += h.cost
	f.kept = true // set first: the code below may fault
	if h.whole {
		w.held.whole += f.Len()
	} else if h.ring != nil {
		h.ring.Keep()
	}
	if c.holds += h.cost; c.holds == h.cost {
		c.holder = len(w.held.holders)
		w.held.holders = append(w.held.holders, c)
	}
	w.stats.RxEarly++
	if c.params.RecvMarkers && c.mode == modeFull && c.health == healthy && c.placeEarly(w, h, r) {
		c.segs.Placed(buf)
		c.freeHeld(w, buf)
	} else if h.ring == nil && !h.whole {
		w.link.Hold(&h.frame)
	}
	w.stats.HeldPeak = max(w.stats.HeldPeak, uint64(w.held.used))
}

func (c *tcpConn) freeHeld(w *worker, b tcp.Buf) {
	h := &w.held.frames[b]
	w.held.used -= h.cost
	if c.holds -= h.cost; c.holds == 0 {
		w.held.dismiss(c)
	}
	if h.whole {
		w.held.whole -= h.frame.Len()
		h.frame.Pieces[0] = nil
	} else if h.ring != nil {
		h.ring.Unkeep(&h.frame)
	} else {
		w.link.Release(&h.frame)
	}
	w.held.free = append(w.held.free, b)
}

// wantsHeld reports whether c, which needs a frame to hold a segment when none is free,
// holds less than half of its share, so that another connection must give up frames. If
// it holds more, the segment is dropped instead: its peer then retransmits one segment,
// whereas reneging would cost a time-out and the retransmission of everything that was
// selectively acknowledged (RFC 2018 section 8).
func (c *tcpConn) wantsHeld(w *worker) bool {
	return 2*c.holds*len(w.held.holders) < len(w.held.frames)
}

// mayHold returns how many segments of the MTU c could hold: those it holds already, plus all
// free frames, or the half of its share for which others would have to give up frames.
func (c *tcpConn) mayHold(w *worker) int {
	n := c.holds + w.held.room()
	if 2*n < len(w.held.frames) {
		n = max(n, len(w.held.frames)/max(2*len(w.held.holders), 1))
	}
	return n
}

// reclaim drops some frames of the connection that holds the most, at most once per turn. Its
// peer retransmits them.
func (w *worker) reclaim() {
	if w.held.reclaimed == w.stats.Turns {
		return
	}
	w.held.reclaimed = w.stats.Turns
	if len(w.held.holders) == 0 {
		return
	}
	most := slices.MaxFunc(w.held.holders, func(a, b *tcpConn) int { return a.holds - b.holds })
	w.stats.RxReclaims++
	most.segs.Reclaim(max(min(len(w.held.frames)/8, most.holds/2), 1))
	most.drainHeld(w)
	w.mark(&most.lane)
}

// drainHeld delivers the held segments that are now in order.
func (c *tcpConn) drainHeld(w *worker) {
	var h tcp.Held
	for c.segs != nil && !c.late && !c.waits.full() {
		if c.mode == modeFull && w.enough() {
			w.postpone(c)
			return
		}
		if !c.segs.PollHeld(&h) {
			return
		}
		switch {
		case h.Buf != tcp.NoBuf:
			c.deliverHeld(w, &h)
		case h.Deliver && c.mode == modeFull && c.health == healthy:
			c.rx.HandleSkipped(h.Len) // its FPDUs were placed early
			c.fpdus(w)
		}
	}
}

// deliverHeld delivers h and releases its frame, even if the turn faults.
func (c *tcpConn) deliverHeld(w *worker, h *tcp.Held) {
	defer c.freeHeld(w, h.Buf)
	if h.Deliver {
		hf := &w.held.frames[h.Buf]
		c.deliver(w, &hf.frame, hf.off+h.Off, h.Len)
	}
}
