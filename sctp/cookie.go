package sctp

import (
	"crypto/hmac"
	"crypto/sha256"
	"net/netip"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// Secret is the key of cookies, tags and initial TSNs. It is random and kept for the life of the process.
type Secret [32]byte

// cookie is the state of an association that is being set up. The peer stores it, signed (RFC 9260 5.1.3).
type cookie struct {
	created      clock.Time
	life         uint32 // ms
	flow         pkt.Flow
	tag, peerTag uint32
	tsn, peerTSN serial.Num
	rwnd         uint32
	out, in      uint16 // our stream counts, within what the peer allows
	tie, peerTie uint32
	addrs        [maxAddrs]netip.Addr
	naddrs       int
	collided     bool // made in COOKIE-WAIT or COOKIE-ECHOED
}

const (
	cookieFixed = 8 + 4 + 36 + 4*4 + 4 + 2*2 + 2*4 + 1 + 1
	macLen      = 16
)

func mac(key *Secret, b []byte) [macLen]byte {
	h := hmac.New(sha256.New, key[:])
	h.Write(b)
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	return [macLen]byte(sum[:macLen])
}

// append appends the cookie with its MAC.
func (c *cookie) append(b []byte, key *Secret) []byte {
	at := len(b)
	b = be.AppendUint64(b, uint64(c.created))
	b = be.AppendUint32(b, c.life)
	b = append(b, c.flow.Local[:]...)
	b = append(b, c.flow.Remote[:]...)
	b = be.AppendUint16(b, c.flow.LocalPort)
	b = be.AppendUint16(b, c.flow.RemotePort)
	for _, v := range [...]uint32{c.tag, c.peerTag, uint32(c.tsn), uint32(c.peerTSN), c.rwnd} {
		b = be.AppendUint32(b, v)
	}
	b = be.AppendUint16(b, c.out)
	b = be.AppendUint16(b, c.in)
	for _, v := range [...]uint32{c.tie, c.peerTie} {
		b = be.AppendUint32(b, v)
	}
	flags := byte(0)
	if c.collided {
		flags = 1
	}
	b = append(b, flags, byte(c.naddrs))
	for _, a := range c.addrs[:c.naddrs] {
		v := a.As16()
		b = append(b, v[:]...)
	}
	m := mac(key, b[at:])
	return append(b, m[:]...)
}

// decode reads a cookie and reports whether its MAC is valid. A cookie with a valid MAC was written here.
func (c *cookie) decode(b []byte, key *Secret) bool {
	n := len(b) - macLen
	if n < cookieFixed {
		return false
	}
	if m := mac(key, b[:n]); !hmac.Equal(m[:], b[n:]) {
		return false
	}
	b = b[:n]
	*c = cookie{created: clock.Time(be.Uint64(b)), life: be.Uint32(b[8:])}
	b = b[12:]
	c.flow = pkt.Flow{Local: [16]byte(b[:16]), Remote: [16]byte(b[16:32]), LocalPort: be.Uint16(b[32:]), RemotePort: be.Uint16(b[34:])}
	b = b[36:]
	c.tag, c.peerTag = be.Uint32(b), be.Uint32(b[4:])
	c.tsn, c.peerTSN = serial.Num(be.Uint32(b[8:])), serial.Num(be.Uint32(b[12:]))
	c.rwnd = be.Uint32(b[16:])
	c.out, c.in = be.Uint16(b[20:]), be.Uint16(b[22:])
	c.tie, c.peerTie = be.Uint32(b[24:]), be.Uint32(b[28:])
	c.collided = b[32] != 0
	c.naddrs = int(b[33])
	b = b[34:]
	if c.naddrs > maxAddrs || len(b) != 16*c.naddrs {
		return false
	}
	for i := range c.naddrs {
		c.addrs[i] = netip.AddrFrom16([16]byte(b[16*i:])).Unmap()
	}
	return true
}

// stale returns by how many microseconds the cookie has exceeded its lifetime, or 0.
func (c *cookie) stale(now clock.Time) uint32 {
	over := now.Sub(c.created).Microseconds() - int64(c.life)*1000
	if over <= 0 {
		return 0
	}
	return uint32(min(over, 1<<32-1))
}

// draw returns a tag, never 0, and an initial TSN, both unpredictable to others (RFC 9260 5.3.1).
func draw(key *Secret, f *pkt.Flow, now clock.Time, salt uint32) (tag uint32, tsn serial.Num) {
	var b [64]byte
	copy(b[:], f.Local[:])
	copy(b[16:], f.Remote[:])
	be.PutUint16(b[32:], f.LocalPort)
	be.PutUint16(b[34:], f.RemotePort)
	be.PutUint64(b[36:], uint64(now))
	be.PutUint32(b[44:], salt)
	b[48] = 't'
	m := mac(key, b[:])
	return max(be.Uint32(m[:]), 1), serial.Num(be.Uint32(m[4:]))
}

// tieTags returns the Tie-Tags of an association with these tags (RFC 9260 1.3): a nonce by which a cookie names the
// association. Cookies are signed, not secret, so they must not have the tags of an association that is established.
func tieTags(key *Secret, tag, peerTag uint32) (tie, peerTie uint32) {
	m := mac(key, be.AppendUint32(be.AppendUint32([]byte("tie"), tag), peerTag))
	return max(be.Uint32(m[:]), 1), be.Uint32(m[4:])
}

// offer returns the cookie for the INIT i that arrived on flow f.
func offer(now clock.Time, cfg *Config, f *pkt.Flow, i *Init, tag uint32, tsn serial.Num) cookie {
	life := uint32(cookieLife.Milliseconds())
	life += min(i.Preserve, life) // a listener at most doubles the lifetime
	return cookie{
		created: now, life: life, flow: *f, tag: tag, peerTag: i.Tag, tsn: tsn, peerTSN: i.TSN, rwnd: i.Rwnd,
		out: uint16(min(cfg.Streams, int(i.In))), in: uint16(min(cfg.Streams, int(i.Out))),
		addrs: i.Addrs, naddrs: i.NAddrs,
	}
}

// initAck returns the complete packet that answers an INIT.
func initAck(cfg *Config, f *pkt.Flow, i *Init, c *cookie, key *Secret) []byte {
	h := Header{f.LocalPort, f.RemotePort, i.Tag}
	r := Init{Tag: c.tag, Rwnd: uint32(cfg.RcvWindow), Out: c.out, In: uint16(cfg.Streams), TSN: c.tsn,
		Adaptation: cfg.Adaptation, HasAdaptation: cfg.Adaptation != 0, Cookie: c.append(nil, key)}
	// Report unknown parameters as far as they fit.
	room := 512
	for _, p := range i.report[:i.nrep] {
		if room -= 4 + pad4(len(p)); room >= 0 {
			r.report[r.nrep] = p
			r.nrep++
		}
	}
	return r.Append(h.Append(make([]byte, 0, 512)), ChunkInitAck)
}
