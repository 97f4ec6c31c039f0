package sctppeer

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
)

const (
	port     = 7174
	peerPort = 7175
	headroom = 64 // Ethernet, IPv4, UDP
)

// host is one of our associations on a link, with its DDP streams. It does for the association what a worker of the
// data plane does.
type host struct {
	t     *testing.T
	link  link.Link
	flow  pkt.Flow
	tuple pkt.Tuple
	udp   bool
	key   sctp.Secret
	cfg   sctp.Config
	mcfg  session.Config
	l     *sctp.Listener
	a     *sctp.Assoc
	m     *session.Mux
	bufs  map[sctp.Buf]message
	next  sctp.Buf
	kept  map[int][]byte
	part  []byte
	frame [32]link.Frame
	out   sctp.Out

	events []sctp.Event
	ddp    []session.Event
	pieces int // messages that arrived in pieces
}

type message struct {
	b       []byte
	stream  uint16
	control bool
}

func makeHost(t *testing.T, profile session.Profile, udp bool) *host {
	h := &host{t: t, udp: udp, key: sctp.Secret{1, 2, 3}, bufs: map[sctp.Buf]message{}, kept: map[int][]byte{}}
	profile.Configure(&h.cfg)
	h.cfg.UDP = udp
	h.cfg.Streams = 16
	h.mcfg.Profile = profile
	return h
}

// newHost opens v.A. The kernel sees the packets too. Sockets that nothing reads keep it from responding.
func newHost(t *testing.T, v *testenv.Veth, profile session.Profile, udp bool) *host {
	h := makeHost(t, profile, udp)
	h.flow = pkt.NewFlow(netip.AddrPortFrom(v.A.Addr4, port), netip.AddrPortFrom(v.B.Addr4, peerPort))
	h.tuple = pkt.Tuple{Flow: h.flow, Proto: pkt.ProtoSCTP, SrcMAC: [6]byte(v.A.MAC), DstMAC: [6]byte(v.B.MAC)}
	var fd int
	v.A.NS.Run(t, func() (err error) {
		if udp {
			h.tuple.Proto = pkt.ProtoUDP
			h.tuple.LocalPort, h.tuple.RemotePort = sctp.UDPPort, sctp.UDPPort
			if fd, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_DGRAM, 0); err == nil {
				err = syscall.Bind(fd, &syscall.SockaddrInet4{Port: sctp.UDPPort})
			}
		} else {
			fd, err = syscall.Socket(syscall.AF_INET, syscall.SOCK_RAW, pkt.ProtoSCTP)
		}
		if err == nil {
			h.link, err = link.OpenPacket(v.A.Name, link.PacketOptions{})
		}
		return err
	})
	t.Cleanup(func() {
		h.link.Close()
		syscall.Close(fd)
	})
	return h
}

func (h *host) listen() { h.l = sctp.NewListener(&h.cfg, &h.key, h.link.MTU()) }

func (h *host) dial() {
	h.a = sctp.Dial(clock.Now(), &h.cfg, h.flow, &h.key, h.link.MTU())
}

// run takes turns until done reports true.
func (h *host) run(what string, done func() bool) {
	h.t.Helper()
	end := time.Now().Add(time.Minute)
	for !done() {
		if time.Now().After(end) {
			h.t.Fatalf("timed out waiting for %s: %s", what, h.describe())
		}
		h.turn()
	}
}

func (h *host) describe() string {
	if h.a == nil {
		return "no association"
	}
	return fmt.Sprintf("%v, err %v, events %v, ddp %v, %+v", h.a.State(), h.a.Err(), h.events, h.ddp, h.a.Stats())
}

func (h *host) turn() {
	now := clock.Now()
	n := h.link.Receive(h.frame[:])
	for i := range h.frame[:n] {
		h.receive(now, &h.frame[i])
		h.link.Release(&h.frame[i])
	}
	wait := 5 * time.Millisecond
	if h.a != nil {
		h.a.HandleTimeout(now)
		h.pump(now)
		if d := h.a.Deadline(); d != 0 {
			wait = max(0, min(wait, d.Sub(now)))
		}
	}
	h.link.Flush()
	var done [64]link.Slot
	for _, s := range done[:h.link.Reap(done[:])] {
		h.link.Free(s)
	}
	if n == 0 {
		h.link.Wait(wait, -1)
	}
}

