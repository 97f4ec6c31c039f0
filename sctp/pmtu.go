package sctp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// The smallest MTUs accepted (RFC 1191, RFC 8201 section 4), and the size that nearly every path carries, which is tried first after a
// black hole (BASE_PLPMTU of RFC 8899 5.1.2).
const (
	minMTU  = 576
	baseMTU = 1200
	minMTU6 = 1280
)

const (
	raiseAfter = 10 * time.Minute // PMTU_RAISE_TIMER of RFC 8899 5.1.1
	probeWait  = 15 * time.Second // PROBE_TIMER is this plus one RTO
	maxProbes  = 3                // unanswered probes of one size (RFC 8899 5.1.2)

	// blackHoleTimeouts is how many consecutive time-outs of long packets, while shorter ones get through, indicate a black hole. It is the
	// same as for TCP: fewer are too often ordinary loss.
	blackHoleTimeouts = 3
)

// commonMTUs are the sizes to search (RFC 8899 5.3.2): those of Ethernet and other links, and of tunnels over them.
var commonMTUs = [...]int{1006, 1280, 1400, 1420, 1450, 1476, 1492, 1500, 4352, 8166, 8950, 9000, 17914, 32000}

// pmtu is the path MTU discovery state of a path. Packets start at the MTU of the first hop. If ICMP errors or losses show that this is too
// long, packets become shorter, and padded HEARTBEATs later search for what the path carries (RFC 8899 6.2). While packets have the full
// first-hop size there is no search.
type pmtu struct {
	limit  int  // MTU of the first hop
	above  int  // least size known not to get through
	size   int  // IP packet size of the outstanding or next probe; 0 if none
	tries  int  // probes of this size sent
	plain  bool // the probe tests reachability for size, but is not padded
	send   bool
	nonce  uint64
	lost   int // consecutive time-outs that lost something longer than floor
	passed int // size of a probe answered since then, or 0
}

func (p *path) minMTU() int {
	if p.addr.Is6() {
		return minMTU6
	}
	return minMTU
}

// floor returns the MTU to fall back to after size-related losses. Shorter packets are never suspected.
func (p *path) floor() int {
	if p.mtu > baseMTU {
		return max(baseMTU, p.minMTU())
	}
	return p.minMTU()
}

// SetMTU sets the MTU of the first hop of path i, in bytes of IP. A change discards what was discovered about the path. The MTU of path 0
// also applies to addresses that the peer adds later.
func (a *Assoc) SetMTU(i, mtu int) {
	if i == 0 {
		a.mtu = mtu
	}
	p := &a.paths[i]
	if mtu == p.pmtu.limit {
		return
	}
	p.pmtu = pmtu{limit: mtu}
	p.stop(timerMTU)
	p.mtu = max(mtu, p.minMTU())
}

// lowerMTU lowers the MTU of the path. A search for a larger one starts after the given time.
func (p *path) lowerMTU(now clock.Time, mtu int, again time.Duration) {
	mtu = max(mtu, p.minMTU())
	if mtu >= p.mtu {
		return
	}
	p.mtu = mtu
	p.pmtu = pmtu{limit: p.pmtu.limit}
	p.arm(timerMTU, now.Add(again))
}

// tooBig processes an ICMP error that reports the MTU of path i.
func (a *Assoc) tooBig(now clock.Time, i, mtu int) {
	p := &a.paths[i]
	m := &p.pmtu
	if mtu < p.minMTU()/2 {
		return
	}
	// A packet of minimum size cannot become shorter: retransmitted at once, it would only meet the next error.
	mtu = max(mtu, p.minMTU())
	switch {
	case mtu < p.mtu:
		p.lowerMTU(now, mtu, raiseAfter)
		long := false // the packet of the chunk is
		for q := a.next; q != a.first; {
			q--
			it := a.at(q)
			if int(it.path) == i && it.state == inFlight {
				if long = long || int(it.size) > mtu; long {
					a.lose(q)
				}
			}
			long = long && !it.head
		}
	case m.searching() && mtu < m.size:
		// A probe was too long (RFC 8899 4.6.2): the router's MTU is better than the table.
		m.above = mtu + 1
		if mtu > p.mtu {
			m.tries = 0
			a.probeMTU(now, p, mtu)
		} else {
			a.search(now, p)
		}
	}
}

// searching reports whether a search is in progress.
func (m *pmtu) searching() bool { return m.size != 0 && m.lost == 0 }

