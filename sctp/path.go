package sctp

import (
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// path is one address of the peer's with all that is known of the way there.
type path struct {
	addr      netip.Addr
	udp       uint16
	mtu       int
	pmtu      pmtu
	confirmed bool // the peer is known to be there (RFC 9260 5.4)
	active    bool
	errors    int

	cwnd, ssthresh, pba int
	flight              int
	fullBefore          bool // the window was used up before this SACK
	acked               int  // octets that this SACK acknowledges
	heard               bool // this SACK acknowledges something
	earliest            bool // and the oldest in flight
	single              bool // timed out: one packet at a time until something is acknowledged
	lastData            clock.Time

	srtt, rttvar, rto time.Duration
	timing            bool // an RTT is being measured
	timed             serial.Num
	timedAt           clock.Time

	t3      clock.Time
	ack     []byte     // HEARTBEAT ACKs to be sent there
	hb      clock.Time // next HEARTBEAT, or the time-out of the last one
	hbOut   bool       // the last one is not answered
	hbWait  bool       // nor is its time over
	hbSend  bool
	hbNonce uint64
	hbAt    clock.Time
	used    bool // data were sent since the heartbeat timer was armed
}

// PathInfo describes a path.
type PathInfo struct {
	Addr              netip.Addr
	UDPPort           uint16
	MTU, Cwnd, Flight int
	RTO, SRTT         time.Duration
	Active, Confirmed bool
}

// Path returns path i, an index that Out.Path gives.
func (a *Assoc) Path(i int) PathInfo {
	p := &a.paths[i]
	return PathInfo{p.addr, p.udp, p.mtu, p.cwnd, p.flight, p.rto, p.srtt, p.active, p.confirmed}
}

// FindPath returns the path to an address, if there is one.
func (a *Assoc) FindPath(addr netip.Addr) (i int, ok bool) {
	i = a.findPath(addr)
	return i, i >= 0
}

// Paths returns how many paths there are, and which one is in use.
func (a *Assoc) Paths() (n, current int) { return a.npaths, a.primary }

func (a *Assoc) addPath(addr netip.Addr, udp uint16, confirmed bool) int {
	for i := range a.paths[:a.npaths] {
		if a.paths[i].addr == addr {
			return i
		}
	}
	if a.npaths == len(a.paths) {
		return 0
	}
	p := &a.paths[a.npaths]
	*p = path{addr: addr, udp: udp, mtu: a.mtu, pmtu: pmtu{limit: a.mtu}, confirmed: confirmed, active: true, rto: a.cfg.RTOInitial}
	a.resetWindow(p)
	a.npaths++
	return a.npaths - 1
}

func (a *Assoc) findPath(addr netip.Addr) int {
	for i := range a.paths[:a.npaths] {
		if a.paths[i].addr == addr {
			return i
		}
	}
	return -1
}

// answerPath is where control chunks and SACKs go in answer to the packet at hand: to
// where it came from, unless the peer is not known to be there (5.4).
func (a *Assoc) answerPath() int {
	if a.paths[a.lastIn].confirmed {
		return a.lastIn
	}
	return a.primary
}

// overhead is what stands in front of the chunks in an IP packet.
func (a *Assoc) overhead(p *path) int {
	n := HeaderLen + 20
	if p.addr.Is6() {
		n += 20
	}
	if a.cfg.UDP {
		n += 8
	}
	return n
}

// budget is how many octets of chunks fit in one packet.
func (a *Assoc) budget(p *path) int { return (p.mtu - a.overhead(p)) &^ 3 }

// pmdcs is PMDCS of RFC 9260: user data of one packet with one DATA chunk.
func (a *Assoc) pmdcs(p *path) int { return a.budget(p) - dataHeader }

// resetWindow sets the initial window (RFC 9260 7.2.1).
func (a *Assoc) resetWindow(p *path) {
	floor := 4404
	if p.addr.Is6() {
		floor = 4344
	}
	m := a.pmdcs(p)
	p.cwnd = min(4*m, max(2*m, floor))
	p.ssthresh = 1 << 30
	p.pba = 0
}

// sample is RFC 9260 6.3.1.
func (a *Assoc) sample(p *path, r time.Duration) {
	r = max(r, 1)
	if p.srtt == 0 {
		p.srtt, p.rttvar = r, r/2
	} else {
		d := p.srtt - r
		if d < 0 {
			d = -d
		}
		p.rttvar += (d - p.rttvar) / 4
		p.srtt += (r - p.srtt) / 8
	}
	a.setRTO(p)
}

// setRTO sets the RTO to what was measured, or to the initial one (6.3.1 C1): the back-off
// of what was asked before is not that of what follows.
func (a *Assoc) setRTO(p *path) {
	p.rto = a.cfg.RTOInitial
	if p.srtt != 0 {
		p.rto = min(max(p.srtt+4*p.rttvar, a.cfg.RTOMin), a.cfg.RTOMax)
	}
}

func (a *Assoc) backOff(p *path) { p.rto = min(2*p.rto, a.cfg.RTOMax) }

// TimeoutsInARow is how many packets and heartbeats in a row were not answered in
// time.
func (a *Assoc) TimeoutsInARow() int { return a.errors }

// failed counts a time-out on path i: of what is counted for the association too, or not,
// as a HEARTBEAT on a path that is not in use (RFC 9260 8.1). It reports whether the
// association is over.
func (a *Assoc) failed(now clock.Time, i int, counts bool) bool {
	p := &a.paths[i]
	if p.active {
		p.errors++ // 8.3
	}
	if counts {
		a.errors++
	}
	if a.errors > a.cfg.MaxAssoc {
		a.end(ErrTimeout)
		return true
	}
	if p.errors > a.cfg.MaxPath && p.active && a.npaths > 1 {
		p.active = false
		a.choosePath()
	}
	return false
}

// alive clears the counts of path i.
func (a *Assoc) alive(i int) {
	p := &a.paths[i]
	p.errors = 0
	a.errors = 0
	if !p.active {
		p.active = true
		a.choosePath()
	}
}

// choosePath takes the first path that is up, in the peer's order. If none is, the
// one in use stays.
func (a *Assoc) choosePath() {
	for i := range a.paths[:a.npaths] {
		if p := &a.paths[i]; p.active && p.confirmed {
			if i != a.primary {
				a.primary = i
				a.stats.Failovers++
			}
			return
		}
	}
}

// retransmitPath is where what was lost on path i goes: another path that is up.
func (a *Assoc) retransmitPath(i int) int {
	for n := 1; n < a.npaths; n++ {
		j := (i + n) % a.npaths
		if p := &a.paths[j]; p.active && p.confirmed {
			return j
		}
	}
	return a.primary
}
