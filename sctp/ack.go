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
	for i := range a.paths[:a.npaths] {
		p := &a.paths[i]
		p.acked = 0
		p.fullBefore = p.flight+a.pmdcs(p) > p.cwnd
	}
	newest, any := a.cumAck, false
	for range n {
		it := a.at(a.first)
		if it.state == acked {
			a.gapAcked--
		} else {
			newest, any = a.cumAck+1, true
			a.ackItem(now, a.first)
		}
		if it.buf != NoBuf {
			a.released = append(a.released, it.buf)
		}
		a.first++
		a.cumAck++
	}
	if s.Gaps() > 0 || a.gapAcked > 0 {
		if t, ok := a.gaps(now, s); ok {
			newest, any = serial.Max(newest, t), true
		}
	}
	if a.recovering && a.recoverTo.LessEq(a.cumAck) {
		a.recovering, a.fastPending = false, false
	}
	if s.Gaps() > 0 && any {
		a.misses(s, newest, n > 0)
	}
	a.peerRwnd = int(min(s.Rwnd, 1<<30)) - a.outstanding
	a.probing = s.Rwnd == 0
	octets := 0
	for i := range a.paths[:a.npaths] {
		p := &a.paths[i]
		if p.acked == 0 {
			continue
		}
		octets += p.acked
		a.alive(i)
		if n > 0 && !a.recovering {
			a.grow(p)
		}
		p.t3 = 0
	}
	for i := range a.paths[:a.npaths] {
		p := &a.paths[i]
		if p.flight == 0 {
			p.t3 = 0
			p.pba = 0
		} else if p.t3 == 0 {
			p.t3 = now.Add(p.rto)
		}
	}
	// A peer that takes packets in batches sends one SACK for many: as many packets may
	// leave as if there had been one for every second packet.
	a.burst = a.cfg.MaxBurst * max(1, octets/(2*a.MaxMessage()))
	if a.first == a.last {
		a.probing = false
	}
	a.tryShutdown(now)
}

// gaps takes the gap reports: what they name has come, and what an earlier SACK
// named and this one does not was given up by the peer. It returns the highest TSN
// that is new.
func (a *Assoc) gaps(now clock.Time, s *Sack) (newest serial.Num, any bool) {
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
	for p := a.first; p != a.next; p++ {
		t := a.tsn(p)
		for g < n && to.Less(t) {
			g++
			load()
		}
		it := a.at(p)
		if g < n && from.LessEq(t) {
			if it.state != acked {
				a.ackItem(now, p)
				it.state = acked
				a.gapAcked++
				newest, any = t, true
			}
			continue
		}
		if it.state == acked {
			a.gapAcked--
			it.state = lost
			it.sends = max(it.sends, 2)
			a.lostCount++
		}
	}
	return newest, any
}

// misses counts the holes below what is newly acknowledged (HTNA), and marks for
// fast retransmission what was missed three times.
func (a *Assoc) misses(s *Sack, newest serial.Num, advanced bool) {
	if a.recovering && advanced {
		_, newest = s.Gap(s.Gaps() - 1)
	}
	found := false
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
		if !a.recovering && !found {
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
	p.ssthresh = max(p.cwnd/2, 4*a.pmdcs(p))
	p.cwnd = a.pmdcs(p)
	p.pba = 0
	p.timing = false
	a.backOff(p)
	a.recovering, a.fastPending = false, false
	for q := a.first; q != a.next; q++ {
		it := a.at(q)
		if it.state == inFlight && int(it.path) == i {
			it.fast = false
			a.lose(q)
		}
	}
	a.burst = a.cfg.MaxBurst
	// Probes of a window that the peer keeps closed, and says so, are no failure
	// (6.1 A).
	if a.probing {
		a.probing = false
		return
	}
	a.failed(now, i)
}
