package ctrl

import (
	"net/netip"
	"slices"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/internal/subnet"
)

// startups are the connections of a listener whose MPA request has not arrived, at most
// StartupDefaults.PerListener. A further connection evicts the oldest one of the network that has
// the most. A user may have as many of them as queue pairs; then a listener with leastPending or
// more replaces its own. A network may have an eighth of that, and of the descriptors: programs
// open hundreds at once, and to an initiator a reset means that the peer does not know revision 2.
// Idle connections of a network therefore lock out no peer that sends its request, at any listener.
type startups struct {
	by      map[netip.Prefix][]*conn // by network, oldest first
	n       int
	sockets *pool // counts their kernel sockets, which no queue pair has yet; nil if they have none
	log     tally
}

func (s *startups) add(c *conn) {
	if s.by == nil {
		s.by = make(map[netip.Prefix][]*conn)
	}
	p := subnet.Of(c.remote.Addr())
	s.by[p] = append(s.by[p], c)
	s.n++
	c.sess.use.starting++
	if s.sockets != nil {
		s.sockets.extra++
	}
}

// remove reports whether c was one of them.
func (s *startups) remove(c *conn) bool {
	p := subnet.Of(c.remote.Addr())
	i := slices.Index(s.by[p], c)
	if i < 0 {
		return false
	}
	s.n--
	c.sess.use.starting--
	if s.sockets != nil {
		s.sockets.extra--
	}
	if s.by[p] = slices.Delete(s.by[p], i, i+1); len(s.by[p]) == 0 {
		delete(s.by, p)
	}
	return true
}

// spare reports whether the daemon can hold more of them.
func (s *startups) spare() bool { return s.sockets == nil || s.sockets.spare() }

// victim returns the connection to evict for a new one from addr, or nil if there are less than perNet of its network and
// less than most of all.
func (s *startups) victim(addr netip.Addr, perNet, most int) *conn {
	longest := s.by[subnet.Of(addr)]
	switch {
	case len(longest) >= perNet:
		return longest[0]
	case s.n < most:
		return nil
	}
	for _, cs := range s.by {
		if len(cs) > len(longest) {
			longest = cs
		}
	}
	return longest[0]
}

// leastPending is the number of start-ups, and of requests that wait for an answer, that a listener may have beside
// any number of its user's other listeners: enough for a peer that takes a while beside one that connects again and
// again, and for a program beside one that hangs.
const leastPending = 16

// leastPerNet is the number of start-ups that a network may have at a listener in any case.
const leastPerNet = 64

// makeRoom resets a connection of l in start-up if a new one from addr would exceed a limit, or
// if its connections are kernel sockets and the daemon has few descriptors left. Called with mu held.
func (s *Server) makeRoom(l *listener, addr netip.Addr) {
	most := s.cfg.Startup.PerListener
	least := most
	if l.sess.use.starting >= l.sess.policy().limits.QPs {
		least = leastPending
	}
	if !l.starting.spare() {
		least = 1
	}
	most = min(most, max(l.starting.n, least))
	perNet := l.sess.policy().limits.QPs / 8
	if p := l.starting.sockets; p != nil {
		perNet = min(perNet, int(p.most/8))
	}
	c := l.starting.victim(addr, max(perNet, leastPerNet), most)
	if c == nil {
		return
	}
	l.dropped++
	s.counters.startupsEvicted.Add(1)
	if n, due := l.starting.log.add(s.now()); due {
		l.sess.log.Warn("idle connections reset: too many in MPA start-up", zap.Stringer("listener", l.claim.addr), zap.Stringer("peer", c.remote), zap.Uint64("times", n))
	}
	s.abandon(c)
}
