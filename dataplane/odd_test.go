package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestNotAnswered checks that a packet that no host can have sent to us alone is not answered (with a SYN-ACK, RST,
// cookie or ABORT) and does not open a connection.
func TestNotAnswered(t *testing.T) {
	const port = 7174
	syn := func() []byte {
		h := tcp.Header{SrcPort: 40000, DstPort: port, Seq: 1, Flags: tcp.SYN, Window: 1000}
		b := make([]byte, h.Len())
		h.Put(b)
		return b
	}
	init := func() []byte {
		h := sctp.Header{SrcPort: 40000, DstPort: port}
		b := append(h.Append(nil), 1, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 10, 0, 10, 0, 0, 0, 1)
		sctp.SetChecksum(b)
		return b
	}
	for _, proto := range []uint8{pkt.ProtoTCP, pkt.ProtoSCTP} {
		for _, listening := range []bool{true, false} {
			for _, tc := range []struct {
				name, from string
				mac        byte // 1: the frame is to a group, 2: from one
				answered   bool
			}{
				{"a host", "10.0.0.1", 0, true}, {"a host over IPv6", "fd00::1", 0, true},
				{"nobody", "0.0.0.0", 0, false}, {"loopback", "127.0.0.1", 0, false}, {"a group", "224.0.0.1", 0, false},
				{"all", "255.255.255.255", 0, false}, {"ourselves", "10.0.0.2", 0, false}, {"to all on the link", "10.0.0.1", 1, false},
				{"all on the link", "10.0.0.1", 2, false},
				{"nobody over IPv6", "::", 0, false}, {"loopback over IPv6", "::1", 0, false}, {"a group over IPv6", "ff02::1", 0, false},
				{"ourselves over IPv6", "fd00::2", 0, false}, {"our subnet's broadcast address", "10.0.0.255", 0, false},
				{"another address of ours", "10.0.0.9", 0, false}, {"another address of ours over IPv6", "fd00::9", 0, false},
			} {
				s := newSim(t, link.PipeConfig{Slots: 256, RxFrames: 256, TxRing: 256})
				h := s.hosts[1]
				from := netip.MustParseAddr(tc.from)
				local := netip.AddrPortFrom(addrOf(1, from.Is6()), port)
				h.e.resolver = hostless{}
				h.e.learnHostless()
				h.w.turn()
				w := h.w
				w.sctp0()
				if listening && proto == pkt.ProtoTCP {
					listen(t, w, 1, &ListenRequest{Local: local, Backlog: 8})
				} else if listening {
					w.listenSCTP(t, 1, local, SCTP{})
				}
				tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(from, 40000), local), Proto: proto, V6: from.Is6(), SrcMAC: macA, DstMAC: macB}
				tu.DstMAC[0] |= tc.mac & 1
				tu.SrcMAC[0] |= tc.mac >> 1
				l4 := init()
				if proto == pkt.ProtoTCP {
					l4 = syn()
					binary.BigEndian.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, tu.PseudoSum(len(l4)))))
				}
				w.takes(&tu, l4)
				if got := w.stats.TxFrames > 0; got != tc.answered || !tc.answered && (w.stats.Conns > 0 || w.stats.RxMalformed != 1) {
					t.Errorf("protocol %d, listener %v, from %s: answered %v, %+v", proto, listening, tc.name, got, w.stats)
				}
			}
		}
	}
}

// TestIdentification checks that the IPv4 identifications of packets to one host do not show what others get. By a count of all packets a
// host that forges segments of a connection would see which of them are answered, and so find its sequence numbers.
func TestIdentification(t *testing.T) {
	h := newForeign(t, 8)
	probe := func() uint16 {
		h.segment(666, tcp.Header{Flags: tcp.ACK, Ack: 1}, "")
		if h.answer.Flags != tcp.RST {
			t.Fatalf("a segment without a connection was answered by %v", h.answer.Flags)
		}
		return h.id
	}
	h.segment(40000, tcp.Header{Flags: tcp.SYN}, "")
	h.segment(40000, tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}, "")
	var sent [2]uint64
	var seen [2]uint16
	for i, seq := range []serial.Num{2, 1 << 30} { // in the window, and not
		before, first := h.w.stats.TxFrames, probe()
		h.segment(40000, tcp.Header{Flags: tcp.RST, Seq: seq}, "")
		seen[i], sent[i] = probe()-first, h.w.stats.TxFrames-before
		if first != 0 {
			t.Errorf("a packet has the identification %d; want 0", first)
		}
	}
	if sent[0] != sent[1]+1 {
		t.Fatalf("%d and %d packets; want a challenge for the segment in the window alone", sent[0], sent[1])
	}
	if seen[0] != seen[1] {
		t.Errorf("a segment in the window of a connection advances the identifications for others by %d, another one by %d", seen[0], seen[1])
	}
}

