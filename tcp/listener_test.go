package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
)

// cookieSYN is the SYN of a peer that uses all options.
func cookieSYN() Segment {
	s := Segment{Header: Header{SrcPort: 7174, DstPort: 40000, Seq: 5000, Flags: SYN, Window: 65535}, Buf: NoBuf}
	s.Opts = Options{MSS: 1460, HasWScale: true, WScale: 9, SACKPermitted: true, HasTimestamps: true, TSVal: 99}
	return s
}

// flood fills the SYN queue of l.
func flood(l *Listener, n int) {
	f := simFlow(0, false)
	for i := range n {
		f.RemotePort = uint16(1000 + i)
		s := cookieSYN()
		l.HandleSegment(simStart, f, &s)
	}
}

// TestSYNCookie checks that a connection from a cookie has the options of its SYN (RFC 4987 3.6).
func TestSYNCookie(t *testing.T) {
	for _, tc := range []struct {
		name        string
		change      func(*Segment)
		mss         int
		sack, ts    bool
		shift       uint8
		ecn, v6     bool
		listenerECN ECN
	}{
		{name: "everything", mss: 1448, sack: true, ts: true, shift: 9},
		{name: "no timestamps", change: func(s *Segment) { s.Opts.HasTimestamps = false }, mss: 1460},
		{name: "no SACK", change: func(s *Segment) { s.Opts.SACKPermitted = false }, mss: 1448, ts: true, shift: 9},
		{name: "no window scale", change: func(s *Segment) { s.Opts.HasWScale = false }, mss: 1448, ts: true, sack: true},
		{name: "small MSS", change: func(s *Segment) { s.Opts.MSS = 1300 }, mss: 1208, ts: true, sack: true, shift: 9},
		{name: "tiny MSS", change: func(s *Segment) { s.Opts.MSS = 100 }, mss: 52, ts: true, sack: true, shift: 9},
		{name: "no MSS", change: func(s *Segment) { s.Opts.MSS = 0 }, mss: 524, ts: true, sack: true, shift: 9},
		{name: "ECN", change: func(s *Segment) { s.Flags |= ECE | CWR }, mss: 1448, ts: true, sack: true, shift: 9, ecn: true, listenerECN: AcceptECN},
		{name: "ECN off", change: func(s *Segment) { s.Flags |= ECE | CWR }, mss: 1448, ts: true, sack: true, shift: 9},
		{name: "IPv6", mss: 1428, ts: true, sack: true, shift: 9, v6: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := DefaultConfig()
			cfg.ECN = tc.listenerECN
			l := NewListener(&cfg, 2, [16]byte{7}, 1500)
			flood(l, 10)
			if l.half != 2 || l.flooded != simStart {
				t.Fatalf("%d half-open connections, last cookie sent at %v", l.half, l.flooded)
			}
			f := simFlow(0, tc.v6)
			s := cookieSYN()
			if tc.change != nil {
				tc.change(&s)
			}
			now := simStart.Add(time.Millisecond)
			c, r, ok := l.HandleSegment(now, f, &s)
			if c != nil || !ok || r.Flags&^ECE != SYN|ACK || r.Ack != 5001 {
				t.Fatalf("%v %v %+v", c, ok, r)
			}
			if (r.Flags&ECE != 0) != tc.ecn {
				t.Errorf("SYN-ACK has flags %v", r.Flags)
			}
			// The ACK of the handshake, with the first bytes.
			now = now.Add(50 * time.Millisecond)
			a := Segment{Header: Header{SrcPort: 7174, DstPort: 40000, Seq: 5001, Ack: r.Seq + 1, Flags: ACK | PSH, Window: 500}, Len: 10, Buf: 1}
			if a.Opts.HasTimestamps = r.Opts.HasTimestamps; a.Opts.HasTimestamps {
				a.Opts.TSVal, a.Opts.TSEcr = 149, r.Opts.TSVal
			}
			c, _, ok = l.HandleSegment(now, f, &a)
			if c == nil || ok {
				t.Fatal("the cookie was not taken")
			}
			if c.State() != Established {
				t.Fatal(c.State())
			}
			if e, ok := c.PollEvent(); !ok || e != EventEstablished {
				t.Error("no event")
			}
			in := c.HandleSegment(now, &a)
			if in.Action != Deliver || in.Len != 10 || in.Seq != 5001 {
				t.Errorf("%+v", in)
			}
			if c.MSS() != tc.mss || c.sackOK != tc.sack || c.tsOK != tc.ts || c.sndShift != tc.shift || c.ecnOK != tc.ecn {
				t.Errorf("MSS %d SACK %v timestamps %v shift %d ECN %v", c.MSS(), c.sackOK, c.tsOK, c.sndShift, c.ecnOK)
			}
			if c.wnd != 500<<tc.shift {
				t.Errorf("window %d", c.wnd)
			}
			var o Out
			if !c.PollTransmit(now, &o) || o.Ack != 5011 || o.Seq != r.Seq+1 {
				t.Errorf("%+v", o)
			}
			if o.Opts.HasTimestamps && int32(o.Opts.TSVal-r.Opts.TSVal) <= 0 {
				t.Error("the timestamp clock runs backwards")
			}
			l.Done(c)
			if l.half != 2 {
				t.Errorf("%d half-open connections", l.half)
			}
		})
	}
}

