package sctp

import (
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// path is one address of the peer and the state of the path to it.
type path struct {
	addr      netip.Addr
	udp       uint16
	overhead  int // bytes before the chunks in an IP packet
	mtu       int
	pmtu      pmtu
	confirmed bool // address confirmed (RFC 9260 5.4)
	active    bool
	errors    int

	cwnd, ssthresh, pba int
	flight              int
	fullBefore          bool // the window was fully used before this SACK
	acked               int  // bytes acknowledged by this SACK
	single              bool // T3 expired: send one packet at a time until something is acknowledged
	lastData            clock.Time

	srtt, rttvar, rto time.Duration
	timed             serial.Num // TSN whose RTT is measured
	timedAt           clock.Time // when it was sent; 0: none is measured

	deadlines [numPathTimers]clock.Time // see timers.go

	ack     []byte // HEARTBEAT ACKs to send on this path
	beat    beat
	hbNonce uint64
	hbAt    clock.Time
	used    bool // data was sent since the heartbeat timer was armed
}

// beat is the state of the last HEARTBEAT.
type beat uint8

const (
	beatIdle beat = iota // answered, or data has made it unnecessary
	beatDue              // to be sent now
	beatSent             // to be answered before its time-out
	beatLate             // timed out; an answer still counts
)

// PathInfo describes the state of a path. A path that is queried has its fields as counters.
type PathInfo struct {
	Addr              netip.Addr
	UDPPort           uint16
	MTU, Cwnd         int
	RTO, SRTT         time.Duration
	Active, Confirmed bool
}

// Path returns the state of path i, an index as in Out.Path.
func (a *Assoc) Path(i int) PathInfo {
	p := &a.paths[i]
	return PathInfo{p.addr, p.udp, p.mtu, p.cwnd, p.rto, p.srtt, p.active, p.confirmed}
}

// FindPath returns the index of the path to addr, or -1.
func (a *Assoc) FindPath(addr netip.Addr) int {
	for i := range a.paths {
		if a.paths[i].addr == addr {
			return i
		}
	}
	return -1
}

// Paths returns the number of paths.
func (a *Assoc) Paths() int { return len(a.paths) }

// Primary returns the index of the primary path.
func (a *Assoc) Primary() int { return a.primary }

func (a *Assoc) addPath(addr netip.Addr, udp uint16, confirmed bool) {
	if len(a.paths) == maxAddrs || a.FindPath(addr) >= 0 {
		return
	}
	p := path{addr: addr, udp: udp, mtu: a.mtu, pmtu: pmtu{limit: a.mtu}, confirmed: confirmed, active: true, rto: rtoInitial}
	p.overhead = HeaderLen + 20
	if addr.Is6() {
		p.overhead += 20
	}
	if a.cfg.UDP {
		p.overhead += 8
	}
	p.resetWindow()
	a.paths = append(a.paths, p)
}

// answerPath returns the path for control chunks and SACKs that answer the current packet: its source, unless that address is unconfirmed
// (5.4).
func (a *Assoc) answerPath() int {
	if a.paths[a.lastIn].confirmed {
		return a.lastIn
	}
	return a.primary
}

// budget returns how many bytes of chunks fit in one packet.
func (p *path) budget() int { return (p.mtu - p.overhead) &^ 3 }

// pmdcs returns PMDCS of RFC 9260: the user data of a packet with one DATA chunk.
func (p *path) pmdcs() int { return p.budget() - dataHeader }

// resetWindow sets the initial window (RFC 9260 7.2.1).
func (p *path) resetWindow() {
	floor := 4404
	if p.addr.Is6() {
		floor = 4344
	}
	m := p.pmdcs()
	p.cwnd = min(4*m, max(2*m, floor))
	p.ssthresh = 1 << 30
	p.pba = 0
}

// times reports whether the RTT of tsn is being measured.
func (p *path) times(tsn serial.Num) bool { return p.timedAt != 0 && p.timed == tsn }

// sample is RFC 9260 6.3.1, of what was sent at the given time and is answered now. What was in flight while this host
// was stopped says nothing about the path.
func (a *Assoc) sample(now clock.Time, p *path, sent clock.Time) {
	if sent < a.since {
		return
	}
	r := max(now.Sub(sent), 1)
	if p.srtt == 0 {
		p.srtt, p.rttvar = r, r/2
	} else {
		p.rttvar += ((p.srtt - r).Abs() - p.rttvar) / 4
		p.srtt += (r - p.srtt) / 8
	}
	a.setRTO(p)
	a.cfg.RTT.Add(r)
}

// setRTO sets the RTO from the measured RTT, or to its initial value (6.3.1 C1). The back-off of earlier data does not apply to new data.
func (a *Assoc) setRTO(p *path) {
	p.rto = rtoInitial
	if p.srtt != 0 {
		p.rto = min(max(p.srtt+4*p.rttvar, a.cfg.RTOMin), rtoMax)
	}
}

func (p *path) backOff() { p.rto = min(2*p.rto, rtoMax) }

// TimeoutsInARow returns how many consecutive packets and heartbeats timed out, in the set-up too.
func (a *Assoc) TimeoutsInARow() int { return max(a.errors, a.initRetries) }

// failed counts a time-out on path i. counts says whether it counts for the association too; a HEARTBEAT on an unused
// path does not (RFC 9260 8.1). One that is late counts for neither, since the answer may be lost. It reports whether the
// association has ended.
func (a *Assoc) failed(i int, counts bool) bool {
	if a.late {
		return false
	}
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
	if p.errors > maxPath && p.active && len(a.paths) > 1 {
		p.active = false
		a.choosePath()
	}
	return false
}

// alive clears the error counts of path i.
func (a *Assoc) alive(i int) {
	p := &a.paths[i]
	p.errors = 0
	a.errors = 0
	if !p.active {
		p.active = true
		a.choosePath()
	}
}

// choosePath selects the first active path in the peer's order. If there is none, the current path stays.
func (a *Assoc) choosePath() {
	for i := range a.paths {
		if p := &a.paths[i]; p.active && p.confirmed {
			if i != a.primary {
				a.primary = i
				a.stats.Failovers++
			}
			return
		}
	}
}

// retransmitPath returns the path for chunks lost on path i: another active path if there is one.
func (a *Assoc) retransmitPath(i int) int {
	for n := 1; n < len(a.paths); n++ {
		j := (i + n) % len(a.paths)
		if p := &a.paths[j]; p.active && p.confirmed {
			return j
		}
	}
	return a.primary
}
