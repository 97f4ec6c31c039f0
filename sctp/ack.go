package sctp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// missesToLose is how many SACKs must report a chunk missing before it is marked lost (RFC 9260 7.2.4).
const missesToLose = 3

// maxWalk is the number of chunks that the gap reports of SACKs may make us look at at one time; the report that reaches it is
// the last one considered. A peer whose SACKs contradict each other could otherwise take the worker's time by short
// packets. Later SACKs repeat the reports.
const maxWalk = 4 * rcvTSNs

// handleSack is RFC 9260 6.2.1 and 7.2.
func (a *Assoc) handleSack(now clock.Time, s *Sack) {
	n := s.Cum.Sub(a.cumAck)
	if n < 0 {
		return // older than the current state
	}
	if n > int(a.next-a.first) {
		a.abort(causeProtocol, nil, ErrProtocol) // acknowledges TSNs that were never sent
		return
	}
	a.stats.Sacks++
	a.noAcks()
	newest, any := a.cumulative(now, n)
	top := newest
	if now != a.walkedAt {
		a.walkedAt, a.walked = now, 0
	}
	if (s.Gaps() > 0 || a.gapAcked > 0) && a.walked < maxWalk {
		t, high, ok := a.gaps(now, s)
		if ok {
			newest, any = serial.Max(newest, t), true
		}
		top = serial.Max(top, high)
	}
	a.opened(n > 0)
	if s.Gaps() > 0 && any {
		if a.recovery != recoveryNone && n > 0 {
			newest = top
		}
		a.misses(newest)
	}
	// The window is closed if the next message does not fit (6.1 A).
	a.probing = a.first != a.last && int64(s.Rwnd) < int64(a.at(a.first).len)
	if !a.probing && a.starved {
		a.starved = false
		if !any && n == 0 {
			a.probeLost()
		}
	}
	a.peerRwnd = int(min(s.Rwnd, 1<<30)) - a.outstanding
	if a.peerRwnd > 0 {
		a.stop(timerPersist)
		a.probe = false
	}
	a.acknowledged(now)
}

// shutdownAcks processes the cumulative TSN of a SHUTDOWN like a SACK without gap reports. It does not change the window, and chunks
// acknowledged by earlier gap reports stay acknowledged.
func (a *Assoc) shutdownAcks(now clock.Time, cum serial.Num) {
	n := cum.Sub(a.cumAck)
	if n > int(a.next-a.first) {
		a.abort(causeProtocol, nil, ErrProtocol)
		return
	}
	had := a.outstanding
	a.noAcks()
	a.cumulative(now, max(n, 0))
	a.opened(n > 0)
	a.peerRwnd += had - a.outstanding
	a.acknowledged(now)
}

// noAcks resets the per-path state that one acknowledgement fills in.
func (a *Assoc) noAcks() {
	a.ackedPackets = 0
	for i := range a.paths {
		p := &a.paths[i]
		p.acked = 0
		p.fullBefore = p.flight+p.pmdcs() > p.cwnd
	}
}

