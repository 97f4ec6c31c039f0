package sctp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// missesToLose is how many reports of a hole make a chunk lost (RFC 9260 7.2.4).
const missesToLose = 3

// handleSack is RFC 9260 6.2.1 and 7.2.
func (a *Assoc) handleSack(now clock.Time, s *Sack) {
	n := s.Cum.Sub(a.cumAck)
	if n < 0 {
		return // older than what is known
	}
	if n > int(a.next-a.first) {
		a.abort(CauseProtocol, nil, ErrProtocol) // TSNs that were never sent
		return
	}
	a.stats.Sacks++
	a.noAcks()
	newest, any := a.cumulative(now, n)
	top := newest
	if s.Gaps() > 0 || a.gapAcked > 0 {
		t, high, ok := a.gaps(now, s)
		if ok {
			newest, any = serial.Max(newest, t), true
		}
		top = serial.Max(top, high)
	}
	a.opened(n > 0)
	if s.Gaps() > 0 && any {
		if a.recovering && n > 0 {
			newest = top
		}
		a.misses(newest)
	}
	if s.Rwnd > 0 && a.starved {
		a.starved = false
		if !any && n == 0 {
			a.probeLost()
		}
	}
	a.peerRwnd = int(min(s.Rwnd, 1<<30)) - a.outstanding
	a.probing = s.Rwnd == 0 && a.first != a.last
	if a.peerRwnd > 0 {
		a.stop(timerPersist)
		a.probe = false
	}
	a.acknowledged(now)
}

// shutdownAcks takes the cumulative TSN of a SHUTDOWN as that of a SACK without gaps,
// which says nothing new of the window: what gap reports named stays acknowledged.
func (a *Assoc) shutdownAcks(now clock.Time, cum serial.Num) {
	n := cum.Sub(a.cumAck)
	if n > int(a.next-a.first) {
		a.abort(CauseProtocol, nil, ErrProtocol)
		return
	}
	had := a.outstanding
	a.noAcks()
	a.cumulative(now, max(n, 0))
	a.opened(n > 0)
	a.peerRwnd += had - a.outstanding
	a.acknowledged(now)
}

// noAcks begins what an acknowledgement says of the paths.
func (a *Assoc) noAcks() {
	a.ackedPackets = 0
	for i := range a.paths[:a.npaths] {
		p := &a.paths[i]
		p.acked, p.heard, p.earliest = 0, false, false
		p.fullBefore = p.flight+a.pmdcs(p) > p.cwnd
	}
}

// cumulative acknowledges the n oldest messages. It returns the highest TSN that is new.
func (a *Assoc) cumulative(now clock.Time, n int) (newest serial.Num, any bool) {
	newest = a.cumAck
	for range n {
		it := a.at(a.first)
		if it.state == acked {
			a.gapAcked--
		} else {
			newest, any = a.cumAck+1, true
			// Whatever the path has in flight that is older is acknowledged too.
			a.paths[it.path].earliest = true
			a.ackItem(now, a.first)
		}
		if it.buf != NoBuf {
			a.released = append(a.released, it.buf)
		}
		a.first++
		a.cumAck++
	}
	return newest, any
}

// opened ends a recovery that is over, and opens the congestion windows.
func (a *Assoc) opened(advanced bool) {
	if a.recovering && a.recoverTo.LessEq(a.cumAck) {
		a.recovering, a.fastPending = false, false
	}
	if !advanced || a.recovering {
		return
	}
	for i := range a.paths[:a.npaths] {
		if p := &a.paths[i]; p.acked > 0 {
			a.grow(p)
		}
	}
}

// acknowledged ends what an acknowledgement does: the paths that it was heard of are up,
// and T3 begins anew where it named the earliest in flight (RFC 9260 6.3.2 R3).
func (a *Assoc) acknowledged(now clock.Time) {
	for i := range a.paths[:a.npaths] {
		p := &a.paths[i]
		if p.heard {
			a.alive(i)
			p.single = false
		}
		if p.flight == 0 {
			p.t3 = 0
			p.pba = 0
		} else if p.t3 == 0 || p.earliest {
			p.t3 = now.Add(p.rto)
		}
	}
	// A peer that takes packets in batches sends one SACK for many: as many packets may
	// leave as if there had been one for every second packet.
	a.burst = a.cfg.MaxBurst * max(1, a.ackedPackets/2)
	a.tryShutdown(now)
}

