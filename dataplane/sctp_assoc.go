package dataplane

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

// newAssoc adds an association that was dialed or accepted.
func (w *worker) newAssoc(a *sctp.Assoc, flow pkt.Flow, t pkt.Tuple, o SCTP, ip IPOptions) *assoc {
	as := &assoc{a: a, opts: o, tuple: t, ip: ip, sessions: make(map[uint16]*stream)}
	as.tuple.Proto = pkt.ProtoSCTP
	if o.UDP {
		as.tuple.Proto = pkt.ProtoUDP
	}
	as.llp, as.key = as, handoff.Key{Flow: flow, Proto: pkt.ProtoSCTP}
	w.enter(&as.lane)
	w.sctp.n++
	return as
}

// adoptSCTP moves an association for which an INIT ACK or COOKIE ACK has arrived here from the
// worker that dialed k. Until it is established it has no data in that worker's slots. A packet
// without the association's tag moves nothing. adoptSCTP reports whether there is such an
// association.
func (w *worker) adoptSCTP(k handoff.Key, udp uint16, b []byte) bool {
	owner, full := w.e.dialedBy(k, w)
	if owner == nil {
		return full
	}
	b = bytes.Clone(b)
	owner.post(func(o *worker) {
		as := o.assocOf(k)
		if as == nil || as.lst != nil || as.gone {
			return
		}
		if s := as.a.State(); s != sctp.CookieWait && s != sctp.CookieEchoed {
			return
		}
		if !as.a.Ours(b) { // any host may have sent it
			as.a.HandlePacket(o.now, k.Flow, udp, b)
			as.data(o, b)
			o.mark(&as.lane)
			return
		}
		o.sctp.n--
		o.moveTo(w, &as.lane, func(w *worker) {
			w.sctp0().n++
			as.a.HandlePacket(w.now, k.Flow, udp, b)
			as.data(w, b)
		})
	})
	return true
}

// learnAddrs accepts packets for as from every address that the peer has listed. The
// verification tag proves that the peer sent them, so listing another host's address does not
// divert that host's packets.
func (as *assoc) learnAddrs(w *worker) {
	for i := range as.a.Paths() {
		k := handoff.Key{Flow: as.key.Flow, Proto: pkt.ProtoSCTP, Tag: as.a.Tag()}
		if k.Flow.Remote = as.a.Path(i).Addr.As16(); k.Flow == as.key.Flow || w.lanes[k] != nil {
			continue
		}
		// ICMP errors quote packets as we sent them.
		for _, k := range [...]handoff.Key{k, {Flow: k.Flow.Reverse(), Proto: pkt.ProtoSCTP, Tag: as.a.PeerTag()}} {
			if w.lanes[k] == nil {
				w.lanes[k] = &as.lane
				as.also = append(as.also, k)
				w.e.dir.Put(k, w)
			}
		}
	}
}

func (as *assoc) forgetAddrs(w *worker) {
	for _, k := range as.also {
		delete(w.lanes, k)
		w.e.dir.Remove(k, w)
	}
	as.also = nil
}

// further returns the peer's addresses other than that of the flow.
func (as *assoc) further() (addrs [][16]byte) {
	for i := 1; i < as.a.Paths(); i++ {
		addrs = append(addrs, as.a.Path(i).Addr.As16())
	}
	return addrs
}

// findHops resolves the next hops to these addresses, which may belong to other interfaces or
// be behind other routers.
func (as *assoc) findHops(w *worker) {
	addrs, local := as.further(), netip.AddrFrom16(as.key.Flow.Local).Unmap()
	if len(addrs) == 0 {
		return
	}
	// Peer-supplied addresses may not exist, so their lookups may use at most half of
	// the resolver slots.
	w.e.lookUp(&w.e.hopLookups, maxHopLookups/2, func() {
		for _, a := range addrs {
			if hop, err := w.e.resolver.Resolve(netip.AddrFrom16(a).Unmap(), local, w.dev.name); err == nil {
				w.post(func(w *worker) { as.setFurtherHop(w, a, &hop) })
			}
		}
	})
}

// findHop resolves the next hop to a peer that has requested a session, to get the route's MTU and
// to watch the neighbour. There is one such lookup at a time.
func (as *assoc) findHop(w *worker) {
	if as.finding {
		return
	}
	remote, local := as.key.Flow.Remote, netip.AddrFrom16(as.key.Flow.Local).Unmap()
	as.finding = w.e.lookUp(&w.e.accepted, maxAcceptLookups, func() {
		hop, err := w.e.resolver.Resolve(netip.AddrFrom16(remote).Unmap(), local, w.dev.name)
		w.post(func(w *worker) {
			as.finding = false
			if err == nil && !as.gone {
				as.setHop(w, remote, &hop)
			}
		})
	})
}

