package sctp

import (
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// HandlePacket processes a packet of flow f whose checksum is correct; udp is its UDP source port if it was encapsulated. The caller then
// drains PollData while the packet is still available.
func (a *Assoc) HandlePacket(now clock.Time, f pkt.Flow, udp uint16, b []byte) {
	var h Header
	var c Chunk
	if a.state == Closed {
		return
	}
	if h.Decode(b) != nil || (udp != 0) != a.cfg.UDP { // only packets encapsulated as ours are answered
		a.stats.BadPacket++
		return
	}
	next, err := NextChunk(b, HeaderLen, &c)
	if err != nil || h.SrcPort != f.RemotePort || h.DstPort != f.LocalPort {
		a.stats.BadPacket++
		return
	}
	if !a.tagOK(&h, &c, next < len(b)) {
		a.stats.BadTag++
		return
	}
	a.stats.RxPackets++
	a.noteStop(now, a.Deadline())
	from := a.FindPath(netip.AddrFrom16(f.Remote).Unmap())
	if from < 0 {
		from = a.primary
	} else if h.Tag == a.tag {
		a.paths[from].udp = udp // RFC 6951 5.4
	}
	a.lastIn, a.lastUDP = from, udp
	if a.state == ShutdownSent && h.Tag == a.tag { // the peer is alive, and may have much to send (9.2)
		a.errors, a.paths[a.primary].errors = 0, 0
	}
	data, sacked, budget := false, false, 64
	for {
		if c.Type == ChunkData {
			if !a.mayReceive() {
				a.stats.RxDropped++
			} else if data = true; !a.handleData(&c) {
				return
			}
		} else if c.Type != ChunkSack || !sacked { // no peer bundles two, and each costs as much as there is in flight
			sacked = sacked || c.Type == ChunkSack
			if !a.control(now, &f, &h, b, &c) {
				break
			}
		}
		if a.state == Closed {
			return
		}
		if next >= len(b) {
			break
		}
		if c.Type != ChunkData {
			if budget--; budget == 0 {
				break // more control chunks than a peer needs
			}
		}
		if next, err = NextChunk(b, next, &c); err != nil {
			a.stats.BadPacket++
			break // padding or a truncated chunk: the chunks before it count
		}
	}
	if data && a.state != Closed {
		a.dataSeen(now)
	}
}

func (a *Assoc) mayReceive() bool {
	return a.state == Established || a.state == ShutdownPending || a.state == ShutdownSent
}

// Ours reports whether packet b carries the verification tag that the association gave to its peer, which nobody else knows.
func (a *Assoc) Ours(b []byte) bool {
	var h Header
	return h.Decode(b) == nil && h.Tag == a.tag
}

// Tag returns that verification tag, and PeerTag the tag of packets to the peer.
func (a *Assoc) Tag() uint32     { return a.tag }
func (a *Assoc) PeerTag() uint32 { return a.peerTag }

// tagOK is RFC 9260 8.5.
func (a *Assoc) tagOK(h *Header, c *Chunk, more bool) bool {
	switch c.Type {
	case ChunkInit:
		return h.Tag == 0 && !more
	case ChunkAbort, ChunkShutdownComplete:
		if c.Flags&flagTag != 0 {
			return a.peerTag != 0 && h.Tag == a.peerTag
		}
		return h.Tag == a.tag
	case ChunkCookieEcho:
		return true // the cookie decides
	case ChunkShutdownAck:
		// An out-of-the-blue packet during setup (8.5.1 E).
		return h.Tag == a.tag || a.state == CookieWait || a.state == CookieEchoed
	}
	return h.Tag == a.tag
}

// control processes a chunk other than DATA. It reports whether to continue with the packet.
func (a *Assoc) control(now clock.Time, f *pkt.Flow, h *Header, b []byte, c *Chunk) bool {
	switch c.Type {
	case ChunkInit:
		if c.Off == HeaderLen {
			a.handleInit(now, f, c)
		}
		return false
	case ChunkInitAck:
		if c.Off == HeaderLen && a.state == CookieWait {
			a.handleInitAck(now, c)
		}
		return false
	case ChunkCookieEcho:
		return c.Off == HeaderLen && a.handleCookieEcho(now, h, c)
	case ChunkCookieAck:
		if a.state == CookieEchoed {
			if a.initRetries == 0 {
				a.sample(now, &a.paths[0], a.t1Sent)
			}
			a.up(now)
		}
	case ChunkSack:
		switch a.state {
		case Established, ShutdownPending, ShutdownReceived, ShutdownSent:
			var s Sack
			if s.Decode(c.Body) != nil {
				a.abort(causeProtocol, nil, ErrProtocol)
				return false
			}
			a.handleSack(now, &s)
		}
	case ChunkHeartbeat:
		p := &a.paths[a.lastIn]
		if a.state != CookieWait && len(p.ack)+chunkHeader+pad4(len(c.Body)) <= min(maxReplies, p.budget()) {
			p.ack = appendChunk(p.ack, ChunkHeartbeatAck, 0, c.Body)
		}
	case ChunkHeartbeatAck:
		a.heartbeatAck(now, c.Body)
	case ChunkAbort:
		e := &AbortError{}
		var p param
		if _, err := nextParam(c.Body, &p); err == nil {
			e.cause = causeCode(p.Type)
		}
		a.end(e)
		return false
	case ChunkShutdown:
		a.handleShutdown(now, c)
	case ChunkShutdownAck:
		switch a.state {
		case ShutdownSent, ShutdownAckSent:
			a.want |= wantShutdownComplete
			a.end(nil)
		case CookieWait, CookieEchoed:
			// 8.4 (5): the peer is finishing an older association.
			a.respond(shutdownComplete(f, h.Tag))
		}
		return false
	case ChunkShutdownComplete:
		if a.state == ShutdownAckSent {
			a.end(nil)
		}
		return false
	case ChunkError:
		a.handleError(now, c)
	case ChunkECNE, ChunkCWR, ChunkPad:
	default:
		a.stats.UnknownChunks++
		how := c.Type.unknown()
		if how&unknownReport != 0 && a.state >= Established {
			a.reply(causeUnknownChunk, c.raw(b))
		}
		return how&unknownSkip != 0
	}
	return true
}

// maxReplies limits the bytes queued for ERROR, and for HEARTBEAT ACK on each path, at a peer's request.
const maxReplies = 1024

// reply queues an ERROR chunk.
func (a *Assoc) reply(c causeCode, info []byte) {
	to := a.answerPath()
	if len(a.replies)+chunkHeader+4+len(info)+3 > min(maxReplies, a.paths[to].budget()) {
		return
	}
	b, at := beginChunk(a.replies, ChunkError, 0)
	// The cause is last in the chunk, whose padding is not part of it.
	b = be.AppendUint16(b, uint16(c))
	b = be.AppendUint16(b, uint16(4+len(info)))
	b = append(b, info...)
	a.replies = endChunk(b, at)
	a.replyTo = to
}

// respond queues the packet b, which answers the one that is processed.
func (a *Assoc) respond(b []byte) {
	if len(a.raw) < 4 {
		a.raw = append(a.raw, rawPacket{b, a.lastIn, a.lastUDP})
	}
}

func shutdownComplete(f *pkt.Flow, tag uint32) []byte {
	h := Header{f.LocalPort, f.RemotePort, tag}
	return appendChunk(h.Append(nil), ChunkShutdownComplete, flagTag, nil)
}

// handleError processes the causes of an ERROR.
func (a *Assoc) handleError(now clock.Time, c *Chunk) {
	rest := c.Body
	for len(rest) > 0 {
		var p param
		var err error
		if rest, err = nextParam(rest, &p); err != nil {
			return
		}
		if causeCode(p.Type) == causeStaleCookie && a.state == CookieEchoed && len(p.Body) == 4 {
			// Start again with a longer cookie lifetime (5.2.6).
			if a.stales++; a.stales > maxInit {
				a.end(ErrTimeout)
				return
			}
			a.preserve = min(be.Uint32(p.Body)/1000+1000, 60000)
			a.state = CookieWait
			a.cookie, a.unknown = nil, nil
			a.want = wantInit
			a.t1Sent = now
			a.arm(timerInit, now.Add(a.paths[0].rto))
			return
		}
	}
}

// HandleICMP processes an ICMP error about a packet of ours (RFC 9260 section 10). It ignores an error whose verification tag does not
// match.
func (a *Assoc) HandleICMP(now clock.Time, e *pkt.ICMPError) {
	if a.state == Closed {
		return
	}
	if e.Seq != 0 && e.Seq != a.peerTag || e.Seq == 0 && (a.state != CookieWait || e.InitTag != a.tag) {
		return
	}
	i := a.FindPath(netip.AddrFrom16(e.Flow.Remote).Unmap())
	if i < 0 {
		return
	}
	if a.refused(e) {
		a.end(ErrNoSCTP) // section 10, ICMP8: treated as an ABORT
		return
	}
	switch e.Kind {
	case pkt.TooBig:
		a.tooBig(now, i, e.MTU)
	case pkt.Unreachable, pkt.TimeExceeded:
		if a.state == CookieWait && a.unreachable(e) {
			a.end(ErrUnreachable)
		}
	}
}

// softRetries is how often INIT is retransmitted before an ICMP error that may pass soon ends the set-up, as an open of TCP: a router may
// report so for a moment, while it resolves an address or its routes change.
const softRetries = 2

// unreachable reports whether an ICMP error about INIT ends the set-up. Port unreachable is ignored (ICMP3).
func (a *Assoc) unreachable(e *pkt.ICMPError) bool {
	if e.Kind == pkt.Unreachable && pkt.Prohibited(a.paths[0].addr.Is6(), e.Code) {
		return true
	}
	return a.initRetries >= softRetries && !portUnreachable(e)
}

// refused reports whether an ICMP error says that the destination has no SCTP: protocol unreachable, unrecognized next header, or port
// unreachable in answer to UDP (RFC 6951 5.5).
func (a *Assoc) refused(e *pkt.ICMPError) bool {
	v6 := a.paths[0].addr.Is6()
	switch {
	case a.cfg.UDP:
		return portUnreachable(e)
	case v6:
		return e.Kind == pkt.ParameterProblem && e.Code == 1
	}
	return e.Kind == pkt.Unreachable && e.Code == 2
}

func portUnreachable(e *pkt.ICMPError) bool {
	code := uint8(3)
	if netip.AddrFrom16(e.Flow.Remote).Unmap().Is6() {
		code = 4
	}
	return e.Kind == pkt.Unreachable && e.Code == code
}
