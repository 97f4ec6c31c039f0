// Package peer is an iWARP peer for tests that is not built from iwarpd's
// packages: its Ethernet, IPv4, TCP, MPA, DDP and RDMAP are written here once
// more, as simply as can be, so that every byte it sends is the test's to
// choose and every byte it gets is checked by somebody else's code. It needs a
// wire that loses nothing.
package peer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
)

var be = binary.BigEndian

// MAC is the address of every Host.
var MAC = [6]byte{2, 0, 0, 0, 0x66, 0x66}

// patience is how long Host waits for what must come at once.
const patience = time.Minute

// ErrPatience means that an expected event did not come in time.
var ErrPatience = errors.New("peer: timed out waiting")

type key struct {
	remote        netip.Addr
	local, remotP uint16
}

// Host is a station at the end of a wire. One goroutine uses it.
type Host struct {
	link    link.Link
	addr    netip.Addr
	gateway [6]byte
	streams map[key]*Stream
	listens map[uint16][]*Stream // accepted, not yet taken
	port    uint16
	frames  [16]link.Frame
	done    [64]link.Slot
}

// New makes a Host of address addr, an IPv4 address. Every frame goes to the
// station gateway.
func New(l link.Link, addr netip.Addr, gateway [6]byte) *Host {
	return &Host{link: l, addr: addr, gateway: gateway, streams: make(map[key]*Stream), listens: make(map[uint16][]*Stream), port: 20000}
}

// Until takes frames until cond holds.
func (h *Host) Until(what string, cond func() bool) error {
	for end := time.Now().Add(patience); !cond(); {
		if h.Poll() > 0 {
			continue
		}
		if time.Now().After(end) {
			return fmt.Errorf("%w for %s", ErrPatience, what)
		}
		h.link.Wait(time.Millisecond, -1)
	}
	return nil
}

// Poll takes the frames that are there, and answers them.
func (h *Host) Poll() int {
	n := h.link.Receive(h.frames[:])
	for i := range h.frames[:n] {
		f := &h.frames[i]
		var b []byte
		for _, p := range f.Pieces[:f.N] {
			b = append(b, p...)
		}
		h.link.Release(f)
		h.frame(b)
	}
	h.flush()
	return n
}

func (h *Host) flush() {
	h.link.Flush()
	for {
		n := h.link.Reap(h.done[:])
		for _, s := range h.done[:n] {
			h.link.Free(s)
		}
		if n < len(h.done) {
			return
		}
	}
}

func (h *Host) frame(b []byte) {
	if len(b) < 14+20+20 || be.Uint16(b[12:]) != 0x0800 || b[14] != 0x45 || b[14+9] != 6 {
		return
	}
	ip := b[14:]
	ip = ip[:min(len(ip), int(be.Uint16(ip[2:])))]
	from, _ := netip.AddrFromSlice(ip[12:16])
	if to, _ := netip.AddrFromSlice(ip[16:20]); to != h.addr {
		return
	}
	var s segment
	if !s.decode(ip[20:]) {
		return
	}
	k := key{from, s.dst, s.src}
	st := h.streams[k]
	if st == nil {
		if _, ok := h.listens[s.dst]; !ok || s.flags&(flagSYN|flagACK) != flagSYN {
			return
		}
		st = h.newStream(k)
		st.passive = true
	}
	if len(s.payload) > 0 {
		st.TOS = ip[1]
	}
	st.handle(&s)
}

// send puts one TCP segment on the wire.
func (h *Host) send(k key, s *segment) error {
	h.flush()
	slot, ok := h.link.Alloc()
	if !ok {
		return errors.New("peer: no TX slot")
	}
	b := h.link.Bytes(slot)
	copy(b, h.gateway[:])
	copy(b[6:], MAC[:])
	be.PutUint16(b[12:], 0x0800)
	ip := b[14:]
	n := s.encode(ip[20:])
	src, dst := h.addr.As4(), k.remote.As4()
	copy(ip, []byte{0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0})
	be.PutUint16(ip[2:], uint16(20+n))
	copy(ip[12:], src[:])
	copy(ip[16:], dst[:])
	be.PutUint16(ip[10:], ^sum(ip[:20], 0))
	pseudo := sum(ip[12:20], 6+uint32(n))
	be.PutUint16(ip[20+16:], 0)
	be.PutUint16(ip[20+16:], ^sum(ip[20:20+n], uint32(pseudo)))
	if !h.link.Post(slot, 0, 14+20+n) {
		h.link.Free(slot)
		return errors.New("peer: ring full")
	}
	h.flush()
	return nil
}

// sum is the Internet checksum before its complement.
func sum(b []byte, s uint32) uint16 {
	for ; len(b) >= 2; b = b[2:] {
		s += uint32(be.Uint16(b))
	}
	if len(b) == 1 {
		s += uint32(b[0]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}
