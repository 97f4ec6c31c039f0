package sctp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// The least MTUs that are believed (RFC 1191, RFC 8201 section 4), and what nearly every
// path takes, which is tried first when packets get lost for their size (BASE_PLPMTU of
// RFC 8899 5.1.2).
const (
	minMTU  = 576
	baseMTU = 1200
	minMTU6 = 1280
)

const (
	raiseAfter = 10 * time.Minute // PMTU_RAISE_TIMER of RFC 8899 5.1.1
	probeWait  = 15 * time.Second // PROBE_TIMER is longer than this by an RTO
	maxProbes  = 3                // of one size, unanswered (RFC 8899 5.1.2)

	// blackHoleTimeouts is how many time-outs in a row, each of a long packet, make a
	// black hole, if shorter ones get through: as many as with TCP, since fewer are
	// too often mere loss.
	blackHoleTimeouts = 3
)

// commonMTUs are the sizes that are searched between what gets through and what does
// not (RFC 8899 5.3.2): what tunnels leave of Ethernet's, and of other links'.
var commonMTUs = [...]int{1006, 1280, 1400, 1420, 1450, 1476, 1492, 1500, 4352, 8166, 8950, 9000, 17914, 32000}

// pmtu is what is known of the MTU of a path beside the one in use. Packets begin with
// that of the first hop. If they turn out to be too long, by ICMP or by what gets lost,
// they become shorter, and later on HEARTBEATs with padding find out what the path takes
// (RFC 8899 6.2). Where packets have the length that the first hop takes nothing is asked.
type pmtu struct {
	limit  int        // MTU of the first hop
	due    clock.Time // when a search begins, or the probe that is out is given up
	above  int        // sizes from this one on do not get through, as far as the search knows
	size   int        // IP packet of the probe that is to be sent, or is out; 0: none
	tries  int        // how often this size was sent
	plain  bool       // it stands for size, but is not padded
	send   bool
	nonce  uint64
	lost   int // time-outs in a row that lost something longer than floor
	passed int // what got through since: size of a probe, or 0
}

func (p *path) minMTU() int {
	if p.addr.Is6() {
		return minMTU6
	}
	return minMTU
}

// floor is the MTU to fall back to when packets get lost for their size. Shorter ones are
// not suspected.
func (p *path) floor() int {
	if p.mtu > baseMTU {
		return max(baseMTU, p.minMTU())
	}
	return p.minMTU()
}

// SetMTU tells the MTU of the first hop on path i, in octets of IP. If it is another one
// than before, what was found out of the path is forgotten with it. That of path 0 is
// also that of addresses which the peer will name.
func (a *Assoc) SetMTU(i, mtu int) {
	if i == 0 {
		a.mtu = mtu
	}
	p := &a.paths[i]
	if mtu == p.pmtu.limit {
		return
	}
	p.pmtu = pmtu{limit: mtu}
	if mtu = max(mtu, p.minMTU()); mtu != p.mtu {
		p.mtu = mtu
	}
}

// lowerMTU takes a smaller MTU for path i. After the time given it is seen if there is
// more.
func (a *Assoc) lowerMTU(now clock.Time, i, mtu int, again time.Duration) {
	p := &a.paths[i]
	mtu = max(mtu, p.minMTU())
	if mtu >= p.mtu {
		return
	}
	p.mtu = mtu
	p.pmtu = pmtu{limit: p.pmtu.limit, due: now.Add(again)}
}

// tooBig takes what an ICMP error says that path i carries.
func (a *Assoc) tooBig(now clock.Time, i, mtu int) {
	p := &a.paths[i]
	m := &p.pmtu
	if mtu < p.minMTU()/2 {
		return
	}
	// What is as short as packets become has no further answer: sent again at once, it
	// would meet the next error.
	mtu = max(mtu, p.minMTU())
	switch {
	case mtu < p.mtu:
		a.lowerMTU(now, i, mtu, raiseAfter)
		for q := a.first; q != a.next; q++ {
			if it := a.at(q); int(it.path) == i && int(it.len) > a.pmdcs(p) {
				a.lose(q)
			}
		}
	case m.searching() && mtu < m.size:
		// A probe was too long (RFC 8899 4.6.2): the router knows better than the table.
		m.above = mtu + 1
		if mtu > p.mtu {
			m.tries = 0
			a.probeMTU(now, p, mtu)
		} else {
			a.search(now, p)
		}
	}
}

