package dataplane

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/sctp"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestSCTPPeerGone checks that an association with a silent peer is dropped and posted work is flushed.
func TestSCTPPeerGone(t *testing.T) {
	silent := false
	s := newSim(t, link.PipeConfig{Filter: func(bool, []byte) bool { return !silent }})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	silent = true
	s.limit = s.now.Add(time.Hour)
	s.post(a, qa, verbs.SendWR{ID: 7, Op: rdmap.OpRead, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
	if ev := s.closed(0); ev.Err == nil {
		t.Error("closed without an error")
	}
	if len(qa.wcs) != 1 || qa.wcs[0].Status != verbs.WCFlushErr {
		t.Errorf("completions %+v", qa.wcs)
	}
	s.closed(1)
	s.closedSCTP()
}

// TestSCTPJoinedParted checks that an association is reported as long as its packets must be steered here, and that
// one whose listener is closed ends with its last session.
func TestSCTPJoinedParted(t *testing.T) {
	for _, how := range []string{"the dialling side ends", "listener closed in a session", "listener closed after the session"} {
		t.Run(how, func(t *testing.T) {
			s := newSim(t, link.PipeConfig{})
			qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
			a, b := s.openSCTP(SCTP{}, qa, qb)
			for i, want := range []Event{{Conn: a.id, Flow: a.flow()}, {Listener: 1, Flow: b.flow()}} {
				if ev, ok := s.hosts[i].take(EventJoined); !ok || ev.Conn != want.Conn || ev.Listener != want.Listener || ev.Flow != want.Flow {
					t.Errorf("host %d: %+v, %v", i, ev, ok)
				}
			}
			rest := func() {
				end := s.now.Add(3 * time.Second)
				s.until("rest", func() bool { return s.now > end })
				for i, h := range s.hosts {
					if _, ok := h.take(EventParted); ok || h.w.sctp.n != 1 {
						t.Errorf("host %d: the association has ended", i)
					}
				}
			}
			w := s.hosts[1].w
			switch how {
			case "the dialling side ends":
				s.hosts[0].w.disconnect(a, false)
			case "listener closed in a session":
				w.unlisten(1)
				rest()
				w.disconnect(b, false)
			default:
				a.as().lst = &listener{} // as at a peer that keeps its associations
				s.hosts[0].w.disconnect(a, false)
				rest()
				w.unlisten(1)
			}
			s.closed(0)
			s.closed(1)
			s.closedSCTP()
			for i, h := range s.hosts {
				if ev, ok := h.take(EventParted); !ok || ev.Flow != []pkt.Flow{a.flow(), b.flow()}[i] {
					t.Errorf("host %d: no EventParted", i)
				}
			}
		})
	}
}

// TestSCTPOverUDPZeroSum checks that a computed UDP checksum of 0, which would mean no checksum, is sent so that the
// receiver accepts it.
func TestSCTPOverUDPZeroSum(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	w := s.hosts[0].w
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 9899), netip.AddrPortFrom(addrB, 9899))
	tuple := pkt.Tuple{Flow: flow, Proto: pkt.ProtoUDP, SrcMAC: macA, DstMAC: macB}
	p := make([]byte, 12+16)
	udp := append([]byte{9899 >> 8, 9899 & 0xff, 9899 >> 8, 9899 & 0xff, 0, byte(8 + len(p)), 0, 0}, p...)
	for v := uint32(1); ; v++ {
		if v == 1<<24 {
			t.Fatal("no packet has that sum")
		}
		binary.BigEndian.PutUint32(udp[8+4:], v)
		sctp.SetChecksum(udp[8:])
		if pkt.Checksum(pkt.Sum(udp, tuple.PseudoSum(len(udp)))) == 0 {
			break
		}
	}
	slot, ok := w.link.Alloc()
	if !ok {
		t.Fatal("no slot")
	}
	copy(w.link.Bytes(slot)[headroom:], udp[8:])
	w.slots[slot].owned = false
	w.postSCTP(&tuple, 9899, slot, headroom, len(udp)-8)
	w.link.Flush()
	var f [1]link.Frame
	if s.hosts[1].link.Receive(f[:]) != 1 {
		t.Fatal("no frame")
	}
	var got pkt.Packet
	b := f[0].Pieces[0]
	if err := got.Parse(b, f[0].Len()); err != nil {
		t.Fatal(err)
	}
	b = b[got.L4Off : got.L4Off+got.L4Len]
	if sum := binary.BigEndian.Uint16(b[6:]); sum == 0 || pkt.Fold(pkt.Sum(b, got.PseudoSum)) != 0xffff {
		t.Errorf("checksum %#x is wrong", sum)
	}
}