// mtuDue starts a search on path i, or ends the outstanding probe as lost.
func (a *Assoc) mtuDue(now clock.Time, i int) {
	p := &a.paths[i]
	m := &p.pmtu
	switch {
	case a.state != Established:
		m.size = 0
		p.arm(timerMTU, now.Add(raiseAfter))
	case !p.confirmed || !p.active || p.errors > 0:
		m.tries = 0 // losses there have nothing to do with size
		p.arm(timerMTU, now.Add(probeWait+p.rto))
	case m.size == 0 || m.lost > 0:
		m.lost, m.passed = 0, 0 // data sent now gets through
		m.tries, m.above = 0, m.limit+1
		a.probeMTU(now, p, m.limit) // try the full first-hop MTU first
	case m.tries < maxProbes:
		a.probeMTU(now, p, m.size)
	default:
		m.above = m.size
		a.search(now, p)
	}
}

// search continues with the middle of the sizes between those that get through and those that do not.
func (a *Assoc) search(now clock.Time, p *path) {
	m := &p.pmtu
	var sizes [len(commonMTUs)]int
	n := 0
	for _, s := range commonMTUs {
		if s > p.mtu && s < m.above {
			sizes[n] = s
			n++
		}
	}
	m.tries = 0
	if n > 0 {
		a.probeMTU(now, p, sizes[n/2])
		return
	}
	m.size, m.send = 0, false
	p.stop(timerMTU)
	if p.mtu < m.limit {
		p.arm(timerMTU, now.Add(raiseAfter))
	}
}

// probeMTU schedules a HEARTBEAT on p that makes an IP packet of size bytes.
func (a *Assoc) probeMTU(now clock.Time, p *path, size int) {
	m := &p.pmtu
	m.size, m.send, m.plain = size, true, false
	m.tries++
	m.nonce = a.newNonce(now)
	p.arm(timerMTU, now.Add(probeWait+p.rto))
	a.stats.MTUProbes++
}

// mtuProbe builds the probe (RFC 8899 6.2.1.2). A peer that does not know PAD skips it.
func (a *Assoc) mtuProbe(now clock.Time, h *Header, i int) []byte {
	p := &a.paths[i]
	m := &p.pmtu
	m.send = false
	b := a.heartbeat(h, i, now, m.nonce)
	if n := HeaderLen + (m.size-p.overhead)&^3 - len(b); !m.plain && n >= chunkHeader {
		var at int
		b, at = beginChunk(b, ChunkPad, 0)
		for n -= chunkHeader; n > 0; n -= len(zero4) {
			b = append(b, zero4[:]...)
		}
		b = endChunk(b, at)
	}
	a.head = b[:0]
	return b
}

// mtuProbed processes the answer to the probe of path i. It does not clear the error count while data is outstanding, because the data may
// be lost for its size (RFC 9260 8.1).
func (a *Assoc) mtuProbed(now clock.Time, i int) {
	p := &a.paths[i]
	m := &p.pmtu
	m.nonce, m.send = 0, false
	if a.outstanding == 0 && a.lostCount == 0 {
		a.alive(i)
	}
	if m.lost > 0 {
		m.passed, m.size = m.size, 0
		return
	}
	if m.size > p.mtu {
		p.mtu = m.size
	}
	a.search(now, p)
}

// blackHole records a time-out on path i in which a packet of size bytes, the longest lost, did not get through. After several in a row,
// shorter probes are sent together with the retransmissions. If a probe gets through and the long packets still do not, the size is the
// cause and no ICMP error reports it (RFC 8899 4.3); a dead peer answers neither. The first probe has the size that nearly every path
// carries (BASE in RFC 8899 5.2), the second the minimum size without PAD, for a narrower path or a peer that mishandles PAD.
func (a *Assoc) blackHole(now clock.Time, i, size int) {
	p := &a.paths[i]
	m := &p.pmtu
	if size <= p.floor() {
		return
	}
	if m.lost == 0 { // no search in the meantime
		p.longGotThrough(now)
	}
	switch m.lost++; {
	case m.lost < blackHoleTimeouts-1:
	case m.passed != 0:
		a.stats.BlackHoles++
		p.lowerMTU(now, m.passed, p.rto)
	default:
		due := p.deadlines[timerMTU]
		a.probeMTU(now, p, p.floor())
		p.arm(timerMTU, due)
		if m.plain = (m.lost-blackHoleTimeouts)%2 == 0; m.plain {
			m.size = p.minMTU()
		}
	}
}

// longGotThrough ends a black hole suspicion and any search; another search starts later.
func (p *path) longGotThrough(now clock.Time) {
	p.pmtu = pmtu{limit: p.pmtu.limit}
	p.stop(timerMTU)
	if p.mtu < p.pmtu.limit {
		p.arm(timerMTU, now.Add(raiseAfter))
	}
}
