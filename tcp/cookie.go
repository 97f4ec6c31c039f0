package tcp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// SYN cookies (RFC 4987 3.6). The initial sequence number consists of five bits of a 64-second counter, three bits of MSS table index, and
// 24 bits of a keyed hash over the flow, the peer's initial sequence number and those values. The other options of the SYN (window scale,
// SACK, ECN) go into the low bits of the timestamp, which the peer echoes.
const (
	cookiePeriod = 64 // seconds

	cookieWScale = 0x0f // 15: no window scaling
	cookieSACK   = 0x10
	cookieECN    = 0x20
	cookieBits   = 0x3f
)

var cookieMSS = [8]int{64, 536, 1220, 1400, 1440, 1460, 4312, 8940}

func cookieTime(now clock.Time) uint32 { return uint32(int64(now) / (cookiePeriod * 1e9)) }

func (l *Listener) cookie(f *pkt.Flow, irs serial.Num, t uint32, mss uint32) serial.Num {
	h := flowHash(&l.secret, f, uint64(irs)<<32|uint64(t<<3|mss)) // each value apart: peers know them all, and choose irs
	return serial.Num(t&31<<27 | mss<<24 | h[1]&0xffffff)
}

// tsOff returns the timestamp offset of a flow for connections made from a cookie. It is the same for every call.
func (l *Listener) tsOff(f *pkt.Flow) uint32 { return flowHash(&l.secret, f, 0)[0] }

// cookieReply returns the SYN-ACK of a SYN cookie; no state is kept.
func (l *Listener) cookieReply(now clock.Time, f *pkt.Flow, s *Segment) Header {
	cfg := l.cfg.withDefaults()
	path := newPath(f, l.mtu)
	peer := int(s.Opts.MSS)
	if peer == 0 {
		peer = path.defaultMSS()
	}
	m := uint32(0)
	for i, v := range cookieMSS {
		if v <= peer {
			m = uint32(i)
		}
	}
	shift, max := rcvScale(&cfg, path.offeredMSS())
	h := Header{SrcPort: f.LocalPort, DstPort: f.RemotePort, Flags: SYN | ACK, Ack: s.Seq + 1, Window: uint16(min(max, 0xffff))}
	h.Seq = l.cookie(f, s.Seq, cookieTime(now), m)
	h.Opts.MSS = uint16(path.offeredMSS())
	if !s.Opts.HasTimestamps || l.cfg.NoTimestamps {
		return h
	}
	bits := uint32(cookieWScale)
	if s.Opts.HasWScale && !l.cfg.NoWindowScale {
		bits = uint32(s.Opts.WScale)
		h.Opts.HasWScale, h.Opts.WScale = true, shift
	}
	if s.Opts.SACKPermitted && !l.cfg.NoSACK {
		bits |= cookieSACK
		h.Opts.SACKPermitted = true
	}
	if l.cfg.acceptsECN() && s.Flags&(ECE|CWR) == ECE|CWR {
		bits |= cookieECN
		h.Flags |= ECE
	}
	h.Opts.HasTimestamps = true
	h.Opts.TSEcr = s.Opts.TSVal
	ts := (&options{tsOff: l.tsOff(f)}).tsAt(now)
	// The timestamp clock must not appear to run backwards later in the connection.
	h.Opts.TSVal = ts&^cookieBits | bits
	if int32(h.Opts.TSVal-ts) > 0 {
		h.Opts.TSVal -= cookieBits + 1
	}
	return h
}

// checkCookie returns a new connection if the ACK s answers a valid cookie, else nil.
func (l *Listener) checkCookie(now clock.Time, f *pkt.Flow, s *Segment) *Conn {
	if l.flooded == 0 || now.Sub(l.flooded) > cookieLife {
		return nil
	}
	iss, irs := s.Ack-1, s.Seq-1
	m := uint32(iss) >> 24 & 7
	t := cookieTime(now)
	if uint32(iss)>>27 != t&31 {
		t--
	}
	if l.cookie(f, irs, t, m) != iss {
		return nil
	}
	syn := Header{Seq: irs, Ack: s.Ack, Window: s.Window}
	syn.Opts.MSS = uint16(cookieMSS[m])
	ecn := false
	if s.Opts.HasTimestamps && !l.cfg.NoTimestamps {
		bits := s.Opts.TSEcr & cookieBits
		syn.Opts.HasTimestamps, syn.Opts.TSVal = true, s.Opts.TSVal
		if w := uint8(bits & cookieWScale); w <= maxWScale {
			syn.Opts.HasWScale, syn.Opts.WScale = true, w
		}
		syn.Opts.SACKPermitted = bits&cookieSACK != 0
		ecn = bits&cookieECN != 0
	}
	c := newConn(now, l.cfg, *f, iss, l.mtu)
	c.nxt = iss + 1
	c.una = c.nxt
	c.tsOff = l.tsOff(f)
	c.takeSYN(now, &syn)
	c.ecnOK = ecn && l.cfg.acceptsECN()
	c.establish(now)
	return c
}
