package dataplane

import (
	"encoding/binary"
	"math/rand/v2"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

func (as *assoc) begin(w *worker) int {
	w.sched.Enqueue(&as.member)
	return 0
}

// pump pumps an association and its sessions. They share one place in the round: that of the
// client of the first session.
func (as *assoc) pump(w *worker, g *sched.Grant) int {
	work := as.events(w)
	if as.gone {
		return work
	}
	work += as.resume()
	work += as.data(w, nil)
	if as.mux != nil {
		for as.a.Room() > 0 && w.link.FreeSlots() >= slotReserve && as.mux.PollControl(&w.sctp.ctl) {
			as.sendControl(w, &w.sctp.ctl)
			work++
		}
		for i := 0; i < len(as.round) && (g == nil || len(as.round) > 1); i++ {
			if s := as.round[i]; s.mode == modeFull {
				s.lookAt(w)
			}
		}
		if g != nil {
			work += as.composeSessions(w, g)
		}
	}
	if as.done() {
		as.a.Close(w.now)
	}
	for as.a.PollTransmit(w.now, &w.sctp.out) {
		as.transmit(w)
		work++
	}
	for {
		b, ok := as.a.PollReleased()
		if !ok {
			break
		}
		st := &w.slots[b]
		if as.mux != nil {
			as.mux.HandleAcked(st.sid, st.control)
		}
		w.disown(&as.lane, link.Slot(b))
		work++
	}
	work += as.sessionEvents(w)
	for i := 0; i < len(as.round); i++ {
		s := as.round[i]
		if s.mode == modeFull {
			s.completions(w)
		}
		if s.mode == modeFull && as.mux.CanSend(s.sid) {
			s.pullMore(w)
		}
		s.flushLate(w)
	}
	if work > 0 {
		w.mark(&as.lane)
	}
	return work + as.events(w)
}

func (as *assoc) pumpStream(w *worker, s *stream, g *sched.Grant) { as.composeDDP(w, s, g) }

// sendControl sends a session control message from a slot.
func (as *assoc) sendControl(w *worker, c *session.Control) {
	s, ok := w.link.Alloc()
	if !ok {
		return
	}
	n := copy(w.link.Bytes(s)[headroom:], c.Data)
	as.push(w, s, n, c.Stream, c.PPID, true)
}

func (as *assoc) push(w *worker, s link.Slot, n int, sid uint16, ppid uint32, control bool) {
	st := &w.slots[s]
	st.owned, st.n, st.sid, st.control = true, n, sid, control
	w.record = link.NoSlot
	w.sched.Own(&as.member)
	// Clear the padding of the chunk.
	clear(w.link.Bytes(s)[headroom+n : headroom+n+3])
	as.a.Push(&sctp.Message{Stream: sid, PPID: ppid, Urgent: control, Buf: sctp.Buf(s), Len: n})
}

// composeSessions divides the grant of an association among its sessions by deficit round
// robin. A session that stops for lack of room, slots or grant keeps its turn.
func (as *assoc) composeSessions(w *worker, g *sched.Grant) int {
	work := 0
	for idle := 0; idle < len(as.round); {
		if as.turn >= len(as.round) {
			as.turn = 0
		}
		s := as.round[as.turn]
		if s.mode != modeFull {
			as.turn++
			idle++
			continue
		}
		if s.share <= 0 {
			s.share += w.sched.Quantum()
		}
		had := min(s.share, g.Left)
		sub := g.Part(had)
		work += as.composeDDP(w, s, &sub)
		g.Left -= had - sub.Left
		s.share -= had - sub.Left
		switch {
		case sub.Why == sched.Spent && s.share <= 0 && g.Left > 0:
			as.turn++
			idle = 0
		case sub.Why != sched.Idle:
			g.Why = sub.Why
			return work
		case as.a.Room() < as.a.MaxMessage():
			return work
		default:
			s.share = min(s.share, 0)
			as.turn++
			idle++
		}
	}
	return work
}

// composeDDP fills TX slots with DDP segments of s while the window and g have room.
func (as *assoc) composeDDP(w *worker, s *stream, g *sched.Grant) int {
	s.remoteEvents(w)
	n := 0
	for s.mode == modeFull && as.mux.CanSend(s.sid) {
		if s.health != failed {
			s.pull(w)
		}
		mulpdu := as.a.MaxMessage() - session.HeaderLen
		if as.a.Room() < mulpdu+session.HeaderLen || !w.sched.May(&as.member, g) || !s.hasPend && !s.poll(w, mulpdu, mulpdu) {
			break
		}
		slot, ok := w.recordSlot()
		if !ok {
			s.hasPend, g.Why = true, sched.Slots
			break
		}
		s.hasPend = false
		used := as.composeSegment(w, s, w.link.Bytes(slot)[headroom:])
		if used == 0 {
			w.freeRecord()
			break
		}
		as.push(w, slot, used, s.sid, as.opts.Profile.Segment(), false)
		w.stats.TxFPDUs++
		g.Left -= sched.Cost(used, 1, 1)
		n++
	}
	s.composed(w, n > 0, g.Why == sched.Idle)
	return n
}

// composeSegment writes the pending segment of s after its DDP-SSN. It returns 0 if the payload
// could not be read, which the DDP stream handles.
func (as *assoc) composeSegment(w *worker, s *stream, dst []byte) int {
	p := &s.pending
	payload, ok := s.gather(w, s.pending.Len)
	if !ok {
		return 0
	}
	w.current = s
	n := session.HeaderLen + copy(dst[session.HeaderLen:], p.Hdr[:p.HdrLen])
	for _, b := range payload {
		n += copy(dst[n:], b)
	}
	w.current = nil
	as.mux.Begin(s.sid, dst)
	return n
}

// transmit sends the packet in w.sctp.out. A packet with a single message that is not being
// sent already uses the message's own slot; others are copied.
func (as *assoc) transmit(w *worker) {
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
		if !w.slots[s].posted && at >= t.HeaderLen()+8 {
			b := w.link.Bytes(s)
			copy(b[at:], o.Head)
			copy(b[headroom-16:], q.Hdr[:])
			w.postSCTP(&t, o.UDP, s, at, o.Len)
			return
		}
	}
	s, ok := w.spareSlot()
	if !ok {
		return
	}
	at := t.HeaderLen() + 8 // a packet of full size needs more room than a message
	b := w.link.Bytes(s)[at:]
	n := copy(b, o.Head)
	for i := range o.Parts[:o.N] {
		q := &o.Parts[i]
		n += copy(b[n:], q.Hdr[:])
		n += copy(b[n:], w.link.Bytes(link.Slot(q.Buf))[headroom:headroom+q.Len+q.Pad])
	}
	if o.Fragment {
		w.tapFlow(&t, s, at)
		at, n = w.finishSCTP(&t, o.UDP, s, at, n)
		w.fragments(&t, p.MTU, w.link.Bytes(s)[at:at+n])
		w.link.Free(s)
		return
	}
	w.postSCTP(&t, o.UDP, s, at, n)
}

