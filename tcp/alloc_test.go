package tcp

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// loop connects two connections by a queue of segments and nothing else.
type loop struct {
	a, b *Conn
	now  clock.Time
	buf  Buf
	q    [2][]Out
	got  int
	drop int // drops every drop-th segment with payload; 0: none
	n    int

	follow    bool // PollFollowing is called
	following int  // segments that it returned
	runs      bool // records of one length are queued together
	together  int  // segments that left together
}

func newLoop(t testing.TB, cfg Config, mtu int) *loop {
	l := &loop{now: simStart}
	l.a = Dial(l.now, &cfg, simFlow(0, false), 1, mtu)
	ln := NewListener(&cfg, 1, [16]byte{}, mtu)
	var o Out
	l.a.PollTransmit(l.now, &o)
	s := Segment{Header: o.Header, Buf: NoBuf}
	l.b, _, _ = ln.HandleSegment(l.now, simFlow(1, false), &s)
	l.turn()
	l.turn()
	if l.a.State() != Established || l.b.State() != Established {
		t.Fatal("not established")
	}
	return l
}

// turn delivers what is in flight to both ends and lets them send.
func (l *loop) turn() {
	l.now = l.now.Add(20 * time.Microsecond)
	var o Out
	var h Held
	for i, c := range [2]*Conn{l.a, l.b} {
		in := l.q[1-i]
		for k := range in {
			s := Segment{Header: in[k].Header, Len: in[k].Len, Buf: in[k].Buf, ECN: in[k].ECN}
			r := c.HandleSegment(l.now, &s)
			if r.Action == Deliver {
				l.got += r.Len
			}
			for c.PollHeld(&h) {
				l.got += h.Len
			}
		}
		l.q[1-i] = in[:0]
		if d := c.Deadline(); d.Due(l.now) {
			c.HandleTimeout(l.now)
		}
		for o = (Out{}); l.poll(c, &o); {
			for rest, more := o, true; more; {
				var seg Out
				if seg, more = rest.split(); more {
					l.together++
				}
				if l.n++; l.drop == 0 || o.Len == 0 || l.n%l.drop != 0 {
					l.q[i] = append(l.q[i], seg)
				}
			}
		}
		for {
			if _, ok := c.PollReleased(); !ok {
				break
			}
		}
		for {
			if _, ok := c.PollEvent(); !ok {
				break
			}
		}
	}
}

// split removes the first segment from o. It reports whether o has more.
func (o *Out) split() (first Out, more bool) {
	first = *o
	first.Len = min(o.Len, o.Size)
	o.Seq, o.Off, o.Len = o.Seq.Add(first.Len), o.Off+first.Len, o.Len-first.Len
	o.Flags &^= CWR
	return first, o.Len > 0
}

// poll returns the next segment of c.
func (l *loop) poll(c *Conn, o *Out) bool {
	if l.follow && c.PollFollowing(l.now, o) {
		l.following++
		return true
	}
	return c.PollTransmit(l.now, o)
}

func (l *loop) push() {
	mss := l.a.MSS()
	for l.a.Room() >= mss {
		l.buf++
		if l.runs {
			l.a.SetBurst(20)
			l.a.PushRun(l.buf, min(l.a.Room()/mss, 44)*mss, mss)
		} else {
			l.a.Push(l.buf, mss)
		}
	}
}

// pushAll queues records of these lengths, those of one length that follow each other as a run if l.runs is set.
func (l *loop) pushAll(sizes []int) {
	for len(sizes) > 0 {
		n := 1
		for l.runs && n < len(sizes) && sizes[n] == sizes[0] {
			n++
		}
		l.buf++
		l.a.PushRun(l.buf, n*sizes[0], sizes[0])
		sizes = sizes[n:]
	}
}

// TestNoAllocs checks that nothing allocates in the steady state, with losses and
// without.
func TestNoAllocs(t *testing.T) {
	for _, drop := range []int{0, 97} {
		for _, runs := range []bool{false, true} {
			cfg := DefaultConfig()
			cfg.RcvWindow = 256 << 10
			cfg.ECN = RequestECN
			l := newLoop(t, cfg, 1500)
			l.drop, l.runs = drop, runs
			for range 5000 {
				l.push()
				l.turn()
			}
			before := l.got
			if n := testing.AllocsPerRun(2000, func() { l.push(); l.turn() }); n != 0 {
				t.Errorf("drop %d, runs %v: %v allocations a turn", drop, runs, n)
			}
			if l.got-before < 1<<20 {
				t.Errorf("drop %d, runs %v: only %d bytes moved", drop, runs, l.got-before)
			}
			if drop > 0 && l.a.stats.Retransmits == 0 {
				t.Error("nothing was lost")
			}
			if runs && l.together == 0 {
				t.Errorf("drop %d: no segments left together", drop)
			}
		}
	}
}

// BenchmarkBulk sends, receives and acknowledges one segment with payload. The time includes both ends and the loop.
func BenchmarkBulk(b *testing.B) {
	for _, bm := range []struct {
		name string
		mtu  int
		drop int
	}{{"1500", 1500, 0}, {"9000", 9000, 0}, {"1500/loss", 1500, 101}} {
		b.Run(bm.name, func(b *testing.B) {
			cfg := DefaultConfig()
			l := newLoop(b, cfg, bm.mtu)
			l.drop = bm.drop
			b.ReportAllocs()
			b.SetBytes(int64(l.a.MSS()))
			b.ResetTimer()
			for l.got < b.N*l.a.MSS() {
				l.push()
				l.turn()
			}
		})
	}
}

// BenchmarkRequest sends one small record in each direction.
func BenchmarkRequest(b *testing.B) {
	l := newLoop(b, DefaultConfig(), 1500)
	b.ReportAllocs()
	for b.Loop() {
		l.buf++
		l.a.Push(l.buf, 64)
		l.turn()
		l.buf++
		l.b.Push(l.buf, 64)
		l.turn()
	}
}

func BenchmarkHeaderDecode(b *testing.B) {
	h := Header{Flags: ACK, Opts: Options{HasTimestamps: true, NSACK: 3}}
	var buf [MaxHeaderLen]byte
	n := h.Put(buf[:])
	b.ReportAllocs()
	for b.Loop() {
		if _, err := h.Decode(buf[:n]); err != nil {
			b.Fatal(err)
		}
	}
}
