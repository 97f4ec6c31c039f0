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

// takePort claims the local endpoint want for the active open c, within the user's quota. Called with mu held.
func (s *Server) takePort(c *conn, want netip.AddrPort) (*claim, error) {
	uid, limit := c.sess.cred.Uid, uint64(c.sess.policy().limits.Ports)
	a := s.account(uid)
	err := error(nil)
	if have := a[resPorts]; have >= limit {
		err = overQuota(uid, resPorts, have, 1, limit)
	} else if err = s.room(a, uid, resPorts, 1); err == nil {
		s.charge(a, resPorts, 1)
		var cl *claim
		if cl, err = s.claims.take(want, c.by, uid, false); err == nil {
			cl.active = true
			return cl, nil
		}
		s.portFreed(uid)
	}
	if want.Port() == 0 {
		if cl := s.reusePort(uid, want.Addr(), c); cl != nil {
			return cl, nil
		}
	}
	return nil, err
}

// reusePort takes the user's oldest reusable port on addr for c out of TIME-WAIT, preferring one whose last peer was another. Called with
// mu held.
func (s *Server) reusePort(uid uint32, addr netip.Addr, c *conn) *claim {
	q, best := s.timeWait[uid], -1
	for i, cl := range q {
		if cl.addr.Addr() != addr || cl.on.sockets() != c.by.sockets() || s.now().Sub(cl.since) < reuseAfter {
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
	cl := q[best]
	s.timeWait[uid] = slices.Delete(q, best, best+1)
	cl.timeWait = false
	return cl
}

// reuseLook is the maximum number of ports with the same last peer that are skipped.
const reuseLook = 64

// leavePort releases the endpoint of c, which has ended. A port in TIME-WAIT is released at the
// end of TIME-WAIT.
func (s *Server) leavePort(c *conn) {
	cl, now := c.claim, s.now()
	if c.listener != nil || cl == nil {
		s.claims.drop(cl)
		return
	}
	if c.orderly && !c.within { // none of its segments is in flight
		cl.until, cl.remote = now.Add(s.cfg.TimeWait), c.remote
	}
	if cl.until <= now { // or that of an earlier connection
		s.claims.drop(cl)
		return
	}
	cl.timeWait, cl.since = true, now
	q := s.timeWait[cl.uid]
	i := len(q)
	for i > 0 && q[i-1].until > cl.until {
		i--
	}
	s.timeWait[cl.uid] = slices.Insert(q, i, cl)
	s.wake(cl.until)
}

// endTimeWait releases the ports whose TIME-WAIT is over, and returns when the next one ends, or 0. Called with mu held.
func (s *Server) endTimeWait(now clock.Time) (next clock.Time) {
	for uid, q := range s.timeWait {
		for len(q) > 0 && q[0].until.Due(now) {
			s.claims.drop(q[0])
			q[0] = nil
			q = q[1:]
		}
		if s.timeWait[uid] = q; len(q) == 0 {
			delete(s.timeWait, uid)
			continue
		}
		next = clock.Earliest(next, q[0].until)
	}
	return next
}

// portsInTimeWait returns the number of ports in TIME-WAIT. Called with mu held.
func (s *Server) portsInTimeWait() (n int) {
	for _, q := range s.timeWait {
		n += len(q)
	}
	return n
}

// portFreed returns a port to the quota of uid. Called with mu held.
func (s *Server) portFreed(uid uint32) {
	s.uncharge(s.account(uid), resPorts, 1)
	s.settle(uid)
}
