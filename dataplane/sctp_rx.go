package dataplane

import (
	"encoding/binary"
	"net/netip"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
)

// sctpFrame takes a frame with an SCTP packet, or with UDP that may hold one.
func (w *worker) sctpFrame(f *link.Frame) {
	in := &w.in
	s := w.sctp
	if s == nil {
		if w.e.dir == nil {
			w.stats.RxUnwanted++
			return
		}
		s = w.sctp0() // another worker may have dialled
	}
	off, n := in.pkt.L4Off, in.pkt.L4Len
	udp := uint16(0)
	if in.pkt.Proto == pkt.ProtoUDP {
		if in.pkt.Flow.LocalPort != sctp.UDPPort || n < 8 {
			w.stats.RxUnwanted++
			return
		}
		if !w.udp(f) {
			return
		}
		udp = in.pkt.Flow.RemotePort
		off, n = off+8, in.pkt.L4Len-8
	}
	b := contiguous(f, off, n)
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
	flow := in.pkt.Flow
	flow.RemotePort, flow.LocalPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	as := s.assocs[flow]
	if as == nil {
		as = w.assocFrom(flow, b)
	}
	if as == nil || as.a.State() == sctp.Closed {
		if as == nil && (w.adoptSCTP(flow, udp, b) || w.stray(flow, true, f) || w.strayAddr(alsoKey(flow, b), f)) {
			return
		}
		if as = w.sctpUnowned(flow, udp, b); as == nil {
			return
		}
	}
	as.a.HandlePacket(w.now, flow, udp, b)
	if as.a.PollRestart() {
		w.sctpRestarted(as)
	}
	w.sctpData(as, b)
	w.mark(&as.carrier)
}

// udp checks the UDP header of the frame in hand, and cuts off what is behind the
// datagram (RFC 768). A checksum of 0 is none, which IPv6 does not allow (RFC 8200,
// Section 8.1; RFC 6951, Section 5.3).
func (w *worker) udp(f *link.Frame) bool {
	p := &w.in.pkt
	h := f.Pieces[0][p.L4Off : p.L4Off+8]
	n := int(binary.BigEndian.Uint16(h[4:]))
	if n < 8 || n > p.L4Len {
		w.stats.RxMalformed++
		return false
	}
	p.PseudoSum = pkt.Add(pkt.Add(p.PseudoSum, uint32(n)), 0xffff-uint32(p.L4Len))
	p.L4Len = n
	if h[6] == 0 && h[7] == 0 && !p.V6 || checksum(f, p) == 0xffff && (h[6] != 0 || h[7] != 0) {
		return true
	}
	w.stats.RxChecksum++
	return false
}

// sctpICMP takes the ICMP error in hand, about an SCTP packet or about one in UDP, which
// has to show the verification tag behind the ports (RFC 6951 5.5).
func (w *worker) sctpICMP(f *link.Frame) {
	e, udp := &w.in.icmp, uint16(0)
	if e.Proto == pkt.ProtoUDP {
		udp = e.Flow.RemotePort
		if e.Flow.LocalPort != sctp.UDPPort || !e.Decapsulate() {
			return
		}
	}
	as := w.assocOf(e.Flow)
	if as == nil && w.sctp != nil {
		as = w.sctp.also[alsoICMP(e)]
	}
	if as == nil {
		if !w.stray(e.Flow, true, f) {
			w.strayAddr(alsoICMP(e), f)
		}
		return
	}
	if i, ok := as.a.FindPath(netip.AddrFrom16(e.Flow.Remote).Unmap()); !ok || as.a.Path(i).UDPPort != udp {
		return
	}
	w.stats.RxICMP++
	as.a.HandleICMP(w.now, e)
	w.mark(&as.carrier)
}

