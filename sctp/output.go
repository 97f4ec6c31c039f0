package sctp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
)

// PollTransmit returns the next packet to send. It must be drained after EventClosed too: the last packet may be an ABORT or a SHUTDOWN
// COMPLETE.
func (a *Assoc) PollTransmit(now clock.Time, o *Out) bool {
	o.N, o.Len, o.Retransmit, o.Fragment = 0, 0, false, false
	o.Path = a.primary
	if len(a.raw) > 0 {
		r := a.raw[0]
		a.raw = append(a.raw[:0], a.raw[1:]...)
		o.Head, o.Path = r.b, r.path
		a.done(o)
		o.UDP = r.udp
		return true
	}
	h := Header{a.flow.LocalPort, a.flow.RemotePort, a.peerTag}
	if a.want.take(wantShutdownComplete) {
		o.Head = appendChunk(h.Append(a.head[:0]), ChunkShutdownComplete, 0, nil)
		o.Path = a.lastIn
		return a.done(o)
	}
	switch a.state {
	case Closed:
		return false
	case CookieWait:
		if !a.want.take(wantInit) {
			return false
		}
		h.Tag = 0
		i := Init{Tag: a.tag, Rwnd: uint32(a.cfg.RcvWindow), Out: uint16(a.cfg.Streams), In: uint16(a.cfg.Streams), TSN: a.initTSN,
			Adaptation: a.cfg.Adaptation, HasAdaptation: a.cfg.Adaptation != 0, Preserve: a.preserve}
		o.Head = i.Append(h.Append(a.head[:0]), ChunkInit)
		return a.done(o)
	}
	if a.want.take(wantCookieEcho) {
		b := appendChunk(h.Append(a.head[:0]), ChunkCookieEcho, 0, a.cookie)
		if len(a.unknown) > 0 && len(b)+chunkHeader+4+len(a.unknown) <= a.paths[a.primary].budget() {
			at := 0
			b, at = beginChunk(b, ChunkError, 0)
			b = endChunk(appendCause(b, causeUnknownParams, a.unknown), at)
			a.unknown = a.unknown[:0]
		}
		a.head = b[:0]
		o.Head = b
		return a.done(o)
	}
	for i := range a.paths {
		p := &a.paths[i]
		switch {
		case p.beat == beatDue:
			p.beat = beatSent
			o.Head = a.heartbeat(&h, i, p.hbAt, p.hbNonce)
		case p.pmtu.send:
			o.Head = a.mtuProbe(now, &h, i)
		case len(p.ack) > 0 && !p.confirmed: // only HEARTBEATs and their answers go to an unconfirmed address (5.4)
			o.Head = append(h.Append(a.head[:0]), p.ack...)
			a.head, p.ack = o.Head[:0], p.ack[:0]
		default:
			continue
		}
		o.Path = i
		return a.done(o)
	}
	return a.bundle(now, &h, o)
}

// shutdownRoom is the size in bytes of SHUTDOWN, or of SHUTDOWN ACK with an ERROR.
const shutdownRoom = 2*chunkHeader + 4

func (a *Assoc) done(o *Out) bool {
	o.UDP = a.paths[o.Path].udp
	o.Len += len(o.Head)
	a.stats.TxPackets++
	return true
}

// bundle builds a packet of control chunks and DATA.
func (a *Assoc) bundle(now clock.Time, h *Header, o *Out) bool {
	b := h.Append(a.head[:0])
	r := &a.rcv
	noData := false
	if a.want.take(wantCookieAck) {
		b = appendChunk(b, ChunkCookieAck, 0, nil)
		o.Path = a.answerPath()
	}
	for i := range a.paths {
		if p := &a.paths[i]; len(p.ack) > 0 && (len(b) == HeaderLen || i == o.Path) {
			b = append(b, p.ack...)
			p.ack = p.ack[:0]
			o.Path = i
			break
		}
	}
	if n := len(a.replies); n > 0 && (len(b) == HeaderLen || a.replyTo == o.Path && len(b)+n <= HeaderLen+a.paths[o.Path].budget()) {
		o.Path = a.replyTo
		b = append(b, a.replies...)
		a.replies = a.replies[:0]
	}
	sacked := false
	if r.sackNow {
		if len(b) == HeaderLen {
			o.Path = a.answerPath()
		}
		room := HeaderLen + a.paths[o.Path].budget() - len(b)
		if a.want&(wantShutdown|wantShutdownAck) != 0 {
			room -= shutdownRoom
		}
		if room >= chunkHeader+sackFixed {
			b = a.appendSack(b, room)
			sacked = true
		}
	}
	if a.want.take(wantShutdown) {
		var at int
		b, at = beginChunk(b, ChunkShutdown, 0)
		b = endChunk(be.AppendUint32(b, uint32(r.cum)), at)
		noData = true
	}
	if a.want.take(wantShutdownAck) {
		b = appendChunk(b, ChunkShutdownAck, 0, nil)
		noData = true
		if a.want.take(wantStaleShutdown) {
			var at int
			b, at = beginChunk(b, ChunkError, 0)
			b = endChunk(appendCause(b, causeShuttingDown, nil), at)
		}
	}
	a.head = b[:0]
	o.Head = b
	if !noData {
		a.addData(now, o, sacked)
		a.hurry(o)
	}
	if o.empty() {
		return false
	}
	return a.done(o)
}