// setHop sets the next hop to the peer, or to one of its further addresses.
func (as *assoc) setHop(w *worker, remote [16]byte, hop *Hop) {
	if remote != as.key.Flow.Remote {
		as.setFurtherHop(w, remote, hop)
		return
	}
	old := as.tuple
	setHop(&as.tuple, hop, as.ip)
	for i := range as.a.Paths() { // those of the peer's further addresses that have the same next hop too
		if i > 0 && as.ownHop(i) {
			continue
		}
		as.a.SetMTU(i, w.mtuOf(hop))
		if as.tuple != old || hop.Found {
			as.a.PathChanged(w.now, i)
		}
	}
	w.mark(&as.lane)
}

func (as *assoc) setDSCP(dscp uint8) error {
	as.ip.DSCP, as.tuple.DSCP = dscp, dscp
	return nil
}

func (as *assoc) setFurtherHop(w *worker, addr [16]byte, hop *Hop) {
	to := netip.AddrFrom16(addr).Unmap()
	i := as.a.FindPath(to)
	if i < 0 || as.gone {
		return
	}
	for len(as.hops) <= i {
		as.hops = append(as.hops, Hop{})
	}
	old := as.tupleTo(i, to)
	as.hops[i] = *hop
	as.a.SetMTU(i, w.mtuOf(hop))
	if as.tupleTo(i, to) != old || hop.Found {
		as.a.PathChanged(w.now, i)
	}
	w.mark(&as.lane)
}

// ownHop reports whether path i has its own next hop.
func (as *assoc) ownHop(i int) bool { return i < len(as.hops) && as.hops[i].DstMAC != [6]byte{} }

// tupleTo returns the headers for a packet on path i, to addr.
func (as *assoc) tupleTo(i int, addr netip.Addr) pkt.Tuple {
	t := as.tuple
	t.Remote = addr.As16()
	if as.ownHop(i) {
		setHop(&t, &as.hops[i], as.ip)
	}
	return t
}

// furtherKey returns the key that packet b of flow f has if it came from a further address.
func furtherKey(f pkt.Flow, b []byte) handoff.Key {
	return handoff.Key{Flow: f, Proto: pkt.ProtoSCTP, Tag: binary.BigEndian.Uint32(b[4:])}
}

// up creates the sessions of an association that has been established.
func (as *assoc) up(w *worker) {
	if as.mux != nil {
		return
	}
	w.e.dialing.Remove(as.key, w)
	out, in := as.a.Streams()
	n := min(out, in)
	as.learnAddrs(w)
	as.findHops(w)
	as.mux = session.New(session.Config{Profile: as.opts.Profile, Pending: n}, n)
	if !as.passive {
		w.stats.ActiveOpens++
	}
	for _, s := range slices.Clone(as.round) {
		if s.ini != nil {
			as.initiate(w, s)
		}
	}
}

// events handles the events of the association.
func (as *assoc) events(w *worker) int {
	n := 0
	for {
		ev, ok := as.a.PollEvent()
		if !ok {
			return n
		}
		n++
		switch ev {
		case sctp.EventUp:
			as.up(w)
		case sctp.EventRestart:
			as.restarted(w)
		case sctp.EventShutdown:
			for _, s := range as.round {
				w.event(s, Event{Kind: EventPeerClosed})
			}
		case sctp.EventClosed:
			for as.a.PollTransmit(w.now, &w.sctp.out) {
				as.transmit(w)
			}
			as.retire(w)
			return n
		}
	}
}

// restarted ends the sessions of an association that the peer has restarted.
func (as *assoc) restarted(w *worker) {
	if as.mux == nil { // it was not established yet
		as.up(w)
		return
	}
	out, in := as.a.Streams()
	for _, s := range slices.Clone(as.round) {
		as.endSession(w, s, errSession)
	}
	as.dropReleased(w) // messages of these sessions must not be attributed to later ones
	as.enhanced = false
	as.forgetAddrs(w)
	as.learnAddrs(w)
	as.findHops(w)
	as.mux.Reset(min(out, in))
}

// dropReleased frees the slots of messages whose sessions have ended.
func (as *assoc) dropReleased(w *worker) {
	for b, ok := as.a.PollReleased(); ok; b, ok = as.a.PollReleased() {
		w.disown(&as.lane, link.Slot(b))
	}
}

