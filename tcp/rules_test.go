package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestDefaultMSS checks that without an MSS option from the peer segments hold 536 bytes over IPv4 and 1220 over IPv6
// (RFC 9293 MUST-15).
func TestDefaultMSS(t *testing.T) {
	for v6, want := range map[bool]int{false: 536, true: 1220} {
		for _, mtu := range []int{1500, 9000} {
			cfg := DefaultConfig()
			cfg.NoTimestamps = true
			c := Dial(simStart, &cfg, simFlow(0, v6), 1, mtu)
			var o Out
			for c.PollTransmit(simStart, &o) {
			}
			c.HandleSegment(simStart, &Segment{Header: Header{Seq: 9, Ack: 2, Flags: SYN | ACK, Window: 60000}, Buf: NoBuf})
			if c.State() != Established || c.MSS() != want {
				t.Errorf("IPv6 %v, MTU %d: %v, MSS %d; want %d", v6, mtu, c.State(), c.MSS(), want)
			}
		}
	}
}

// dialed returns an established connection whose peer has the given options and window.
func dialed(cfg Config, opts Options, window uint16) *Conn {
	c := Dial(simStart, &cfg, simFlow(0, false), 1, 1500)
	var o Out
	for c.PollTransmit(simStart, &o) {
	}
	c.HandleSegment(simStart, &Segment{Header: Header{Seq: 9, Ack: 2, Flags: SYN | ACK, Window: window, Opts: opts}, Buf: NoBuf})
	for c.PollTransmit(simStart, &o) {
	}
	return c
}

// TestWindowIsUnsigned checks that a window above 32767 is not taken for negative, in the SYN and later (RFC 9293
// MUST-1).
func TestWindowIsUnsigned(t *testing.T) {
	for _, window := range []uint16{0x7fff, 0x8000, 0xffff} {
		cfg := DefaultConfig()
		c := dialed(cfg, Options{MSS: 1460}, window)
		var o Out
		for range 2 {
			if c.Room() < 1000 {
				t.Fatalf("window %d: room for %d bytes", window, c.Room())
			}
			c.Push(1, 1000)
			if !c.PollTransmit(simStart, &o) || o.Len != 1000 {
				t.Fatalf("window %d: nothing is sent", window)
			}
			c.HandleSegment(simStart, &Segment{Header: Header{Seq: 10, Ack: o.Seq.Add(1000), Flags: ACK, Window: window}, Buf: NoBuf})
		}
	}
}

// TestOptionLength checks that an option whose length exceeds the option space is ignored, with everything after it
// (RFC 9293 MUST-7).
func TestOptionLength(t *testing.T) {
	for _, kind := range []byte{kindMSS, kindWScale, kindSACKPerm, kindTimestamp, kindSACK, 77} {
		for room := 2; room < 20; room++ {
			for length := range 40 {
				b := make([]byte, 60)
				for i := range b {
					b[i] = 0xee
				}
				b[0], b[1] = kind, byte(length)
				for i := 2; i < room; i++ {
					b[i] = kindNOP
				}
				var o Options
				o.decode(b[:room])
				if bad := length < 2 || length > room; o.Malformed != bad {
					t.Errorf("kind %d, length %d of %d bytes: malformed %v", kind, length, room, o.Malformed)
				}
			}
		}
	}
}

// TestISSOfFlow checks that the initial sequence number depends on both ends of a connection and on the secret (RFC
// 6528 3).
func TestISSOfFlow(t *testing.T) {
	base := simFlow(0, false)
	iss := ISS([16]byte{1}, base, simStart)
	for name, change := range map[string]func(secret *[16]byte){
		"secret":         func(s *[16]byte) { s[15]++ },
		"local address":  func(*[16]byte) { base.Local[15]++ },
		"remote address": func(*[16]byte) { base.Remote[15]++ },
		"local port":     func(*[16]byte) { base.LocalPort++ },
		"remote port":    func(*[16]byte) { base.RemotePort++ },
	} {
		secret := [16]byte{1}
		base = simFlow(0, false)
		change(&secret)
		if ISS(secret, base, simStart) == iss {
			t.Errorf("another %s makes no other number", name)
		}
	}
}

