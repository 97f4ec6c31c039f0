package ctrl

import (
	"net/netip"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// The port of a connection that was opened here and closed from here first stays
// claimed while TCP is in TIME-WAIT: the engine answers for it, and its guard
// socket keeps the kernel from giving it to another program. Such ports count in
// their user's quota. A user that has no more, or a host that has none, reuses the
// port that has been in TIME-WAIT for longest: for another peer there is nothing to
// wait for, and the engine lets a connection to the same peer follow by RFC 6191.

// reuseAfter is how long a port is in TIME-WAIT before it is reused.
const reuseAfter = time.Second

// takePort claims the local endpoint want for the active open c, within the quota
// of its user. Called with mu held.
func (s *Server) takePort(c *conn, want netip.AddrPort) (*claim, error) {
	uid, limit := c.sess.cred.Uid, uint64(c.sess.policy().limits.Ports)
	a := s.account(uid)
	err := error(nil)
	if have := a[resPorts]; have >= limit {
		err = overQuota(uid, resPorts, have, 1, limit)
	} else {
		var cl *claim
		if cl, err = s.claims.take(want, uid, false); err == nil {
			cl.active = true
			a[resPorts]++
			return cl, nil
		}
	}
	if want.Port() == 0 {
		if cl := s.reusePort(uid, want.Addr(), c.remote); cl != nil {
			return cl, nil
		}
	}
	return nil, err
}

// reusePort takes the user's oldest port on addr out of TIME-WAIT, if there is one
// that may be reused: rather one whose last peer was not remote. Called with mu held.
func (s *Server) reusePort(uid uint32, addr netip.Addr, remote netip.AddrPort) *claim {
	q, best := s.timeWait[uid], -1
	for i, cl := range q {
		if cl.addr.Addr() != addr || s.now().Sub(cl.since) < reuseAfter {
			continue
		}
		if best < 0 {
			best = i
		}
		if cl.remote != remote {
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
	cl.rests = false
	return cl
}

// reuseLook bounds how many ports are passed over whose last peer was the same.
const reuseLook = 64

// leavePort gives up the endpoint of c, which has ended; a port in TIME-WAIT only
// when that is over. Called with mu held.
func (s *Server) leavePort(c *conn) {
	cl, now := c.claim, s.now()
	if c.listener != nil || cl == nil {
		s.claims.drop(cl)
		return
	}
	if c.lingers {
		cl.until, cl.remote = now.Add(s.cfg.TimeWait), c.remote
	}
	if cl.until <= now { // also that of a connection before
		s.claims.drop(cl)
		return
	}
	cl.rests, cl.since = true, now
	q := s.timeWait[cl.uid]
	i := len(q)
	for i > 0 && q[i-1].until > cl.until {
		i--
	}
	s.timeWait[cl.uid] = slices.Insert(q, i, cl)
	s.wake(cl.until)
}

// endTimeWait frees the ports whose TIME-WAIT is over, and returns when the next
// one's is; 0: there is none. Called with mu held.
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

// resting returns how many ports are in TIME-WAIT. Called with mu held.
func (s *Server) resting() (n int) {
	for _, q := range s.timeWait {
		n += len(q)
	}
	return n
}

// portFreed returns a port to the quota of uid. Called with mu held.
func (s *Server) portFreed(uid uint32) {
	s.account(uid)[resPorts]--
	s.settle(uid)
}
