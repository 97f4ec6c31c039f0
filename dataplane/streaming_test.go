package dataplane

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestStreamingMode takes connections from streaming mode to full operation over wires that lose, duplicate and
// reorder frames: an exchange between the ULPs, MPA startup with either side of TCP as initiator, then verbs. Every
// byte of either mode must arrive once and in order, the queue pair must be attached before the first FPDU, and only
// FPDUs may be sent after the switch (RFC 5044 7.1, 7.1.5).
func TestStreamingMode(t *testing.T) {
	seed := testenv.Seed(t)
	bad := impair.Config{Loss: 0.08, Duplicate: 0.03, Reorder: 0.1, Delay: time.Millisecond, Jitter: time.Millisecond}
	var again uint64
	for i := 0; i < 12 || again < 20 && i < 100 && !withinHost.on; i++ { // as many as it takes to lose some
		passive, clean := i%2 == 1, i < 2
		t.Run(fmt.Sprintf("passive=%v/%d", passive, i), func(t *testing.T) {
			cfg := link.PipeConfig{AtoB: bad, BtoA: bad}
			if clean {
				cfg.AtoB, cfg.BtoA = impair.Config{}, impair.Config{}
			}
			cfg.AtoB.Seed, cfg.BtoA.Seed = seed+uint64(2*i), seed+uint64(2*i+1)
			s := newSim(t, cfg)
			a, b := s.open()
			ends := [2]*streamingEnd{{host: s.hosts[0], c: a}, {host: s.hosts[1], c: b}}
			ini, res := ends[0], ends[1]
			if passive {
				ini, res = res, ini
			}

			// The ULPs talk first.
			hello := bytes.Repeat([]byte("streaming mode, before MPA. "), 400)
			ini.send(hello)
			s.until("the message", func() bool { res.read(); return len(res.got) >= len(hello) })
			answer := bytes.Repeat([]byte("an answer. "), 300)
			res.send(answer)
			s.until("the answer", func() bool { ini.read(); return len(ini.got) >= len(answer) })
			if !bytes.Equal(res.got, hello) || !bytes.Equal(ini.got, answer) {
				t.Fatal("bytes of streaming mode differ")
			}
			ini.got, res.got = nil, nil

			// The Request follows the last message of the initiator's ULP, the Reply that of the responder's.
			mcfg := mpa.DefaultConfig()
			mcfg.Markers, mcfg.IRD, mcfg.ORD = i%4 < 2, 4, 4
			if withinHost.direct {
				mcfg.Markers, mcfg.CRC = false, false
			}
			is, rs := mpa.NewInitiator(mcfg, s.now), mpa.NewResponder(mcfg, s.now)
			const last = "the last of the initiator's ULP"
			ini.send([]byte(last))
			frame, ok := is.PollTransmit()
			if !ok {
				t.Fatal("no Request")
			}
			ini.send(frame)
			s.until("the Request", func() bool { res.read(); return len(res.got) >= len(last)+len(frame) })
			if string(res.got[:len(last)]) != last {
				t.Fatalf("in front of the Request: %q", res.got[:len(last)])
			}
			if n, err := rs.HandleStream(s.now, res.got[len(last):]); err != nil || n != len(frame) {
				t.Fatalf("the Request: %d bytes taken, %v", n, err)
			}
			if err := rs.Accept(nil, -1, -1); err != nil {
				t.Fatal(err)
			}
			reply, ok := rs.PollTransmit()
			if !ok {
				t.Fatal("no Reply")
			}
			const farewell = "the last of the responder's ULP"
			qi, qr := newSimQP(t, ini.host, 1<<16), newSimQP(t, res.host, 1<<16)
			copy(qi.mem[:8192], bytes.Repeat([]byte("RDMA! "), 2000))
			for k := range 4 {
				qr.recvs = append(qr.recvs, verbs.RecvWR{ID: uint64(k), SGEs: qr.sge(k*4096, 4096)})
			}
			res.host.w.attach(res.c.id, res.c, Attachment{QP: &qr.QPBinding, Params: rs.Result(), Reply: append([]byte(farewell), reply...)})
			res.c.conn().streamSend(res.host.w, []byte("of streaming mode, but late"))
			s.until("the Reply", func() bool { ini.read(); return len(ini.got) >= len(farewell)+len(reply) })
			if string(ini.got[:len(farewell)]) != farewell {
				t.Fatalf("in front of the Reply: %q", ini.got[:len(farewell)])
			}
			if n, err := is.HandleStream(s.now, ini.got[len(farewell):]); err != nil || n != len(ini.got)-len(farewell) {
				t.Fatalf("the Reply: %d bytes of %d taken, %v", n, len(ini.got)-len(farewell), err)
			}

			// Both queue pairs send at once, and their first messages arrive intact.
			qi.sends = append(qi.sends,
				verbs.SendWR{ID: 1, Op: rdmap.OpSend, SGEs: qi.sge(0, 4096)},
				verbs.SendWR{ID: 2, Op: rdmap.OpWrite, SGEs: qi.sge(4096, 4096), Remote: 0x10000 + 1<<15, RKey: qr.reg.STag()},
				verbs.SendWR{ID: 3, Op: rdmap.OpSend, SGEs: qi.sge(0, 1)})
			ini.host.w.attach(ini.c.id, ini.c, Attachment{QP: &qi.QPBinding, Params: is.Result()})
			ini.c.conn().streamSend(ini.host.w, []byte("of streaming mode, but late"))
			s.until("full operation", func() bool { return a.mode == modeFull && b.mode == modeFull })
			for _, e := range ends {
				ev, ok := e.host.take(EventEstablished)
				if !ok || ev.Conn != e.c.id || e.c.qp == nil {
					t.Fatalf("full operation: event %v, queue pair %v", ok, e.c.qp != nil)
				}
			}
			s.until("the work", func() bool { return len(qi.wcs) == 3 && len(qr.wcs) == 2 })
			for _, wc := range append(qi.wcs, qr.wcs...) {
				if wc.Status != verbs.WCSuccess {
					t.Fatalf("%+v", wc)
				}
			}
			if !bytes.Equal(qr.mem[:4096], qi.mem[:4096]) || !bytes.Equal(qr.mem[1<<15:1<<15+4096], qi.mem[4096:8192]) {
				t.Error("what was sent or written differs")
			}
			for i, h := range s.hosts {
				if ev, ok := h.take(EventData); ok {
					t.Errorf("host %d has bytes of streaming mode after the switch: %q", i, ev.Data)
				}
				if ev, ok := h.take(EventFailed); ok {
					t.Errorf("host %d: %v", i, ev.Err)
				}
			}
			if n := a.conn().tcp.Stats().Retransmits + b.conn().tcp.Stats().Retransmits; clean && n > 0 {
				t.Errorf("%d segments sent again over a clean wire", n)
			} else {
				again += n
			}
			s.closeAll(a)
		})
	}
	if again < 20 && !withinHost.on {
		t.Errorf("only %d segments were sent again: did the wires lose any?", again)
	}
}

