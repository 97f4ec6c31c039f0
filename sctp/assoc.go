package sctp

import (
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// Assoc is one association: the TCB of RFC 9260 section 14. It is not safe for concurrent use.
type Assoc struct {
	// Identity and result. err and events are read by the owner.
	cfg    Config
	key    Secret
	flow   pkt.Flow
	mtu    int
	state  State
	err    error
	events uint16
	stats  Stats

	// Values negotiated by INIT and INIT ACK (RFC 9260 5.1).
	tag, peerTag uint32 // verification tag of packets to us
	initTSN      serial.Num
	out, in      int // streams

	// The peer's addresses. Data goes to the primary path, replies to the source of the last packet.
	paths   []path // at most maxAddrs
	primary int
	errors  int // consecutive time-outs
	lastIn  int // path of the last packet received, and its UDP port
	lastUDP uint16
	salt    uint32

	setupState
	toSend
	sending

	// Receiver: TSNs received, SACKs due, and messages for PollData.
	rcv receiver

	timers
}

// setupState is the state of INIT and COOKIE ECHO and their retransmissions on the active side.
type setupState struct {
	initRetries int
	stales      int // cookies that the peer reported as stale
	t1Sent      clock.Time
	preserve    uint32 // lifetime increment to request in the next INIT, in ms
	cookie      []byte // the peer's cookie, to be echoed
	unknown     []byte // unknown parameters of INIT ACK, each to be reported as an error cause
}

// toSend holds the control chunks and whole packets that PollTransmit returns next.
type toSend struct {
	want    wants
	replies []byte // ERROR chunks
	replyTo int
	raw     []rawPacket
	head    []byte // scratch buffer of PollTransmit
}

// sending is a ring of messages in TSN order.
//
//	first          next           last
//	  | sent, unacked | never sent  |
//
// The item at first has TSN cumAck+1. released holds the Bufs for PollReleased.
type sending struct {
	q            []item // a ring whose length is a power of two
	first        uint32 // oldest item not cumulatively acknowledged
	next         uint32 // oldest item never sent
	last         uint32 // one past the newest item
	cumAck       serial.Num
	peerRwnd     int
	outstanding  int // bytes in flight
	queued       int // bytes never sent
	lostCount    int
	gapAcked     int
	walked       int        // chunks that gap reports made us look at since walkedAt
	walkedAt     clock.Time // when the last SACK came
	burst        int        // packets of new data that may be sent
	polled       bool       // PollTransmit was called after the last SACK
	ackedPackets int        // packets acknowledged by the current SACK
	recovery     recovery
	recoverTo    serial.Num // recovery ends when this is acknowledged
	probing      bool       // a closed window is being probed, and a SACK was received
	starved      bool       // a probe was sent, or data for which the peer had no room
	probe        bool       // send a probe of the closed window now
	released     []Buf
	releasedHead int
}

// recovery is the state of fast recovery (RFC 9260 7.2.4).
type recovery uint8

const (
	recoveryNone  recovery = iota
	recoveryFirst          // entered: the first packet of the retransmission ignores the window
	recoveryRest           // that packet was sent
)

// rawPacket is a complete packet to send on a path, but to its own UDP port: a peer that restarts may use another one (RFC 6951 5.4).
type rawPacket struct {
	b    []byte
	path int
	udp  uint16
}

// wants is the set of chunks to send.
type wants uint16

const (
	wantInit wants = 1 << iota
	wantCookieEcho
	wantCookieAck
	wantShutdown
	wantShutdownAck
	wantShutdownComplete
	wantStaleShutdown // COOKIE ECHO in SHUTDOWN-ACK-SENT: ERROR cause 10
)

func (w *wants) take(b wants) bool {
	had := *w&b != 0
	*w &^= b
	return had
}

func newAssoc(cfg *Config, f pkt.Flow, udp uint16, key *Secret, mtu int) *Assoc {
	a := &Assoc{cfg: cfg.withDefaults(), key: *key, flow: f, mtu: mtu}
	a.q = make([]item, 64)
	a.head = make([]byte, 0, 2048)
	a.addPath(netip.AddrFrom16(f.Remote).Unmap(), udp, true)
	a.burst = a.cfg.MaxBurst
	return a
}

// Dial starts an association in COOKIE-WAIT; PollTransmit returns the INIT. mtu is that of the link, or of the path if it is known.
func Dial(now clock.Time, cfg *Config, f pkt.Flow, key *Secret, mtu int) *Assoc {
	udp := uint16(0)
	if cfg.UDP {
		udp = UDPPort
	}
	a := newAssoc(cfg, f, udp, key, mtu)
	a.tag, a.initTSN = draw(key, &f, now, 1)
	a.setTSN(a.initTSN)
	a.state = CookieWait
	a.want |= wantInit
	a.t1Sent = now
	a.arm(timerInit, now.Add(a.paths[0].rto))
	return a
}

func (a *Assoc) setTSN(t serial.Num) {
	a.initTSN = t
	a.cumAck = t - 1
}

// State returns the state of RFC 9260 section 4.
func (a *Assoc) State() State { return a.state }

// Open reports whether the association is established or being set up, and neither side has started to end it.
func (a *Assoc) Open() bool {
	return a.state == Established || a.state == CookieWait || a.state == CookieEchoed
}

// Err returns why the association ended. It is nil before the end and after an orderly shutdown.
func (a *Assoc) Err() error { return a.err }

// Streams returns the number of outgoing and incoming streams. It is valid once the association is established.
func (a *Assoc) Streams() (out, in int) { return a.out, a.in }

// Stats returns the counters.
func (a *Assoc) Stats() Stats { return a.stats }

// MaxMessage returns the longest message, in bytes, that fits in one packet.
func (a *Assoc) MaxMessage() int { return a.paths[a.primary].pmdcs() }

// Unacked returns the number of pushed messages that are not cumulatively acknowledged.
func (a *Assoc) Unacked() int { return int(a.last - a.first) }

// Room returns how many bytes could be sent now: the smaller of the congestion window and the peer's window, less what is in flight and
// queued. It is 0 when nothing may be pushed. While nothing is in flight it is at least MaxMessage, because a closed window is probed only
// with a queued message.
func (a *Assoc) Room() int {
	switch {
	case a.state != Established:
		return 0
	case a.first == a.last:
		return max(a.MaxMessage(), a.room())
	}
	return a.room()
}

func (a *Assoc) room() int {
	p := &a.paths[a.primary]
	if a.lostCount > 0 || a.last-a.next > 64 || a.last-a.first >= rcvTSNs-1 {
		return 0
	}
	// The last message may extend beyond the window (RFC 9260 6.1 B).
	return max(0, min(p.cwnd+p.pmdcs()-1-p.flight, a.peerRwnd)-a.queued)
}

// Push queues a message of an established association. A message that cannot be sent, as after Close or the peer's SHUTDOWN, is released at
// once.
func (a *Assoc) Push(m *Message) {
	if m.Len <= 0 || a.state != Established || int(m.Stream) >= a.out {
		if m.Buf != NoBuf {
			a.released = append(a.released, m.Buf)
		}
		return
	}
	it := item{stream: m.Stream, ppid: m.PPID, buf: m.Buf, len: int32(m.Len), flags: flagBegin | flagEnd | flagUnordered}
	if m.Urgent {
		it.flags |= flagImmediate
	}
	a.push(it)
	a.queued += m.Len
}

// PollReleased returns a pushed Buf that is no longer needed: it is cumulatively acknowledged, or the association has ended or restarted.
func (a *Assoc) PollReleased() (Buf, bool) {
	if a.releasedHead == len(a.released) {
		a.released, a.releasedHead = a.released[:0], 0
		return NoBuf, false
	}
	b := a.released[a.releasedHead]
	a.releasedHead++
	return b, true
}

// PollEvent returns the next event. EventClosed is the last one.
func (a *Assoc) PollEvent() (Event, bool) {
	for e := EventUp; e <= EventClosed; e++ {
		if a.events&(1<<e) != 0 {
			a.events &^= 1 << e
			return e, true
		}
	}
	return 0, false
}

// SetBacklog sets how many delivered bytes the application has not consumed yet. They reduce the receive window. paused closes it for the
// peer; what is on its way is taken as far as there is room.
func (a *Assoc) SetBacklog(n int, paused bool) {
	a.rcv.backlog, a.rcv.paused = n, paused
	if w := a.window(); a.rcv.started && w >= a.cfg.RcvWindow/2 && a.rcv.advertised < a.cfg.RcvWindow/4 {
		a.rcv.sackNow = true
	}
}

// SetWindow sets Config.RcvWindow, in bytes. Data already kept stays.
func (a *Assoc) SetWindow(n int) {
	a.cfg.RcvWindow = max(n, 2*minRwnd)
	a.SetBacklog(a.rcv.backlog, a.rcv.paused)
}

// Kept returns how many bytes the owner keeps for the association.
func (a *Assoc) Kept() int { return a.rcv.keptLen }

// Close shuts the association down once everything pushed is acknowledged (RFC 9260 9.2).
func (a *Assoc) Close(now clock.Time) {
	switch a.state {
	case CookieWait, CookieEchoed:
		a.end(nil)
	case Established:
		a.state = ShutdownPending
		a.guard(now)
		a.tryShutdown(now)
	}
}

// guard limits how long a shutdown may take (T5-shutdown-guard, RFC 9260 9.2). It starts with Close, because a peer that keeps its window
// closed can delay SHUTDOWN forever.
func (a *Assoc) guard(now clock.Time) {
	if !a.armed(timerGuard) {
		a.arm(timerGuard, now.Add(guardTime))
	}
}

// PollRestart reports and consumes a pending EventRestart, before PollEvent would. Data in the packet that restarts the association belongs
// to the new association, so an owner with per-message state calls PollRestart before PollData.
func (a *Assoc) PollRestart() bool {
	is := a.events&(1<<EventRestart) != 0
	a.events &^= 1 << EventRestart
	return is
}

// Abort ends the association at once with an ABORT, which PollTransmit returns.
func (a *Assoc) Abort() { a.abort(causeUserAbort, nil, ErrAborted) }

// GiveUp is Abort with the cause "out of resource": the owner is short of memory.
func (a *Assoc) GiveUp() { a.abort(causeOutOfResource, nil, ErrNoRoom) }

// abort sends an ABORT with a cause and ends the association.
func (a *Assoc) abort(c causeCode, info []byte, err error) {
	if a.state == Closed {
		return
	}
	if a.peerTag != 0 {
		h := Header{a.flow.LocalPort, a.flow.RemotePort, a.peerTag}
		b, at := beginChunk(h.Append(nil), ChunkAbort, 0)
		if c != 0 {
			b = appendCause(b, c, info)
		}
		a.raw = append(a.raw[:0], rawPacket{endChunk(b, at), a.primary, a.paths[a.primary].udp})
	}
	a.end(err)
}

// end discards the association. Every Buf and every kept chunk returns to the owner.
func (a *Assoc) end(err error) {
	if a.state == Closed {
		return
	}
	a.state = Closed
	a.err = err
	a.dropSends()
	a.rcv.forgetAll()
	a.rcv.sackNow, a.rcv.pending = false, 0
	a.stop(timerSack)
	a.want &= wantShutdownComplete
	a.replies = a.replies[:0]
	a.stop(timerInit, timerShutdown, timerGuard)
	for i := range a.paths {
		p := &a.paths[i]
		p.deadlines = [numPathTimers]clock.Time{}
		p.beat, p.ack = beatIdle, p.ack[:0]
		p.pmtu = pmtu{limit: p.pmtu.limit}
	}
	a.events |= 1 << EventClosed
}

// dropSends releases every message.
func (a *Assoc) dropSends() {
	for p := a.first; p != a.last; p++ {
		if it := a.at(p); it.buf != NoBuf {
			a.released = append(a.released, it.buf)
		}
	}
	a.first, a.next, a.last = 0, 0, 0
	a.outstanding, a.queued, a.lostCount, a.gapAcked = 0, 0, 0, 0
	a.recovery, a.probing = recoveryNone, false
	a.stop(timerPersist)
	a.probe, a.starved = false, false
	for i := range a.paths {
		p := &a.paths[i]
		p.stop(timerT3)
		p.flight, p.timedAt, p.single = 0, 0, false
	}
}

// up enters ESTABLISHED.
func (a *Assoc) up(now clock.Time) {
	a.state = Established
	a.stop(timerInit)
	a.initRetries, a.stales = 0, 0
	a.errors = 0
	a.cookie = nil
	a.setRTO(&a.paths[0])
	a.events |= 1 << EventUp
	a.burst = a.cfg.MaxBurst
	for i := range a.paths {
		a.armHeartbeat(now, i)
		if !a.paths[i].confirmed {
			a.paths[i].arm(timerHeartbeat, now) // verified at once (RFC 9260 5.4)
		}
	}
}

// adopt sets what the cookie records about the two ends.
func (a *Assoc) adopt(c *cookie) {
	a.tag, a.peerTag = c.tag, c.peerTag
	a.out, a.in = int(c.out), int(c.in)
	a.peerRwnd = int(c.rwnd)
	a.stop(timerSack)
	a.rcv.start(c.peerTSN, a.cfg.RcvWindow, a.cfg.MaxKept)
	a.addAddrs(c.addrs[:c.naddrs])
}

func (a *Assoc) addAddrs(addrs []netip.Addr) {
	for _, ad := range addrs {
		if a.usable(ad) {
			a.addPath(ad, a.paths[0].udp, false)
		}
	}
}

// usable reports whether an address that the peer lists may become a path: it is of the family of the others, and may be another host's.
func (a *Assoc) usable(ad netip.Addr) bool {
	return ad.Is4() == a.paths[0].addr.Is4() && (a.cfg.Hostless == nil || !a.cfg.Hostless(ad))
}
