package tcp

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// fuzzConn brings a connection into one of the states.
func fuzzConn(t testing.TB, state State, opt byte) (*Conn, *Listener) {
	cfg := DefaultConfig()
	cfg.NoTimestamps = opt&1 != 0
	cfg.NoSACK = opt&2 != 0
	cfg.ECN = ECN(opt>>2&1) * RequestECN
	if opt&8 != 0 {
		cfg.RcvWindow = 5000
	}
	if opt&16 != 0 {
		cfg.MaxHeld = 4
	}
	cfg.CongestionControl = CongestionControl(opt >> 5 % 3)
	cfg.KeepAliveIdle = time.Minute
	f := simFlow(0, false)
	l := NewListener(&cfg, 1, [16]byte{1}, 1500)
	var c *Conn
	seg := func(flags Flags, seq, ack serial.Num) {
		s := Segment{Header: Header{Seq: scriptPeerISN + seq, Ack: ack, Flags: flags, Window: 30000}, Buf: NoBuf}
		if flags&SYN != 0 {
			s.Opts = Options{MSS: 1460, SACKPermitted: true, HasWScale: true, WScale: 3}
		}
		s.Opts.HasTimestamps, s.Opts.TSVal = true, 100
		var o Out
		if c == nil {
			c, _, _ = l.HandleSegment(simStart, f, &s)
		} else {
			c.HandleSegment(simStart, &s)
		}
		for c.PollTransmit(simStart, &o) {
		}
	}
	switch state {
	case SynSent:
		return Dial(simStart, &cfg, f, 0xfffffff0, 1500), l
	case SynReceived:
		seg(SYN, 0, 0)
		return c, l
	}
	c = Dial(simStart, &cfg, f, 0xfffffff0, 1500)
	seg(SYN|ACK, 0, c.iss+1)
	closeIt := func() {
		c.Close(simStart)
		var o Out
		for c.PollTransmit(simStart, &o) {
		}
	}
	switch state {
	case FinWait1:
		closeIt()
	case FinWait2, TimeWait:
		closeIt()
		seg(ACK, 1, c.iss+2)
		if state == TimeWait {
			seg(FIN|ACK, 1, c.iss+2)
		}
	case CloseWait, LastAck:
		seg(FIN|ACK, 1, c.iss+1)
		if state == LastAck {
			closeIt()
		}
	case Closing:
		closeIt()
		seg(FIN|ACK, 1, c.iss+1)
	case Closed:
		c.Abort(simStart)
	}
	if c.State() != state {
		t.Fatalf("state is %v, want %v", c.State(), state)
	}
	return c, l
}

// FuzzSegment sends arbitrary segments to a connection in every state and makes arbitrary calls. It must not panic,
// its invariants must hold, each byte must be delivered at most once and in order, and every Buf must be returned.
func FuzzSegment(f *testing.F) {
	for s := Closed; s <= TimeWait; s++ {
		f.Add([]byte{byte(s), 0, 0x10, 1, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 0, 200, 0x18, 0, 0, 100, 3, 2, 9, 0})
		f.Add([]byte{byte(s), 31, 0, 0x18, 0, 100, 0, 10, 0, 2, 255, 1, 3, 255, 0, 0x10, 5, 5, 5, 5, 5, 5, 4, 6})
	}
	f.Fuzz(fuzzSegment)
}

// TestSegmentRandom runs FuzzSegment on random bytes.
func TestSegmentRandom(t *testing.T) {
	from, only := firstSeed(t)
	n := uint64(4000)
	if only {
		n = 1
	}
	for seed := from; seed < from+n; seed++ {
		r := rand.New(rand.NewPCG(seed, 99))
		b := make([]byte, 20+r.IntN(3000))
		for i := range b {
			b[i] = byte(r.Uint32())
			// Small numbers keep segments near the window.
			if r.IntN(3) == 0 {
				b[i] &= 3
			}
		}
		b[0] = byte(seed)
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { fuzzSegment(t, b) }) {
			break
		}
	}
}