// A streamingEnd is an end of a connection whose ULP reads the incoming bytes.
type streamingEnd struct {
	host *simHost
	c    *stream
	got  []byte
}

func (e *streamingEnd) send(b []byte) { e.c.conn().streamSend(e.host.w, b) }

func (e *streamingEnd) read() {
	for {
		ev, ok := e.host.take(EventData)
		if !ok {
			return
		}
		e.got = append(e.got, ev.Data...)
		e.c.conn().streamConsumed(e.host.w, len(ev.Data))
	}
}

// TestChecksumOut checks the TCP checksum of every sent frame (RFC 9293 MUST-2, MUST-45).
func TestChecksumOut(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		frames, text := 0, 0
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, frame []byte) bool {
			from, to := addrOf(0, v6), addrOf(1, v6)
			if !toB {
				from, to = to, from
			}
			var p pkt.Packet
			if err := p.Parse(frame, len(frame)); err != nil {
				t.Errorf("frame %d: %v", frames, err)
			}
			if p.Flow.RemoteAddrPort().Addr() != from || p.Flow.LocalAddrPort().Addr() != to {
				t.Errorf("frame %d: from %v to %v", frames, p.Flow.RemoteAddrPort(), p.Flow.LocalAddrPort())
			}
			l4 := frame[p.L4Off : p.L4Off+p.L4Len]
			if !oneSum(l4, from.AsSlice(), to.AsSlice()) {
				t.Errorf("frame %d of %d bytes has the wrong sum", frames, p.L4Len)
			}
			frames++
			text = max(text, p.L4Len)
			return true
		}})
		a, b := s.openTo(addrOf(0, v6), addrOf(1, v6))
		for n := 1; n < 40; n++ {
			a.conn().streamSend(s.hosts[0].w, bytes.Repeat([]byte{byte(n), 0xff}, n)[:n])
			s.until("bytes", func() bool { return b.conn().pre.unread() > 0 })
			s.hosts[1].drain()
			for ev, ok := s.hosts[1].take(EventData); ok; ev, ok = s.hosts[1].take(EventData) {
				b.conn().streamConsumed(s.hosts[1].w, len(ev.Data))
			}
		}
		// FPDUs are checksummed while they are composed.
		qa, qb := newSimQP(t, s.hosts[0], 1<<15), newSimQP(t, s.hosts[1], 1<<15)
		s.attach(a, b, qa, qb, mpa.Params{CRC: true})
		for i := range qa.mem {
			qa.mem[i] = byte(i * i)
		}
		for n := 1; n < 1<<14; n = n*3/2 + 1 {
			qa.sends = append(qa.sends, verbs.SendWR{Op: rdmap.OpWrite, SGEs: qa.sge(n%7, n), Remote: 0x10000, RKey: qb.reg.STag()})
		}
		want := len(qa.sends)
		s.hosts[0].w.mark(a.lane)
		s.until("the Writes", func() bool { return len(qa.wcs) == want })
		s.closeAll(a)
		if frames < 80 || text < 1000 {
			t.Errorf("only %d frames seen, of %d bytes at most", frames, text)
		}
	}
}

