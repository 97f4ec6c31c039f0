package ctrl

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
)

// PeerSet is a set of peers that is kept outside the daemon, such as a set of nftables. Its methods
// are safe for concurrent use, and Contains does not block.
type PeerSet interface {
	// Contains reports whether connections with a are allowed.
	Contains(a netip.Addr) bool
	// Watch registers a function that is called after the set has changed.
	Watch(changed func())
	// String returns the name of the set for errors.
	String() string
}

// mayConnectTo returns an error that names the rule if the client may not connect to peer.
func (c *session) mayConnectTo(peer netip.Addr) error {
	if why := c.denies(c.policy().connectTo, "connect-to", peer); why != "" {
		c.srv.counters.connectsDenied.Add(1)
		return errorf(permission, "ctrl: %s may not connect to %v: %s", user(c.cred.Uid), peer, why)
	}
	return nil
}

// denies returns why peer is denied, and how to allow it: it is not in peers, which is the key of the client's rule,
// or not in the daemon's set. It returns "" if peer is allowed.
func (c *session) denies(peers []netip.Prefix, key string, peer netip.Addr) string {
	s := c.srv
	switch {
	case len(peers) > 0 && !slices.ContainsFunc(peers, func(p netip.Prefix) bool { return p.Contains(peer) }):
		return fmt.Sprintf("not in %s of %s: add it there, and reload iwarpd", key, c.policy().rule)
	case s.peers != nil && !s.peers.Contains(peer):
		return fmt.Sprintf("not in the %v, which allow-set names: add it there", s.peers)
	}
	return ""
}

// admits reports whether peer may connect to l. Workers call it, so it neither blocks nor locks.
func (l *listener) admits(peer netip.Addr) bool {
	why := l.sess.denies(l.sess.policy().acceptFrom, "accept-from", peer)
	if why == "" {
		return true
	}
	s := l.sess.srv
	s.counters.peersDenied.Add(1)
	s.denials.add(denial{peer, l.sess, why})
	return false
}

// A denial is a connection that a peer may not make.
type denial struct {
	peer netip.Addr
	sess *session // the client that listens
	why  string
}

// peerGate restricts peers, in addition to the rules.
type peerGate struct {
	peers   PeerSet // nil: all
	denials denials
}

// denials passes denials to the log without blocking workers. It holds the first one since the
// last message, and counts the others.
type denials struct {
	n     atomic.Uint64
	first chan denial
}

func (d *denials) add(x denial) {
	d.n.Add(1)
	select {
	case d.first <- x:
	default:
	}
}

// log logs denials until done is closed: at most one message per logEvery.
func (d *denials) log(done <-chan struct{}) {
	for {
		select {
		case x := <-d.first:
			x.sess.log.Warn("a peer may not connect", zap.Stringer("peer", x.peer), zap.String("reason", x.why), zap.Uint64("times", d.n.Swap(0)))
		case <-done:
			return
		}
		select {
		case <-time.After(logEvery):
		case <-done:
			return
		}
	}
}

// denied returns an error if the peer of c is denied now.
func (c *conn) denied() error {
	key, peers := "connect-to", c.sess.policy().connectTo
	if c.listener != nil {
		key, peers = "accept-from", c.sess.policy().acceptFrom
	}
	if why := c.sess.denies(peers, key, c.remote.Addr()); why != "" {
		return errorf(permission, "ctrl: %v is not an allowed peer any more: %s", c.remote.Addr(), why)
	}
	return nil
}

// endDenied ends the connections with peers that are denied now, if the configuration says so.
// Called with mu held.
func (s *Server) endDenied() {
	if !s.cfg.EndDenied {
		return
	}
	if n := endConns(s, (*conn).denied); n > 0 {
		s.log.Warn("connections ended whose peers are denied now", zap.Int("connections", n))
	}
}

// endConns ends the connections for which why returns an error, including those that are not open
// yet, and returns their number. Called with mu held.
func endConns(s *Server, why func(*conn) error) int {
	all := values(s.conns)
	for _, sess := range s.sessions {
		for _, c := range sess.conns {
			if s.conns[c.id] != c {
				all = append(all, c)
			}
		}
	}
	n := 0
	for _, c := range all {
		if err := why(c); err != nil {
			s.end(c, err)
			n++
		}
	}
	return n
}
