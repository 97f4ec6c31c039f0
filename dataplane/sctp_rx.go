package dataplane

import (
	"encoding/binary"
	"net/netip"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
)

// sctpFrame processes a frame with an SCTP packet, or with a UDP packet that may contain one.
func (w *worker) sctpFrame(f *rxFrame) {
	s := w.sctp
	if s == nil {
		if w.e.dir == nil {
			w.stats.RxUnsupported++
			return
		}
		s = w.sctp0() // another worker may have dialed
	}
	off, n := f.pkt.L4Off, f.pkt.L4Len
	udp := uint16(0)
	if f.pkt.Proto == pkt.ProtoUDP {
		if f.pkt.Flow.LocalPort != sctp.UDPPort || n < 8 {
			w.stats.RxUnsupported++
			return
		}
		if !w.udp(f) {
			return
		}
		udp = f.pkt.Flow.RemotePort
		off, n = off+8, f.pkt.L4Len-8
	}
	b := contiguous(f.Frame, off, n)
	if b == nil {
		b = s.scratch[:0]
		for i := 0; i < f.N; i++ {
			b = append(b, f.Pieces[i]...)
		}
		b = b[off : off+n]
	}
	if !sctp.Verify(b) {
		w.stats.RxChecksum++
		return
	}
	flow := f.pkt.Flow
	flow.RemotePort, flow.LocalPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	k, further := handoff.Key{Flow: flow, Proto: pkt.ProtoSCTP}, furtherKey(flow, b)
	as := w.assocOf(k)
	if as == nil {
		as = w.assocOf(further)
	}
	if as == nil && (w.adoptSCTP(k, udp, b) || w.forward(k, f) || w.forward(further, f)) {
		return
	}
	if as == nil || as.a.State() == sctp.Closed {
		if as = w.sctpUnowned(f, flow, udp, b); as == nil {
			return
		}
	}
	if as.crowded() {
		w.stats.RxNoHold++
		return // as if it had been lost
	}
	as.a.HandlePacket(w.now, flow, udp, b)
	if as.a.PollRestart() {
		as.restarted(w)
	}
	as.data(w, b)
	w.mark(&as.lane)
}

// udp validates the UDP header of f and cuts off what follows the datagram (RFC 768). A
// checksum of 0 means none, which IPv6 does not allow (RFC 8200, Section 8.1; RFC 6951, Section
// 5.3). Nothing can be sent to port 0, which stands for SCTP without UDP here.
func (w *worker) udp(f *rxFrame) bool {
	p := &f.pkt
	h := f.Pieces[0][p.L4Off : p.L4Off+8]
	n := int(binary.BigEndian.Uint16(h[4:]))
	if n < 8 || n > p.L4Len || p.Flow.RemotePort == 0 {
		w.stats.RxMalformed++
		return false
	}
	p.PseudoSum = pkt.Add(pkt.Add(p.PseudoSum, uint32(n)), 0xffff-uint32(p.L4Len))
	p.L4Len = n
	if h[6] == 0 && h[7] == 0 && !p.V6 || checksum(f.Frame, p) == 0xffff && (h[6] != 0 || h[7] != 0) {
		return true
	}
	w.stats.RxChecksum++
	return false
}

// sctpICMP processes an ICMP error about an SCTP packet, plain or in UDP. It must quote the
// verification tag (RFC 6951 5.5).
func (w *worker) sctpICMP(f *rxFrame) {
	e, udp := &f.icmp, uint16(0)
	if e.Proto == pkt.ProtoUDP {
		udp = e.Flow.RemotePort
		if e.Flow.LocalPort != sctp.UDPPort || !e.Decapsulate() {
			return
		}
	}
	k := handoff.Key{Flow: e.Flow, Proto: pkt.ProtoSCTP}
	further := handoff.Key{Flow: e.Flow.Reverse(), Proto: pkt.ProtoSCTP, Tag: e.Seq}
	if further.Tag == 0 {
		further = k
	}
	as := w.assocOf(k)
	if as == nil {
		as = w.assocOf(further)
	}
	if as == nil {
		if !w.forward(k, f) {
			w.forward(further, f)
		}
		return
	}
	if i := as.a.FindPath(netip.AddrFrom16(e.Flow.Remote).Unmap()); i < 0 || as.a.Path(i).UDPPort != udp {
		return
	}
	w.stats.RxICMP++
	as.a.HandleICMP(w.now, e)
	w.mark(&as.lane)
}