func (as *assoc) timeout(w *worker) {
	if as.giveUp.Due(w.now) {
		as.giveUp = 0
		for _, s := range slices.Clone(as.round) {
			switch {
			case s.ini == nil:
			case s.giveUp.Due(w.now):
				why := ErrTimeout
				if as.mux != nil {
					why = errNoAnswer
				}
				s.abort(w, why)
			default:
				as.giveUp = clock.Earliest(as.giveUp, s.giveUp)
			}
		}
	}
	if as.idle.Due(w.now) {
		as.idle = 0
		if len(as.sessions) == 0 {
			w.stats.AssocsIdle++
			as.a.Close(w.now)
		}
	}
	before := as.a.TimeoutsInARow()
	as.a.HandleTimeout(w.now)
	if as.a.TimeoutsInARow() > before {
		flow := as.key.Flow
		flow.Remote = as.a.Path(as.a.Primary()).Addr.As16()
		if len(as.round) > 0 {
			w.e.recheckHop(as.round[0].id, flow) // the result applies to the whole association
		}
	}
}

func (as *assoc) next() clock.Time {
	return clock.Earliest(as.a.Deadline(), clock.Earliest(as.giveUp, as.idle))
}

// startIdle starts the time in which the peer must request a session.
func (as *assoc) startIdle(w *worker) { as.idle = w.deadlineAfter(w.e.cfg.SCTP.Idle) }

// done reports whether an association is no longer needed: it ends with its last session, after
// the final messages of the sessions have been sent.
func (as *assoc) done() bool {
	return as.lst == nil && len(as.sessions) == 0 && (as.mux == nil || as.mux.Quiet())
}

// strangerWindow is the receive window, in bytes, of an association opened by a peer until one
// of its sessions is accepted, since only short messages precede that. The INIT ACK announces
// the full window, from which peers derive their slow start.
const strangerWindow = 64 << 10

// holds updates the memory held for as. If the total is too large it looks at all associations, and ends some until an
// eighth is free: peers could otherwise cause that by each packet.
func (as *assoc) holds(w *worker) {
	as.weigh(w)
	most := w.e.cfg.SCTP.Memory
	if w.sctp.memory <= most {
		return
	}
	var all []*assoc
	for o := range w.assocs() {
		if o.mux != nil {
			o.mux.Trim()
			o.weigh(w)
		}
		all = append(all, o)
	}
	slices.SortFunc(all, func(a, b *assoc) int {
		if a.admitted != b.admitted {
			if a.admitted {
				return 1
			}
			return -1
		}
		return b.memory - a.memory
	})
	for _, o := range all {
		if w.sctp.memory <= most-most/8 {
			return
		}
		if o.memory == 0 {
			continue
		}
		w.stats.AssocsNoMemory++
		o.a.GiveUp()
		w.sctp.memory -= o.memory
		o.memory = 0
		w.mark(&o.lane)
	}
}

// weigh updates the memory held for as.
func (as *assoc) weigh(w *worker) {
	n := 0
	if as.a.State() != sctp.Closed && !as.gone {
		n = as.a.Kept()
		if as.mux != nil {
			n += as.mux.Memory()
		}
	}
	w.sctp.memory += n - as.memory
	as.memory = n
}

// fault ends an association when a stream faulted while processing one of its messages: later
// messages in the packet are acknowledged, but lost.
func (as *assoc) fault(w *worker) {
	if !as.inHand {
		return
	}
	as.inHand = false
	for d := (sctp.Data{}); as.a.PollData(&d); {
	}
	as.a.Abort()
}

func (as *assoc) reset(*worker) { as.a.Abort() }

// retire removes an association that has ended. Its sessions end with it, without a message of
// their own (RFC 5043 11.3).
func (as *assoc) retire(w *worker) {
	if as.gone {
		return
	}
	w.drop(&as.lane)
	w.sctp.n--
	as.forgetAddrs(w)
	as.holds(w)
	w.sctp.over.add(as)
	for _, s := range slices.Clone(as.round) {
		s.remoteEvents(w)
		as.endSession(w, s, as.a.Err())
	}
	as.setCounted(w, false)
	w.e.events.push(Event{Kind: EventParted, Flow: as.key.Flow, Worker: w.id})
	w.e.dir.Remove(as.key, w) // now another worker may adopt an association of this flow
	as.dropReleased(w)
}
