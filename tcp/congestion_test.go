package tcp

import (
	"math"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// ackRound feeds a congestion control one round trip of ACKs, one for every two segments of the window.
func ackRound(cc congestion, w *window, now clock.Time, rtt time.Duration, mark float64) clock.Time {
	left := w.cwnd
	first := true
	acks := max(1, left/(2*w.mss))
	for i := range acks {
		now = now.Add(rtt / time.Duration(acks))
		n := min(2*w.mss, left)
		left -= n
		a := ackSample{now: now, acked: n, rtt: rtt, srtt: rtt, round: first, limited: true, ece: float64(i) < mark*float64(acks)}
		first = false
		cc.seen(w, &a)
		cc.grow(w, &a)
	}
	return now
}

// afterLoss returns a CUBIC state after one loss, whose window before it was the given number of segments of mss
// bytes.
func afterLoss(segments, mss int) (*cubic, *window) {
	c := algorithms[CUBIC].state().(*cubic)
	w := &window{cwnd: segments * mss, ssthresh: infinite, mss: mss}
	w.ssthresh = c.reduce(w, simStart, w.cwnd, false)
	w.cwnd = w.ssthresh
	return c, w
}

// TestCubicCurve checks the window against RFC 9438 (1): after a loss at W_max it takes K seconds to return there,
// and is concave before and convex after.
func TestCubicCurve(t *testing.T) {
	const mss, rtt = 1000, 100 * time.Millisecond
	c, w := afterLoss(1000, mss)
	now := simStart
	if w.cwnd != 700*mss {
		t.Fatalf("after a loss the window is %d segments, want 700 (beta)", w.cwnd/mss)
	}
	k := math.Cbrt(300 / 0.4)
	at := map[int]float64{}
	for s := range 30 {
		for range 10 {
			now = ackRound(c, w, now, rtt, 0)
		}
		at[s+1] = float64(w.cwnd) / mss
	}
	for s := 2; s <= 15; s++ {
		want := 0.4*math.Pow(float64(s)-k, 3) + 1000
		if got := at[s]; math.Abs(got-want) > 0.03*want {
			t.Errorf("after %d s the window is %.0f segments, want %.0f", s, got, want)
		}
	}
}

// TestCubicUnused checks RFC 9438 4.2.3 and 5.8: the window does not grow while it is not fully used, with or without
// ACKs.
func TestCubicUnused(t *testing.T) {
	const mss, rtt = 1000, 100 * time.Millisecond
	run := func(idle bool, unused time.Duration) int {
		c, w := afterLoss(1000, mss)
		now := simStart
		for range 20 {
			now = ackRound(c, w, now, rtt, 0)
		}
		for end := now.Add(unused); now < end && !idle; {
			now = now.Add(rtt)
			c.seen(w, &ackSample{now: now, acked: mss, rtt: rtt, srtt: rtt, round: true})
		}
		if idle && unused > 0 {
			now = now.Add(unused)
			c.idle(now)
		}
		for range 20 {
			now = ackRound(c, w, now, rtt, 0)
		}
		return w.cwnd / mss
	}
	want := run(false, 0)
	for _, idle := range []bool{false, true} {
		if got := run(idle, 30*time.Second); got < want-want/50 || got > want+want/50 {
			t.Errorf("idle %v: the window is %d segments, want %d", idle, got, want)
		}
	}
}

// TestCubicStopped checks that the window does not grow for time in which this host was stopped and ACKs waited.
func TestCubicStopped(t *testing.T) {
	const rtt = 100 * time.Millisecond
	run := func(stop time.Duration) int {
		cfg := DefaultConfig()
		cfg.MaxBurst = 0
		c := dialed(cfg, Options{MSS: 1460, SACKPermitted: true, HasWScale: true, WScale: 10}, 60000)
		c.w.ssthresh = c.w.cwnd // no slow start
		for now, round := simStart, 0; round < 40; round++ {
			for n := min(c.MSS(), c.Room()); n == c.MSS(); n = min(n, c.Room()) {
				c.Push(1, n)
			}
			for o := (Out{}); c.PollTransmit(now, &o); {
			}
			if now = now.Add(rtt); round == 20 {
				now = now.Add(stop)
			}
			for una := c.una; una != c.nxt; {
				una = una.Add(min(2*c.MSS(), c.nxt.Sub(una)))
				c.HandleSegment(now, &Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: una, Window: 60000}})
			}
		}
		return c.w.cwnd
	}
	if got, want := run(time.Minute), run(0); got > want+want/20 {
		t.Errorf("the window is %d bytes after a stop, %d without", got, want)
	}
}

