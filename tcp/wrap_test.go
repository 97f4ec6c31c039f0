package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestFastRetransmitMuchLater checks that an old recovery does not prevent a new one, however far the sequence
// numbers have advanced.
func TestFastRetransmitMuchLater(t *testing.T) {
	for _, gone := range []int{0, 1 << 30, 2 << 30, 3 << 30} {
		cfg := DefaultConfig()
		cfg.NoSACK = true
		c := Dial(simStart, &cfg, simFlow(0, false), 1, 1500)
		now := simStart
		var o Out
		poll := func() (again int) {
			for c.PollTransmit(now, &o) {
				if o.Retransmit {
					again++
				}
			}
			return again
		}
		ack := func(n serial.Num) {
			now = now.Add(time.Millisecond)
			c.HandleSegment(now, &Segment{Header: Header{Seq: 0x20000001, Ack: n, Flags: ACK, Window: 60000}, Buf: NoBuf})
		}
		poll()
		c.HandleSegment(now, &Segment{Header: Header{Seq: 0x20000000, Ack: c.nxt, Flags: SYN | ACK, Window: 60000}, Buf: NoBuf})
		for range 2 {
			for range 5 {
				c.Push(1, 1000)
			}
			poll()
			for range dupThresh {
				ack(c.una)
			}
			if poll() != 1 {
				t.Fatalf("%d bytes later: three duplicate ACKs led to no retransmission", gone)
			}
			ack(c.nxt)
			c.Push(1, 1000)
			poll()
			ack(c.nxt) // more than the recovery, which RFC 6582 3.2 asks for
			// As if that much had been sent and acknowledged since.
			c.una, c.nxt, c.pushNxt, c.wl2 = c.una.Add(gone), c.nxt.Add(gone), c.pushNxt.Add(gone), c.wl2.Add(gone)
		}
	}
}

// TestUndoMuchLater checks that a D-SACK for data of 4 GiB later, whose sequence numbers are those of an old recovery,
// does not take back that recovery.
func TestUndoMuchLater(t *testing.T) {
	cfg := DefaultConfig()
	cfg.RcvWindow = 1 << 20
	l := newLoop(t, cfg, 65535)
	l.drop = 20
	for l.a.Stats().Recoveries == 0 {
		l.push()
		l.turn()
	}
	from, to := l.a.undo.from, l.a.undo.to
	l.drop = 0
	send := func(bytes int) {
		for end := l.got + bytes; l.got < end; {
			l.push()
			l.turn()
		}
	}
	send(4<<30 - 32<<20)
	for l.a.una.Less(to) { // a segment at a time
		l.buf++
		l.a.Push(l.buf, l.a.MSS())
		l.turn()
	}
	s := Segment{Header: Header{Seq: l.b.nxt, Ack: l.a.una, Flags: ACK, Window: 1000}, Buf: NoBuf}
	s.Opts = Options{HasTimestamps: true, TSVal: l.a.tsRecent, TSEcr: l.a.tsAt(l.now), NSACK: 1}
	s.Opts.SACK[0] = SACKBlock{from, to}
	l.a.HandleSegment(l.now, &s)
	if st := l.a.Stats(); st.DSACKIn != 1 || st.Undos != 0 {
		t.Errorf("%d D-SACKs, %d undos", st.DSACKIn, st.Undos)
	}
}
