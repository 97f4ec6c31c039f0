package dataplane

import (
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// foreign is a listener on host 1 of a sim, and what a peer that the test plays makes it answer.
type foreign struct {
	*simHost
	sim    *sim
	local  netip.AddrPort
	answer tcp.Header // of the last frame
	id     uint16     // its IPv4 identification
}

func newForeign(t *testing.T, backlog int) *foreign {
	p := &foreign{local: netip.AddrPortFrom(addrB, 7174)}
	s := newSim(t, link.PipeConfig{Filter: func(_ bool, f []byte) bool {
		var in pkt.Packet
		if err := in.Parse(f, len(f)); err != nil {
			t.Fatal(err)
		}
		if _, err := p.answer.Decode(f[in.L4Off:]); err != nil {
			t.Fatal(err)
		}
		p.id = binary.BigEndian.Uint16(f[in.L3Off+4:])
		return false
	}})
	p.sim, p.simHost = s, s.hosts[1]
	p.w.turn()
	listen(t, p.w, 1, &ListenRequest{Local: p.local, Backlog: backlog})
	return p
}

// segment makes the host process a segment from a port of the peer.
func (p *foreign) segment(port uint16, hdr tcp.Header, data string) {
	p.receive(port, hdr, data)
	p.w.turn()
}

// receive makes the host receive a segment, which it processes in the next turn.
func (p *foreign) receive(port uint16, hdr tcp.Header, data string) {
	hdr.SrcPort, hdr.DstPort, hdr.Window = port, p.local.Port(), 1000
	tu := pkt.Tuple{Flow: pkt.NewFlow(netip.AddrPortFrom(addrA, port), p.local), Proto: pkt.ProtoTCP, SrcMAC: macA, DstMAC: macB}
	l4 := make([]byte, hdr.Len(), hdr.Len()+len(data))
	hdr.Put(l4)
	l4 = append(l4, data...)
	binary.BigEndian.PutUint16(l4[16:], pkt.Checksum(pkt.Sum(l4, tu.PseudoSum(len(l4)))))
	p.w.receives(&tu, l4)
}

// The segment that answers a SYN cookie may carry data and a FIN, if the ACK before it was lost. The data come before
// the FIN.
func TestCookieWithData(t *testing.T) {
	h := newForeign(t, 1)
	h.segment(39999, tcp.Header{Flags: tcp.SYN}, "") // it takes the only place among the half-open
	h.segment(40000, tcp.Header{Flags: tcp.SYN}, "")
	if h.w.stats.TxStateless != 1 {
		t.Fatal("the answer has no SYN cookie")
	}
	h.segment(40000, tcp.Header{Flags: tcp.ACK | tcp.FIN, Seq: 1, Ack: h.answer.Seq + 1}, "some data")
	h.drain()
	ev, ok := h.take(EventData)
	if !ok || string(ev.Data) != "some data" {
		t.Errorf("data %q", ev.Data)
	}
	if _, ok := h.take(EventPeerClosed); !ok || h.answer.Ack != 11 {
		t.Errorf("peer closed %v, acknowledged %d", ok, h.answer.Ack)
	}
}

// TestFullOfCookies checks that SYN cookies, which cost nothing to collect while there is room, give no peer more
// connections than MaxConns, and that only a SYN makes room by ending a connection in TIME-WAIT.
func TestFullOfCookies(t *testing.T) {
	h := newForeign(t, 1)
	h.e.cfg.MaxConns = 3
	open := func(port uint16) (ack tcp.Header) {
		h.segment(port, tcp.Header{Flags: tcp.SYN}, "")
		return tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}
	}
	ack := open(40000)
	h.segment(40000, ack, "")
	h.drain()
	ev, _ := h.take(EventAccepted)
	open(39999) // half-open
	var acks [10]tcp.Header
	for i := range acks {
		acks[i] = open(uint16(41000 + i))
	}
	if n := h.w.stats.TxStateless; n != uint64(len(acks)) {
		t.Fatalf("%d SYN cookies", n)
	}
	for i, ack := range acks {
		h.segment(uint16(41000+i), ack, "")
	}
	if h.w.stats.Conns != 3 {
		t.Errorf("%d connections; at most 3 may be", h.w.stats.Conns)
	}
	h.w.disconnect(h.w.streams[ev.Conn], false)
	h.w.turn()
	ack.Flags |= tcp.FIN
	ack.Ack++
	h.segment(40000, ack, "")
	if h.w.lookup(&ev.Flow).tcp.State() != tcp.TimeWait {
		t.Fatal("not in TIME-WAIT")
	}
	for _, c := range []struct {
		flags   tcp.Flags
		evicted uint64
	}{{tcp.ACK, 0}, {tcp.RST, 0}, {tcp.SYN, 1}} {
		if h.segment(42000, tcp.Header{Flags: c.flags, Seq: 1, Ack: 1}, ""); h.w.stats.Evicted != c.evicted {
			t.Errorf("%v: %d connections in TIME-WAIT were ended", c.flags, h.w.stats.Evicted)
		}
	}
}

