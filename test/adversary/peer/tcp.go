package peer

import (
	"fmt"
	"net/netip"
)

// Flags of a segment.
const (
	flagFIN = 0x01
	flagSYN = 0x02
	flagRST = 0x04
	flagPSH = 0x08
	flagACK = 0x10
)

// segment is a TCP segment. Options are only sent, and only in a SYN.
type segment struct {
	src, dst uint16
	seq, ack uint32
	flags    uint8
	window   uint16
	mss      uint16
	payload  []byte
}

func (s *segment) decode(b []byte) bool {
	if len(b) < 20 {
		return false
	}
	n := int(b[12]>>4) * 4
	if n < 20 || n > len(b) {
		return false
	}
	*s = segment{be.Uint16(b), be.Uint16(b[2:]), be.Uint32(b[4:]), be.Uint32(b[8:]), b[13], be.Uint16(b[14:]), 0, b[n:]}
	return true
}

func (s *segment) encode(b []byte) int {
	n := 20
	if s.mss != 0 {
		n = 24
		be.PutUint32(b[20:], 2<<24|4<<16|uint32(s.mss))
	}
	be.PutUint16(b, s.src)
	be.PutUint16(b[2:], s.dst)
	be.PutUint32(b[4:], s.seq)
	be.PutUint32(b[8:], s.ack)
	b[12], b[13] = byte(n/4)<<4, s.flags
	be.PutUint16(b[14:], s.window)
	be.PutUint32(b[16:], 0)
	return n + copy(b[n:], s.payload)
}

// MSS is what a Stream announces and never exceeds.
const MSS = 1460

// Stream is a TCP connection.
type Stream struct {
	h       *Host
	k       key
	passive bool
	open    bool
	dead    bool   // we have sent a RST: nothing is acknowledged any more
	una     uint32 // oldest sequence number that is not acknowledged
	nxt     uint32 // ours, next to send
	rcv     uint32 // the other side's, next expected
	wnd     uint16 // the other side's, not scaled

	In  []byte // received in order, not taken
	TOS byte   // of the last segment with payload
	FIN bool   // received, in order
	RST bool   // received
}

func (h *Host) newStream(k key) *Stream {
	s := &Stream{h: h, k: k, una: 0x10000, nxt: 0x10000}
	h.streams[k] = s
	return s
}

// Dial connects to remote.
func (h *Host) Dial(remote netip.AddrPort) (*Stream, error) {
	h.port++
	s := h.newStream(key{remote.Addr(), h.port, remote.Port()})
	if err := s.send(flagSYN, s.nxt, nil); err != nil {
		return nil, err
	}
	s.nxt++
	if err := h.Until("SYN-ACK", func() bool { return s.open || s.RST }); err != nil {
		return nil, err
	}
	if s.RST {
		return nil, fmt.Errorf("peer: %v refused", remote)
	}
	return s, nil
}

// Listen lets others connect to port.
func (h *Host) Listen(port uint16) { h.listens[port] = nil }

// Accept returns the next connection to port.
func (h *Host) Accept(port uint16) (*Stream, error) {
	if err := h.Until("SYN", func() bool { return len(h.listens[port]) > 0 }); err != nil {
		return nil, err
	}
	s := h.listens[port][0]
	h.listens[port] = h.listens[port][1:]
	return s, nil
}

func (s *Stream) send(flags uint8, seq uint32, payload []byte) error {
	seg := segment{src: s.k.local, dst: s.k.remotP, seq: seq, ack: s.rcv, flags: flags, window: 0xffff, payload: payload}
	if flags&flagSYN != 0 {
		seg.mss = MSS
	}
	return s.h.send(s.k, &seg)
}

func (s *Stream) handle(g *segment) {
	switch {
	case g.flags&flagRST != 0:
		s.RST = true
		return
	case g.flags&flagSYN != 0:
		s.rcv = g.seq + 1
		if s.passive {
			if s.nxt == s.una {
				s.nxt++
			}
			_ = s.send(flagSYN|flagACK, s.una, nil)
			return
		}
		s.open, s.una, s.wnd = true, g.ack, g.window
		_ = s.send(flagACK, s.nxt, nil)
		return
	}
	if g.flags&flagACK != 0 && int32(g.ack-s.una) > 0 {
		s.una = g.ack
	}
	s.wnd = g.window
	if s.passive && !s.open && s.una == s.nxt {
		s.open = true
		s.h.listens[s.k.local] = append(s.h.listens[s.k.local], s)
	}
	if len(g.payload) == 0 && g.flags&flagFIN == 0 {
		return
	}
	off := int32(s.rcv - g.seq) // what of it is old
	if n := int32(len(g.payload)); off >= 0 && off <= n {
		if off < n {
			s.In = append(s.In, g.payload[off:]...)
			s.rcv += uint32(n - off)
		}
		if g.flags&flagFIN != 0 && !s.FIN {
			s.FIN = true
			s.rcv++
		}
	}
	if !s.dead {
		_ = s.send(flagACK, s.nxt, nil)
	}
}

// Send sends bytes, in segments as large as can be.
func (s *Stream) Send(b []byte) error {
	for len(b) > 0 {
		n := min(len(b), MSS)
		room := func() bool { return int(s.wnd) >= int(s.nxt-s.una)+n || s.Ended() }
		if err := s.h.Until("window", room); err != nil {
			return err
		}
		if err := s.send(flagACK|flagPSH, s.nxt, b[:n]); err != nil {
			return err
		}
		s.nxt += uint32(n)
		b = b[n:]
		s.h.Poll()
	}
	return nil
}

// SendAt sends one segment whose first byte is off bytes ahead of what Send
// would send next. It does not move that point.
func (s *Stream) SendAt(off int, b []byte) error {
	return s.send(flagACK|flagPSH, s.nxt+uint32(off), b)
}

// Advance says that n bytes sent by SendAt count as sent.
func (s *Stream) Advance(n int) { s.nxt += uint32(n) }

// CloseWrite sends a FIN.
func (s *Stream) CloseWrite() error {
	err := s.send(flagFIN|flagACK, s.nxt, nil)
	s.nxt++
	return err
}

// Reset sends a RST, and nothing after it.
func (s *Stream) Reset() error {
	s.dead = true
	return s.send(flagRST|flagACK, s.nxt, nil)
}

// Need waits for n bytes, or for the end of the stream.
func (s *Stream) Need(n int) error {
	return s.h.Until(fmt.Sprintf("%d bytes", n), func() bool { return len(s.In) >= n || s.Ended() })
}

// Ended reports whether nothing more can come.
func (s *Stream) Ended() bool { return s.FIN || s.RST }

// Forget lets go of the stream: its segments are not answered any more.
func (s *Stream) Forget() { delete(s.h.streams, s.k) }
