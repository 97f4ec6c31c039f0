package dataplane

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
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

// assocOf returns the association of flow here, nil if there is none.
func (w *worker) assocOf(flow pkt.Flow) *assoc {
	if w.sctp == nil {
		return nil
	}
	return w.sctp.assocs[flow]
}

// sctpUnowned answers a packet that is no association's. It returns the one that a
// listener made of it.
func (w *worker) sctpUnowned(flow pkt.Flow, udp uint16, b []byte) *assoc {
	if !w.in.pkt.Answerable() {
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

// sctpUp makes the sessions of an association that is established.
func (w *worker) sctpUp(as *assoc) {
	if as.mux != nil {
		return
	}
	w.forgetDialing(as.flow)
	out, in := as.a.Streams()
	n := min(out, in)
	w.learnAddrs(as)
	as.mux = session.New(session.Config{Profile: as.opts.Profile, Pending: n}, n)
	if !as.passive {
		w.stats.ActiveOpens++
	}
	for _, c := range slices.Clone(as.round) {
		if c.ini != nil {
			w.initiate(c)
		}
	}
}

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

// sctpEvents acts on what the association reports.
func (w *worker) sctpEvents(as *assoc) int {
	n := 0
	for {
		ev, ok := as.a.PollEvent()
		if !ok {
			return n
		}
		n++
		switch ev {
		case sctp.EventUp:
			w.sctpUp(as)
		case sctp.EventRestart:
			w.sctpRestarted(as)
		case sctp.EventShutdown:
			for _, c := range as.round {
				w.event(c, EventPeerClosed, nil, nil)
			}
		case sctp.EventClosed:
			for as.a.PollTransmit(w.now, &w.sctp.out) {
				w.transmitSCTP(as)
			}
			w.retire(as)
			return n
		}
	}
}

// sctpRestarted ends the sessions of an association that the peer has begun anew.
func (w *worker) sctpRestarted(as *assoc) {
	if as.mux == nil { // it had not begun here
		w.sctpUp(as)
		return
	}
	out, in := as.a.Streams()
	for _, c := range slices.Clone(as.round) {
		w.endSession(c, errSession)
	}
	w.dropReleased(as) // what they had under way is nothing to the sessions to come
	as.enhanced = false
	w.forgetAddrs(as)
	w.learnAddrs(as)
	as.mux.Reset(min(out, in))
}

// dropReleased takes back the slots of messages that nobody waits for any more.
func (w *worker) dropReleased(as *assoc) {
	for b, ok := as.a.PollReleased(); ok; b, ok = as.a.PollReleased() {
		w.disown(&as.carrier, link.Slot(b))
	}
}

// sessionEvents acts on what the sessions report.
func (w *worker) sessionEvents(as *assoc) int {
	n := 0
	ev := &w.sctp.ev
	for as.mux != nil && as.mux.PollEvent(ev) {
		n++
		c := as.streams[ev.Stream]
		if ev.Kind == session.EventRequest {
			if c != nil {
				w.endSession(c, nil) // the last session there; the peer knows that it is over
			}
			c = w.newSession(as, ev.Stream, w.newID())
			c.passive = true
			as.idle = 0
			e := Event{Kind: EventRequest, Conn: c.id, Flow: c.flow, Worker: w.id, Setup: ev.Setup}
			if as.lst != nil {
				e.Listener = as.lst.id
			}
			w.e.events.push(e)
			if as.passive && len(as.streams) == 1 && w.e.resolver != nil {
				go w.e.resolveConn(c.id, c.flow) // what the route says, and to hear of the neighbour
			}
			continue
		}
		if c == nil {
			continue
		}
		switch ev.Kind {
		case session.EventOpen:
			c.ini = nil
			as.enhanced = as.enhanced || ev.Setup.Enhanced != nil
			w.e.events.push(Event{Kind: EventAnswer, Conn: c.id, Flow: c.flow, Worker: w.id, Setup: ev.Setup})
		case session.EventRejected:
			if as.plain(c, ev.Setup) {
				continue // as soon as the stream is free
			}
			w.e.events.push(Event{Kind: EventRejected, Conn: c.id, Flow: c.flow, Worker: w.id, Setup: ev.Setup})
			w.endSession(c, ErrRejected)
		case session.EventTerminated:
			w.event(c, EventPeerClosed, nil, nil)
			w.remoteEventsSCTP(c)
			w.dropQP(c)
			c.mode = modeClosing
		case session.EventFailed:
			w.stats.Violations++
			c.err = ev.Err
			w.dropQP(c)
			c.mode = modeClosing
		case session.EventIdle:
			if i := c.ini; i != nil && i.retry && c.mode != modeClosing {
				i.retry = false
				w.stats.SessionRetries++
				if err := as.mux.Initiate(c.sid, i.setup); err == nil {
					continue
				}
			}
			w.endSession(c, nil)
		}
	}
	return n
}

// remoteEventsSCTP acts on what the stream of a session reports.
func (w *worker) remoteEventsSCTP(c *conn) {
	if c.mode == modeFull && c.stream != nil {
		w.remoteEvents(c)
	}
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
	if c.mode == modeFull && c.stream.TerminateSent() {
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
	t := as.tuple
	t.Remote = p.Addr.As16()
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

// sctpTerminated ends a session whose peer sent an RDMAP Terminate.
func (w *worker) sctpTerminated(c *conn, err *term.RemoteError) {
	c.err = err
	w.closeSession(c)
}