// gaps takes the gap reports: what they name has come. What an earlier SACK named and
// this one does not may have been given up by the peer, or found no place in the report:
// it is in flight again (6.2.1 D iii). gaps returns the highest TSN that is new, and the
// highest that is named.
func (a *Assoc) gaps(now clock.Time, s *Sack) (newest, top serial.Num, any bool) {
	g, n := 0, s.Gaps()
	var from, to serial.Num
	load := func() {
		for ; g < n; g++ {
			from, to = s.Gap(g)
			if from.LessEq(to) && s.Cum.Less(from) {
				return
			}
		}
	}
	load()
	top = s.Cum
	older := 0 // paths with something in flight further down, a bit each
	for p := a.first; p != a.next; p++ {
		t := a.tsn(p)
		for g < n && to.Less(t) {
			g++
			load()
		}
		it := a.at(p)
		if g < n && from.LessEq(t) {
			top = t
			if it.state != acked {
				if it.state == inFlight && older&(1<<it.path) == 0 {
					a.paths[it.path].earliest = true
				}
				a.ackItem(now, p)
				it.state = acked
				a.gapAcked++
				newest, any = t, true
			}
			continue
		}
		if it.state == acked {
			a.gapAcked--
			a.paths[it.path].flight += int(it.len)
			a.outstanding += int(it.len)
			it.state, it.misses = inFlight, 0
			it.sends = max(it.sends, 2)
		}
		if it.state == inFlight {
			older |= 1 << it.path
		}
	}
	return newest, top, any
}

// misses counts the holes below newest, the highest TSN newly acknowledged (HTNA), and
// marks for fast retransmission what was missed three times.
func (a *Assoc) misses(newest serial.Num) {
	found, cut := false, 0 // paths whose window was cut, a bit each
	for p := a.first; p != a.next; p++ {
		if newest.LessEq(a.tsn(p)) {
			break
		}
		it := a.at(p)
		if it.state != inFlight || it.fast {
			continue
		}
		if it.misses++; it.misses < missesToLose {
			continue
		}
		pa := &a.paths[it.path]
		if !a.recovering && cut&(1<<it.path) == 0 {
			cut |= 1 << it.path
			pa.ssthresh = max(pa.cwnd/2, 4*a.pmdcs(pa))
			pa.cwnd = pa.ssthresh
			pa.pba = 0
		}
		found = true
		it.fast = true
		a.stats.FastRetransmits++
		a.lose(p)
		if p == a.first {
			pa.t3 = 0 // RFC 9260 7.2.4 (4)
		}
	}
	if found && !a.recovering {
		a.recovering = true
		a.fastPending = true
		a.recoverTo = a.tsn(a.next - 1)
	}
}

// grow opens the congestion window (RFC 9260 7.2.1, 7.2.2). In slow start L is the number
// of SACKs that there would have been for every second packet, if that is more than one.
func (a *Assoc) grow(p *path) {
	m := a.pmdcs(p)
	if p.cwnd <= p.ssthresh {
		if p.fullBefore {
			p.cwnd += min(p.acked, m*max(1, p.acked/(2*m)))
		}
		return
	}
	p.pba += p.acked
	if p.pba >= p.cwnd && p.fullBefore {
		p.pba -= p.cwnd
		p.cwnd += m
	} else {
		p.pba = min(p.pba, p.cwnd)
	}
}

// retransmitTimeout is RFC 9260 6.3.3 and 7.2.3 for path i.
func (a *Assoc) retransmitTimeout(now clock.Time, i int) {
	p := &a.paths[i]
	p.t3 = 0
	a.stats.Timeouts++
	if probe := a.probing && a.outstanding <= a.pmdcs(p) && a.lostCount == 0; !probe {
		p.ssthresh = max(p.cwnd/2, 4*a.pmdcs(p))
		p.cwnd = a.pmdcs(p)
		p.pba = 0
	}
	p.single = true
	p.timing = false
	a.backOff(p)
	a.recovering, a.fastPending = false, false
	longest := 0
	for q := a.first; q != a.next; q++ {
		it := a.at(q)
		if it.state == inFlight && int(it.path) == i {
			longest = max(longest, int(it.size))
			it.fast = false
			a.lose(q)
		}
	}
	a.burst = a.cfg.MaxBurst
	// Probes of a window that the peer keeps closed, and says so, are no failure
	// (6.1 A).
	if a.probing {
		a.probing, a.starved = false, true
		return
	}
	if !a.failed(now, i, true) {
		a.blackHole(now, i, longest)
	}
}

// probeLost has what is in flight, since T3 was last due with a closed window, sent again
// at once: the peer, who now has room, has dropped it, and T3 may have become a minute.
func (a *Assoc) probeLost() {
	for p := a.first; p != a.next; p++ {
		a.lose(p)
	}
	for i := range a.paths[:a.npaths] {
		a.paths[i].t3 = 0
	}
}

// idled lowers the window of a path that nothing was sent on for a while, by half for each
// RTO (7.2.1): what it was measured by is no longer so.
func (a *Assoc) idled(now clock.Time, p *path) {
	if p.flight > 0 || p.lastData == 0 || now.Sub(p.lastData) < p.rto {
		return
	}
	a.burst = min(a.burst, a.cfg.MaxBurst)
	least := 4 * a.pmdcs(p)
	if p.cwnd > least {
		p.ssthresh = p.cwnd
	}
	for ; p.cwnd > least && now.Sub(p.lastData) >= p.rto; p.lastData = p.lastData.Add(p.rto) {
		p.cwnd = max(p.cwnd/2, least)
	}
	p.lastData = now
}
