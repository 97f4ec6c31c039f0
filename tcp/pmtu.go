package tcp

import (
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// Header sizes and limits of the two IP versions.
const (
	ipv4Header, ipv6Header         = 20, 40
	ipv4MinMTU, ipv6MinMTU         = 68, 1280
	ipv4DefaultMSS, ipv6DefaultMSS = 536, 1220 // RFC 9293 MUST-15
	minMSS                         = 32        // lower limit of the MSS, whatever the MTU
)

const (
	leastMTU  = 552              // smallest path MTU accepted over IPv4, as in Linux
	pmtuRaise = 10 * time.Minute // time after which a lowered path MTU is raised again (RFC 1191 6.3)
	pmtuRetry = 10 * time.Second // the same if the longer packets got through before
)

// newPath returns the state of a path of which only the MTU of the link is known.
func newPath(f *pkt.Flow, mtu int) pathState {
	return pathState{v6: !netip.AddrFrom16(f.Remote).Is4In6(), linkMTU: mtu, mtu: mtu}
}

func (p *pathState) ipHeader() int {
	if p.v6 {
		return ipv6Header
	}
	return ipv4Header
}

// overhead returns the bytes of a packet before the payload of a segment.
func (c *Conn) overhead() int {
	n := c.ipHeader() + headerLen
	if c.tsOK {
		n += timestampsLen
	}
	return n
}

func (p *pathState) defaultMSS() int {
	if p.v6 {
		return ipv6DefaultMSS
	}
	return ipv4DefaultMSS
}

// offeredMSS returns the value of our MSS option (RFC 9293 3.7.1, RFC 6691). It depends on the link, not on the path to the peer.
func (p *pathState) offeredMSS() int {
	return min(max(p.linkMTU-p.ipHeader()-headerLen, minMSS), 0xffff)
}

// setMSS computes the payload of a full segment (RFC 9293 3.7.1, MUST-16) and splits queued segments if it has shrunk.
func (c *Conn) setMSS() {
	n := min(c.mtu-c.ipHeader()-headerLen, c.peerMSS)
	if c.tsOK {
		n -= timestampsLen
	}
	n = max(n, minMSS)
	if n == c.mss {
		return
	}
	old := c.mss
	c.mss = n
	c.w.mss = n
	c.w.cwnd = max(c.w.cwnd, n)
	if n < old || c.state < Established {
		c.q.recut(int32(n))
		// The peer may have taken the first part of a segment.
		for c.q.outstanding() && c.q.at(c.q.head).end().LessEq(c.una) {
			c.release(c.q.at(c.q.head))
			c.q.pop()
		}
	}
}

// minMTU returns the smallest path MTU that is accepted.
func (p *pathState) minMTU() int {
	if p.v6 {
		return ipv6MinMTU
	}
	return leastMTU
}

// SetMTU sets the MTU of the link. A change discards what was discovered about the path.
func (c *Conn) SetMTU(now clock.Time, mtu int) {
	if mtu == c.linkMTU {
		return
	}
	c.linkMTU = mtu
	c.stop(timerPMTU)
	c.changeMTU(now, mtu)
}

func (c *Conn) changeMTU(now clock.Time, mtu int) {
	if mtu == c.mtu || c.state == Closed {
		return
	}
	shrunk := mtu < c.mtu
	c.mtu = mtu
	c.setMSS()
	if shrunk {
		c.stats.PMTUShrinks++
		if mtu < c.linkMTU {
			c.arm(timerPMTU, now.Add(pmtuRaise))
		}
	}
}

// raiseMTU raises a lowered path MTU to that of the link, unless nothing gets through now.
func (c *Conn) raiseMTU(now clock.Time) {
	if c.backoff > 0 {
		c.arm(timerPMTU, now.Add(pmtuRetry))
		return
	}
	c.mtu, c.proven = c.linkMTU, 0
	c.setMSS()
}

// HandleICMP processes an ICMP error about a packet of this connection. It ignores an error whose sequence number is not in flight (RFC
// 5927 4.1).
func (c *Conn) HandleICMP(now clock.Time, e *pkt.ICMPError) {
	if c.state == Closed || !serial.Num(e.Seq).In(c.una, uint32(c.nxt-c.una)) && (c.state != SynSent && c.state != SynReceived || serial.Num(e.Seq) != c.iss) {
		return
	}
	switch e.Kind {
	case pkt.TooBig:
		c.tooBig(now, e)
	case pkt.Unreachable, pkt.TimeExceeded:
		// An error other than "too big" is fatal only before the connection is established (RFC 9293 MUST-54 to 56, RFC 5927 5.2).
		if err := openError(e, c.v6, c.synRetries); c.state == SynSent && err != nil {
			c.end(err)
			return
		}
		c.softError = true
	}
}

// softRetries is how often a SYN is retransmitted before a soft error ends an open: a router may answer so for a moment, while it resolves
// an address or its routes change, but not for long (RFC 5461 section 4).
const softRetries = 2

// openError returns what an open fails with because of e, or nil if it goes on. synRetries is how often its SYN was retransmitted.
func openError(e *pkt.ICMPError, v6 bool, synRetries int) error {
	if err := hardError(v6, e.Code); err != nil && e.Kind == pkt.Unreachable {
		return err
	}
	if synRetries >= softRetries {
		return ErrUnreachable
	}
	return nil
}

// hardError returns what an open fails with if code is protocol unreachable or port unreachable (RFC 1122 4.2.3.9), or says that
// communication is prohibited, else nil.
func hardError(v6 bool, code uint8) error {
	switch {
	case pkt.Prohibited(v6, code):
		return ErrUnreachable
	case v6 && code == 4, !v6 && (code == 2 || code == 3):
		return ErrRefused
	}
	return nil
}

// tooBig lowers the path MTU and retransmits the segments that were too long.
func (c *Conn) tooBig(now clock.Time, e *pkt.ICMPError) {
	if c.state < Established {
		return
	}
	c.q.divide()
	p := c.q.find(serial.Num(e.Seq))
	if p == c.q.next || c.q.at(p).seq != serial.Num(e.Seq) {
		return
	}
	mtu := e.MTU
	size := int(c.q.at(p).len) + c.overhead()
	if mtu == 0 {
		mtu = plateau(size) // RFC 1191 section 5: the router did not report its MTU
	}
	mtu = max(mtu, c.minMTU())
	if mtu >= c.mtu || mtu >= size {
		return
	}
	// Every segment that is too long is lost too, but not by congestion (RFC 1191 6.5).
	for p := c.q.head; p != c.q.next; p++ {
		if s := c.q.at(p); s.state == inFlight && int(s.len)+c.overhead() > mtu {
			c.q.markLost(p)
		}
	}
	c.changeMTU(now, mtu)
}

// plateau returns the next lower common MTU (RFC 1191 section 7.1).
func plateau(mtu int) int {
	for _, m := range [...]int{9000, 8166, 4352, 2002, 1500, 1492, 1280, 1006, 576, 508, 296} {
		if m < mtu {
			return m
		}
	}
	return ipv4MinMTU
}

// blackHoleTimeouts is how many consecutive time-outs of one segment indicate a black hole: R1 of RFC 9293 3.8.3 (SHLD-10). Fewer are too
// often ordinary loss, which would then keep the MTU low for a long time.
const blackHoleTimeouts = 3

// blackHole lowers the path MTU when full segments do not get through and no ICMP error reports why (RFC 4821 7.7, RFC 8899 4.3). If segments
// of that size did before, the path has probably carried nothing for a while, as when a link was down, so it does not stay low for long.
func (c *Conn) blackHole(now clock.Time) {
	if c.backoff < blackHoleTimeouts {
		return
	}
	s := c.q.at(c.q.head)
	size, outage := min(c.mtu, int(s.len)+c.overhead()), int(s.len) <= c.proven
	for _, mtu := range blackHoleMTUs {
		if mtu < size && mtu >= c.minMTU() {
			if c.changeMTU(now, mtu); outage {
				c.arm(timerPMTU, now.Add(pmtuRetry))
			}
			// The next transmission is a new, shorter segment, so reduce the back-off.
			c.backoff = blackHoleTimeouts - 1
			return
		}
	}
}

// blackHoleMTUs are the sizes to try, in descending order: Ethernet, tunnels, IPv6, and a size that every path should carry.
var blackHoleMTUs = [...]int{1500, 1400, 1280, 1084}