// TestSCTPRestartWithData checks that data in the packet that restarts an association belongs to the new association.
func TestSCTPRestartWithData(t *testing.T) {
	var cookie []byte
	var tsn uint32
	armed := false
	s := newSim(t, link.PipeConfig{Filter: func(toB bool, f []byte) bool {
		if !armed || !toB {
			return true
		}
		switch chunk := f[14+20+12:]; sctp.ChunkType(chunk[0]) {
		case sctp.ChunkInit:
			tsn = binary.BigEndian.Uint32(chunk[16:])
		case sctp.ChunkCookieEcho:
			cookie = bytes.Clone(f)
			return false
		}
		return true
	}})
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, b := s.openSCTP(SCTP{}, qa, qb)
	wa, wb := s.hosts[0].w, s.hosts[1].w
	// Host 0 loses its state and starts again from the same port.
	wa.timers.Stop(&a.as().lane.timer)
	wa.unmark(&a.as().lane)
	wa.sctp.n--
	delete(wa.lanes, a.lane.key)
	delete(wa.streams, a.id)
	armed = true
	s.now = s.now.Add(time.Second)
	wa.turn()
	wa.dialSCTP(t, wa.newID(), a.flow(), Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 0)
	s.until("the cookie", func() bool { return cookie != nil })

	p := cookie[14+20:]
	for len(p)%4 != 0 {
		p = append(p, 0)
	}
	p = append(p, byte(sctp.ChunkData), 7, 0, 16+4+5) // the U, B and E bits
	p = binary.BigEndian.AppendUint32(p, tsn)
	p = append(p, 0, 0, 0, 0, 0, 0, 0, 17, 0, 0, 0, 1)
	p = append(p, "hello\x00\x00\x00"...)
	sctp.SetChecksum(p)
	tuple := pkt.Tuple{Flow: a.flow(), Proto: pkt.ProtoSCTP, SrcMAC: macA, DstMAC: macB}
	frame := make([]byte, tuple.HeaderLen(), tuple.HeaderLen()+len(p))
	tuple.Put(frame, len(p), 0)
	frame = append(frame, p...)
	f := rxFrame{Frame: &link.Frame{N: 1}}
	if err := f.pkt.Parse(frame, len(frame)); err != nil {
		t.Fatal(err)
	}
	f.Pieces[0] = frame
	wb.sctpFrame(&f)
	s.until("the request", func() bool {
		ev, ok := s.hosts[1].take(EventRequest)
		return ok && string(ev.Setup.Private) == "hello" && ev.Conn != b.id
	})
	if ev := s.closed(1); ev.Conn != b.id || !errors.Is(ev.Err, errSession) {
		t.Errorf("the old session: %+v", ev)
	}
	if got := b.as().mux.State(0); got != session.Requested {
		t.Errorf("the new session is %v", got)
	}
}

