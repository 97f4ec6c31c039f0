package dataplane

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

func (w *worker) newAssoc(a *sctp.Assoc, flow pkt.Flow, t pkt.Tuple, o SCTP) *assoc {
	as := &assoc{a: a, opts: o, flow: flow, tuple: t, streams: make(map[uint16]*conn)}
	as.tuple.Proto = pkt.ProtoSCTP
	if o.UDP {
		as.tuple.Proto = pkt.ProtoUDP
	}
	as.carrier.as, as.carrier.flow = as, flow
	as.carrier.timer.conn = &as.carrier
	as.carrier.join(&w.house)
	w.sctp.assocs[flow] = as
	w.claim(flow, true)
	return as
}

// forgetDialing ends what connectSCTP noted for adoptSCTP.
func (w *worker) forgetDialing(flow pkt.Flow) {
	if w.e.ndialing.Load() == 0 {
		return
	}
	w.e.mu.Lock()
	if w.e.dialing[flow] == w {
		delete(w.e.dialing, flow)
		w.e.ndialing.Store(int32(len(w.e.dialing)))
	}
	w.e.mu.Unlock()
}

// adoptSCTP is adopt for an association that another worker dials, whose INIT ACK or
// COOKIE ACK came here: nothing is in that worker's slots before it is established. A
// packet without the tag of the association moves nothing. adoptSCTP reports whether
// there is one.
func (w *worker) adoptSCTP(flow pkt.Flow, udp uint16, b []byte) bool {
	if w.e.ndialing.Load() == 0 {
		return false
	}
	w.e.mu.Lock()
	owner := w.e.dialing[flow]
	w.e.mu.Unlock()
	if owner == nil || owner == w {
		return false
	}
	b = bytes.Clone(b)
	owner.post(func(o *worker) {
		as := o.sctp.assocs[flow]
		if as == nil || as.lst != nil || as.over {
			return
		}
		if s := as.a.State(); s != sctp.CookieWait && s != sctp.CookieEchoed {
			return
		}
		if !as.a.Ours(b) { // anybody may have sent it
			as.a.HandlePacket(o.now, flow, udp, b)
			o.sctpData(as, b)
			o.mark(&as.carrier)
			return
		}
		o.forgetDialing(flow)
		o.timers.stop(&as.carrier.timer)
		o.unmark(&as.carrier)
		delete(o.sctp.assocs, flow)
		w.e.dir.move(flowKey{flow: flow, sctp: true}, o, w)
		o.sctp.moved[flow] = w
		for _, c := range as.round {
			o.unmark(c)
			delete(o.conns, c.id)
			o.moved[c.id] = w
		}
		w.post(func(w *worker) {
			as.carrier.timer, as.carrier.deadline, as.carrier.client = timer{conn: &as.carrier}, 0, nil
			as.carrier.pumped = 0
			as.carrier.join(&w.house)
			w.sctp0().assocs[flow] = as
			w.claim(flow, true)
			for _, c := range as.round {
				c.timer = timer{conn: c}
				w.conns[c.id] = c
			}
			as.a.HandlePacket(w.now, flow, udp, b)
			w.sctpData(as, b)
			w.mark(&as.carrier)
		})
	})
	return true
}

// learnAddrs lets the packets of as come from each address that the peer has named. That
// it is the peer who sends them is seen by the verification tag: whoever names the address
// of another host, with the ports of an association of that, has none of its packets.
func (w *worker) learnAddrs(as *assoc) {
	n, _ := as.a.Paths()
	for i := range n {
		k := flowKey{flow: as.flow, sctp: true, tag: as.a.Tag()}
		if k.flow.Remote = as.a.Path(i).Addr.As16(); k.flow == as.flow || w.sctp.also[k] != nil {
			continue
		}
		// ICMP errors show packets as we sent them.
		for _, k := range [...]flowKey{k, {flow: k.flow.Reverse(), sctp: true, tag: as.a.PeerTag()}} {
			if w.sctp.also[k] != nil {
				continue
			}
			w.sctp.also[k] = as
			as.also = append(as.also, k)
			if w.e.dir != nil {
				w.e.dir.put(k, w)
			}
		}
	}
}

func (w *worker) forgetAddrs(as *assoc) {
	for _, k := range as.also {
		delete(w.sctp.also, k)
		if w.e.dir != nil {
			w.e.dir.remove(k, w)
		}
	}
	as.also = nil
}

// further returns the addresses of the peer's beside that of the flow.
func (as *assoc) further() (addrs [][16]byte) {
	n, _ := as.a.Paths()
	for i := 1; i < n; i++ {
		addrs = append(addrs, as.a.Path(i).Addr.As16())
	}
	return addrs
}

