package ctrl

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/iwarpd/iwarpd/dataplane"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

// shared is an association whose DDP streams several connections of one client share, at the client's request: those to the same port over
// the same transport. Clients never share one, because its end, for any reason, ends all of its sessions. Server.mu guards all fields
// except ready.
type shared struct {
	remote netip.AddrPort
	opts   dataplane.SCTP
	ready  chan struct{} // closed when the engine has the association, or never will
	claim  *claim        // nil until the engine has the association
	device string        // device of the Hop; set with claim
	n      int           // connections on it; the association ends with the last one
}

// redials limits how often a connection tries another stream.
const redials = 8

// fits reports whether c may use sh, as far as is known yet.
func (sh *shared) fits(c *conn) bool {
	if sh.n == 0 || sh.remote != c.remote || sh.opts != *c.sctp {
		return false
	}
	if sh.claim == nil {
		return true
	}
	have, want := sh.claim.addr, c.wantAddr
	return (c.by == nil || sh.device == "" || c.by.Name == sh.device) && (!want.Addr().IsValid() || want.Addr() == have.Addr()) && (want.Port() == 0 || want.Port() == have.Port()) &&
		c.sess.policy().mayUse(have.Addr())
}

// share starts c on an existing association of its client. Otherwise it returns a new one, which the caller must open for c and later
// connections, and whose ready it must close. It returns nil if c needs nothing more from the caller.
func (s *Server) share(c *conn) *shared {
	s.mu.Lock()
	defer s.mu.Unlock()
	tried := make(map[*shared]bool)
	for c.state == connResolving {
		i := slices.IndexFunc(c.sess.shared, func(sh *shared) bool { return !tried[sh] && !c.alone && sh.fits(c) })
		if i < 0 {
			c.shared = &shared{remote: c.remote, opts: *c.sctp, ready: make(chan struct{}), n: 1}
			c.sess.shared = append(c.sess.shared, c.shared)
			return c.shared
		}
		sh := c.sess.shared[i]
		tried[sh] = true
		s.mu.Unlock()
		<-sh.ready
		s.mu.Lock()
		if c.state == connResolving && sh.claim != nil && sh.fits(c) && s.joinShared(c, sh) {
			return nil
		}
	}
	return nil
}

// joinShared starts c on sh. It reports false if sh has no stream for it. Called with mu held, which it releases temporarily.
func (s *Server) joinShared(c *conn, sh *shared) bool {
	sh.n++
	sh.claim.refs++
	c.shared = sh
	ours, err := s.open(c, sh.claim, sh.device, true)
	switch {
	case err == nil || !ours:
	case errors.Is(err, dataplane.ErrNoStream):
		s.leaveShared(c)
		c.state, c.id = connResolving, 0
		return false
	default:
		s.failConn(c, err)
	}
	return true
}

// leaveShared removes c from its association and from the events of the engine.
func (s *Server) leaveShared(c *conn) {
	delete(s.conns, c.id)
	s.claims.drop(c.claim)
	c.claim = nil
	c.unshare()
}

// unshare records that c has left its association.
func (c *conn) unshare() {
	sh := c.shared
	if sh == nil {
		return
	}
	c.shared = nil
	if sh.n--; sh.n == 0 {
		c.sess.shared = slices.DeleteFunc(c.sess.shared, func(o *shared) bool { return o == sh })
	}
}

// reshare starts c again if its stream was not available: the peer has fewer streams, or has started a session on it at the same time. It
// reports whether it does.
func (s *Server) reshare(c *conn, err error) bool {
	few := errors.Is(err, dataplane.ErrNoStream)
	if c.shared == nil || c.redials == redials || !few && !errors.Is(err, ddp.ErrCollision) {
		return false
	}
	c.redials++
	c.alone = c.alone || few // another association would have no more streams
	s.leaveShared(c)
	s.startDial(c)
	return true
}