// TestSCTPNoListener checks that a connect to a host without a listener fails at once, and that a connect to a silent
// address times out.
func TestSCTPNoListener(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.hosts[1].w.sctp0()
	local, remote := netip.AddrPortFrom(addrA, 40000), netip.AddrPortFrom(addrB, 9)
	w := s.hosts[0].w
	w.turn()
	w.dialSCTP(t, w.newID(), pkt.NewFlow(local, remote), Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 0)
	if ev := s.closed(0); ev.Err == nil {
		t.Error("closed without an error")
	}
	s.closedSCTP()
}

// TestSCTPLimit checks the limit of associations for all peers together.
func TestSCTPLimit(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	ha, hb := s.hosts[0], s.hosts[1]
	hb.w.turn()
	hb.w.listenSCTP(t, 1, netip.AddrPortFrom(addrB, 7174), SCTP{})
	hb.e.cfg.MaxConns = 3
	ha.w.turn()
	for i := range uint16(6) {
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40000+i), netip.AddrPortFrom(addrB, 7174))
		ha.w.dialSCTP(t, ha.w.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 20*time.Second)
	}
	for i := range 3 {
		if ev := s.closed(0); !errors.Is(ev.Err, ErrTimeout) {
			t.Errorf("connection %d closed by %v", i, ev.Err)
		}
		if hb.w.sctp.n > 3 {
			t.Fatalf("%d associations", hb.w.sctp.n)
		}
	}
}

// TestSCTPIdle checks that an association without a session is shut down after a minute and one with a session is
// not.
func TestSCTPIdle(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.listenSCTP()
	c := s.dialSCTP(40001, 0)
	c.ini = nil
	idle := c.as()
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	s.until("two associations", func() bool { return s.hosts[1].w.sctp.n == 2 })
	began := s.now
	s.until("one is over", func() bool { return idle.gone && s.hosts[1].w.sctp.n == 1 })
	if d := s.now.Sub(began); d < 58*time.Second || d > 62*time.Second {
		t.Errorf("over after %v", d)
	}
	if idle.a.Err() != nil || s.hosts[1].w.stats.AssocsIdle != 1 {
		t.Errorf("ended by %v", idle.a.Err())
	}
	wait := s.now.Add(5 * time.Minute)
	s.until("time to pass", func() bool { return s.now > wait })
	if a.as().gone || a.mode != modeFull {
		t.Error("an association with a session ended")
	}
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
}

// TestSCTPPerPeer checks the limit of associations per peer address; one that ends makes room.
func TestSCTPPerPeer(t *testing.T) {
	s := newSim(t, link.PipeConfig{})
	s.hosts[1].e.cfg.SCTP.PerPeer = 2
	s.listenSCTP()
	var reqs []Event
	for port := range uint16(3) {
		s.dialSCTP(40001+port, 0)
	}
	requests := func(n int) func() bool {
		return func() bool {
			if ev, ok := s.hosts[1].take(EventRequest); ok {
				reqs = append(reqs, ev)
			}
			return len(reqs) == n
		}
	}
	s.until("two requests", requests(2))
	s.until("a refusal", func() bool { return s.hosts[1].w.stats.AssocsRefused > 0 })
	if n := s.hosts[1].w.sctp.n; n != 2 {
		t.Fatalf("%d associations", n)
	}
	w := s.hosts[1].w
	w.answerSCTP(w.streams[reqs[0].Conn], session.Setup{}, Attachment{})
	s.until("a third request", requests(3))
	for _, r := range reqs[1:] {
		w.answerSCTP(w.streams[r.Conn], session.Setup{}, Attachment{})
	}
	// Other listeners have room while one is full.
	reqs = nil
	for port := range uint16(3) {
		s.dialSCTP(40011+port, 0)
	}
	s.until("two requests more", requests(2))
	w.listenSCTP(t, 2, netip.AddrPortFrom(addrB, 7175), SCTP{})
	other := s.hosts[0].w
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 40020), netip.AddrPortFrom(addrB, 7175))
	other.dialSCTP(t, other.newID(), flow, Hop{SrcMAC: macA, DstMAC: macB}, SCTP{}, session.Setup{}, 0)
	s.until("a request of the other listener", requests(3))
	w.unlisten(2)
	for len(reqs) > 0 {
		w.answerSCTP(w.streams[reqs[0].Conn], session.Setup{}, Attachment{})
		reqs = reqs[1:]
	}
	s.until("the last request", requests(1))
	w.answerSCTP(w.streams[reqs[0].Conn], session.Setup{}, Attachment{})
	s.closedSCTP()
	if len(w.sctp.peers) != 0 {
		t.Errorf("counts left: %v", w.sctp.peers)
	}
}