// TestCubicRestart checks that a window that was lowered after idle time recovers by slow start and then congestion
// avoidance, not by a single ACK.
func TestCubicRestart(t *testing.T) {
	const mss, rtt = 1000, time.Millisecond
	c, w := afterLoss(100, mss)
	now := simStart
	for range 1500 {
		now = ackRound(c, w, now, rtt, 0)
	}
	was := w.cwnd
	now = now.Add(time.Second)
	c.idle(now)
	w.cwnd = 10 * mss
	for w.cwnd < was*3/4 {
		before := w.cwnd
		if now = ackRound(c, w, now, rtt, 0); w.cwnd > 2*before+mss || w.cwnd <= before {
			t.Fatalf("the window went from %d to %d segments in a round trip", before/mss, w.cwnd/mss)
		}
	}
}

// TestCubicTimeout checks RFC 9438 4.8: in congestion avoidance after a time-out K is 0 and W_max the window at its
// start, not that of before the time-out.
func TestCubicTimeout(t *testing.T) {
	const mss, rtt = 1000, 100 * time.Millisecond
	c, w := afterLoss(1000, mss)
	w.cwnd = mss
	now := simStart
	for w.cwnd < w.ssthresh {
		now = ackRound(c, w, now, rtt, 0)
	}
	from := float64(w.cwnd) / mss
	for s := 1; s <= 10; s++ {
		for range 10 {
			now = ackRound(c, w, now, rtt, 0)
		}
		want := from + 0.4*math.Pow(float64(s), 3)
		if got := float64(w.cwnd) / mss; got < from || math.Abs(got-want) > 0.03*want {
			t.Errorf("after %d s the window is %.0f segments, want %.0f", s, got, want)
		}
	}
}

// TestCubicRenoRegion checks RFC 9438 4.3: with a short round trip the window is
// no smaller than Reno's would be.
func TestCubicRenoRegion(t *testing.T) {
	const mss, rtt = 1000, time.Millisecond
	c, w := afterLoss(20, mss)
	now := simStart
	for range 20 {
		now = ackRound(c, w, now, rtt, 0)
	}
	// alpha is 9/17 a round trip until the old window is reached, then 1.
	if got := float64(w.cwnd) / mss; got < 14+20*0.5 || got > 14+21 {
		t.Errorf("after 20 round trips the window is %.1f segments", got)
	}
}

// TestCubicFastConvergence checks RFC 9438 4.7.
func TestCubicFastConvergence(t *testing.T) {
	c := new(cubic)
	w := window{cwnd: 100_000, mss: 1000}
	c.reduce(&w, simStart, w.cwnd, false)
	if c.wMax != 100_000 {
		t.Errorf("W_max %v", c.wMax)
	}
	w.cwnd = 80_000
	c.reduce(&w, simStart, w.cwnd, false)
	if c.wMax != 80_000*0.85 {
		t.Errorf("W_max %v, want 68000", c.wMax)
	}
	c.undo(&w)
	if c.wMax != 100_000 {
		t.Errorf("after undo W_max is %v", c.wMax)
	}
}

// TestCubicMSS checks that the window in bytes goes on to W_max when the size of a segment changes, neither stops nor
// goes far beyond it.
func TestCubicMSS(t *testing.T) {
	const wMax, rtt = 900_000, 100 * time.Millisecond
	for _, mss := range [][2]int{{8948, 1448}, {1448, 8948}} {
		c, w := afterLoss(wMax/mss[0], mss[0])
		now := simStart
		for range 10 {
			now = ackRound(c, w, now, rtt, 0)
		}
		was := w.cwnd
		w.mss = mss[1]
		for range 70 {
			now = ackRound(c, w, now, rtt, 0)
		}
		if w.cwnd < wMax*95/100 || w.cwnd > wMax*120/100 {
			t.Errorf("MSS %d, then %d: the window is %d bytes, and was %d when the MSS changed; want about %d", mss[0], mss[1], w.cwnd, was, wMax)
		}
	}
}

// TestNewReno checks RFC 5681 (2), (3) and (4).
func TestNewReno(t *testing.T) {
	r := algorithms[NewReno].state()
	w := window{cwnd: 10_000, ssthresh: 40_000, mss: 1000}
	now := ackRound(r, &w, simStart, time.Millisecond, 0)
	if w.cwnd != 20_000 {
		t.Errorf("slow start: %d", w.cwnd)
	}
	w.ssthresh = 20_000
	now = ackRound(r, &w, now, time.Millisecond, 0)
	now = ackRound(r, &w, now, time.Millisecond, 0)
	if w.cwnd < 21_000 || w.cwnd > 22_000 {
		t.Errorf("congestion avoidance: %d after two round trips", w.cwnd)
	}
	if got := r.reduce(&w, now, 30_000, false); got != 15_000 {
		t.Errorf("half of the flight is %d", got)
	}
	if got := r.reduce(&w, now, 1000, false); got != 2000 {
		t.Errorf("least threshold is %d", got)
	}
}