// fragments sends a packet as IP fragments: a message in flight cannot be cut otherwise after
// the path MTU has shrunk (RFC 9260 7.3). Nobody can predict their identification (RFC 7739).
func (w *worker) fragments(t *pkt.Tuple, mtu int, b []byte) {
	at := t.FragmentHeaderLen()
	size := t.FragmentSize(mtu)
	id := rand.Uint32()
	for off := 0; off < len(b); off += size {
		s, ok := w.spareSlot()
		if !ok {
			return // dropped, as packets may be
		}
		n := copy(w.link.Bytes(s)[at:], b[off:min(off+size, len(b))])
		t.PutFragment(w.link.Bytes(s), n, off, off+n < len(b), id)
		w.postFrame(&w.tapped, s, 0, at+n)
		w.stats.TxFragments++
	}
}

// postSCTP completes the SCTP packet of n bytes at offset at of slot s, and posts the frame.
func (w *worker) postSCTP(t *pkt.Tuple, udp uint16, s link.Slot, at, n int) {
	w.tapFlow(t, s, at)
	at, n = w.finishSCTP(t, udp, s, at, n)
	off := at - t.HeaderLen()
	t.Put(w.link.Bytes(s)[off:at], n, 0)
	w.postFrame(&w.tapped, s, off, at+n-off)
}

// finishSCTP writes the checksum of a packet and, if needed, a UDP header before it. It returns
// the offset and length of the IP payload.
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

// tapFlow sets the flow that taps see for the following frames: the addresses of t, and the
// ports of the SCTP packet at offset at of slot s, also for UDP.
func (w *worker) tapFlow(t *pkt.Tuple, s link.Slot, at int) {
	if w.taps != nil {
		b, f := w.link.Bytes(s)[at:], &w.tapped
		*f = t.Flow
		f.LocalPort, f.RemotePort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	}
}