// oneSum verifies the checksum of a TCP segment byte by byte, with its pseudo-header.
func oneSum(l4, from, to []byte) bool {
	b := append(append(append([]byte{}, from...), to...), 0, 0, byte(len(l4)>>8), byte(len(l4)), 0, pkt.ProtoTCP)
	b = append(b, l4...)
	sum := 0
	for i, v := range b {
		if i%2 == 0 {
			sum += int(v) << 8
		} else {
			sum += int(v)
		}
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return sum == 0xffff
}

// TestChecksumIn checks that a segment with any changed byte is dropped without effect, and is not even acknowledged
// (RFC 9293 MUST-3).
func TestChecksumIn(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		hit, at := false, 0
		var sizes []int
		var wrong *byte // in the sender's slot, which is used for retransmission
		var bad byte
		s := newSim(t, link.PipeConfig{Filter: func(toB bool, frame []byte) bool {
			if wrong != nil && *wrong == bad {
				*wrong ^= 0x10
			}
			wrong = nil
			if !toB || !hit {
				return true
			}
			var p pkt.Packet
			if err := p.Parse(frame, len(frame)); err != nil {
				t.Error(err)
			}
			if at >= p.L4Len {
				at = -1
				return true
			}
			sizes = append(sizes, p.L4Len)
			wrong, hit = &frame[p.L4Off+at], false
			*wrong ^= 0x10
			bad = *wrong
			return true
		}})
		a, b := s.openTo(addrOf(0, v6), addrOf(1, v6))
		for s.step() {
		}
		var sent, got []byte
		for n := 0; at >= 0; n++ {
			// Short segments, and long ones whose checksum and MPA CRC are computed in one pass.
			msg := bytes.Repeat([]byte{byte(n), byte(n >> 8), 7}, 50+302*(n%2))
			hit = true
			before := s.hosts[1].w.stats.RxChecksum
			sent = append(sent, msg...)
			a.conn().streamSend(s.hosts[0].w, msg)
			e := &streamingEnd{host: s.hosts[1], c: b}
			s.until("the message", func() bool { e.read(); return len(e.got) >= len(msg) })
			got = append(got, e.got...)
			if at >= 0 && s.hosts[1].w.stats.RxChecksum != before+1 {
				t.Fatalf("byte %d changed: %d wrong sums found", at, s.hosts[1].w.stats.RxChecksum-before)
			}
			if n%2 == 1 {
				at++
				if at > 40 {
					at += 36
				}
			}
		}
		if !bytes.Equal(sent, got) || len(sizes) < 60 {
			t.Errorf("what was sent again differs, or only %d segments were changed", len(sizes))
		}
		s.closeAll(a)
	}
}
