package ctrl

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// deadline returns the earlier of limit and the deadline of the startup, or 0.
func (c *conn) deadline() clock.Time {
	if c.st != nil && (c.state == connStartup || c.state == connWaiting) {
		return clock.Earliest(c.limit, c.st.Deadline())
	}
	return c.limit
}

// arm makes the timer goroutine watch the deadline of c. Called with mu held.
func (s *Server) arm(c *conn) {
	at := c.deadline()
	if at == 0 || c.state == connGone {
		delete(s.pending, c)
		return
	}
	s.pending[c] = struct{}{}
	s.wake(at)
}

// wake makes the timer goroutine wake at the given time or earlier. Called with mu held.
func (s *Server) wake(at clock.Time) {
	if s.wakeAt == 0 || at < s.wakeAt {
		select {
		case s.rewake <- struct{}{}:
		default:
		}
	}
}

// runTimers handles the deadlines of connections.
func (s *Server) runTimers() {
	t := time.NewTimer(time.Hour)
	defer t.Stop()
	for {
		s.mu.Lock()
		next := s.expire(s.now())
		s.wakeAt = next
		wait := time.Hour
		if next != 0 {
			wait = next.Sub(s.now())
		}
		s.mu.Unlock()
		t.Reset(wait)
		select {
		case <-t.C:
		case <-s.rewake:
		case <-s.done:
			return
		}
	}
}

// expire handles the deadlines that have passed and returns the next one. Called with mu held.
func (s *Server) expire(now clock.Time) (next clock.Time) {
	for c := range s.pending {
		if c.deadline().Due(now) {
			s.expired(c, now)
		}
	}
	for c := range s.pending {
		next = clock.Earliest(next, c.deadline())
	}
	next = clock.Earliest(next, s.endTimeWaits(now))
	next = clock.Earliest(next, s.endLate(now))
	next = clock.Earliest(next, s.claims.endLost(now))
	next = clock.Earliest(next, s.refreshAgain(now))
	return clock.Earliest(next, s.resetLingers(now))
}

func (s *Server) expired(c *conn, now clock.Time) {
	if c.limit.Due(now) {
		switch c.state {
		case connUp, connClosing: // a close that took too long
			c.limit = 0
			s.engine.Disconnect(c.id, true)
			s.arm(c)
		default:
			err := c.failure
			if err == nil {
				what := waits[c.state]
				if c.sctp != nil && c.state == connDialing {
					what = "the SCTP association, or the peer's answer,"
				}
				err = errorf(timedOut, "ctrl: connection with %v: %s took too long", c.remote, what)
			}
			s.end(c, err)
		}
		return
	}
	c.st.HandleTimeout(now)
	s.pump(c)
}

var waits = [...]string{
	connResolving: "finding the route and the neighbour", connDialing: "the TCP handshake", connStartup: "the MPA start-up", connStreaming: "",
	connWaiting: "the application's answer", connSwitching: "the first FPDU of the peer", connGone: "",
}