// sctpUnowned handles packet b of f, which belongs to no association. It returns the
// association that a listener created for it, if any.
func (w *worker) sctpUnowned(f *rxFrame, flow pkt.Flow, udp uint16, b []byte) *assoc {
	if !w.e.answerable(&f.pkt) {
		w.stats.RxMalformed++
		return nil
	}
	t := f.pkt.Reply()
	l := w.listeners.admitting(&flow, pkt.ProtoSCTP)
	if l != nil && (w.sctp.n >= w.e.cfg.MaxConns || l.unseen >= maxUnseen) {
		w.stats.RxNoConn++
		return nil // no answer: the peer tries again
	}
	if l != nil && w.sctp.peers[guestOf(&flow)] >= w.e.cfg.SCTP.PerPeer && sctp.IsSetup(b) {
		w.stats.AssocsRefused++
		return nil
	}
	if l == nil || l.opts.UDP != (udp != 0) {
		w.stats.RxNoConn++
		w.sctpReply(&t, udp, sctp.OutOfBlue(flow, b))
		return nil
	}
	l.ip.apply(&t)
	a, reply := l.sctp.HandlePacket(w.now, flow, udp, b)
	w.sctpReply(&t, udp, reply)
	if a == nil {
		return nil
	}
	if old := w.assocOf(handoff.Key{Flow: flow, Proto: pkt.ProtoSCTP}); old != nil {
		old.events(w) // the old association is closed, and retires now; this packet arrived before it was pumped
	}
	as := w.newAssoc(a, flow, t, l.opts, l.ip)
	as.lst, as.passive = l, true
	a.SetWindow(min(strangerWindow, w.tcp.RcvWindow))
	w.e.events.pushCounted(w, &l.unseen, Event{Kind: EventJoined, Listener: l.id, Flow: flow, Worker: w.id})
	as.setCounted(w, true)
	as.startIdle(w)
	w.stats.PassiveOpens++
	return as
}

func (w *worker) sctpReply(t *pkt.Tuple, udp uint16, b []byte) {
	if b == nil {
		return
	}
	if len(b) > min(w.mtu-48, w.link.SlotSize()-headroom) {
		return
	}
	s, ok := w.spareSlot()
	if !ok {
		return
	}
	copy(w.link.Bytes(s)[headroom:], b)
	w.postSCTP(t, udp, s, headroom, len(b))
	w.stats.TxStateless++
}

// crowded reports whether the client of as should receive no more, because its far memory is
// slow. All sessions belong to one client.
func (as *assoc) crowded() bool {
	for _, s := range as.round {
		if s.qp != nil {
			return s.crowded()
		}
	}
	return false
}

// data reads the user data from an association, and handles session commands at once: a command
// for a session that has ended must not reach the next session of the stream. It returns the
// amount of work.
func (as *assoc) data(w *worker, b []byte) int {
	var d sctp.Data
	for as.a.PollData(&d) {
		switch d.Act {
		case sctp.Deliver:
			as.message(w, &d, b[d.Off:d.Off+d.Len])
		case sctp.Keep:
			for len(as.kept) <= d.Slot {
				as.kept = append(as.kept, nil)
			}
			as.kept[d.Slot] = append(w.sctp.buffer(d.Len), b[d.Off:d.Off+d.Len]...)
		case sctp.DeliverKept:
			as.message(w, &d, as.kept[d.Slot])
			as.unkeep(w, d.Slot)
		case sctp.Forget:
			as.unkeep(w, d.Slot)
		}
	}
	as.holds(w)
	if as.mux == nil {
		return 0
	}
	backlog := as.mux.Held()
	for _, s := range as.round {
		if s.qp != nil && s.qp.Far != nil {
			backlog += s.qp.Far.Backlog()
		}
	}
	as.a.SetBacklog(backlog, as.stalled)
	return as.sessionEvents(w)
}

// buffer returns a buffer for n bytes that is not much longer: sctp counts bytes, and the peer
// chooses the length of its chunks.
func (s *sctpState) buffer(n int) []byte {
	free := s.free
	if top := len(free) - 1; top >= 0 && cap(free[top]) <= 4*n {
		b := free[top]
		free[top], s.free = nil, free[:top]
		return b[:0]
	}
	return nil
}

// unkeep frees the buffer of a slot.
func (as *assoc) unkeep(w *worker, slot int) {
	if slot >= len(as.kept) {
		return
	}
	if b := as.kept[slot]; b != nil && len(w.sctp.free) < 256 {
		w.sctp.free = append(w.sctp.free, b)
	}
	as.kept[slot] = nil
}

func (as *assoc) message(w *worker, d *sctp.Data, b []byte) {
	as.up(w)
	if !d.Begin || !d.End { // the pieces of a message are consecutive
		part := &w.sctp.part
		if d.Begin {
			*part = (*part)[:0]
		}
		*part = append(*part, b...)
		if !d.End {
			return
		}
		b = *part
	}
	as.mux.HandleMessage(d.Stream, d.PPID, d.Unordered, b)
}
