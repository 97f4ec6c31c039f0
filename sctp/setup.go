package sctp

import (
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// refusal returns the ABORT that refuses an INIT or INIT ACK, and the error, or nil if it is acceptable. The ABORT carries the peer's tag.
func refusal(cfg *Config, f *pkt.Flow, i *Init, decodeErr error, wantCookie bool) ([]byte, error) {
	h := Header{f.LocalPort, f.RemotePort, i.Tag}
	var cause causeCode
	var info []byte
	err := ErrProtocol
	switch {
	case i.Tag == 0:
		// 3.3.3 for INIT ACK; an INIT without a tag cannot be answered.
		return nil, ErrProtocol
	case i.HostName:
		cause = causeUnresolvable
		info = []byte{0, byte(paramHostName), 0, 4}
	case decodeErr != nil || !i.valid():
		cause = causeInvalidParam
	case wantCookie && len(i.Cookie) == 0:
		cause = causeMissingParam
		info = []byte{0, 0, 0, 1, 0, byte(paramStateCookie)}
	case !cfg.accepts(i.Adaptation, i.HasAdaptation):
		cause, err = causeUserAbort, ErrAdaptation
		info = []byte("adaptation layer indication not accepted")
	default:
		return nil, nil
	}
	b, at := beginChunk(h.Append(nil), ChunkAbort, 0)
	return endChunk(appendCause(b, cause, info), at), err
}

// handleInit processes an INIT for an existing association (RFC 9260 5.2.1, 5.2.2).
func (a *Assoc) handleInit(now clock.Time, f *pkt.Flow, c *Chunk) {
	if a.state == ShutdownAckSent {
		a.want |= wantShutdownAck
		return
	}
	var i Init
	err := i.Decode(c.Body)
	if abort, why := refusal(&a.cfg, f, &i, err, false); why != nil {
		if abort != nil {
			a.respond(abort)
		}
		return
	}
	tag, tsn := a.tag, a.initTSN
	if a.state >= CookieEchoed {
		for _, ad := range i.Addrs[:i.NAddrs] {
			if a.adds(ad) {
				h := Header{f.LocalPort, f.RemotePort, i.Tag}
				b, at := beginChunk(h.Append(nil), ChunkAbort, 0)
				var p []byte
				if ad.Is4() {
					p = appendParam(nil, paramIPv4, ad.AsSlice())
				} else {
					p = appendParam(nil, paramIPv6, ad.AsSlice())
				}
				a.respond(endChunk(appendCause(b, causeRestartAddresses, p), at))
				return
			}
		}
	}
	if a.state > CookieEchoed {
		a.salt++
		tag, tsn = draw(&a.key, f, now, i.Tag^a.salt<<16)
	}
	k := offer(now, &a.cfg, f, &i, tag, tsn)
	if a.state > CookieWait {
		k.tie, k.peerTie = tieTags(&a.key, a.tag, a.peerTag)
	}
	k.collided = a.state <= CookieEchoed
	a.respond(initAck(&a.cfg, f, &i, &k, &a.key))
}

// adds reports whether an address of an INIT would be a new path of the association.
func (a *Assoc) adds(ad netip.Addr) bool {
	return a.usable(ad) && len(a.paths) < maxAddrs && a.FindPath(ad) < 0
}

// handleInitAck processes the answer to our INIT (5.1 C).
func (a *Assoc) handleInitAck(now clock.Time, c *Chunk) {
	var i Init
	err := i.Decode(c.Body)
	abort, why := refusal(&a.cfg, &a.flow, &i, err, true)
	if why == nil && len(i.Cookie) > a.paths[0].budget()-chunkHeader {
		why = ErrProtocol
	}
	if why != nil {
		if abort != nil {
			a.raw = append(a.raw[:0], rawPacket{abort, a.lastIn, a.lastUDP})
		}
		a.end(why)
		return
	}
	a.peerTag = i.Tag
	a.out, a.in = min(a.cfg.Streams, int(i.In)), min(a.cfg.Streams, int(i.Out))
	a.peerRwnd = int(min(i.Rwnd, 1<<30))
	a.stop(timerSack)
	a.rcv.start(i.TSN, a.cfg.RcvWindow, a.cfg.MaxKept)
	a.addAddrs(i.Addrs[:i.NAddrs])
	a.cookie = append(a.cookie[:0], i.Cookie...)
	a.unknown = a.unknown[:0]
	for _, p := range i.report[:i.nrep] {
		if len(a.unknown)+pad4(len(p)) <= 256 {
			a.unknown = append(a.unknown, p...)
			a.unknown = append(a.unknown, zero4[:pad4(len(p))-len(p)]...)
		}
	}
	p := &a.paths[0]
	if a.initRetries == 0 {
		a.sample(now, p, a.t1Sent)
	}
	a.setRTO(p)
	a.initRetries = 0
	a.state = CookieEchoed
	a.want |= wantCookieEcho
	a.want &^= wantInit
	a.t1Sent = now
	a.arm(timerInit, now.Add(p.rto))
}

// handleCookieEcho processes a COOKIE ECHO for an existing association (5.2.4). It reports whether to continue with the packet.
func (a *Assoc) handleCookieEcho(now clock.Time, h *Header, c *Chunk) bool {
	var k cookie
	if !k.decode(c.Body, &a.key) || k.flow != a.flow && a.FindPath(netip.AddrFrom16(k.flow.Remote).Unmap()) < 0 ||
		k.flow.LocalPort != a.flow.LocalPort || k.flow.RemotePort != a.flow.RemotePort || k.tag != h.Tag {
		a.stats.CookiesBad++
		return false
	}
	local, peer := k.tag == a.tag, k.peerTag == a.peerTag
	tie, peerTie := tieTags(&a.key, a.tag, a.peerTag)
	if over := k.stale(now); over != 0 && !(local && peer) {
		a.stats.CookiesStale++
		a.respond(staleCookie(&k, over))
		return false
	}
	switch {
	case local && peer: // D
		if a.state == CookieEchoed {
			a.up(now)
		}
	case !local && !peer && k.tie == tie && k.peerTie == peerTie: // A
		if a.state == ShutdownAckSent {
			a.want |= wantShutdownAck | wantStaleShutdown
			return false
		}
		a.restart(now, &k)
	case local && !peer && a.state <= CookieEchoed: // B
		a.stats.Collisions++
		a.adopt(&k)
		a.want &^= wantInit | wantCookieEcho
		a.up(now)
	default: // C, and anything that matches no case
		return false
	}
	a.want |= wantCookieAck
	return true
}

// restart restarts the association: the peer has lost its state (5.2.4.1 A).
func (a *Assoc) restart(now clock.Time, k *cookie) {
	a.stats.Restarts++
	a.dropSends()
	a.adopt(k)
	a.setTSN(k.tsn)
	a.replies = a.replies[:0]
	a.want = 0
	a.verifyAt = 0
	a.stop(timerInit, timerShutdown, timerGuard)
	a.errors = 0
	for i := range a.paths {
		p := &a.paths[i]
		p.rto, p.srtt, p.rttvar = rtoInitial, 0, 0
		p.errors, p.active = 0, true
		p.resetWindow()
	}
	a.paths[a.lastIn].udp = a.lastUDP
	a.events &^= 1<<EventUp | 1<<EventShutdown
	a.up(now)
	a.events &^= 1 << EventUp
	a.events |= 1 << EventRestart
}

// staleCookie returns the ERROR for a cookie that has exceeded its lifetime by over microseconds.
func staleCookie(k *cookie, over uint32) []byte {
	h := Header{k.flow.LocalPort, k.flow.RemotePort, k.peerTag}
	b, at := beginChunk(h.Append(nil), ChunkError, 0)
	return endChunk(appendCause(b, causeStaleCookie, be.AppendUint32(nil, over)), at)
}
