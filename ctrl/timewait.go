package ctrl

import (
	"net/netip"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// The port of a connection that was opened and first closed here stays claimed while TCP is in TIME-WAIT: the engine answers for it, and
// its guard socket keeps the kernel from giving it to another program. Such ports count in their user's quota. When the user's quota or the
// host's ports are used up, the port that has been in TIME-WAIT longest is reused: for another peer there is no need to wait, and for the
// same peer RFC 6191 allows it.

// reuseAfter is the least time that a port stays in TIME-WAIT.
const reuseAfter = time.Second

// reuseLook is the maximum number of ports with the same last peer that are skipped.
const reuseLook = 64

// startTimeWait inserts cl, whose connection has ended now.
func (u *usage) startTimeWait(cl *claim, now clock.Time) {
	cl.since = now
	i := len(u.timeWait)
	for i > 0 && u.timeWait[i-1].until > cl.until {
		i--
	}
	u.timeWait = slices.Insert(u.timeWait, i, cl)
}

// reuse removes and returns the oldest port on addr that c can use, preferring one whose last peer was another. It
// returns nil if there is none.
func (u *usage) reuse(c *conn, addr netip.Addr, now clock.Time) *claim {
	best := -1
	for i, cl := range u.timeWait {
		if cl.addr.Addr() != addr || cl.on.sockets() != c.by.sockets() || now.Sub(cl.since) < reuseAfter {
			continue
		}
		if best < 0 {
			best = i
		}
		if cl.remote != c.remote {
			best = i
			break
		}
		if i-best >= reuseLook {
			break
		}
	}
	if best < 0 {
		return nil
	}
	cl := u.timeWait[best]
	u.timeWait = slices.Delete(u.timeWait, best, best+1)
	cl.since = 0
	return cl
}

// endTimeWaits releases the ports whose TIME-WAIT is over, and returns when the next one ends, or 0. Called with mu
// held.
func (s *Server) endTimeWaits(now clock.Time) (next clock.Time) {
	for _, u := range s.usage {
		for len(u.timeWait) > 0 && u.timeWait[0].until.Due(now) {
			cl := u.timeWait[0]
			u.timeWait[0] = nil
			u.timeWait = u.timeWait[1:]
			s.claims.drop(cl)
		}
		if len(u.timeWait) > 0 {
			next = clock.Earliest(next, u.timeWait[0].until)
		}
	}
	return next
}

// takePort claims the local endpoint want for the active open c, within the user's quota. Called with mu held.
func (s *Server) takePort(c *conn, want netip.AddrPort) (*claim, error) {
	uid, limit := c.sess.cred.Uid, uint64(c.sess.policy().limits.Ports)
	a := &c.sess.use.account
	err := error(nil)
	if have := a[resPorts]; have >= limit {
		err = overQuota(uid, resPorts, have, 1, limit)
	} else if err = s.room(a, uid, resPorts, 1); err == nil {
		s.charge(a, resPorts, 1)
		var cl *claim
		if cl, err = s.claims.take(want, c.by, uid, c.remote); err == nil {
			cl.active = true
			return cl, nil
		}
		s.portFreed(uid)
	}
	if want.Port() == 0 {
		if cl := c.sess.use.reuse(c, want.Addr(), s.now()); cl != nil {
			if err := s.claims.steerTCP(cl, netip.AddrPort{}); err != nil { // its last peer may still send to it
				s.claims.drop(cl)
				return nil, err
			}
			return cl, nil
		}
	}
	return nil, err
}

// leavePort releases the endpoint of c, which has ended. A port in TIME-WAIT is released at the
// end of TIME-WAIT.
func (s *Server) leavePort(c *conn) {
	cl, now := c.claim, s.now()
	switch {
	case cl == nil:
		return
	case c.listener != nil:
		s.claims.leave(cl, c.local.Addr())
		return
	}
	if (c.leaving || c.timeWait) && !c.within { // none of its segments is in flight
		cl.until, cl.remote = now.Add(s.cfg.TimeWait), c.remote
	}
	if cl.until <= now { // or that of an earlier connection
		s.claims.drop(cl)
		return
	}
	s.usageOf(cl.uid).startTimeWait(cl, now)
	s.wake(cl.until)
}

// portFreed returns a port to the quota of uid. Called with mu held.
func (s *accounts) portFreed(uid uint32) {
	s.uncharge(s.account(uid), resPorts, 1)
	s.settle(uid)
}

// portsInTimeWait returns the number of ports in TIME-WAIT. Called with mu held.
func (s *Server) portsInTimeWait() (n int) {
	for _, u := range s.usage {
		n += len(u.timeWait)
	}
	return n
}
