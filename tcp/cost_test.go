package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
)

// crowd is a connection with very many segments in flight, whose peer is driven by hand.
type crowd struct {
	*loop
	c     *Conn
	first serial.Num
	sent  int
	ts    uint32 // of the last segment sent
	began time.Time
}

const crowdSegs = 1 << 16

func newCrowd(t *testing.T) *crowd {
	cfg := DefaultConfig()
	cfg.MaxBurst = 0
	l := newLoop(t, cfg, 1500)
	y := &crowd{loop: l, c: l.a, first: l.a.una, began: time.Now()}
	y.c.wnd, y.c.w.cwnd = 1<<30, 1<<30
	for i := range crowdSegs {
		y.c.Push(Buf(i), y.c.MSS())
	}
	if y.send(); y.sent != crowdSegs {
		t.Fatalf("%d segments in flight, want %d", y.sent, crowdSegs)
	}
	y.now = y.now.Add(50 * time.Millisecond)
	return y
}

func (y *crowd) send() {
	var o Out
	for y.c.PollTransmit(y.now, &o) {
		y.ts = o.Opts.TSVal
		y.sent++
	}
}

// at returns where a segment starts.
func (y *crowd) at(seg int) serial.Num { return y.first.Add(seg * y.c.MSS()) }

func (y *crowd) ack(acked int, echo uint32, blocks ...SACKBlock) {
	s := Segment{Header: Header{Seq: y.c.rcvNxt, Ack: y.at(acked), Flags: ACK, Window: 65535}, Buf: NoBuf}
	s.Opts = Options{HasTimestamps: true, TSVal: y.b.tsAt(y.now), TSEcr: echo, NSACK: uint8(len(blocks))}
	copy(s.Opts.SACK[:], blocks)
	y.c.HandleSegment(y.now, &s)
}

// cheap fails the test if all that took longer than it may on a very slow machine. It takes milliseconds.
func (y *crowd) cheap(t *testing.T) {
	t.Helper()
	if d := time.Since(y.began); d > 2*time.Second {
		t.Errorf("that took %v", d)
	}
}

// TestUndoCost checks that undoing a recovery does not walk over the list of segments in flight for each lost segment.
func TestUndoCost(t *testing.T) {
	y := newCrowd(t)
	for i := range 4 {
		y.ack(0, y.ts, SACKBlock{y.at(crowdSegs / 2), y.at(crowdSegs/2 + 1 + i)})
	}
	y.now = y.now.Add(50 * time.Millisecond)
	y.c.HandleTimeout(y.now)
	if y.c.q.lostSegs < crowdSegs/3 {
		t.Fatalf("%d segments are lost", y.c.q.lostSegs)
	}
	y.send()
	y.now = y.now.Add(time.Millisecond)
	y.ack(1, y.ts-1000) // of a segment that was not retransmitted
	if y.c.stats.Undos != 1 || y.c.q.lostSegs != 0 {
		t.Fatalf("%d reductions undone, %d segments lost", y.c.stats.Undos, y.c.q.lostSegs)
	}
	y.cheap(t)
}

// TestSACKCost checks that ACKs which report the same data in blocks that differ do not walk over it each time.
func TestSACKCost(t *testing.T) {
	y := newCrowd(t)
	for i := range 20000 {
		y.ack(1, y.ts, SACKBlock{y.at(2 + i%2), y.at(crowdSegs - 1 - i%3)}, SACKBlock{y.at(3), y.at(crowdSegs)})
	}
	if y.c.q.sackedSegs != crowdSegs-2 {
		t.Fatalf("%d segments SACKed, want %d", y.c.q.sackedSegs, crowdSegs-2)
	}
	y.cheap(t)
}

// TestLongRecordCost checks that a record longer than the MSS is cut by itself, not with all that is queued. A peer may have an MSS
// below the least FPDU.
func TestLongRecordCost(t *testing.T) {
	y := newCrowd(t)
	const n = 4000
	for range n {
		y.c.Push(1, 2*y.c.MSS()+1)
	}
	if y.send(); y.sent != crowdSegs+3*n {
		t.Errorf("%d segments sent, want %d", y.sent, crowdSegs+3*n)
	}
	y.cheap(t)
}

// TestReorderingCost checks that ACKs of reordered segments do not walk over all segments that are not late enough to be lost.
func TestReorderingCost(t *testing.T) {
	y := newCrowd(t)
	const n = 20000
	for i := range n {
		y.ack(0, y.ts, SACKBlock{y.at(crowdSegs - 1 - i), y.at(crowdSegs)})
	}
	if y.c.q.sackedSegs != n || y.c.q.lostSegs != 0 {
		t.Fatalf("%d segments SACKed, %d lost; want %d and none", y.c.q.sackedSegs, y.c.q.lostSegs, n)
	}
	y.cheap(t)
	y.now = y.c.deadlines[timerRACK]
	y.c.HandleTimeout(y.now)
	if y.c.q.lostSegs != crowdSegs-n {
		t.Errorf("%d segments lost at the end of the reordering window, want %d", y.c.q.lostSegs, crowdSegs-n)
	}
}

// TestTimeWaitMemory checks that a connection in TIME-WAIT has no send queue, which may be long after a fast transfer.
func TestTimeWaitMemory(t *testing.T) {
	for _, state := range []State{FinWait2, TimeWait} {
		c, _ := fuzzConn(t, state, 0)
		if n := len(c.q.s); (n == 0) != (state == TimeWait) {
			t.Errorf("%v: room for %d segments in the send queue", state, n)
		}
	}
}