// findHops asks for the next hops to them, since another address may be another interface
// of the peer's, or behind another router.
func (w *worker) findHops(as *assoc) {
	addrs, local := as.further(), netip.AddrFrom16(as.flow.Local).Unmap()
	if len(addrs) == 0 {
		return
	}
	// Who asks for addresses that a peer has named, and nobody may have, leaves others a turn.
	w.e.ask(maxDoubts/2, func() {
		for _, a := range addrs {
			if hop, err := w.e.resolver.Resolve(netip.AddrFrom16(a).Unmap(), local); err == nil {
				w.post(func(w *worker) { w.setFurtherHop(as, a, &hop) })
			}
		}
	})
}

func (w *worker) setFurtherHop(as *assoc, addr [16]byte, hop *Hop) {
	i, ok := as.a.FindPath(netip.AddrFrom16(addr).Unmap())
	if !ok || as.over {
		return
	}
	for len(as.hops) <= i {
		as.hops = append(as.hops, Hop{})
	}
	as.hops[i] = *hop
	as.a.SetMTU(i, w.mtuOf(hop))
	w.mark(&as.carrier)
}

// ownHop reports whether path i has a next hop of its own.
func (as *assoc) ownHop(i int) bool { return i < len(as.hops) && as.hops[i].DstMAC != [6]byte{} }

// setMTU sets the MTU of the way to the first address, and of the others that begin
// with the same hop.
func (as *assoc) setMTU(mtu int) {
	n, _ := as.a.Paths()
	for i := range n {
		if i == 0 || !as.ownHop(i) {
			as.a.SetMTU(i, mtu)
		}
	}
}

// tupleTo is what stands in front of a packet that goes on path i, to addr.
func (as *assoc) tupleTo(i int, addr netip.Addr) pkt.Tuple {
	t := as.tuple
	t.Remote = addr.As16()
	if as.ownHop(i) {
		setHop(&t, &as.hops[i])
	}
	return t
}

// assocOf returns the association of flow here, nil if there is none.
func (w *worker) assocOf(flow pkt.Flow) *assoc {
	if w.sctp == nil {
		return nil
	}
	return w.sctp.assocs[flow]
}

// assocFrom returns the association that packet b of flow f belongs to, if it is one of
// this worker's whose peer has sent it from a further address.
func (w *worker) assocFrom(f pkt.Flow, b []byte) *assoc {
	if len(w.sctp.also) == 0 {
		return nil
	}
	return w.sctp.also[alsoKey(f, b)]
}

// alsoKey is what packet b of flow f belongs to if it came from a further address.
func alsoKey(f pkt.Flow, b []byte) flowKey {
	return flowKey{flow: f, sctp: true, tag: binary.BigEndian.Uint32(b[4:])}
}

// alsoICMP is alsoKey for an ICMP error.
func alsoICMP(e *pkt.ICMPError) flowKey {
	return flowKey{flow: e.Flow.Reverse(), sctp: true, tag: e.Seq}
}

// strayAddr is stray for what belongs to k, of an association whose peer has a further
// address.
func (w *worker) strayAddr(k flowKey, f *link.Frame) bool {
	if w.e.dir == nil || k.tag == 0 {
		return false
	}
	owner := w.e.dir.find(&k)
	return owner != w && w.strays.from == nil && !w.handed && w.strayTo(owner, f)
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
	w.findHops(as)
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
	w.findHops(as)
	as.mux.Reset(min(out, in))
}

// dropReleased takes back the slots of messages that nobody waits for any more.
func (w *worker) dropReleased(as *assoc) {
	for b, ok := as.a.PollReleased(); ok; b, ok = as.a.PollReleased() {
		w.disown(&as.carrier, link.Slot(b))
	}
}

// sctpTimer is onTimer for an association.
func (w *worker) sctpTimer(c *conn) {
	as := c.as
	if as.over {
		return
	}
	w.mark(c)
	if !c.deadline.Due(w.now) {
		return // the wheel is early by up to a tick
	}
	c.deadline = 0
	w.stats.Timeouts++
	if c.giveUp.Due(w.now) {
		c.giveUp = 0
		for _, d := range slices.Clone(as.round) {
			switch {
			case d.ini == nil:
			case d.giveUp.Due(w.now):
				why := ErrTimeout
				if as.mux != nil {
					why = errNoAnswer
				}
				w.abort(d, why)
			default:
				c.giveUp = clock.Earliest(c.giveUp, d.giveUp)
			}
		}
	}
	if as.idle.Due(w.now) {
		as.idle = 0
		if len(as.streams) == 0 {
			w.stats.AssocsIdle++
			as.a.Close(w.now)
		}
	}
	before := as.a.TimeoutsInARow()
	as.a.HandleTimeout(w.now)
	if as.a.TimeoutsInARow() > before {
		flow := as.flow
		_, i := as.a.Paths()
		flow.Remote = as.a.Path(i).Addr.As16()
		for _, c := range as.streams {
			w.e.doubt(c.id, flow)
			break // what is found is the association's
		}
	}
}

