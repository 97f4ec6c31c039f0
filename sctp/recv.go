package sctp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
)

const (
	rcvTSNs = 4096 // TSNs accepted beyond the cumulative point, and limit of TSNs in flight: no known peer accepts more
	maxDups = 16   // reported in one SACK
)

// kept is a chunk whose data the owner keeps.
type kept struct {
	dataChunk
	slot int
}

// receiver is the receiving half of an association.
type receiver struct {
	started    bool
	cum        serial.Num // cumulative TSN
	high       serial.Num // highest TSN received
	bits       [rcvTSNs / 64]uint64
	advertised int
	backlog    int
	paused     bool // see SetBacklog

	kept     []kept // by TSN
	keptLen  int    // bytes
	maxKept  int
	free     []int
	slots    int
	expected []uint16 // next SSN of ordered streams, allocated on first use

	out     []Data
	outHead int

	dups    [maxDups]serial.Num
	ndups   int
	pending int // packets with DATA since the last SACK
	sackNow bool
	first   bool // no TSN received yet
}

func (r *receiver) start(tsn serial.Num, window, maxKept int) {
	r.forgetAll()
	r.started, r.first = true, true
	r.cum, r.high = tsn-1, tsn-1
	r.bits = [rcvTSNs / 64]uint64{}
	r.maxKept = maxKept
	r.advertised = window
	clear(r.expected)
	r.ndups, r.pending, r.sackNow = 0, 0, false
}

func (r *receiver) has(t serial.Num) bool {
	return r.bits[t%rcvTSNs/64]&(1<<(t%64)) != 0
}

func (r *receiver) set(t serial.Num)   { r.bits[t%rcvTSNs/64] |= 1 << (t % 64) }
func (r *receiver) unset(t serial.Num) { r.bits[t%rcvTSNs/64] &^= 1 << (t % 64) }

// window returns the receive window that SACKs report.
func (a *Assoc) window() int {
	if a.rcv.paused {
		return 0
	}
	return max(0, a.cfg.RcvWindow-a.rcv.keptLen-a.rcv.backlog)
}

// PollData returns the next user data. The caller drains it after each HandlePacket, while the packet is still available.
func (a *Assoc) PollData(d *Data) bool {
	r := &a.rcv
	if r.outHead == len(r.out) {
		r.out, r.outHead = r.out[:0], 0
		return false
	}
	*d = r.out[r.outHead]
	r.outHead++
	return true
}

// handleData processes a DATA chunk. It reports whether to continue with the packet.
func (a *Assoc) handleData(c *Chunk) bool {
	var d dataChunk
	if !d.decode(c) {
		a.abort(causeProtocol, nil, ErrProtocol)
		return false
	}
	if d.n == 0 {
		a.abort(causeNoUserData, be.AppendUint32(nil, uint32(d.tsn)), ErrProtocol)
		return false
	}
	r := &a.rcv
	if r.first {
		r.first = false
		r.sackNow = true
	}
	if d.flags&flagImmediate != 0 {
		r.sackNow = true
	}
	if ahead := d.tsn.Sub(r.cum); ahead <= 0 || ahead < rcvTSNs && r.has(d.tsn) {
		a.stats.Duplicates++
		if r.ndups < maxDups {
			r.dups[r.ndups] = d.tsn
			r.ndups++
		}
		r.sackNow = true
		return true
	} else if ahead >= rcvTSNs {
		a.stats.RxDropped++
		r.sackNow = true
		return true
	}
	if a.cfg.RcvWindow-r.backlog-r.keptLen <= 0 {
		// No room. The chunk that fills the first hole is worth more than chunks kept beyond it.
		if d.tsn != r.cum+1 || r.backlog >= a.cfg.RcvWindow || !a.reclaim(d.n) {
			a.stats.RxDropped++
			r.sackNow = true
			return true
		}
	}
	if int(d.stream) >= a.in {
		r.accept(d.tsn)
		a.reply(causeInvalidStream, be.AppendUint16(be.AppendUint16(nil, d.stream), 0))
		return true
	}
	if !a.place(&d) {
		return a.state != Closed
	}
	a.stats.RxChunks++
	a.stats.RxBytes += uint64(d.n)
	r.accept(d.tsn)
	return true
}

// accept marks a TSN as received.
func (r *receiver) accept(t serial.Num) {
	r.set(t)
	if r.high.Less(t) {
		r.high = t
	}
	for r.cum != r.high && r.has(r.cum+1) {
		r.cum++
		r.unset(r.cum)
	}
	if r.cum != r.high {
		r.sackNow = true // a hole (6.7)
	}
}

const whole = flagBegin | flagEnd

// place delivers d or makes the owner keep it. It reports whether d is accepted.
func (a *Assoc) place(d *dataChunk) bool {
	r := &a.rcv
	if d.flags&whole == whole && (d.flags&flagUnordered != 0 || d.ssn == r.next(d.stream)) {
		r.deliver(d, Deliver, 0)
		if d.flags&flagUnordered == 0 {
			r.expected[d.stream]++
			r.release()
		}
		return true
	}
	if len(r.kept) >= r.maxKept && !a.reclaimFor(d) {
		return false
	}
	slot := 0
	if n := len(r.free); n > 0 {
		slot, r.free = r.free[n-1], r.free[:n-1]
	} else {
		slot = r.slots
		r.slots++
	}
	i := len(r.kept)
	for i > 0 && d.tsn.Less(r.kept[i-1].tsn) {
		i--
	}
	r.kept = append(r.kept, kept{})
	copy(r.kept[i+1:], r.kept[i:])
	r.kept[i] = kept{*d, slot}
	r.keptLen += d.n
	r.deliver(d, Keep, slot)
	r.release()
	return true
}

