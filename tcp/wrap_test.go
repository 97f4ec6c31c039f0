package tcp

import (
	"testing"
	"time"
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
		ack := func() {
			now = now.Add(time.Millisecond)
			c.HandleSegment(now, &Segment{Header: Header{Seq: 0x20000001, Ack: c.una, Flags: ACK, Window: 60000}, Buf: NoBuf})
		}
		poll()
		c.HandleSegment(now, &Segment{Header: Header{Seq: 0x20000000, Ack: c.nxt, Flags: SYN | ACK, Window: 60000}, Buf: NoBuf})
		for range 2 {
			for range 5 {
				c.Push(1, 1000)
			}
			poll()
			for range dupThresh {
				ack()
			}
			if poll() != 1 {
				t.Fatalf("%d bytes later: three duplicate ACKs led to no retransmission", gone)
			}
			now = now.Add(time.Millisecond)
			c.HandleSegment(now, &Segment{Header: Header{Seq: 0x20000001, Ack: c.nxt, Flags: ACK, Window: 60000}, Buf: NoBuf})
			// As if that much had been sent and acknowledged since.
			c.una, c.nxt, c.pushNxt, c.wl2 = c.una.Add(gone), c.nxt.Add(gone), c.pushNxt.Add(gone), c.wl2.Add(gone)
		}
	}
}