// hostless is a resolver of a host with two addresses of each family.
type hostless struct{ Resolver }

func (hostless) Hostless() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.9"), netip.MustParseAddr("10.0.0.255"), netip.MustParseAddr("fd00::9")}
}

// receives makes w receive a frame, which it processes in the next turn.
func (w *worker) receives(tu *pkt.Tuple, l4 []byte) {
	f := link.Frame{N: 1}
	f.Pieces[0] = make([]byte, tu.HeaderLen(), tu.HeaderLen()+len(l4))
	tu.Put(f.Pieces[0], len(l4), 0)
	f.Pieces[0] = append(f.Pieces[0], l4...)
	w.take(&f)
}

// takes makes w process a frame and turn once.
func (w *worker) takes(tu *pkt.Tuple, l4 []byte) {
	w.receives(tu, l4)
	w.turn()
}

// TestUDPHeader checks that the length field of UDP limits the datagram that carries SCTP, that the UDP checksum
// is verified, and that a datagram from port 0 is not taken for SCTP without UDP.
func TestUDPHeader(t *testing.T) {
	const port = 7174
	for _, v6 := range []bool{false, true} {
		for _, tc := range []struct {
			name             string
			length, trailing int // the header's length field (0: the right one); bytes after the datagram
			zero, wrong      bool
			port0, plain     bool // the source port is 0; the listener takes SCTP without UDP
			malformed, sum   uint64
		}{
			{name: "right"}, {name: "no checksum", zero: true, sum: map[bool]uint64{true: 1}[v6]}, {name: "wrong checksum", wrong: true, sum: 1},
			{name: "bytes behind it", trailing: 5}, {name: "bytes behind it, no checksum", trailing: 4, zero: true, sum: map[bool]uint64{true: 1}[v6]},
			{name: "longer than the packet", length: 41, malformed: 1}, {name: "no header", length: 7, malformed: 1},
			{name: "from port 0", port0: true, malformed: 1}, {name: "from port 0 to a listener without UDP", port0: true, plain: true, malformed: 1},
		} {
			s := newSim(t, link.PipeConfig{Slots: 256, RxFrames: 256, TxRing: 256})
			w := s.hosts[1].w
			w.turn()
			local := netip.AddrPortFrom(addrOf(1, v6), port)
			w.listenSCTP(t, 1, local, SCTP{UDP: !tc.plain})
			from := uint16(5000)
			if tc.port0 {
				from = 0
			}
			h := sctp.Header{SrcPort: 40000, DstPort: port}
			b := append(h.Append(nil), 1, 0, 0, 20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 10, 0, 10, 0, 0, 0, 1)
			sctp.SetChecksum(b)
			n := 8 + len(b)
			tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(addrOf(0, v6), from), netip.AddrPortFrom(addrOf(1, v6), sctp.UDPPort)),
				Proto: pkt.ProtoUDP, V6: v6, SrcMAC: macA, DstMAC: macB}
			l4 := []byte{byte(from >> 8), byte(from), sctp.UDPPort >> 8, sctp.UDPPort & 0xff, 0, byte(n), 0, 0}
			if tc.length != 0 {
				l4[5] = byte(tc.length)
			}
			l4 = append(l4, b...)
			if !tc.zero {
				binary.BigEndian.PutUint16(l4[6:], pkt.UDPChecksum(pkt.Sum(l4, tu.PseudoSum(n))))
			}
			if tc.wrong {
				l4[7] ^= 1
			}
			l4 = append(l4, []byte("junk!")[:tc.trailing]...)
			w.takes(&tu, l4)
			st := &w.stats
			if want := uint64(1) - tc.malformed - tc.sum; st.RxMalformed != tc.malformed || st.RxChecksum != tc.sum || st.TxFrames != want {
				t.Errorf("v6 %v, %s: %d answers, %d malformed, %d checksums; want %d, %d, %d", v6, tc.name, st.TxFrames, st.RxMalformed, st.RxChecksum, want, tc.malformed, tc.sum)
			}
		}
	}
}

