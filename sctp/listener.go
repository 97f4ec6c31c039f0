package sctp

import (
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// Listener is a listening port. It keeps no state for associations that are being set up.
type Listener struct {
	cfg   Config
	key   Secret
	mtu   int
	salt  uint32
	stats ListenerStats
}

// ListenerStats holds the counters of a Listener.
type ListenerStats struct {
	Inits, Refused, CookiesGood, CookiesBad, CookiesStale uint64
}

// Add adds o to s, field by field.
func (s *ListenerStats) Add(o *ListenerStats) {
	s.Inits += o.Inits
	s.Refused += o.Refused
	s.CookiesGood += o.CookiesGood
	s.CookiesBad += o.CookiesBad
	s.CookiesStale += o.CookiesStale
}

// NewListener returns a listener. mtu is that of the link.
func NewListener(cfg *Config, key *Secret, mtu int) *Listener {
	return &Listener{cfg: cfg.withDefaults(), key: *key, mtu: mtu}
}

// Stats returns the counters.
func (l *Listener) Stats() ListenerStats { return l.stats }

// SetMTU sets the MTU of future associations.
func (l *Listener) SetMTU(mtu int) { l.mtu = mtu }

// HandlePacket processes a packet, with correct checksum, that belongs to no association. If a is not nil it is a new established
// association: the caller adds it to the flow table and passes the same packet to a.HandlePacket. If reply is not nil the caller sends it,
// after setting its checksum.
func (l *Listener) HandlePacket(now clock.Time, f pkt.Flow, udp uint16, b []byte) (a *Assoc, reply []byte) {
	var h Header
	var c Chunk
	if h.Decode(b) != nil || !unicast(&f) {
		return nil, nil
	}
	next, err := NextChunk(b, HeaderLen, &c)
	if err != nil {
		return nil, nil
	}
	switch c.Type {
	case ChunkInit:
		if h.Tag != 0 || next < len(b) {
			return nil, nil
		}
		return nil, l.handleInit(now, &f, &c)
	case ChunkCookieEcho:
		var k cookie
		if !k.decode(c.Body, &l.key) || k.flow != f || k.tag != h.Tag || k.collided {
			l.stats.CookiesBad++
			return nil, nil
		}
		if over := k.stale(now); over != 0 {
			l.stats.CookiesStale++
			return nil, staleCookie(&k, over)
		}
		l.stats.CookiesGood++
		a = newAssoc(&l.cfg, f, udp, &l.key, l.mtu)
		a.adopt(&k)
		a.setTSN(k.tsn)
		a.up(now)
		return a, nil
	}
	return nil, OutOfBlue(f, b)
}

func (l *Listener) handleInit(now clock.Time, f *pkt.Flow, c *Chunk) []byte {
	l.stats.Inits++
	var i Init
	err := i.Decode(c.Body)
	if abort, why := refusal(&l.cfg, f, &i, err, false); why != nil {
		l.stats.Refused++
		return abort
	}
	l.salt++
	tag, tsn := draw(&l.key, f, now, l.salt)
	k := offer(now, &l.cfg, f, &i, tag, tsn)
	return initAck(&l.cfg, f, &i, &k, &l.key)
}

func unicast(f *pkt.Flow) bool {
	v6 := netip.AddrFrom16(f.Local).Unmap().Is6()
	return pkt.Unicast(&f.Local, v6) && pkt.Unicast(&f.Remote, v6)
}

// OutOfBlue returns the answer to an out-of-the-blue packet with correct checksum (RFC 9260 8.4), or nil. The caller sets the checksum.
func OutOfBlue(f pkt.Flow, b []byte) []byte {
	var h Header
	if h.Decode(b) != nil || !unicast(&f) {
		return nil
	}
	tag, flags := h.Tag, uint8(flagTag)
	for off, first := HeaderLen, true; off < len(b); first = false {
		var c Chunk
		next, err := NextChunk(b, off, &c)
		if err != nil {
			break
		}
		off = next
		switch c.Type {
		case ChunkAbort, ChunkShutdownComplete, ChunkCookieAck:
			return nil
		case ChunkInit:
			if !first || h.Tag != 0 || len(c.Body) < 4 || be.Uint32(c.Body) == 0 {
				return nil
			}
			tag, flags = be.Uint32(c.Body), 0
		case ChunkShutdownAck:
			return shutdownComplete(&f, h.Tag)
		case ChunkError:
			var p param
			if _, err := nextParam(c.Body, &p); err == nil && causeCode(p.Type) == causeStaleCookie {
				return nil
			}
		}
	}
	r := Header{f.LocalPort, f.RemotePort, tag}
	return appendChunk(r.Append(nil), ChunkAbort, flags, nil)
}

// IsSetup reports whether a packet begins with INIT or COOKIE ECHO, the chunks that ask a listener for an association.
func IsSetup(b []byte) bool {
	return len(b) > HeaderLen && (ChunkType(b[HeaderLen]) == ChunkInit || ChunkType(b[HeaderLen]) == ChunkCookieEcho)
}
