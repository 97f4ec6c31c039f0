package sctp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// itemState is the state of a message in the send queue.
type itemState uint8

const (
	waiting itemState = iota // never sent
	inFlight
	lost  // to be retransmitted
	acked // acknowledged by a gap report
)

// item is a message in the send queue. Its TSN follows from its position.
type item struct {
	buf    Buf
	len    int32
	ppid   uint32
	stream uint16
	ssn    uint16
	size   uint16 // bytes of the IP packet that it left in, as far as it
	flags  uint8
	state  itemState
	misses uint8
	sends  uint8
	path   uint8
	fast   bool   // already fast retransmitted; not again
	head   bool   // the first chunk of its packet
	run    uint16 // so many chunks from this one on are acked, if more than 1: see gaps
}

func (s *sending) at(p uint32) *item { return &s.q[p&uint32(len(s.q)-1)] }

// tsn returns the TSN of the item at position p.
func (s *sending) tsn(p uint32) serial.Num { return s.cumAck + 1 + serial.Num(p-s.first) }

func (s *sending) push(it item) {
	if int(s.last-s.first) == len(s.q) {
		q := make([]item, 2*len(s.q))
		for p := s.first; p != s.last; p++ {
			q[p&uint32(len(q)-1)] = *s.at(p)
		}
		s.q = q
	}
	*s.at(s.last) = it
	s.last++
}

// leave records that the item at position p is sent on path i now.
func (a *Assoc) leave(now clock.Time, p uint32, i int) {
	it, pa := a.at(p), &a.paths[i]
	if it.state == lost {
		a.lostCount--
		a.stats.Retransmits++
		if pa.times(a.tsn(p)) {
			pa.timedAt = 0 // Karn's algorithm
		}
	} else {
		a.queued -= int(it.len)
		if pa.timedAt == 0 {
			pa.timed, pa.timedAt = a.tsn(p), now
		}
	}
	it.state, it.path, it.misses = inFlight, uint8(i), 0
	it.sends = min(it.sends+1, 255-1)
	pa.flight += int(it.len)
	pa.used = true
	pa.lastData = now
	a.outstanding += int(it.len)
	a.peerRwnd -= int(it.len)
	if !pa.armed(timerT3) {
		pa.arm(timerT3, now.Add(pa.rto))
	}
}

// land removes an item from the bytes in flight.
func (a *Assoc) land(it *item) {
	a.paths[it.path].flight -= int(it.len)
	a.outstanding -= int(it.len)
}

// lose marks the item at position p for retransmission.
func (a *Assoc) lose(p uint32) {
	it := a.at(p)
	if it.state != inFlight {
		return
	}
	a.land(it)
	a.peerRwnd += int(it.len)
	it.state = lost
	a.lostCount++
	if pa := &a.paths[it.path]; pa.times(a.tsn(p)) {
		pa.timedAt = 0
	}
}

// ackItem records that the peer has received the item at position p.
func (a *Assoc) ackItem(now clock.Time, p uint32) {
	it := a.at(p)
	pa := &a.paths[it.path]
	a.alive(int(it.path))
	pa.single = false
	if pa.pmtu.lost > 0 && int(it.size) > pa.floor() {
		pa.longGotThrough(now)
	}
	switch it.state {
	case inFlight:
		a.land(it)
		pa.acked += int(it.len)
		if it.head {
			a.ackedPackets++
		}
		if pa.times(a.tsn(p)) {
			if it.sends == 1 {
				a.sample(now, pa, pa.timedAt)
			}
			pa.timedAt = 0
		}
	case lost:
		a.lostCount--
	}
}
