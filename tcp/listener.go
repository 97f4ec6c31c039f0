package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Listener is a port in LISTEN. It does not store half-open connections: it counts them, and answers with SYN cookies when the SYN queue is
// full.
type Listener struct {
	cfg     *Config
	backlog int
	half    int // connections in SYN-RECEIVED
	secret  [16]byte
	mtu     int
	flooded clock.Time // time of the last cookie sent
}

// NewListener returns a listener with a SYN queue of backlog entries. Each new connection has the settings that cfg has then. mtu is that of
// the link. secret is random and kept for the life of the process.
func NewListener(cfg *Config, backlog int, secret [16]byte, mtu int) *Listener {
	return &Listener{cfg: cfg, backlog: max(backlog, 1), secret: secret, mtu: mtu}
}

// HandleSegment processes a segment for the listening port that matches no connection (RFC 9293 3.10.7.2). If c is not nil the caller adds
// it to the flow table: it is in SYN-RECEIVED, and PollTransmit returns its SYN-ACK; or a SYN cookie made it ESTABLISHED, and the caller
// passes the same segment to c.HandleSegment. If ok is true the caller sends reply.
func (l *Listener) HandleSegment(now clock.Time, f pkt.Flow, s *Segment) (c *Conn, reply Header, ok bool) {
	switch {
	case s.Flags&RST != 0:
		return nil, Header{}, false
	case s.Flags&ACK != 0:
		if s.Flags&SYN == 0 {
			if c := l.checkCookie(now, &f, s); c != nil {
				return c, Header{}, false
			}
		}
		reply, ok = Reset(&s.Header, s.Len)
		return nil, reply, ok
	case s.Flags&SYN == 0:
		return nil, Header{}, false
	}
	if l.half >= l.backlog {
		l.flooded = now
		return nil, l.cookieReply(now, &f, s), true
	}
	l.half++
	iss := ISS(l.secret, f, now)
	c = newConn(now, l.cfg, f, iss, l.mtu)
	c.state = SynReceived
	c.queued = true
	c.nxt = iss + 1
	c.takeSYN(now, &s.Header)
	c.ecnOK = l.cfg.acceptsECN() && s.Flags&(ECE|CWR) == ECE|CWR
	c.synPending = true
	c.arm(timerRTO, now.Add(c.rto))
	return c, Header{}, false
}

// Done reports that c, which came from this listener, has left SYN-RECEIVED. It may be called more than once, and for a connection made
// from a cookie, which does not count in the SYN queue.
func (l *Listener) Done(c *Conn) {
	if c.queued {
		c.queued = false
		l.half--
	}
}

// Half returns the number of connections in SYN-RECEIVED.
func (l *Listener) Half() int { return l.half }

// SetMTU sets the MTU of future connections.
func (l *Listener) SetMTU(mtu int) { l.mtu = mtu }

// cookieLife is how long after the last cookie was sent a cookie is accepted.
const cookieLife = 2 * cookiePeriod * time.Second
