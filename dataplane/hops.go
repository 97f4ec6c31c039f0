package dataplane

import (
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Hop is the first hop to a destination, from the kernel's routes and neighbours.
type Hop struct {
	SrcMAC, DstMAC [6]byte
	VLANs          []uint16 // TCIs, outermost first
	MTU            int      // path MTU, in bytes of an IP packet
	Src            netip.Addr
	Local          bool   // the destination is an address of this host
	Found          bool   // the neighbour's address was not known, or no longer: it has just answered
	Device         string // name of the outgoing interface
}

// Errors of a Resolver that the request causes, and no host on the way.
var (
	ErrSource    = errors.New("not an address of the interface")
	ErrBroadcast = errors.New("a broadcast or multicast address, not that of one host: give the host's own")
	ErrNetwork   = errors.New("the address of a network, not that of one host: give the host's own")
)

// Resolver finds the next hop to a destination over the interface device, or over the one that
// the routes name if device is "". Resolve may block for a bounded time while the kernel
// resolves a neighbour. Watch registers a function that is called when routes, neighbours or
// the MTU may have changed.
type Resolver interface {
	Resolve(dst, src netip.Addr, device string) (Hop, error)
	Watch(changed func())
}

// hopsChanged starts to resolve all next hops again, without waiting. It never runs twice at
// once, so that results cannot arrive out of order.
func (e *Engine) hopsChanged() {
	if e.changes.Add(1) > 1 {
		return // the running goroutine starts over
	}
	go func() {
		for left := int32(1); left > 0 && !e.stop.Load(); {
			n := e.changes.Load()
			e.learnHostless()
			e.offerMTU()
			e.rehop()
			left = e.changes.Add(-n)
		}
	}()
}

// learnHostless asks the resolver, if it supports this, for the addresses at which no other
// host can be: this host's own, and the broadcast addresses of its subnets.
func (e *Engine) learnHostless() {
	r, ok := e.resolver.(interface{ Hostless() []netip.Addr })
	if !ok {
		return
	}
	all := make(map[[16]byte]struct{})
	for _, a := range r.Hostless() {
		all[a.As16()] = struct{}{}
	}
	e.hostless.Store(&all)
}

// answerable reports whether p may be answered and may begin a connection (RFC 9293 MUST-57 and
// MUST-63).
func (e *Engine) answerable(p *pkt.Packet) bool {
	return p.Answerable() && !e.isHostless(p.Flow.Remote)
}

func (e *Engine) isHostless(addr [16]byte) bool {
	hostless := e.hostless.Load()
	if hostless == nil {
		return false
	}
	_, is := (*hostless)[addr]
	return is
}

// offerMTU makes new connections announce the current MTU of their interface, if the resolver
// knows it: larger frames may not arrive.
func (e *Engine) offerMTU() {
	r, ok := e.resolver.(interface{ MTU(device string) int })
	if !ok {
		return
	}
	for _, d := range e.devices {
		mtu := r.MTU(d.name)
		if mtu <= 0 {
			continue // the interface has been removed
		}
		for _, w := range d.workers {
			w.post(func(w *worker) {
				w.announced = min(w.mtu, mtu)
				w.listeners.setMTU(w.announced)
			})
		}
	}
}

// maxRehops bounds the concurrent lookups of rehop.
const maxRehops = 64

// rehop resolves the next hop of every connection again, once per pair of addresses and many at
// a time, since each unreachable neighbour takes seconds.
func (e *Engine) rehop() {
	type way struct {
		local, remote [16]byte
		device        string
	}
	conns := make(map[way][]ConnID)
	all, silent := e.QueryConns(nil)
	for _, id := range silent { // the worker's connections are resolved when it runs again
		e.workers[id].post(func(*worker) { e.hopsChanged() })
	}
	for _, ci := range all {
		w := way{ci.Flow.Local, ci.Flow.Remote, e.Device(ci.ID)}
		conns[w] = append(conns[w], ci.ID)
		if ci.SCTP == nil {
			continue
		}
		for _, a := range ci.SCTP.further {
			w.remote = a
			conns[w] = append(conns[w], ci.ID)
		}
	}
	var wg sync.WaitGroup
	turns := make(chan struct{}, maxRehops)
	for w, ids := range conns {
		turns <- struct{}{}
		wg.Go(func() {
			e.resolveConns(ids, pkt.Flow{Local: w.local, Remote: w.remote}, w.device)
			<-turns
		})
	}
	wg.Wait()
}

// maxHopLookups bounds the concurrent lookups of recheckHop. Other connections retry at their next
// time-out.
const maxHopLookups = 16

// recheckHop resolves the next hop of a connection again after repeated time-outs. The kernel sees
// none of its packets, so it would not notice by itself that the neighbour is gone or has a new
// address (RFC 1122, Section 3.3.1.4; RFC 4861, Section 7.3.1): the resolver, if it supports this,
// makes it probe the neighbour. If that has another address, a later call finds it.
func (e *Engine) recheckHop(id ConnID, flow pkt.Flow) {
	e.lookUp(&e.hopLookups, maxHopLookups, func() {
		if r, ok := e.resolver.(interface {
			Probe(dst, src netip.Addr, device string)
		}); ok {
			r.Probe(netip.AddrFrom16(flow.Remote).Unmap(), netip.AddrFrom16(flow.Local).Unmap(), e.Device(id))
		}
		e.resolveConn(id, flow)
	})
}

// maxAcceptLookups bounds the concurrent lookups of acceptedHop and findHop.
const maxAcceptLookups = 1024

// acceptedHop resolves the next hop of a connection that a peer has opened, to get the route's MTU
// and to watch the neighbour. A peer may open and reset connections faster than they are resolved:
// those beyond the limit answer to the sender of their frames, as they do in any case at first.
func (e *Engine) acceptedHop(id ConnID, flow pkt.Flow) {
	e.lookUp(&e.accepted, maxAcceptLookups, func() { e.resolveConn(id, flow) })
}

// lookUp calls f in a goroutine, unless the number n of lookups in progress has reached most. It reports whether it does.
func (e *Engine) lookUp(n *atomic.Int32, most int32, f func()) bool {
	if e.resolver == nil {
		return false
	}
	if n.Add(1) > most {
		n.Add(-1)
		return false
	}
	go func() {
		defer n.Add(-1)
		f()
	}()
	return true
}

// resolveConn resolves a connection's next hop and passes the result to its worker.
func (e *Engine) resolveConn(id ConnID, flow pkt.Flow) {
	e.resolveConns([]ConnID{id}, flow, e.Device(id))
}

func (e *Engine) resolveConns(ids []ConnID, flow pkt.Flow, device string) {
	hop, err := e.resolver.Resolve(netip.AddrFrom16(flow.Remote).Unmap(), netip.AddrFrom16(flow.Local).Unmap(), device)
	if err != nil {
		return // keep the current hop: the peer was reached through it
	}
	for _, id := range ids {
		e.onStream(id, func(w *worker, s *stream) {
			if s != nil {
				s.lane.llp.setHop(w, flow.Remote, &hop)
			}
		})
	}
}