// TestListenerConfig checks that later connections follow a change of the settings, as after a change of the link, with and without a
// cookie.
func TestListenerConfig(t *testing.T) {
	cfg := DefaultConfig()
	l := NewListener(&cfg, 1, [16]byte{7}, 1500)
	for _, held := range []int{16, 32} {
		cfg.MaxHeld = held
		f, s := simFlow(0, false), cookieSYN()
		c, _, _ := l.HandleSegment(simStart, f, &s)
		var o Out
		if !c.PollTransmit(simStart, &o) || int(o.Window) != held*1460 {
			t.Errorf("%d held segments: a window of %d", held, o.Window)
		}
		if _, r, _ := l.HandleSegment(simStart, f, &s); int(r.Window) != held*1460 {
			t.Errorf("%d held segments: a window of %d with a cookie", held, r.Window)
		}
		l.Done(c)
	}
}

// TestSYNCookieBad checks that a connection is made only for the right number, in time, from the right flow.
func TestSYNCookieBad(t *testing.T) {
	cfg := DefaultConfig()
	f := simFlow(0, false)
	for _, tc := range []struct {
		name  string
		wait  time.Duration
		again bool // the flood continues until the ACK arrives
		seq   serial.Num
		ack   serial.Num
		port  uint16
		good  bool
	}{
		{name: "good", good: true},
		{name: "good, a minute later", wait: 64 * time.Second, again: true, good: true},
		{name: "too late", wait: 130 * time.Second, again: true},
		{name: "hours later, when the counter has wrapped", wait: 32 * 64 * time.Second, again: true},
		{name: "no flood any more", wait: 130 * time.Second},
		{name: "another ACK", ack: 1},
		{name: "another hash", ack: 1 << 20},
		{name: "another time", ack: 1 << 27},
		{name: "another MSS", ack: 1 << 24},
		{name: "another sequence number", seq: 1},
		{name: "another port", port: 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := NewListener(&cfg, 1, [16]byte{7}, 1500)
			flood(l, 2)
			s := cookieSYN()
			_, r, _ := l.HandleSegment(simStart, f, &s)
			now := simStart.Add(tc.wait)
			if tc.again {
				s := cookieSYN()
				g := f
				g.RemotePort = 9
				l.HandleSegment(now, g, &s)
			}
			g := f
			g.RemotePort += tc.port
			a := Segment{Header: Header{Seq: 5001 + tc.seq, Ack: r.Seq + 1 + tc.ack, Flags: ACK, Window: 500}, Buf: NoBuf}
			c, reply, ok := l.HandleSegment(now, g, &a)
			if (c != nil) != tc.good {
				t.Fatalf("connection %v", c != nil)
			}
			if !tc.good && (!ok || reply.Flags != RST || reply.Seq != a.Ack) {
				t.Errorf("reply %+v", reply)
			}
		})
	}
}

// TestSYNCookieRelated checks that no cookie tells what another one is: not one of a later time or of another MSS for another sequence
// number of the peer, whatever the peer knows of how they are made.
func TestSYNCookieRelated(t *testing.T) {
	const step = 0x9e3779b1 // factors that mixed the counter and the MSS into the hash
	cfg := DefaultConfig()
	l, f := NewListener(&cfg, 1, [16]byte{7}, 1500), simFlow(0, false)
	flood(l, 2)
	s := cookieSYN()
	_, r, _ := l.HandleSegment(simStart, f, &s)
	for later := range uint32(100) {
		for mss := range uint32(8) {
			now := simStart.Add(time.Duration(later) * cookiePeriod * time.Second)
			l.flooded = now
			old, t0 := uint32(r.Seq), cookieTime(simStart)
			t1, m0 := t0+later, old>>24&7
			if t1 == t0 && mss == m0 {
				continue // the cookie itself
			}
			irs := uint32(s.Seq) ^ t0*step ^ t1*step
			iss := t1&31<<27 | mss<<24 | (old-t0*8-m0*0x51ed27+t1*8+mss*0x51ed27)&0xffffff
			a := Segment{Header: Header{Seq: serial.Num(irs + 1), Ack: serial.Num(iss + 1), Flags: ACK, Window: 500}, Buf: NoBuf}
			if c, _, _ := l.HandleSegment(now, f, &a); c != nil {
				t.Fatalf("a cookie made of one that is %v old, for MSS %d, was taken", now.Sub(simStart), cookieMSS[mss])
			}
		}
	}
}

