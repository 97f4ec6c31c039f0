package dataplane

import (
	"encoding/binary"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// pumpSCTP moves an association and its sessions forward. They have one place in
// the round, that of the client whose session was the first.
func (w *worker) pumpSCTP(as *assoc, g *grant) int {
	if as.over {
		return 0
	}
	work := w.sctpEvents(as)
	if as.over {
		return work
	}
	work += w.sessionEvents(as)
	if as.mux != nil {
		for as.a.Room() > 0 && w.link.FreeSlots() >= slotReserve && as.mux.PollControl(&w.sctp.ctl) {
			w.sendControl(as, &w.sctp.ctl)
			work++
		}
		for i := 0; i < len(as.round) && (g == nil || len(as.round) > 1); i++ {
			if c := as.round[i]; c.mode == modeFull {
				w.lookAt(c)
			}
		}
		if g != nil {
			work += w.composeSessions(as, g)
		}
	}
	if as.done() {
		as.a.Close(w.now)
	}
	for as.a.PollTransmit(w.now, &w.sctp.out) {
		w.transmitSCTP(as)
		work++
	}
	for {
		b, ok := as.a.PollReleased()
		if !ok {
			break
		}
		st := &w.slots[b]
		if as.mux != nil {
			as.mux.Acked(st.sid, st.control)
		}
		w.disown(&as.carrier, link.Slot(b))
		work++
	}
	work += w.sctpData(as, nil)
	for i := 0; i < len(as.round); i++ {
		c := as.round[i]
		if c.mode == modeFull {
			w.completions(c)
		}
		if c.mode == modeFull && as.mux.CanSend(c.sid) {
			w.pullMore(c)
		}
		w.flushLate(c)
	}
	if work > 0 {
		w.mark(&as.carrier)
	}
	work += w.sctpEvents(as)
	if as.over {
		return work
	}
	if at := as.deadlineOf(); at != as.carrier.deadline || at != 0 && !as.carrier.timer.armed() {
		as.carrier.deadline = at
		if at != 0 {
			w.timers.arm(&as.carrier.timer, at)
		}
	}
	return work
}

// sendControl puts a session control message in a slot.
func (w *worker) sendControl(as *assoc, c *session.Control) {
	s, ok := w.link.Alloc()
	if !ok {
		return
	}
	n := copy(w.link.Bytes(s)[headroom:], c.Data)
	w.pushSCTP(as, s, n, c.Stream, c.PPID, true)
}

func (w *worker) pushSCTP(as *assoc, s link.Slot, n int, sid uint16, ppid uint32, control bool) {
	st := &w.slots[s]
	st.owned, st.n, st.sid, st.control = true, n, sid, control
	w.own(&as.carrier)
	// The chunk's padding, if there is any.
	clear(w.link.Bytes(s)[headroom+n : headroom+n+3])
	as.a.Push(&sctp.Message{Stream: sid, PPID: ppid, Urgent: control, Buf: sctp.Buf(s), Len: n})
}

// composeSessions shares the grant of an association among its sessions, by deficit
// round robin as among connections. Who stops for want of room, slots or grant has its
// turn still.
func (w *worker) composeSessions(as *assoc, g *grant) int {
	work := 0
	for idle := 0; idle < len(as.round); {
		if as.turn >= len(as.round) {
			as.turn = 0
		}
		c := as.round[as.turn]
		if c.mode != modeFull {
			as.turn++
			idle++
			continue
		}
		if c.credit <= 0 {
			c.credit += w.quantum
		}
		had := min(c.credit, g.left)
		sub := grant{left: had, until: g.until}
		work += w.composeDDP(c, &sub)
		g.left -= had - sub.left
		c.credit -= had - sub.left
		switch {
		case sub.why == stopSpent && c.credit <= 0 && g.left > 0:
			as.turn++
			idle = 0
		case sub.why != stopIdle:
			g.why = sub.why
			return work
		case as.a.Room() < as.a.MaxMessage():
			return work
		default:
			c.credit = min(c.credit, 0)
			as.turn++
			idle++
		}
	}
	return work
}

// composeDDP fills TX slots with DDP segments while the window has room.
func (w *worker) composeDDP(c *conn, g *grant) int {
	as := c.as
	w.remoteEventsSCTP(c)
	n, octets, why, shut := 0, 0, stopIdle, false
	for c.mode == modeFull && as.mux.CanSend(c.sid) {
		if !c.failed {
			c.qp.QP.PullSend(pullBudget)
		}
		mulpdu := as.a.MaxMessage() - session.HeaderLen
		if as.a.Room() < mulpdu+session.HeaderLen {
			shut = len(as.round) > 1
			break
		}
		if !w.may(&as.carrier, g) {
			why = g.why
			break
		}
		if !c.hasPend && !c.stream.PollSegment(mulpdu, &c.pending) {
			break
		}
		s, ok := w.link.Alloc()
		if !ok {
			c.hasPend, g.why, why = true, stopSlots, stopSlots
			break
		}
		c.hasPend = false
		if used := w.composeSegment(c, w.link.Bytes(s)[headroom:]); used > 0 {
			w.pushSCTP(as, s, used, c.sid, as.opts.Profile.Segment(), false)
			w.stats.TxFPDUs++
			g.left -= used + recordCost + fpduCost
			octets += used
			n++
		} else {
			w.link.Free(s)
			break
		}
	}
	if n > 0 || c.failed {
		w.remoteEventsSCTP(c)
	}
	if c.mode == modeFull && c.stream.TerminateSent() && !c.hasPend { // else that is what waits
		c.mode = modeClosing
		w.dropQP(c)
		w.closeSession(c)
	}
	if c.sent(octets, why) && (!shut || c.last <= 0) {
		w.dropQP(c)
		c.mode = modeClosing
		w.closeSession(c)
	}
	return n
}

// composeSegment writes the pending segment behind its DDP-SSN. It returns 0 when the
// payload could not be read: the stream knows.
func (w *worker) composeSegment(c *conn, dst []byte) int {
	p := &c.pending
	var parts [verbs.MaxSGE][]byte
	var payload [][]byte
	if p.Len > 0 && p.Src.Kind != rdmap.SourceNone {
		ok := false
		if payload, ok = c.qp.QP.Gather(&p.Src, p.Len, parts[:0]); !ok {
			w.violation(c, c.stream.Err())
			w.mark(c)
			return 0
		}
	}
	w.current = c
	n := session.HeaderLen + copy(dst[session.HeaderLen:], p.Hdr[:p.HdrLen])
	for _, b := range payload {
		n += copy(dst[n:], b)
	}
	w.current = nil
	c.as.mux.Begin(c.sid, dst)
	return n
}

// transmitSCTP makes a frame of the packet in w.sctp.out. One message that is in no
// other post leaves from its own slot; anything else is copied.
func (w *worker) transmitSCTP(as *assoc) {
	o := &w.sctp.out
	p := as.a.Path(o.Path)
	t := as.tupleTo(o.Path, p.Addr)
	if o.Retransmit {
		w.stats.TxRetransmits++
	}
	if o.N == 1 && !o.Fragment {
		q := &o.Parts[0]
		s := link.Slot(q.Buf)
		at := headroom - 16 - len(o.Head)
		if w.slots[s].posted == 0 && at >= t.HeaderLen()+8 {
			b := w.link.Bytes(s)
			copy(b[at:], o.Head)
			copy(b[headroom-16:], q.Hdr[:])
			w.postSCTP(&t, o.UDP, s, at, o.Len)
			return
		}
	}
	s, ok := w.link.Alloc()
	if !ok {
		w.stats.TxNoSlot++
		return
	}
	at := t.HeaderLen() + 8 // a full packet fills the slot more than a message does
	b := w.link.Bytes(s)[at:]
	n := copy(b, o.Head)
	for i := range o.Parts[:o.N] {
		q := &o.Parts[i]
		n += copy(b[n:], q.Hdr[:])
		n += copy(b[n:], w.link.Bytes(link.Slot(q.Buf))[headroom:headroom+q.Len+q.Pad])
	}
	w.slots[s].owned = false
	if o.Fragment {
		w.tapFlow(&t, s, at)
		at, n = w.finishSCTP(&t, o.UDP, s, at, n)
		w.fragments(&t, p.MTU, w.link.Bytes(s)[at:at+n])
		w.link.Free(s)
		return
	}
	w.postSCTP(&t, o.UDP, s, at, n)
}

// fragments posts a packet as IP fragments: a message that was under way when the
// path's MTU shrank cannot be cut otherwise (RFC 9260 7.3).
func (w *worker) fragments(t *pkt.Tuple, mtu int, b []byte) {
	at := t.FragmentHeaderLen()
	size := t.FragmentSize(mtu)
	w.ipid++
	for off := 0; off < len(b); off += size {
		s, ok := w.link.Alloc()
		if !ok {
			w.stats.TxNoSlot++
			return // lost, as a packet may be
		}
		n := copy(w.link.Bytes(s)[at:], b[off:min(off+size, len(b))])
		t.PutFragment(w.link.Bytes(s), n, off, off+n < len(b), uint32(w.ipid))
		w.slots[s].owned = false
		w.postFrame(s, 0, at+n)
		w.stats.TxFragments++
	}
}

// postSCTP finishes the n octets of an SCTP packet at offset at of slot s, and posts
// the frame.
func (w *worker) postSCTP(t *pkt.Tuple, udp uint16, s link.Slot, at, n int) {
	w.tapFlow(t, s, at)
	at, n = w.finishSCTP(t, udp, s, at, n)
	off := at - t.HeaderLen()
	w.ipid++
	t.Put(w.link.Bytes(s)[off:at], n, 0, w.ipid)
	w.postFrame(s, off, at+n-off)
}

// finishSCTP writes the checksum of a packet and puts UDP's header in front of it. It
// returns where the payload of IP lies.
func (w *worker) finishSCTP(t *pkt.Tuple, udp uint16, s link.Slot, at, n int) (int, int) {
	b := w.link.Bytes(s)
	sctp.SetChecksum(b[at : at+n])
	if t.Proto == pkt.ProtoUDP {
		at, n = at-8, n+8
		h := b[at : at+8]
		binary.BigEndian.PutUint16(h, sctp.UDPPort)
		binary.BigEndian.PutUint16(h[2:], udp)
		binary.BigEndian.PutUint16(h[4:], uint16(n))
		h[6], h[7] = 0, 0
		binary.BigEndian.PutUint16(h[6:], pkt.UDPChecksum(pkt.Sum(b[at:at+n], t.PseudoSum(n))))
	}
	return at, n
}

// tapFlow tells the taps what the frames that follow belong to: the addresses of t, and
// the ports of the SCTP packet at offset at of slot s, in UDP too.
func (w *worker) tapFlow(t *pkt.Tuple, s link.Slot, at int) {
	if w.taps != nil {
		b, f := w.link.Bytes(s)[at:], &w.sctp.tapped
		*f = t.Flow
		f.LocalPort, f.RemotePort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	}
}

// postFrame posts n octets at offset off of slot s, of what tapFlow has said.
func (w *worker) postFrame(s link.Slot, off, n int) {
	if w.taps != nil {
		w.tapOut(&w.sctp.tapped, w.link.Bytes(s)[off:off+n])
	}
	w.postUntapped(s, off, n)
}

func (w *worker) postUntapped(s link.Slot, off, n int) {
	slot := &w.slots[s]
	if !w.link.Post(s, off, n) {
		w.link.Flush()
		w.reap()
		if !w.link.Post(s, off, n) {
			w.stats.TxRingFull++
			if !slot.owned && slot.posted == 0 {
				w.link.Free(s)
			}
			return
		}
	}
	slot.posted++
	w.stats.TxFrames++
	w.stats.TxOctets += uint64(n)
}