// movable is a resolver whose neighbor moves without the kernel noticing: watchers are not called.
type movable struct {
	mu    sync.Mutex
	mac   [6]byte
	moved [6]byte // the address that a probe finds, or zero: mac
	asked int
}

func (m *movable) Resolve(netip.Addr, netip.Addr, string) (Hop, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked++
	return Hop{SrcMAC: macA, DstMAC: m.mac}, nil
}

// Probe makes later calls of Resolve find the new address.
func (m *movable) Probe(dst, src netip.Addr, device string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.moved != [6]byte{} && dst == addrB && src == addrA {
		m.mac = m.moved
	}
}

func (*movable) Watch(func()) {}

// TestSilentNeighbour checks that after the peer has moved to another machine, a connection without answers resolves
// its next hop again and continues.
func TestSilentNeighbour(t *testing.T) {
	const size = 8000
	moved := [6]byte{2, 0, 0, 0, 0, 0x77}
	for _, overSCTP := range []bool{false, true} {
		dead := false
		s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool { return !dead || !isB || [6]byte(f) == moved }})
		r := &movable{mac: macB}
		s.hosts[0].e.resolver = r
		qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
		a := s.connect(overSCTP, qa, qb)
		if r.asked != 0 {
			t.Errorf("SCTP %v: asked %d times for a peer that answers", overSCTP, r.asked)
		}
		dead = true
		r.mu.Lock()
		r.moved = moved
		r.mu.Unlock()
		s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
		s.until("all sent and acknowledged", func() bool {
			for s.hosts[0].e.hopLookups.Load() != 0 {
				runtime.Gosched() // the resolver's answer takes no virtual time
			}
			if overSCTP {
				return len(qa.wcs) == 1 && a.as().a.Unacked() == 0
			}
			return len(qa.wcs) == 1 && a.conn().tcp.Stats().InFlight == 0
		})
		if took := s.now.Sub(clock.Time(time.Second)); took > 30*time.Second {
			t.Errorf("SCTP %v: that took %v", overSCTP, took)
		}
	}
}

// TestNewHopAtOnce checks that what has timed out several times is retransmitted at once when the peer gets another next
// hop, or answers to ARP again, and not after the rest of the last time-out, which has grown to seconds; and that the same
// next hop changes nothing.
func TestNewHopAtOnce(t *testing.T) {
	moved := Hop{SrcMAC: macA, DstMAC: [6]byte{2, 0, 0, 0, 0, 0x77}}
	back := Hop{SrcMAC: macA, DstMAC: macB, Found: true}
	for _, overSCTP := range []bool{false, true} {
		newHopAtOnce(t, overSCTP, moved)
		newHopAtOnce(t, overSCTP, back)
	}
}

func newHopAtOnce(t *testing.T, overSCTP bool, to Hop) {
	const size = 8000
	dead := false
	s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool { return !dead || !isB }})
	qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
	a := s.connect(overSCTP, qa, qb)
	timeouts := func() int {
		if overSCTP {
			return a.as().a.TimeoutsInARow()
		}
		return a.conn().tcp.TimeoutsInARow()
	}
	dead = true
	s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("time-outs", func() bool { return timeouts() == 4 })
	dead = false
	w := s.hosts[0].w
	sent := w.stats.TxFrames
	a.lane.llp.setHop(w, a.flow().Remote, &Hop{SrcMAC: macA, DstMAC: macB})
	for range 10 {
		s.now = s.now.Add(time.Millisecond)
		w.turn()
	}
	if n := w.stats.TxFrames - sent; n != 0 {
		t.Errorf("SCTP %v: the same next hop made it send %d frames", overSCTP, n)
	}
	from := s.now
	a.lane.llp.setHop(w, a.flow().Remote, &to)
	s.until("all sent and acknowledged", func() bool {
		if overSCTP {
			return len(qa.wcs) == 1 && a.as().a.Unacked() == 0
		}
		return len(qa.wcs) == 1 && a.conn().tcp.Stats().InFlight == 0
	})
	if took := s.now.Sub(from); took > time.Second {
		t.Errorf("SCTP %v, next hop %+v: that took %v", overSCTP, to, took)
	}
}