// TestRightEdge checks that the right edge of the offered window never moves left, whatever arrives and is consumed,
// and also where scaling rounds it (RFC 9293 SHLD-14).
func TestRightEdge(t *testing.T) {
	rnd := testenv.Rand(t)
	cfg := DefaultConfig()
	cfg.NoTimestamps = true
	cfg.RcvWindow = 1 << 20
	c := dialed(cfg, Options{MSS: 1460, HasWScale: true, WScale: 7}, 60000)
	if c.rcvShift == 0 {
		t.Fatal("the window is not scaled")
	}
	var edge serial.Num
	seq, backlog, acks := c.RcvNxt(), 0, 0
	for range 20000 {
		n := 1 + rnd.IntN(1460)
		if in := c.HandleSegment(simStart, &Segment{Header: Header{Seq: seq, Ack: 2, Flags: ACK | PSH, Window: 60000}, Len: n, Buf: 1}); in.Action == Deliver {
			seq, backlog = seq.Add(in.Len), backlog+in.Len
		}
		if rnd.IntN(4) == 0 {
			backlog -= rnd.IntN(backlog + 1)
		}
		c.SetBacklog(backlog)
		var o Out
		for c.PollTransmit(simStart, &o) {
			if at := o.Ack.Add(int(o.Window) << c.rcvShift); acks > 0 && at.Less(edge) {
				t.Fatalf("the edge moves left by %d", edge.Sub(at))
			} else {
				edge = at
			}
			acks++
		}
	}
	if acks < 1000 {
		t.Errorf("only %d ACKs seen", acks)
	}
}

// TestHardError checks which ICMP errors refuse an open, and that only one that says that nothing listens is a refusal.
func TestHardError(t *testing.T) {
	for code := range 256 {
		var v4, v6 error
		switch code {
		case 1, 5, 6:
			v6 = ErrUnreachable
		case 2, 3:
			v4 = ErrRefused
		case 4:
			v6 = ErrRefused
		case 9, 10, 13:
			v4 = ErrUnreachable
		}
		if got := hardError(false, uint8(code)); got != v4 {
			t.Errorf("IPv4, code %d: %v; want %v", code, got, v4)
		}
		if got := hardError(true, uint8(code)); got != v6 {
			t.Errorf("IPv6, code %d: %v; want %v", code, got, v6)
		}
	}
}

// TestPartTaken checks that what a peer has taken of a segment is not sent again when the MSS shrinks: no ACK of it would
// carry news.
func TestPartTaken(t *testing.T) {
	c := dialed(DefaultConfig(), Options{MSS: 1460}, 60000)
	from := c.nxt
	c.Push(1, 1460)
	var o Out
	c.PollTransmit(simStart, &o)
	c.HandleSegment(simStart, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: from + 1000, Window: 60000}})
	c.SetMTU(simStart, 576)
	checkInvariants(t, c)
	now := c.Deadline()
	c.HandleTimeout(now)
	if !c.PollTransmit(now, &o) || o.Seq != from+536 || o.Len != 536 {
		t.Errorf("of 1000 bytes acknowledged, %d to %d are sent again", o.Seq-from, o.Seq.Add(o.Len)-from)
	}
	c.HandleSegment(now, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: from + 1460, Window: 60000}})
	if b, ok := c.PollReleased(); !ok || b != 1 {
		t.Error("the record is not released")
	}
}

// TestWindowOfRetransmission checks that a new ACK brings its window, although an older ACK had a higher sequence number:
// more would be sent than the peer takes.
func TestWindowOfRetransmission(t *testing.T) {
	c := dialed(DefaultConfig(), Options{MSS: 1460}, 5000)
	from := c.nxt
	c.Push(1, 1000)
	for o := (Out{}); c.PollTransmit(simStart, &o); {
	}
	c.HandleSegment(simStart, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt + 1000, Ack: from, Window: 5000}, Len: 1000, Buf: 1})
	c.HandleSegment(simStart, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: from + 1000, Window: 4000}, Len: 1000, Buf: 2})
	if got := c.edge().Sub(from); got != 5000 {
		t.Errorf("the window ends after %d bytes; want 5000", got)
	}
}