// TestDCTCP checks RFC 8257 3.3: alpha follows the share of marked bytes, and the window is reduced by the fraction
// alpha/2.
func TestDCTCP(t *testing.T) {
	d := &dctcp{alpha: 1}
	w := window{cwnd: 100_000, ssthresh: 50_000, mss: 1000}
	now := simStart
	for range 200 {
		w.cwnd = 100_000
		now = ackRound(d, &w, now, time.Millisecond, 0.2)
	}
	if math.Abs(d.alpha-0.2) > 0.02 {
		t.Errorf("alpha is %.3f, want 0.2", d.alpha)
	}
	w.cwnd = 100_000
	if got := d.reduce(&w, now, w.cwnd, true); math.Abs(float64(got)-90_000) > 1500 {
		t.Errorf("an echo lowers the window to %d", got)
	}
	if got := d.reduce(&w, now, w.cwnd, false); got != 50_000 {
		t.Errorf("a loss lowers the window to %d", got)
	}
}

// TestHyStart checks RFC 9406: slow start ends when the round-trip time rises, and continues while it is constant.
func TestHyStart(t *testing.T) {
	for _, rises := range []bool{false, true} {
		c := algorithms[CUBIC].state()
		w := window{cwnd: 10_000, ssthresh: infinite, mss: 1000}
		now, rtt := simStart, 20*time.Millisecond
		for range 11 {
			if rises && w.cwnd > 100_000 {
				rtt += 6 * time.Millisecond
			}
			now = ackRound(c, &w, now, rtt, 0)
		}
		if got := w.ssthresh < infinite; got != rises {
			t.Errorf("round-trip time rises: %v, slow start ended: %v at %d", rises, got, w.cwnd)
		}
	}
}

// TestHyStartResumes checks that slow start is the standard one again if the round-trip time falls in conservative slow
// start (RFC 9406 4.2).
func TestHyStartResumes(t *testing.T) {
	c := algorithms[CUBIC].state()
	w := window{cwnd: 100_000, ssthresh: infinite, mss: 1000}
	now := simStart
	for _, rtt := range []time.Duration{20, 20, 30, 20, 20} {
		now = ackRound(c, &w, now, rtt*time.Millisecond, 0)
	}
	had := w.cwnd
	if ackRound(c, &w, now, 20*time.Millisecond, 0); w.cwnd != 2*had {
		t.Errorf("the window grows from %d to %d in a round trip", had, w.cwnd)
	}
}

// TestHyStartOnce checks that HyStart++ is for the first slow start only (RFC 9406 4.3): one after idle time doubles
// the window in each round trip, also if conservative slow start ended the first.
func TestHyStartOnce(t *testing.T) {
	for _, a := range []CongestionControl{CUBIC, NewReno} {
		c := algorithms[a].state()
		w := window{cwnd: 10_000, ssthresh: infinite, mss: 1000}
		now, rtt := simStart, 20*time.Millisecond
		for w.ssthresh == infinite {
			if w.cwnd > 100_000 {
				rtt += 6 * time.Millisecond
			}
			now = ackRound(c, &w, now, rtt, 0)
		}
		now = now.Add(time.Second)
		c.idle(now)
		w.cwnd = 10_000
		if ackRound(c, &w, now, rtt, 0); w.cwnd != 20_000 {
			t.Errorf("%v: slow start after idle time raises the window from 10000 bytes to %d", a, w.cwnd)
		}
	}
}

// TestRTOEstimator checks RFC 6298 (2.2) to (2.4).
func TestRTOEstimator(t *testing.T) {
	c := &rttState{maxRTO: time.Minute}
	c.sampleRTT(simStart, 100*time.Millisecond)
	if c.srtt != 100*time.Millisecond || c.rttvar != 50*time.Millisecond || c.rto != 300*time.Millisecond {
		t.Errorf("first sample: %v %v %v", c.srtt, c.rttvar, c.rto)
	}
	c.sampleRTT(simStart, 180*time.Millisecond)
	if c.srtt != 110*time.Millisecond || c.rttvar != 57500*time.Microsecond || c.rto != 340*time.Millisecond {
		t.Errorf("second sample: %v %v %v", c.srtt, c.rttvar, c.rto)
	}
	c.backoff = 3
	if got := c.currentRTO(); got != 8*c.rto {
		t.Errorf("three times backed off: %v", got)
	}
	c.backoff = 32
	if got := c.currentRTO(); got != time.Minute {
		t.Errorf("the limit: %v", got)
	}
}