// sctpUnowned answers a packet that is no association's. It returns the one that a
// listener made of it.
func (w *worker) sctpUnowned(flow pkt.Flow, udp uint16, b []byte) *assoc {
	if !w.answerable() {
		w.stats.RxMalformed++
		return nil
	}
	t := w.in.pkt.Reply()
	l := w.sctp.listeners[listenKey{flow.Local, flow.LocalPort}]
	if l == nil {
		l = w.sctp.listeners[listenKey{port: flow.LocalPort}]
	}
	if l != nil && len(w.sctp.assocs) >= w.e.cfg.MaxConns {
		w.stats.RxNoConn++
		return nil // no answer: the peer tries again
	}
	if l != nil && w.sctp.peers[flow.Remote] >= w.e.cfg.SCTP.PerPeer && sctp.IsSetup(b) {
		w.stats.AssocsRefused++
		return nil
	}
	if l == nil || l.opts.UDP != (udp != 0) {
		w.stats.RxNoConn++
		w.sctpReply(&t, udp, sctp.OutOfBlue(flow, b))
		return nil
	}
	a, reply := l.l.HandlePacket(w.now, flow, udp, b)
	w.sctpReply(&t, udp, reply)
	if a == nil {
		return nil
	}
	if old := w.sctp.assocs[flow]; old != nil {
		w.sctpEvents(old) // it is closed, and this packet came before its turn
		w.retire(old)
	}
	as := w.newAssoc(a, flow, t, l.opts)
	as.lst, as.passive = l, true
	a.SetWindow(min(strangerWindow, w.tcp.RcvWindow))
	w.e.events.push(Event{Kind: EventJoined, Listener: l.id, Flow: flow, Worker: w.id})
	w.sctp.peers[flow.Remote]++
	w.idles(as)
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
	s, ok := w.link.Alloc()
	if !ok {
		w.stats.TxNoSlot++
		return
	}
	copy(w.link.Bytes(s)[headroom:], b)
	w.slots[s].owned = false
	w.postSCTP(t, udp, s, headroom, len(b))
	w.stats.TxStateless++
}

// sctpData takes the user data that an association reports, and acts on what it means for
// sessions at once: a command for a session that has ended must not meet the next one of
// its stream. It returns how much there was of that.
func (w *worker) sctpData(as *assoc, b []byte) int {
	var d sctp.Data
	for as.a.PollData(&d) {
		switch d.Act {
		case sctp.Deliver:
			w.sctpMessage(as, &d, b[d.Off:d.Off+d.Len])
		case sctp.Keep:
			for len(as.kept) <= d.Slot {
				as.kept = append(as.kept, nil)
			}
			as.kept[d.Slot] = append(w.sctpBuffer(d.Len), b[d.Off:d.Off+d.Len]...)
		case sctp.DeliverKept:
			w.sctpMessage(as, &d, as.kept[d.Slot])
			w.sctpUnkeep(as, d.Slot)
		case sctp.Forget:
			w.sctpUnkeep(as, d.Slot)
		}
	}
	w.holds(as)
	if as.mux == nil {
		return 0
	}
	as.a.SetBacklog(as.mux.Held())
	return w.sessionEvents(as)
}

// sctpBuffer returns a buffer for n octets, not much longer: sctp counts octets, and a peer
// chooses how long its chunks are.
func (w *worker) sctpBuffer(n int) []byte {
	free := w.sctp.free
	if top := len(free) - 1; top >= 0 && cap(free[top]) <= 4*n {
		b := free[top]
		free[top], w.sctp.free = nil, free[:top]
		return b[:0]
	}
	return nil
}

// sctpUnkeep takes back the buffer of a slot.
func (w *worker) sctpUnkeep(as *assoc, slot int) {
	if slot >= len(as.kept) {
		return
	}
	if b := as.kept[slot]; b != nil && len(w.sctp.free) < 256 {
		w.sctp.free = append(w.sctp.free, b)
	}
	as.kept[slot] = nil
}

func (w *worker) sctpMessage(as *assoc, d *sctp.Data, b []byte) {
	w.sctpUp(as)
	if !d.Begin || !d.End { // its pieces follow one another
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
