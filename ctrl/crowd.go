package ctrl

import (
	"net/netip"
	"slices"

	"go.uber.org/zap"
)

// startups are the connections of one listener whose MPA request has not come. One
// address may have StartupDefaults.PerPeer of them, and all addresses together
// StartupDefaults.PerListener: a further connection pushes out the oldest of its
// address, or of the network that has the most. So idle connections cannot keep out
// a peer that sends its request, nor disturb another listener.
type startups struct {
	by  map[netip.Prefix][]*conn // by network, oldest first
	n   int
	log tally
}

// networkOf returns the addresses that one host may use at will: a /64 of IPv6.
func networkOf(a netip.Addr) netip.Prefix {
	bits := a.BitLen()
	if a.Is6() && !a.IsLinkLocalUnicast() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // cannot fail: bits fits
	return p
}

func (s *startups) add(c *conn) {
	if s.by == nil {
		s.by = make(map[netip.Prefix][]*conn)
	}
	p := networkOf(c.remote.Addr())
	s.by[p] = append(s.by[p], c)
	s.n++
}

func (s *startups) remove(c *conn) {
	p := networkOf(c.remote.Addr())
	i := slices.Index(s.by[p], c)
	if i < 0 {
		return
	}
	s.n--
	if s.by[p] = slices.Delete(s.by[p], i, i+1); len(s.by[p]) == 0 {
		delete(s.by, p)
	}
}

// victim returns the connection that one more of addr pushes out, or nil.
func (s *startups) victim(addr netip.Addr, d *StartupDefaults) *conn {
	var oldest *conn
	same := 0
	for _, c := range s.by[networkOf(addr)] {
		if c.remote.Addr() == addr {
			if same++; oldest == nil {
				oldest = c
			}
		}
	}
	switch {
	case same >= d.PerPeer:
		return oldest
	case s.n < d.PerListener:
		return nil
	}
	most := s.by[networkOf(addr)]
	for _, cs := range s.by {
		if len(cs) > len(most) {
			most = cs
		}
	}
	return most[0]
}

// makeRoom resets a connection of l in start-up where one more of addr would be too
// many.
func (s *Server) makeRoom(l *listener, addr netip.Addr) {
	c := l.starting.victim(addr, &s.cfg.Startup)
	if c == nil {
		return
	}
	l.dropped++
	s.counters.crowdedOut.Add(1)
	if n, tell := l.starting.log.add(s.now()); tell {
		l.sess.log.Warn("idle connections reset: too many in MPA start-up", zap.Stringer("listener", l.claim.addr), zap.Stringer("peer", c.remote), zap.Uint64("times", n))
	}
	s.engine.Disconnect(c.id, true)
	s.forget(c)
}