func fuzzSegment(t *testing.T, b []byte) {
	if len(b) > 4096 {
		return
	}
	in := testenv.Choices(b)
	c, l := fuzzConn(t, State(in.Byte())%(TimeWait+1), in.Byte())
	now := simStart
	pushed := map[Buf]bool{}
	held := map[Buf]bool{}
	var next Buf
	got := c.rcvNxt
	started := c.state > SynReceived
	deliver := func(seq serial.Num, n int) {
		if !started {
			got, started = c.irs+1, true
		}
		if seq != got || n <= 0 {
			t.Fatalf("delivery of %d bytes at %d, want %d", n, seq, got)
		}
		got = got.Add(n)
	}
	drain := func() {
		var o Out
		for i := 0; c.PollTransmit(now, &o); i++ {
			if i > 2000 {
				t.Fatal("PollTransmit does not end")
			}
			if o.Buf != NoBuf && !pushed[o.Buf] {
				t.Fatalf("segment of record %d, which is not pushed", o.Buf)
			}
			if o.Header.Len() > MaxHeaderLen {
				t.Fatal("header too long")
			}
		}
		var h Held
		for c.PollHeld(&h) {
			if h.Buf != NoBuf {
				if !held[h.Buf] {
					t.Fatalf("frame %d was not held", h.Buf)
				}
				delete(held, h.Buf)
			}
			if h.Deliver {
				deliver(h.Seq, h.Len)
			}
		}
		for {
			r, ok := c.PollReleased()
			if !ok {
				break
			}
			if !pushed[r] {
				t.Fatalf("record %d released twice", r)
			}
			delete(pushed, r)
		}
		for {
			if _, ok := c.PollEvent(); !ok {
				break
			}
		}
		if len(held) > c.cfg.MaxHeld {
			t.Fatalf("%d frames held", len(held))
		}
		checkInvariants(t, c)
	}
	for len(in) > 0 {
		switch op := in.Byte(); op % 16 {
		case 0:
			now = now.Add(time.Duration(in.Byte()) * time.Millisecond)
		case 1:
			if d := c.Deadline(); d != 0 {
				now = max(now, d)
			}
			c.HandleTimeout(now)
		case 2:
			next++
			pushed[next] = true
			n := 1 + in.Uint16()%(c.MSS()+10)
			c.SetBurst(1 + int(op>>4))
			c.PushRun(next, n*(1+int(op>>4)), n)
		case 3:
			c.SetBacklog(in.Uint16())
		case 4:
			if op == 4 {
				c.Close(now)
			} else if op == 20 {
				c.Abort(now)
			}
		case 5:
			c.SetMTU(now, 300+in.Uint16()%9000)
		case 6:
			c.HandleICMP(now, &pkt.ICMPError{Kind: pkt.ICMPKind(op >> 4 % 5), MTU: in.Uint16() % 2000, Seq: uint32(c.una.Add(in.Uint16()%3000 - 100))})
		case 7:
			if op == 7+16 {
				c.Reclaim(in.Uint16() % 8)
				break
			}
			for h := range held {
				delete(held, h)
				c.Placed(h)
				break
			}
		default:
			s := Segment{Header: Header{Flags: Flags(in.Byte()), Window: uint16(in.Uint16())}, ECN: op >> 6}
			if s.Flags&(SYN|RST|FIN) != 0 && op < 0xf0 {
				s.Flags = s.Flags&^(SYN|RST|FIN) | ACK // so that runs do not end too early
			}
			s.Seq = c.rcvNxt.Add(int(int16(in.Uint16())))
			s.Ack = c.una.Add(int(int16(in.Uint16())))
			if op&1 != 0 {
				s.Seq = c.rcvNxt
			}
			if op&2 != 0 {
				s.Ack = c.nxt
			}
			s.Len = in.Uint16() % 1500
			s.Opts.HasTimestamps = op&4 == 0 || !c.cfg.NoTimestamps
			s.Opts.TSVal = c.tsRecent + uint32(int8(in.Byte()))
			s.Opts.TSEcr = c.tsAt(now) - uint32(in.Byte())
			if op&16 != 0 {
				for range 1 + in.Byte()%4 {
					a := c.una.Add(int(int16(in.Uint16())))
					s.Opts.SACK[s.Opts.NSACK] = SACKBlock{a, a.Add(int(int16(in.Uint16())))}
					s.Opts.NSACK++
				}
			}
			if s.Flags&SYN != 0 {
				s.Opts.MSS = uint16(in.Uint16())
				s.Opts.HasWScale, s.Opts.WScale = true, op>>4&15
				s.Opts.SACKPermitted = op&32 != 0
			}
			next++
			s.Buf = next | 1<<30
			r := c.HandleSegment(now, &s)
			if r.Action == Deliver || r.Action == Hold {
				if r.Off < 0 || r.Len <= 0 || r.Off+r.Len > s.Len {
					t.Fatalf("%+v of %d bytes", r, s.Len)
				}
			}
			switch r.Action {
			case Deliver:
				deliver(r.Seq, r.Len)
			case Hold:
				held[s.Buf] = true
			}
			l.HandleSegment(now, c.flow, &s)
		}
		drain()
	}
	c.Abort(now)
	drain()
	if len(pushed) != 0 || len(held) != 0 {
		t.Fatalf("%d records and %d frames are missing", len(pushed), len(held))
	}
	if d := c.Deadline(); d != 0 {
		t.Fatal("a timer runs after the end")
	}
}