// TestStoppedRTT checks that segments which were in flight while this host was stopped are not timed, whether their ACKs
// or the timer are processed first: the RTO would be that long for many round trips.
func TestStoppedRTT(t *testing.T) {
	for _, timer := range []bool{false, true} {
		c := dialed(DefaultConfig(), Options{MSS: 1460}, 60000)
		poll := func(now clock.Time) {
			for o := (Out{}); c.PollTransmit(now, &o); {
			}
		}
		ack := func(now clock.Time, ack serial.Num) {
			c.HandleSegment(now, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: ack, Window: 60000}})
		}
		c.Push(1, 1000)
		c.Push(2, 1000)
		poll(simStart)
		now := simStart.Add(time.Hour)
		if timer {
			c.HandleTimeout(now)
		}
		for una := c.una; c.una != c.nxt; {
			una = una.Add(1000)
			ack(now, una)
		}
		if c.rto > time.Second {
			t.Errorf("timer %v: the RTO is %v after a stop", timer, c.rto)
		}
		c.Push(3, 1000)
		poll(now)
		if now = now.Add(20 * time.Millisecond); c.una == c.nxt {
			t.Fatal("nothing is sent")
		}
		if ack(now, c.nxt); c.srtt == 0 || c.srtt > 20*time.Millisecond || c.rto > 300*time.Millisecond {
			t.Errorf("timer %v: the next segment is not timed: SRTT %v, RTO %v", timer, c.srtt, c.rto)
		}
	}
}

// TestStopped checks that a host that was stopped, as a paused container is, retransmits or probes when it goes on, and
// gives its peer up only after as much time as if everything had begun then, also if it was stopped just before it would
// have given up.
func TestStopped(t *testing.T) {
	for what, limit := range map[string]time.Duration{
		"SYN": 180 * time.Second, "data": 120 * time.Second, "tail": 120 * time.Second, "probe": 120 * time.Second,
		"user": 90 * time.Second, "FIN-WAIT-2": 60 * time.Second, "keep-alive": 110 * time.Second,
	} {
		t.Run(what, func(t *testing.T) {
			cfg := DefaultConfig()
			switch what {
			case "user":
				cfg.UserTimeout = limit
			case "keep-alive":
				cfg.KeepAliveIdle, cfg.KeepAliveInterval, cfg.KeepAliveCount = 80*time.Second, 10*time.Second, 3
			}
			c, start := dialed(cfg, Options{MSS: 1460, SACKPermitted: what == "tail"}, 60000), simStart
			switch what {
			case "SYN":
				c = Dial(start, &cfg, simFlow(0, false), 1, 1500)
			case "probe":
				c = dialed(cfg, Options{MSS: 1460}, 0)
				c.Push(1, 1000)
			case "data", "tail", "user":
				c.Push(1, 1000)
			case "FIN-WAIT-2":
				c.Close(start)
			}
			poll := func(now clock.Time) (n int) {
				for o := (Out{}); c.PollTransmit(now, &o); n++ {
				}
				return n
			}
			poll(start)
			if what == "FIN-WAIT-2" {
				c.HandleSegment(start, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: c.nxt, Window: 60000}})
			}
			for stops := 0; c.State() != Closed; {
				now := c.Deadline()
				if stop := stops == 0 || stops == 1 && now.Sub(start) == limit; stop {
					now, stops = now.Add(time.Hour), stops+1
					start = now
				}
				c.HandleTimeout(now)
				if sent := poll(now) > 0; !sent && now == start && what != "FIN-WAIT-2" && what != "keep-alive" {
					t.Errorf("nothing is sent after stop %d", stops)
				}
				if c.State() == Closed && (stops < 2 || now.Sub(start) != limit) {
					t.Errorf("gives up %v after stop %d, want %v after the second", now.Sub(start), stops, limit)
				}
			}
		})
	}
}

// TestProbeDue checks that an ACK that arrives between the time-out for a tail probe and the probe says nothing about a
// loss: the probe is still to be sent (RFC 8985 7.4).
func TestProbeDue(t *testing.T) {
	c := dialed(DefaultConfig(), Options{MSS: 1000, SACKPermitted: true}, 60000)
	var o Out
	for range 4 {
		if c.Push(1, 1000); !c.PollTransmit(simStart, &o) {
			t.Fatal("nothing is sent")
		}
	}
	now := c.Deadline()
	c.HandleTimeout(now)
	c.HandleSegment(now, &Segment{Header: Header{Seq: 10, Ack: o.Seq.Add(-1000), Flags: ACK, Window: 60000}, Buf: NoBuf})
	if c.ca != caOpen {
		t.Errorf("the ACK of two segments of four led to state %d", c.ca)
	}
	if !c.PollTransmit(now, &o) || c.Stats().RetransTLP != 1 {
		t.Errorf("%d tail probes", c.Stats().RetransTLP)
	}
}