// TestTimeWaitOrder checks that room is made by the connection with the least time left in TIME-WAIT, which begins again
// when the peer sends its FIN again.
func TestTimeWaitOrder(t *testing.T) {
	h := newForeign(t, 8)
	h.e.cfg.MaxConns = 2
	ports := []uint16{40000, 40001}
	fins := make(map[uint16]tcp.Header)
	for _, port := range ports {
		h.segment(port, tcp.Header{Flags: tcp.SYN}, "")
		ack := tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}
		h.segment(port, ack, "")
		h.drain()
		ev, _ := h.take(EventAccepted)
		h.w.disconnect(h.w.streams[ev.Conn], false)
		h.w.turn()
		ack.Flags |= tcp.FIN
		ack.Ack++
		h.segment(port, ack, "")
		fins[port] = ack
	}
	waits := func(port uint16) bool {
		flow := pkt.NewFlow(h.local, netip.AddrPortFrom(addrA, port))
		c := h.w.lookup(&flow)
		return c != nil && c.tcp.State() == tcp.TimeWait
	}
	if !waits(ports[0]) || !waits(ports[1]) {
		t.Fatal("not in TIME-WAIT")
	}
	h.segment(ports[0], fins[ports[0]], "")
	h.segment(42000, tcp.Header{Flags: tcp.SYN}, "")
	if !waits(ports[0]) || waits(ports[1]) {
		t.Errorf("in TIME-WAIT: %v, %v; want only the first, which has more time left", waits(ports[0]), waits(ports[1]))
	}
}

// TestHalfOpenCostsNothing checks that connections that never get beyond SYN-RECEIVED, whose address may be forged,
// cause neither events nor lookups of next hops.
func TestHalfOpenCostsNothing(t *testing.T) {
	h := newForeign(t, 8)
	r := &slowly{asked: make(chan netip.Addr, 10000), gone: make(chan struct{})}
	defer close(r.gone)
	h.e.resolver = r
	for port := range uint16(100) {
		h.segment(10000+port, tcp.Header{Flags: tcp.SYN}, "")
		h.segment(10000+port, tcp.Header{Flags: tcp.RST, Seq: 1}, "")
	}
	if n := len(h.e.events.q); n != 0 {
		t.Errorf("%d events", n)
	}
	h.segment(40000, tcp.Header{Flags: tcp.SYN}, "")
	h.sim.until("given up", func() bool { return h.w.stats.Conns == 0 })
	if n := h.e.hopLookups.Load(); n != 0 {
		t.Errorf("%d lookups of next hops", n)
	}
	if ev, ok := h.take(EventClosed); ok {
		t.Errorf("event %+v", ev)
	}
}

// TestUnlistenHalfOpen checks that half-open connections end with their listener: the port is not steered any more, so
// that neither an ACK nor a RST of the peer arrives.
func TestUnlistenHalfOpen(t *testing.T) {
	h := newForeign(t, 8)
	h.segment(10000, tcp.Header{Flags: tcp.SYN}, "")
	h.segment(10001, tcp.Header{Flags: tcp.SYN}, "")
	h.segment(10001, tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}, "")
	if n := h.w.stats.Conns; n != 2 {
		t.Fatalf("%d connections, want 2", n)
	}
	start := h.sim.now
	for _, l := range h.w.listeners {
		h.w.unlisten(l.id)
	}
	h.sim.until("one is gone", func() bool { return h.w.stats.Conns == 1 })
	if took := h.sim.now.Sub(start); took > time.Second {
		t.Errorf("it took %v", took)
	}
	if _, ok := h.take(EventAccepted); !ok {
		t.Error("the other one is gone too")
	}
	if ev, ok := h.take(EventClosed); ok {
		t.Errorf("event %+v", ev)
	}
}

// TestManyAccepts checks that a peer that opens and resets connections faster than the control plane handles them
// makes neither the queue of events nor the number of lookups grow without limit, and that it is served again later.
func TestManyAccepts(t *testing.T) {
	h := newForeign(t, 8)
	r := &slowly{asked: make(chan netip.Addr, 10000), gone: make(chan struct{})}
	defer close(r.gone)
	h.e.resolver = r
	connect := func(port uint16) {
		h.segment(port, tcp.Header{Flags: tcp.SYN}, "")
		h.segment(port, tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}, "")
		h.segment(port, tcp.Header{Flags: tcp.RST, Seq: 1}, "")
	}
	for range 2 {
		for port := range uint16(2 * maxUnseen) {
			connect(10000 + port)
		}
		if n, most := len(h.e.events.q), 2*maxUnseen; n > most {
			t.Fatalf("%d events wait for the control plane; at most %d may", n, most)
		}
		if n := h.w.stats.PassiveOpens; n < maxUnseen {
			t.Fatalf("only %d connections", n)
		}
		h.w.stats.PassiveOpens = 0
		h.drain()
		for h.w.turn() > 0 {
		}
	}
	if n := h.e.accepted.Load(); n > maxAcceptLookups {
		t.Errorf("%d lookups of next hops at once", n)
	}
}

// Connections report their first data in the order of arrival, also one whose handshake ends in the same turn, before
// the data of another.
func TestDataInOrder(t *testing.T) {
	h := newForeign(t, 8)
	var acks [2]tcp.Header
	for i := range acks {
		h.segment(uint16(40000+i), tcp.Header{Flags: tcp.SYN}, "")
		acks[i] = tcp.Header{Flags: tcp.ACK, Seq: 1, Ack: h.answer.Seq + 1}
	}
	h.segment(40000, acks[0], "")
	h.drain()
	h.receive(40001, acks[1], "")
	h.receive(40000, acks[0], "first")
	h.receive(40001, acks[1], "second")
	h.w.turn()
	h.drain()
	for _, want := range []string{"first", "second"} {
		if ev, ok := h.take(EventData); !ok || string(ev.Data) != want {
			t.Errorf("data %q; want %q", ev.Data, want)
		}
	}
}