func (h *host) receive(now clock.Time, f *link.Frame) {
	var p pkt.Packet
	b := f.Pieces[0]
	if p.Parse(b, f.Len()) != nil || f.N != 1 || p.Proto != h.tuple.Proto || p.DstMAC != h.tuple.SrcMAC {
		return
	}
	b = b[p.L4Off : p.L4Off+p.L4Len]
	udp := uint16(0)
	if h.udp {
		if p.Flow.LocalPort != sctp.UDPPort {
			return
		}
		udp = p.Flow.RemotePort
		b = b[8:]
	}
	if !sctp.Verify(b) {
		h.t.Error("a packet of the peer's has a wrong checksum")
		return
	}
	flow := p.Flow
	flow.RemotePort, flow.LocalPort = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	if h.a != nil && h.a.State() == sctp.Closed {
		if reply := sctp.OutOfBlue(flow, b); reply != nil {
			h.post(reply)
		}
		return
	}
	if h.a == nil {
		if h.l == nil {
			return
		}
		a, reply := h.l.HandlePacket(now, flow, udp, b)
		if reply != nil {
			h.post(reply)
		}
		if h.a = a; a == nil {
			return
		}
	}
	h.a.HandlePacket(now, flow, udp, b)
	h.drainData(b)
}

func (h *host) drainData(b []byte) {
	var d sctp.Data
	for h.a.PollData(&d) {
		switch d.Act {
		case sctp.Deliver:
			h.deliver(&d, b[d.Off:d.Off+d.Len])
		case sctp.Keep:
			h.kept[d.Slot] = append([]byte(nil), b[d.Off:d.Off+d.Len]...)
		case sctp.DeliverKept:
			h.deliver(&d, h.kept[d.Slot])
		}
	}
}

func (h *host) mux() *session.Mux {
	if h.m == nil {
		out, in := h.a.Streams()
		h.m = session.New(h.mcfg, min(out, in))
	}
	return h.m
}

func (h *host) deliver(d *sctp.Data, b []byte) {
	if d.Begin && d.End {
		h.mux().HandleMessage(d.Stream, d.PPID, d.Unordered, b)
		return
	}
	h.part = append(h.part, b...)
	if d.End {
		h.pieces++
		h.mux().HandleMessage(d.Stream, d.PPID, d.Unordered, h.part)
		h.part = h.part[:0]
	}
}

func (h *host) push(m message, ppid uint32) {
	h.next++
	h.bufs[h.next] = m
	h.a.Push(&sctp.Message{Stream: m.stream, PPID: ppid, Urgent: m.control, Buf: h.next, Len: len(m.b)})
}

// segment sends a DDP segment.
func (h *host) segment(stream uint16, b []byte) {
	h.run("room", func() bool { return h.a.Room() >= len(b)+2 && h.m.CanSend(stream) })
	m := append(make([]byte, 2, 2+len(b)), b...)
	h.m.Begin(stream, m)
	h.push(message{m, stream, false}, h.mcfg.Profile.Segment())
}

func (h *host) pump(now clock.Time) {
	if h.m != nil {
		var c session.Control
		for h.a.Room() > 0 && h.m.PollControl(&c) {
			h.push(message{c.Data, c.Stream, true}, c.PPID)
		}
	}
	for h.a.PollTransmit(now, &h.out) {
		b := append([]byte(nil), h.out.Head...)
		for i := range h.out.Parts[:h.out.N] {
			p := &h.out.Parts[i]
			b = append(append(b, p.Hdr[:]...), h.bufs[p.Buf].b...)
			b = append(b, make([]byte, p.Pad)...)
		}
		h.post(b)
	}
	for {
		b, ok := h.a.PollReleased()
		if !ok {
			break
		}
		if m := h.bufs[b]; h.m != nil {
			h.m.HandleAcked(m.stream, m.control)
		}
		delete(h.bufs, b)
	}
	for {
		e, ok := h.a.PollEvent()
		if !ok {
			break
		}
		h.events = append(h.events, e)
		if e == sctp.EventRestart && h.m != nil {
			h.m.Reset(h.m.Streams())
		}
	}
	if h.m != nil {
		var e session.Event
		for h.m.PollEvent(&e) {
			h.ddp = append(h.ddp, e)
		}
	}
}

func (h *host) post(b []byte) {
	sctp.SetChecksum(b)
	if h.udp {
		u := make([]byte, 8, 8+len(b))
		binary.BigEndian.PutUint16(u, sctp.UDPPort)
		binary.BigEndian.PutUint16(u[2:], sctp.UDPPort)
		binary.BigEndian.PutUint16(u[4:], uint16(8+len(b)))
		b = append(u, b...)
		binary.BigEndian.PutUint16(b[6:], pkt.UDPChecksum(pkt.Sum(b, h.tuple.PseudoSum(len(b)))))
	}
	s, ok := h.link.Alloc()
	if !ok {
		return
	}
	at := headroom - h.tuple.HeaderLen()
	slot := h.link.Bytes(s)
	h.tuple.Put(slot[at:headroom], len(b), 0)
	copy(slot[headroom:], b)
	if !h.link.Post(s, at, headroom-at+len(b)) {
		h.link.Free(s)
	}
}