// deadlineOf returns when the association has to be looked at.
func (as *assoc) deadlineOf() clock.Time {
	return clock.Earliest(as.a.Deadline(), clock.Earliest(as.carrier.giveUp, as.idle))
}

// idles begins the time that the peer has to ask for a session.
func (w *worker) idles(as *assoc) {
	if d := w.e.cfg.SCTP.Idle; d > 0 {
		as.idle = w.now.Add(d)
	}
}

// done reports whether an association has no further use: it ends with its last session,
// once what sessions still have to say is on its way.
func (as *assoc) done() bool {
	return as.lst == nil && len(as.streams) == 0 && (as.mux == nil || as.mux.Quiet())
}

// strangerWindow is the receive window, in octets, of an association that a peer has opened,
// until one of its sessions is accepted: what goes before that is short. INIT ACK has the
// full window, which peers begin their slow start with.
const strangerWindow = 64 << 10

// holds counts what is held for as, and ends associations when it is too much for all.
func (w *worker) holds(as *assoc) {
	w.weigh(as)
	for trimmed := false; w.sctp.memory > w.e.cfg.SCTP.Memory; {
		if !trimmed {
			trimmed = true
			for _, o := range w.sctp.assocs {
				if o.mux != nil {
					o.mux.Trim()
					w.weigh(o)
				}
			}
			continue
		}
		var most *assoc
		for _, o := range w.sctp.assocs {
			if o.memory > 0 && (most == nil || most.admitted && !o.admitted || most.admitted == o.admitted && most.memory < o.memory) {
				most = o
			}
		}
		if most == nil {
			return
		}
		w.stats.AssocsNoMemory++
		most.a.GiveUp(w.now)
		w.sctp.memory -= most.memory
		most.memory = 0
		w.mark(&most.carrier)
	}
}

// weigh counts what is held for as.
func (w *worker) weigh(as *assoc) {
	n := 0
	if as.a.State() != sctp.Closed && !as.over {
		n = as.a.Kept()
		if as.mux != nil {
			n += as.mux.Memory()
		}
	}
	w.sctp.memory += n - as.memory
	as.memory = n
}

// faultSCTP ends an association when a stream faulted over one of its messages: those
// behind it in the packet are acknowledged, and lost.
func (w *worker) faultSCTP(as *assoc) {
	if !as.inHand {
		return
	}
	as.inHand = false
	for d := (sctp.Data{}); as.a.PollData(&d); {
	}
	as.a.Abort(w.now)
}

// retire takes an association that has ended out of the tables. Its sessions end with
// it, without a message of their own (RFC 5043 11.3).
func (w *worker) retire(as *assoc) {
	if as.over {
		return
	}
	as.over = true
	as.carrier.gone = true
	w.timers.stop(&as.carrier.timer)
	known := w.sctp.assocs[as.flow] == as
	if known {
		delete(w.sctp.assocs, as.flow)
	}
	w.forgetAddrs(as)
	w.forgetDialing(as.flow)
	if flow := as.flow; !as.passive {
		if home := w.e.dialer(flow.LocalAddrPort()); home != w {
			home.post(func(home *worker) {
				if home.sctp != nil && home.sctp.moved[flow] == w {
					delete(home.sctp.moved, flow)
				}
			})
		}
	}
	if as.passive {
		if n := w.sctp.peers[as.flow.Remote]; n > 1 {
			w.sctp.peers[as.flow.Remote] = n - 1
		} else {
			delete(w.sctp.peers, as.flow.Remote)
		}
	}
	w.holds(as)
	w.sctp.over.add(as)
	for _, c := range slices.Clone(as.round) {
		w.remoteEventsSCTP(c)
		w.endSession(c, as.a.Err())
	}
	w.e.events.push(Event{Kind: EventParted, Flow: as.flow, Worker: w.id})
	if known {
		w.unclaim(as.flow, true) // from here on another worker may have one of this flow, with an EventJoined
	}
	w.dropReleased(as)
}
