package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// TestAckCost checks that ACKs stay cheap with very many segments in flight, whatever they report. It takes milliseconds; with one walk
// over the queue for each ACK, or one over the lost segments for each segment, it takes more than ten seconds.
func TestAckCost(t *testing.T) {
	const n, late = 1 << 16, 2 * time.Second
	began := time.Now()
	cfg := DefaultConfig()
	cfg.MaxBurst = 0
	l := newLoop(t, cfg, 1500)
	c := l.a
	c.wnd, c.w.cwnd = 1<<30, 1<<30
	mss := c.MSS()
	for i := range n {
		c.Push(Buf(i), mss)
	}
	first := c.una
	var o Out
	var ts uint32 // of the last segment sent
	sent := 0
	send := func() {
		for c.PollTransmit(l.now, &o) {
			ts = o.Opts.TSVal
			sent++
		}
	}
	at := func(seg int) serial.Num { return first.Add(seg * mss) }
	ack := func(acked int, echo uint32, b ...SACKBlock) {
		s := Segment{Header: Header{Seq: c.rcvNxt, Ack: at(acked), Flags: ACK, Window: 65535}, Buf: NoBuf}
		s.Opts = Options{HasTimestamps: true, TSVal: l.b.tsAt(l.now), TSEcr: echo, NSACK: uint8(len(b))}
		copy(s.Opts.SACK[:], b)
		c.HandleSegment(l.now, &s)
	}
	send()
	if sent != n {
		t.Fatalf("%d segments in flight, want %d", sent, n)
	}

	// The first half is lost, then an old timestamp undoes that.
	l.now = l.now.Add(50 * time.Millisecond)
	for i := range 4 {
		ack(0, ts, SACKBlock{at(n / 2), at(n/2 + 1 + i)})
	}
	l.now = l.now.Add(50 * time.Millisecond)
	c.HandleTimeout(l.now)
	if c.lostSegs < n/3 {
		t.Fatalf("%d segments are lost", c.lostSegs)
	}
	send()
	l.now = l.now.Add(time.Millisecond)
	ack(1, ts-1000)
	if c.stats.Undos != 1 || c.lostSegs != 0 {
		t.Fatalf("%d reductions undone, %d segments lost", c.stats.Undos, c.lostSegs)
	}

	// The ACKs report the same data in blocks that differ.
	for i := range 10000 {
		ack(1, ts, SACKBlock{at(2 + i%2), at(n - 1 - i%3)}, SACKBlock{at(3), at(n)})
	}
	if c.sackedSegs != n-2 {
		t.Fatalf("%d segments SACKed, want %d", c.sackedSegs, n-2)
	}
	if d := time.Since(began); d > late {
		t.Errorf("that took %v", d)
	}
}