// cumulative acknowledges the n oldest messages. It returns the highest newly acknowledged TSN.
func (a *Assoc) cumulative(now clock.Time, n int) (newest serial.Num, any bool) {
	newest = a.cumAck
	for range n {
		it := a.at(a.first)
		if it.state == acked {
			a.gapAcked--
		} else {
			newest, any = a.cumAck+1, true
			// Older chunks in flight on this path are acknowledged too.
			a.paths[it.path].stop(timerT3)
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

// opened ends a completed recovery and grows the congestion windows.
func (a *Assoc) opened(advanced bool) {
	if a.recovery != recoveryNone && a.recoverTo.LessEq(a.cumAck) {
		a.recovery = recoveryNone
	}
	if !advanced || a.recovery != recoveryNone {
		return
	}
	for i := range a.paths {
		if p := &a.paths[i]; p.acked > 0 {
			p.grow()
		}
	}
}

// acknowledged finishes the processing of an acknowledgement. T3 restarts on paths whose earliest chunk in flight it has acknowledged, which
// has stopped T3 there (RFC 9260 6.3.2 R3).
func (a *Assoc) acknowledged(now clock.Time) {
	for i := range a.paths {
		p := &a.paths[i]
		if p.flight == 0 {
			p.stop(timerT3)
			p.pba = 0
		} else if !p.armed(timerT3) {
			p.arm(timerT3, now.Add(p.rto))
		}
	}
	// A peer that processes packets in batches sends one SACK for many packets: allow as many as if it had sent one for every second
	// packet. An owner that does so passes several SACKs at once: allow as many as if PollTransmit had been called after each.
	if a.polled {
		a.burst, a.polled = 0, false
	}
	a.burst = max(a.burst, 0) + a.cfg.MaxBurst*max(1, a.ackedPackets/2)
	a.tryShutdown(now)
}

// gaps processes the gap reports of s. A chunk that an earlier SACK reported and this one does not is in flight again: the peer may have
// dropped it, or had no room to report it (6.2.1 D iii). gaps returns the highest newly acknowledged TSN and the highest reported TSN.
//
// Most SACKs repeat what earlier ones reported, and thousands of chunks may be in flight. So the first chunk of a report notes how many it
// covers, which later SACKs pass over, and the walk ends with the last chunk that is or was reported.
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
	older := 0         // bit mask of paths with older chunks in flight
	left := a.gapAcked // chunks that earlier SACKs reported, from p on
	reneged := false
	for p := a.first; p != a.next && (g < n || left > 0); {
		t := a.tsn(p)
		for g < n && to.Less(t) {
			g++
			load()
		}
		it := a.at(p)
		if g < n && from.LessEq(t) {
			begin, end := p, p+min(uint32(to-t)+1, a.next-p)
			for p != end {
				a.walked++
				q := a.at(p)
				if q.state == acked {
					known := min(max(uint32(q.run), 1), end-p)
					left -= int(known)
					p += known
					continue
				}
				if q.state == inFlight && older&(1<<q.path) == 0 {
					a.paths[q.path].stop(timerT3)
				}
				a.ackItem(now, p)
				q.state = acked
				a.gapAcked++
				newest, any = a.tsn(p), true
				p++
			}
			it.run = uint16(end - begin)
			top = a.tsn(end - 1)
			continue
		}
		a.walked++
		if it.state == acked {
			left--
			a.gapAcked--
			a.paths[it.path].flight += int(it.len)
			a.outstanding += int(it.len)
			it.state, it.misses = inFlight, 0
			reneged = true
		}
		if it.state == inFlight {
			older |= 1 << it.path
		}
		p++
	}
	if reneged {
		a.walked += int(a.next - a.first)
		for p := a.first; p != a.next; p++ {
			a.at(p).run = 0
		}
	}
	return newest, top, any
}

// misses counts a miss for each hole below newest, the highest TSN newly acknowledged (HTNA), and marks chunks missed three times for fast
// retransmission.
func (a *Assoc) misses(newest serial.Num) {
	found, cut := false, 0 // bit mask of paths whose window was reduced
	for p := a.first; p != a.next; p++ {
		if newest.LessEq(a.tsn(p)) {
			break
		}
		it := a.at(p)
		if it.state == acked {
			p += max(uint32(it.run), 1) - 1
			continue
		}
		if it.state != inFlight || it.fast {
			continue
		}
		if it.misses++; it.misses < missesToLose {
			continue
		}
		pa := &a.paths[it.path]
		if a.recovery == recoveryNone && cut&(1<<it.path) == 0 {
			cut |= 1 << it.path
			pa.ssthresh = max(pa.cwnd/2, 4*pa.pmdcs())
			pa.cwnd = pa.ssthresh
			pa.pba = 0
		}
		found = true
		it.fast = true
		a.stats.FastRetransmits++
		a.lose(p)
		if p == a.first {
			pa.stop(timerT3) // RFC 9260 7.2.4 (4)
		}
	}
	if found && a.recovery == recoveryNone {
		a.recovery = recoveryFirst
		a.recoverTo = a.tsn(a.next - 1)
	}
}

// grow raises the congestion window (RFC 9260 7.2.1, 7.2.2). In slow start L is the number of SACKs that one for every second packet would
// have been, at least one.
func (p *path) grow() {
	m := p.pmdcs()
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
	a.stats.Timeouts++
	if probe := a.probing && a.outstanding <= p.pmdcs() && a.lostCount == 0; !probe {
		p.ssthresh = max(p.cwnd/2, 4*p.pmdcs())
		p.cwnd = p.pmdcs()
		p.pba = 0
	}
	p.single = true
	p.timedAt = 0
	p.backOff()
	a.recovery = recoveryNone
	longest := a.loseFlight(i)
	a.burst = a.cfg.MaxBurst
	// An unanswered probe of a window that the peer reports as closed is not a failure (6.1 A).
	if a.probing {
		a.probing, a.starved = false, true
		return
	}
	if !a.failed(i, true) {
		a.blackHole(now, i, longest)
	}
}

// loseFlight marks what is in flight on path i for retransmission, and returns the size of its longest packet.
func (a *Assoc) loseFlight(i int) (longest int) {
	for p := a.first; p != a.next; p++ {
		it := a.at(p)
		if it.state == inFlight && int(it.path) == i {
			longest = max(longest, int(it.size))
			it.fast = false
			a.lose(p)
		}
	}
	return longest
}

// probeLost retransmits what is in flight at once, if T3 has expired while the window was closed: the peer now has room, it has dropped
// that data, and T3 may have grown to a minute.
func (a *Assoc) probeLost() {
	for p := a.first; p != a.next; p++ {
		a.lose(p)
	}
	for i := range a.paths {
		a.paths[i].stop(timerT3)
	}
}

// idled halves the window of an idle path once per RTO (7.2.1), because its measurement is out of date.
func (a *Assoc) idled(now clock.Time, p *path) {
	if p.flight > 0 || p.lastData == 0 || now.Sub(p.lastData) < p.rto {
		return
	}
	a.burst = min(a.burst, a.cfg.MaxBurst)
	least := 4 * p.pmdcs()
	if p.cwnd > least {
		p.ssthresh = p.cwnd
	}
	for ; p.cwnd > least && now.Sub(p.lastData) >= p.rto; p.lastData = p.lastData.Add(p.rto) {
		p.cwnd = max(p.cwnd/2, least)
	}
	p.lastData = now
}