// TestSCTPGuests checks which associations count: those without an accepted session, of an address or of an IPv6 /64, which one host has.
func TestSCTPGuests(t *testing.T) {
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{"192.0.2.1", "192.0.2.1", true}, {"192.0.2.1", "192.0.2.2", false}, {"2001:db8::1", "2001:db8::ffff:0:0:2", true},
		{"2001:db8::1", "2001:db8:0:1::1", false}, {"fe80::1", "fe80::2", false},
	} {
		local := netip.AddrPortFrom(addrB, 7174)
		a, b := pkt.NewFlow(netip.AddrPortFrom(netip.MustParseAddr(c.a), 1), local), pkt.NewFlow(netip.AddrPortFrom(netip.MustParseAddr(c.b), 2), local)
		a, b = a.Reverse(), b.Reverse()
		if same := guestOf(&a) == guestOf(&b); same != c.same {
			t.Errorf("%s and %s are one peer: %v", c.a, c.b, same)
		}
	}
	s := newSim(t, link.PipeConfig{})
	s.hosts[1].e.cfg.SCTP.PerPeer = 1
	a, b := s.openSCTP(SCTP{}, newSimQP(t, s.hosts[0], 64), newSimQP(t, s.hosts[1], 64))
	peers := s.hosts[1].w.sctp.peers
	if len(peers) != 0 {
		t.Errorf("with a session: %v", peers)
	}
	s.hosts[1].w.disconnect(b, false)
	s.until("it counts again", func() bool { return len(peers) == 1 })
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
	if len(peers) != 0 {
		t.Errorf("afterwards: %v", peers)
	}
}

// TestSCTPTailLoss checks that with a lower RTO.Min the loss of the only message in flight costs about that time, and
// that no time-out is spurious although the peer delays its SACKs longer.
func TestSCTPTailLoss(t *testing.T) {
	lose := false
	cfg := link.PipeConfig{Filter: func(toB bool, _ []byte) bool {
		ok := !(toB && lose)
		lose = lose && !toB
		return ok
	}}
	s := newSim(t, cfg)
	s.hosts[0].e.cfg.SCTP.RTOMin = 20 * time.Millisecond
	qa, qb := newSimQP(t, s.hosts[0], 8192), newSimQP(t, s.hosts[1], 8192)
	a, _ := s.openSCTP(SCTP{}, qa, qb)
	write := func() (took time.Duration) {
		began, sent := s.now, a.as().a.Stats().TxChunks
		s.post(a, qa, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(0, 100), RKey: qb.reg.STag(), Remote: 0x10000})
		s.until("acknowledged", func() bool { return a.as().a.Stats().TxChunks > sent && a.as().a.Unacked() == 0 })
		return s.now.Sub(began)
	}
	for range 60 { // the round-trip time of the last of them
		if d := write(); d > 5*time.Millisecond {
			t.Fatalf("a Write is acknowledged after %v", d)
		}
	}
	if n := a.as().a.Stats().Timeouts; n != 0 {
		t.Errorf("%d time-outs", n)
	}
	lose = true
	if d := write(); d < 20*time.Millisecond || d > 30*time.Millisecond {
		t.Errorf("a Write whose packet is lost is acknowledged after %v", d)
	}
	s.hosts[0].w.disconnect(a, false)
	s.closedSCTP()
}