func (a *Assoc) maySend() bool {
	return a.state == Established || a.state == ShutdownPending || a.state == ShutdownReceived
}

// addData appends lost messages, then new ones, after the control chunks in o.
func (a *Assoc) addData(now clock.Time, o *Out, sacked bool) {
	a.polled = true
	if !a.maySend() || a.first == a.last {
		return
	}
	if a.lostCount > 0 {
		if a.addLost(now, o); a.lostCount > 0 {
			return
		}
	}
	pa := &a.paths[a.primary]
	if !o.empty() && o.Path != a.primary {
		return
	}
	if a.next == a.last || o.N == 0 && a.burst <= 0 && a.outstanding > 0 {
		return
	}
	a.idled(now, pa)
	had := o.N
	o.Path = a.primary
	for a.next != a.last && o.N < maxParts {
		p := a.next
		it := a.at(p)
		if pa.shut(o) || p-a.first >= rcvTSNs-1 || !a.admits(now, pa, int(it.len)) || !a.part(o, p) {
			break
		}
		it.head = o.N == 1
		a.next++
		a.leave(now, p, a.primary)
	}
	if had == 0 && o.N > 0 {
		a.burst--
	}
	if r := &a.rcv; o.N > 0 && !sacked && r.pending > 0 {
		// Add a SACK if there is room for it.
		if room := a.paths[o.Path].budget() + HeaderLen - len(o.Head) - o.Len; room >= chunkHeader+sackFixed {
			o.Head = a.appendSack(o.Head, room)
			a.head = o.Head[:0]
		}
	}
}

// addLost appends lost messages to o.
func (a *Assoc) addLost(now clock.Time, o *Out) {
	for p := a.first; p != a.next && a.lostCount > 0 && o.N < maxParts; p++ {
		it := a.at(p)
		if it.state != lost {
			continue
		}
		i := a.primary
		if int(it.path) == i && a.paths[i].errors > 0 {
			i = a.retransmitPath(i)
		}
		if a.recovery != recoveryFirst && a.paths[i].shut(o) || !o.empty() && i != o.Path {
			break
		}
		o.Path = i
		if !a.part(o, p) {
			break
		}
		o.Retransmit = true
		it.head = o.N == 1
		a.leave(now, p, i)
	}
	if o.N > 0 && a.recovery == recoveryFirst {
		a.recovery = recoveryRest
	}
}

// shut reports whether the congestion window is exhausted for o.
func (p *path) shut(o *Out) bool {
	return p.flight > 0 && (p.flight >= p.cwnd || p.single && o.N == 0)
}

// admits reports whether the peer's window allows n bytes of new data on path p, or a probe of a closed window. The first probe waits for
// an RTO (RFC 9260 6.1 A): a peer without room drops it, which costs more time than waiting for the SACK that opens the window.
func (a *Assoc) admits(now clock.Time, p *path, n int) bool {
	switch {
	case n <= a.peerRwnd:
		return true
	case a.outstanding > 0:
		return false
	case a.peerRwnd > 0 || a.probe:
		a.starved = a.starved || a.probe
		a.probe = false
		return true
	case !a.armed(timerPersist):
		a.arm(timerPersist, now.Add(p.rto))
	}
	return false
}

// hurry sets the I bit (RFC 9260 6.2) on the last message of o if nothing can follow before a SACK, or nothing does and T3 could expire
// before a delayed SACK: the peer then need not wait for a second packet.
func (a *Assoc) hurry(o *Out) {
	if o.N == 0 {
		return
	}
	pa := &a.paths[o.Path]
	if pa.flight >= pa.cwnd || a.next == a.last && a.lostCount == 0 && a.cfg.RTOMin < maxSackDelay {
		o.Parts[o.N-1].Hdr[1] |= flagImmediate
	}
}

// part adds the message at position p to o, if it fits.
func (a *Assoc) part(o *Out, p uint32) bool {
	it := a.at(p)
	n := dataHeader + pad4(int(it.len))
	pa := &a.paths[o.Path]
	have := len(o.Head) + o.Len
	if have+n > HeaderLen+pa.budget() {
		if !o.empty() {
			return false
		}
		o.Fragment = true
	}
	it.size = uint16(min(have+n-HeaderLen+pa.overhead, pa.mtu, 1<<16-1))
	d := dataChunk{flags: it.flags, tsn: a.tsn(p), stream: it.stream, ssn: it.ssn, ppid: it.ppid, n: int(it.len)}
	q := &o.Parts[o.N]
	d.put(&q.Hdr)
	q.Buf, q.Len, q.Pad = it.buf, int(it.len), pad4(int(it.len))-int(it.len)
	o.N++
	o.Len += n
	a.stats.TxChunks++
	a.stats.TxBytes += uint64(it.len)
	return true
}