// searching reports whether a search is under way.
func (m *pmtu) searching() bool { return m.size != 0 && m.lost == 0 }

// mtuDue begins a search on path i, or gives up the probe that is out.
func (a *Assoc) mtuDue(now clock.Time, i int) {
	p := &a.paths[i]
	m := &p.pmtu
	switch {
	case a.state != Established || a.closing:
		m.size = 0
		m.due = now.Add(raiseAfter)
	case !p.confirmed || !p.active || p.errors > 0:
		m.tries = 0 // what is lost there is not lost for its size
		m.due = now.Add(probeWait + p.rto)
	case m.size == 0 || m.lost > 0:
		m.lost, m.passed = 0, 0 // what is sent now gets through
		m.tries, m.above = 0, m.limit+1
		a.probeMTU(now, p, m.limit) // as if nothing had been in the way
	case m.tries < maxProbes:
		a.probeMTU(now, p, m.size)
	default:
		m.above = m.size
		a.search(now, p)
	}
}

// search goes on with the middle of what is left between what gets through and what does
// not.
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
	m.size, m.send, m.due = 0, false, 0
	if p.mtu < m.limit {
		m.due = now.Add(raiseAfter)
	}
}

// probeMTU has a HEARTBEAT of size octets sent on p, as an IP packet.
func (a *Assoc) probeMTU(now clock.Time, p *path, size int) {
	m := &p.pmtu
	m.size, m.send, m.plain = size, true, false
	m.tries++
	m.nonce = a.newNonce(now)
	m.due = now.Add(probeWait + p.rto)
	a.stats.MTUProbes++
}

// mtuProbe makes the packet (RFC 8899 6.2.1.2). A peer that does not know PAD skips it.
func (a *Assoc) mtuProbe(now clock.Time, h *Header, i int) []byte {
	p := &a.paths[i]
	m := &p.pmtu
	m.send = false
	b := a.heartbeat(h, i, now, m.nonce)
	if n := HeaderLen + (m.size-a.overhead(p))&^3 - len(b); !m.plain && n >= chunkHeader {
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

// mtuProbed takes the answer to the probe of path i. While data are under way those say
// whether the peer is there (RFC 9260 8.1): they may be lost for their size.
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

// blackHole takes note of a time-out on path i, in which a packet of size octets was lost
// and none that is longer. When that happens again and again, shorter ones are tried beside
// what is sent again; if one of these gets through, and the long ones still do not, it is for
// their size, and no ICMP error says so (RFC 8899 4.3). A peer that is not there answers
// neither. The first to be tried has what nearly every path takes (BASE in RFC 8899 5.2),
// the next is as short as can be: for a path that takes less, and a peer that chokes on PAD.
func (a *Assoc) blackHole(now clock.Time, i, size int) {
	p := &a.paths[i]
	m := &p.pmtu
	if size <= p.floor() {
		return
	}
	if m.lost == 0 { // no search meanwhile
		a.longGotThrough(now, p)
	}
	switch m.lost++; {
	case m.lost < blackHoleTimeouts-1:
	case m.passed != 0:
		a.stats.BlackHoles++
		a.lowerMTU(now, i, m.passed, p.rto)
	default:
		due := m.due
		a.probeMTU(now, p, p.floor())
		m.due = due
		if m.plain = (m.lost-blackHoleTimeouts)%2 == 0; m.plain {
			m.size = p.minMTU()
		}
	}
}

// longGotThrough ends a suspicion, and any search: another begins later.
func (a *Assoc) longGotThrough(now clock.Time, p *path) {
	p.pmtu = pmtu{limit: p.pmtu.limit}
	if p.mtu < p.pmtu.limit {
		p.pmtu.due = now.Add(raiseAfter)
	}
}