// TestSilentNeighbourIdle checks the same for an idle connection, before keep-alive declares it dead.
func TestSilentNeighbourIdle(t *testing.T) {
	moved := [6]byte{2, 0, 0, 0, 0, 0x77}
	for _, overSCTP := range []bool{false, true} {
		dead, came := false, 0
		s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool {
			if dead && isB && [6]byte(f) == moved {
				came++
			}
			return !dead || !isB || [6]byte(f) == moved
		}})
		r := &movable{mac: macB}
		s.hosts[0].e.resolver = r
		s.hosts[0].w.tcp.KeepAliveIdle, s.hosts[0].w.tcp.KeepAliveInterval, s.hosts[0].w.tcp.KeepAliveCount = 20*time.Second, 5*time.Second, 6
		qa, qb := newSimQP(t, s.hosts[0], 8), newSimQP(t, s.hosts[1], 8)
		s.connect(overSCTP, qa, qb)
		dead = true
		r.moved = moved
		s.until("the peer is heard again", func() bool {
			for s.hosts[0].e.hopLookups.Load() != 0 {
				runtime.Gosched() // the resolver's answer takes no virtual time
			}
			if ev, ok := s.hosts[0].take(EventClosed); ok {
				t.Fatalf("SCTP %v: closed: %v", overSCTP, ev.Err)
			}
			return came > 1
		})
	}
}

// TestSilentNeighbourAtOpen checks the same for a connection that is being opened.
func TestSilentNeighbourAtOpen(t *testing.T) {
	moved := [6]byte{2, 0, 0, 0, 0, 0x77}
	for _, overSCTP := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool { return !isB || [6]byte(f) == moved }})
		h := s.hosts[0]
		h.e.resolver = &movable{mac: macB, moved: moved}
		from := s.now
		up := func() bool { _, ok := h.take(EventConnected); return ok }
		if overSCTP {
			s.listenSCTP()
			as := s.dialSCTP(40000, 0).as()
			up = func() bool { return as.a.State() == sctp.Established }
		} else {
			remote := netip.AddrPortFrom(addrB, 7174)
			s.hosts[1].w.turn()
			listen(t, s.hosts[1].w, 1, &ListenRequest{Local: remote, Backlog: 8})
			if err := s.connectTo(h.w.newID(), pkt.NewFlow(netip.AddrPortFrom(addrA, 40000), remote)); err != nil {
				t.Fatal(err)
			}
		}
		s.until("the peer is heard", func() bool {
			for h.e.hopLookups.Load() != 0 {
				runtime.Gosched() // the resolver's answer takes no virtual time
			}
			return up()
		})
		if took := s.now.Sub(from); took > 5*time.Second {
			t.Errorf("SCTP %v: that took %v", overSCTP, took)
		}
	}
}

// TestPassiveHop checks that the passive side resolves its next hop again too, over either transport.
func TestPassiveHop(t *testing.T) {
	for _, overSCTP := range []bool{false, true} {
		s := newSim(t, link.PipeConfig{})
		r := &movable{mac: macA}
		s.hosts[1].e.resolver = r
		qa, qb := newSimQP(t, s.hosts[0], 8), newSimQP(t, s.hosts[1], 8)
		s.connect(overSCTP, qa, qb)
		asked := func() int {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.asked
		}
		testenv.Until(t, fmt.Sprintf("SCTP %v: the resolver is asked", overSCTP), func() bool { return asked() != 0 })
	}
}

// slowly is a resolver whose neighbors do not exist; it takes a while to fail.
type slowly struct {
	asked chan netip.Addr
	gone  chan struct{}
}

func (r *slowly) Resolve(dst, _ netip.Addr, _ string) (Hop, error) {
	r.asked <- dst
	<-r.gone
	return Hop{}, errors.New("no neighbour")
}

func (*slowly) Watch(func()) {}

