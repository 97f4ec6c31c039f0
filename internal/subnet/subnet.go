// Package subnet tells which addresses one host can use, and counts connections by host. A host with IPv6 has the
// addresses of a whole /64, so a limit for each address alone would not bind it.
package subnet

import "net/netip"

// Of returns the network of all addresses that the host with the address a can use: a /64 for IPv6, and the address
// alone for IPv4 and for a link-local address.
func Of(a netip.Addr) netip.Prefix {
	a = a.Unmap()
	bits := a.BitLen()
	if a.Is6() && !a.IsLinkLocalUnicast() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // cannot fail: bits fits
	return p
}

// Peer is an address that has connections, or a network.
type Peer[T any] struct {
	Value T
	Net   *Peer[T] // the network of the address, or the Peer itself if that has no other addresses
	Conns int
	at    netip.Prefix
}

// Peers are the addresses that have connections, and their networks. A network may be that of one host or of many, so
// both are counted.
type Peers[T any] map[netip.Prefix]*Peer[T]

// Find returns the peer with the address a. If it has no connections it is a new one, with the Value that value returns
// for the address or the network, or the zero one if value is nil.
func (m Peers[T]) Find(a netip.Addr, value func(network bool) T) *Peer[T] {
	find := func(at netip.Prefix) *Peer[T] {
		p := m[at]
		if p == nil {
			p = &Peer[T]{at: at}
			p.Net = p
			if value != nil {
				p.Value = value(!at.IsSingleIP())
			}
		}
		return p
	}
	a = a.Unmap()
	host, _ := a.Prefix(a.BitLen())
	p := find(host)
	if net := Of(a); net != host {
		p.Net = find(net)
	}
	return p
}

// Add counts a connection of p.
func (m Peers[T]) Add(p *Peer[T]) { m.count(p, 1) }

// Remove counts the end of a connection of p.
func (m Peers[T]) Remove(p *Peer[T]) { m.count(p, -1) }

func (m Peers[T]) count(p *Peer[T], n int) {
	m[p.at] = p
	if p.Conns += n; p.Conns == 0 {
		delete(m, p.at)
	}
	if p.Net != p {
		m.count(p.Net, n)
	}
}

// Crowds reports whether one of p's connections may end for a new one of q: the network of p has at least three more than
// that of q, or p has two more than q, and its network no fewer. Then q does not crowd p afterwards.
func (p *Peer[T]) Crowds(q *Peer[T]) bool {
	return p.Net.Conns >= q.Net.Conns+3 || p.Conns >= q.Conns+2 && p.Net.Conns >= q.Net.Conns
}