// TestSYNCookieReply checks that a SYN-ACK with a cookie differs from another one only in the sequence number and in the low bits of the
// timestamp, and that its timestamp is no later.
func TestSYNCookieReply(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		cfg := DefaultConfig()
		cfg.ECN = AcceptECN
		l := NewListener(&cfg, 1, [16]byte{7}, 9000)
		l.SetMTU(1500)
		f, s, mss := simFlow(0, v6), cookieSYN(), uint16(1460)
		if v6 {
			mss = 1440
		}
		s.Flags |= ECE | CWR
		c, _, _ := l.HandleSegment(simStart, f, &s)
		for i := range 2 * cookieBits {
			now := simStart.Add(time.Duration(i) * time.Millisecond)
			var o Out
			c.synPending = true
			c.tsOff = l.tsOff(&f)
			if !c.PollTransmit(now, &o) {
				t.Fatal("no SYN-ACK")
			}
			_, r, ok := l.HandleSegment(now, f, &s)
			if ahead := int32(r.Opts.TSVal - o.Opts.TSVal); !ok || ahead > 0 || ahead < -2*cookieBits {
				t.Fatalf("a timestamp of %d, and of %d with a cookie", o.Opts.TSVal, r.Opts.TSVal)
			}
			want := o.Header
			want.Seq, want.Opts.TSVal = r.Seq, r.Opts.TSVal
			if r != want || r.Opts.MSS != mss {
				t.Fatalf("v6 %v: with a cookie\n%+v\nwithout\n%+v", v6, r, want)
			}
		}
	}
}

// TestSYNCookieSecret checks that cookies and the offset of timestamps depend on the secret, as initial sequence numbers do, and that
// without a flood no cookie is taken, although it would be right: guesses cost nothing.
func TestSYNCookieSecret(t *testing.T) {
	cfg := DefaultConfig()
	f, s := simFlow(0, false), cookieSYN()
	l, other := NewListener(&cfg, 1, [16]byte{7}, 1500), NewListener(&cfg, 1, [16]byte{8}, 1500)
	flood(l, 2)
	flood(other, 2)
	taken := func(l *Listener, cookie serial.Num, now clock.Time) bool {
		a := Segment{Header: Header{Seq: 5001, Ack: cookie + 1, Flags: ACK, Window: 500}, Buf: NoBuf}
		c, _, _ := l.HandleSegment(now, f, &a)
		return c != nil
	}
	_, r, _ := l.HandleSegment(simStart, f, &s)
	_, q, _ := other.HandleSegment(simStart, f, &s)
	if r.Seq == q.Seq || int32(r.Opts.TSVal^q.Opts.TSVal)&^cookieBits == 0 || ISS(l.secret, f, simStart) == ISS(other.secret, f, simStart) {
		t.Errorf("with another secret: the same cookie %d, timestamp %d, or sequence number", q.Seq, q.Opts.TSVal)
	}
	g := f
	g.RemotePort++
	if l.tsOff(&f) == 0 || l.tsOff(&f) == l.tsOff(&g) {
		t.Error("the offset of the timestamps does not depend on the flow")
	}
	if !taken(l, r.Seq, simStart) || taken(other, r.Seq, simStart) {
		t.Error("the cookie of one listener is not taken, or by another one too")
	}
	for _, after := range []time.Duration{cookieLife, cookieLife + 1} {
		now := simStart.Add(after)
		right := l.cookie(&f, s.Seq, cookieTime(now), 3)
		if got, want := taken(l, right, now), after <= cookieLife; got != want {
			t.Errorf("a right cookie %v after the flood: taken %v", after, got)
		}
	}
	if calm := NewListener(&cfg, 1, [16]byte{7}, 1500); taken(calm, r.Seq, simStart) {
		t.Error("a cookie was taken where none had been sent")
	}
}

// TestSYNFlood checks that a flood uses bounded memory and cannot lock out a peer.
func TestSYNFlood(t *testing.T) {
	cfg := DefaultConfig()
	l := NewListener(&cfg, 16, [16]byte{7}, 1500)
	conns := 0
	var first *Conn
	for i := range 100_000 {
		s := cookieSYN()
		s.Seq = serial.Num(i * 7919)
		f := pkt.Flow{Local: simFlow(0, false).Local, Remote: [16]byte{10: 0xff, 11: 0xff, 12: 11, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)}, LocalPort: 7174, RemotePort: uint16(i)}
		c, _, ok := l.HandleSegment(simStart, f, &s)
		if c != nil {
			conns++
			first = c
		} else if !ok {
			t.Fatal("no cookie")
		}
	}
	if conns != 16 {
		t.Errorf("%d connections", conns)
	}
	s := cookieSYN()
	f := simFlow(0, false)
	if n := testing.AllocsPerRun(100, func() { l.HandleSegment(simStart, f, &s) }); n != 0 {
		t.Errorf("%v allocations for a SYN in a flood", n)
	}
	l.Done(first)
	l.Done(first)
	if l.half != 15 {
		t.Errorf("%d half-open connections after one is done", l.half)
	}
	if c, _, _ := l.HandleSegment(simStart, f, &s); c == nil {
		t.Error("the queue has room, but a cookie was sent")
	}
}