// TestRehop checks that unreachable neighbors delay neither the caller that reports a change nor each other; that
// each is resolved once for all connections, also those of a worker that does not turn for a while; and that a change
// in the meantime resolves them again.
func TestRehop(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	other := netip.MustParseAddr("10.0.0.77")
	s.open()
	s.openFrom(netip.AddrPortFrom(addrA, 40001), addrB)
	s.openFrom(netip.AddrPortFrom(addrA, 40002), other)
	e := s.hosts[0].e
	r := &slowly{asked: make(chan netip.Addr), gone: make(chan struct{})}
	e.resolver = r
	asked := make(map[netip.Addr]int)
	drive := func(what string, done func() bool) {
		for end := time.Now().Add(time.Minute); !done(); {
			s.hosts[0].w.turn() // publishes the list of connections
			select {
			case a := <-r.asked:
				asked[a]++
			default:
				runtime.Gosched()
			}
			if time.Now().After(end) {
				t.Fatalf("%s: asked for %v", what, asked)
			}
		}
	}
	e.hopsChanged()
	testenv.Until(t, "the changes are over without the worker that does not turn", func() bool { return e.changes.Load() == 0 })
	drive("both at a time", func() bool { return asked[addrB] == 1 && asked[other] == 1 })
	e.hopsChanged()
	close(r.gone)
	drive("once more", func() bool { return asked[addrB] == 2 && asked[other] == 2 })
	for end := time.Now().Add(time.Minute); e.changes.Load() != 0; s.hosts[0].w.turn() {
		if time.Now().After(end) {
			t.Fatal("it does not end")
		}
	}
	if len(asked) != 2 {
		t.Errorf("asked for %v", asked)
	}
}

// TestHopKeepsPath checks that an unchanged next hop does not reset a connection's path MTU, and that a changed MTU
// does.
func TestHopKeepsPath(t *testing.T) {
	const size = 4000
	var grabbed []byte
	grab := false
	s := newSim(t, link.PipeConfig{Filter: func(isB bool, f []byte) bool {
		if grab && isB && grabbed == nil && len(f) > 1300 {
			grabbed = bytes.Clone(f)
			return false
		}
		return true
	}})
	a, b := s.open()
	qa, qb := newSimQP(t, s.hosts[0], size), newSimQP(t, s.hosts[1], size)
	s.attach(a, b, qa, qb, mpa.Params{CRC: true, IRD: 4, ORD: 4})
	w := s.hosts[0].w
	hop := Hop{SrcMAC: macA, DstMAC: macB, MTU: 1500}
	a.lane.llp.setHop(w, a.flow().Remote, &hop)
	grab = true
	s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, size), RKey: qb.reg.STag(), Remote: 0x10000})
	s.until("a full segment", func() bool { return grabbed != nil })
	f := link.Frame{N: 1}
	f.Pieces[0] = tooBig(grabbed, 1300, 1<<16)
	w.take(&f)
	if n := a.conn().tcp.Stats().PMTU; n != 1300 {
		t.Fatalf("path MTU %d after the error", n)
	}
	for _, step := range []struct{ hop, path int }{{1500, 1300}, {0, 1300}, {1400, 1400}, {1500, 1500}} {
		hop.MTU = step.hop
		a.lane.llp.setHop(w, a.flow().Remote, &hop)
		if n := a.conn().tcp.Stats().PMTU; n != step.path {
			t.Errorf("path MTU %d after a hop with %d; want %d", n, step.hop, step.path)
		}
	}
	s.closeAll(a)
}

// narrow is a resolver whose interface has a small MTU.
type narrow struct {
	ways
	mtu int
}

func (n *narrow) MTU(string) int { return n.mtu }

// TestOfferedMTU checks that the MSS offered to peers follows the interface's current MTU.
func TestOfferedMTU(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	r := &narrow{}
	e, w := s.hosts[1].e, s.hosts[1].w
	e.resolver = r
	full := w.mtu - 40
	for i, tt := range []struct{ mtu, want int }{{w.mtu, full}, {1300, 1260}, {0, 1260}, {900, 860}, {1 << 16, full}} {
		r.mtu = tt.mtu
		e.offerMTU()
		w.turn()
		a, _ := s.openFrom(netip.AddrPortFrom(addrA, 41000+uint16(i)), addrB)
		if got := a.conn().tcp.MSS() + 12; got != tt.want { // 12 bytes of time stamps
			t.Errorf("MTU %d: peers send %d bytes, want %d", tt.mtu, got, tt.want)
		}
		w.unlisten(1)
		if i%2 == 0 { // and the next listener starts with this MTU
			continue
		}
		listen(t, w, 1, &ListenRequest{Local: netip.AddrPortFrom(addrB, 7174), Backlog: 8})
	}
}