func (r *receiver) next(stream uint16) uint16 {
	for len(r.expected) <= int(stream) {
		r.expected = append(r.expected, 0)
	}
	return r.expected[stream]
}

func (r *receiver) deliver(d *dataChunk, act Act, slot int) {
	r.out = append(r.out, Data{Act: act, Stream: d.stream, PPID: d.ppid, Unordered: d.flags&flagUnordered != 0,
		Begin: d.flags&flagBegin != 0, End: d.flags&flagEnd != 0, Slot: slot, Off: d.off, Len: d.n})
}

// release delivers every kept message that is complete and whose turn has come.
func (r *receiver) release() {
again:
	for i := 0; i < len(r.kept); i++ {
		k := &r.kept[i]
		if k.flags&flagBegin == 0 {
			continue
		}
		if k.flags&flagUnordered == 0 && k.ssn != r.next(k.stream) {
			continue
		}
		j := i
		for r.kept[j].flags&flagEnd == 0 {
			if j+1 == len(r.kept) || !continues(&r.kept[j].dataChunk, &r.kept[j+1].dataChunk) {
				break
			}
			j++
		}
		if r.kept[j].flags&flagEnd == 0 {
			continue
		}
		if k.flags&flagUnordered == 0 {
			r.expected[k.stream]++
		}
		r.giveBack(i, j+1, DeliverKept)
		goto again
	}
}

// continues reports whether e is the fragment that follows d.
func continues(d, e *dataChunk) bool {
	return e.tsn == d.tsn+1 && e.flags&flagBegin == 0 && e.stream == d.stream &&
		(e.flags^d.flags)&flagUnordered == 0 && (e.flags&flagUnordered != 0 || e.ssn == d.ssn)
}

// giveBack releases kept chunks [i,j) with the given action.
func (r *receiver) giveBack(i, j int, act Act) {
	for n := i; n < j; n++ {
		k := &r.kept[n]
		r.deliver(&k.dataChunk, act, k.slot)
		r.free = append(r.free, k.slot)
		r.keptLen -= k.n
	}
	r.kept = append(r.kept[:i], r.kept[j:]...)
}

func (r *receiver) forgetAll() { r.giveBack(0, len(r.kept), Forget) }

// reclaim drops kept chunks beyond the cumulative point, highest TSN first, until n bytes are free. The peer must retransmit them; gap
// reports are not binding (RFC 9260 6.2).
func (a *Assoc) reclaim(n int) bool {
	r := &a.rcv
	for a.cfg.RcvWindow-r.backlog-r.keptLen < n {
		if !a.reclaimLast() {
			return a.cfg.RcvWindow-r.backlog-r.keptLen > 0
		}
	}
	return true
}

func (a *Assoc) reclaimLast() bool {
	r := &a.rcv
	i := len(r.kept) - 1
	if i < 0 || r.kept[i].tsn.LessEq(r.cum) {
		return false
	}
	r.unset(r.kept[i].tsn)
	r.giveBack(i, i+1, Forget)
	for r.high != r.cum && !r.has(r.high) {
		r.high--
	}
	a.stats.Reneged++
	return true
}

// reclaimFor makes room for d among the kept chunks. If chunks in order take all of it, the message cannot be reassembled, and the
// association is aborted.
func (a *Assoc) reclaimFor(d *dataChunk) bool {
	r := &a.rcv
	if n := len(r.kept); r.kept[n-1].tsn.Less(d.tsn) && d.tsn != r.cum+1 {
		a.stats.RxDropped++
		r.sackNow = true
		return false
	}
	if a.reclaimLast() {
		return true
	}
	a.abort(causeOutOfResource, nil, ErrNoRoom)
	return false
}

// dataSeen is called once for each packet with DATA.
func (a *Assoc) dataSeen(now clock.Time) {
	r := &a.rcv
	r.pending++
	if r.pending >= sackEvery || a.state == ShutdownSent {
		r.sackNow = true
	}
	if a.state == ShutdownSent {
		a.sendShutdown(now) // 9.2
	}
	if !r.sackNow && !a.armed(timerSack) {
		a.arm(timerSack, now.Add(sackDelay))
	}
}

// appendSack appends a SACK chunk that takes at most room bytes.
func (a *Assoc) appendSack(b []byte, room int) []byte {
	r := &a.rcv
	b, at := beginChunk(b, ChunkSack, 0)
	w := a.window()
	r.advertised = w
	b = be.AppendUint32(b, uint32(r.cum))
	b = be.AppendUint32(b, uint32(w))
	ngapAt := len(b)
	b = append(b, 0, 0, 0, 0)
	most := (room - chunkHeader - sackFixed) / 4 // as many gap blocks as fit (6.2)
	gaps := 0
	for t := r.cum + 1; gaps < most && t.LessEq(r.high); {
		for !r.has(t) {
			t++
		}
		from := t
		for t.LessEq(r.high) && r.has(t) {
			t++
		}
		b = be.AppendUint16(b, uint16(from.Sub(r.cum)))
		b = be.AppendUint16(b, uint16(t.Sub(r.cum)-1))
		gaps++
	}
	dups := min(r.ndups, most-gaps)
	for _, t := range r.dups[:max(dups, 0)] {
		b = be.AppendUint32(b, uint32(t))
	}
	be.PutUint16(b[ngapAt:], uint16(gaps))
	be.PutUint16(b[ngapAt+2:], uint16(max(dups, 0)))
	r.ndups, r.pending, r.sackNow = 0, 0, false
	a.stop(timerSack)
	return endChunk(b, at)
}
