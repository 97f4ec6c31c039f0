package tcp

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// burst delivers n full segments to b in one batch, without the first if gap is set, and returns the ACKs that
// follow.
func burst(t *testing.T, cfg Config, n int, gap bool) (l *loop, acks []Out) {
	t.Helper()
	l = newLoop(t, cfg, 1500)
	mss := l.a.MSS()
	l.b.quickAcks, l.b.rcvLast = 0, mss // as if more had arrived before
	for k := range n {
		l.a.Push(Buf(k), mss)
	}
	var o Out
	var segs []Out
	for l.a.PollTransmit(l.now, &o) {
		segs = append(segs, o)
	}
	if len(segs) != n {
		t.Fatalf("%d segments left; want %d", len(segs), n)
	}
	if gap {
		segs = segs[1:]
	}
	l.now = l.now.Add(20_000)
	for _, o := range segs {
		l.b.HandleSegment(l.now, &Segment{Header: o.Header, Len: o.Len, Buf: o.Buf})
	}
	for l.b.PollTransmit(l.now, &o) {
		acks = append(acks, o)
	}
	return l, acks
}

// TestBurstIsAcknowledgedInParts checks acknowledgements of bursts. RFC 9293 3.8.6.3 asks for an ACK for at least
// every second full segment. The ACKs of a short burst are sent one by one, all with the final right edge of the
// window. A long burst gets only a few.
func TestBurstIsAcknowledgedInParts(t *testing.T) {
	for _, c := range []struct{ n, acks int }{{1, 0}, {2, 1}, {3, 1}, {4, 2}, {6, 3}, {8, 4}, {10, 4}} {
		t.Run(fmt.Sprint(c.n), func(t *testing.T) {
			l, acks := burst(t, DefaultConfig(), c.n, false)
			if len(acks) != c.acks {
				t.Fatalf("%d ACKs of %d segments; want %d", len(acks), c.n, c.acks)
			}
			for k, o := range acks {
				want := l.b.irs.Add(1 + 2*(k+1)*l.a.MSS())
				if k == len(acks)-1 {
					want = l.b.rcvNxt
				}
				if o.Ack != want {
					t.Errorf("ACK %d is of %d bytes; want %d", k, o.Ack.Sub(l.b.irs)-1, want.Sub(l.b.irs)-1)
				}
				edge := o.Ack.Add(int(o.Window) << l.b.rcvShift)
				if d := l.b.rcvAdv.Sub(edge); d < 0 || d >= 1<<l.b.rcvShift {
					t.Errorf("ACK %d has the window end %d bytes ahead of where it ends", k, d)
				}
			}
			if due := l.b.armed(timerDelayedAck); due != (c.acks == 0) {
				t.Errorf("a delayed ACK is due: %v", due)
			}
		})
	}
}

// TestFollowing checks that PollFollowing and PushRun change nothing: equal connections, of which one uses PollFollowing
// and another also PushRun, send the same segments at the same time, over wires with and without losses and marks,
// while both ends send.
func TestFollowing(t *testing.T) {
	for _, drop := range []int{0, 53, 7} {
		for _, ecn := range []bool{false, true} {
			rng := testenv.Rand(t)
			cfg := DefaultConfig()
			cfg.RcvWindow = 256 << 10
			if ecn {
				cfg.ECN = RequestECN
			}
			var ls [3]*loop
			for i := range ls {
				ls[i] = newLoop(t, cfg, 1500)
				ls[i].drop, ls[i].follow, ls[i].runs = drop, i > 0, i == 2
			}
			for turn := range 3000 {
				small, back := rng.IntN(60), rng.IntN(20) == 0
				var sizes []int
				for n, room := rng.IntN(60), ls[0].a.Room(); len(sizes) < n && room > 0; room -= sizes[len(sizes)-1] {
					if len(sizes) == small {
						sizes = append(sizes, 1+ls[0].a.MSS()/3)
					} else {
						sizes = append(sizes, ls[0].a.MSS())
					}
				}
				ls[2].a.SetBurst(1 + rng.IntN(50))
				for _, l := range ls {
					l.pushAll(sizes)
					if back && l.b.Room() > 0 {
						l.buf++
						l.b.Push(l.buf, 100)
					}
					l.turn()
					for k := range l.q[0] {
						if ecn && (l.n+k)%200 == 0 {
							l.q[0][k].ECN = ce
						}
					}
				}
				for i := range ls[0].q {
					if !slices.Equal(ls[0].q[i], ls[1].q[i]) {
						t.Fatalf("drop %d, ECN %v, turn %d: end %d sends\n%+v\nwith PollFollowing\n%+v", drop, ecn, turn, i, ls[0].q[i], ls[1].q[i])
					}
					if !slices.EqualFunc(ls[0].q[i], ls[2].q[i], sameSegment) {
						t.Fatalf("drop %d, ECN %v, turn %d: end %d sends\n%+v\nwith PushRun\n%+v", drop, ecn, turn, i, ls[0].q[i], ls[2].q[i])
					}
				}
				for _, l := range ls {
					checkInvariants(t, l.a)
				}
			}
			for _, l := range ls[1:] {
				want, got := ls[0].a.Stats(), l.a.Stats()
				want.QueuedSegs = got.QueuedSegs // runs
				if want != got || ls[0].b.Stats() != l.b.Stats() {
					t.Errorf("drop %d: counters\n%+v\nwith PollFollowing, PushRun %v\n%+v", drop, want, l.runs, got)
				}
			}
			if sent := ls[2].a.Stats().SegsOut; drop != 7 && uint64(ls[2].together) < sent/8 { // not in recovery
				t.Errorf("drop %d: only %d of %d segments left together", drop, ls[2].together, sent)
			}
			if sent := ls[1].a.Stats().SegsOut; uint64(ls[1].following) < sent/8 {
				t.Errorf("drop %d: only %d of %d segments by PollFollowing", drop, ls[1].following, sent)
			}
		}
	}
}

// sameSegment reports whether a and b are the same on the wire.
func sameSegment(a, b Out) bool {
	return a.Header == b.Header && a.Len == b.Len && a.ECN == b.ECN && a.Retransmit == b.Retransmit
}

// TestGapIsReportedRepeatedly checks that each out-of-order segment is acknowledged at once (RFC 5681 4.2), so that
// one lost ACK does not hide the gap.
func TestGapIsReportedRepeatedly(t *testing.T) {
	l, acks := burst(t, DefaultConfig(), 4, true)
	if len(acks) != 3 {
		t.Fatalf("%d ACKs of 3 segments out of order", len(acks))
	}
	for k, o := range acks {
		if o.Ack != l.b.rcvNxt || o.Opts.NSACK != 1 {
			t.Errorf("ACK %d: ack %d, %d SACK blocks; want the gap, and a block", k, o.Ack.Sub(l.b.irs), o.Opts.NSACK)
		}
	}
	cfg := DefaultConfig()
	cfg.NoSACK = true
	if _, acks := burst(t, cfg, 4, true); len(acks) != 3 {
		t.Errorf("%d ACKs of 3 segments out of order without SACK", len(acks))
	}
}

// TestBurstOfDuplicatesIsReported checks that duplicates are reported by D-SACK (RFC 2883 4), adjacent ones together,
// and that the sender counts them all.
func TestBurstOfDuplicatesIsReported(t *testing.T) {
	l, _ := burst(t, DefaultConfig(), 8, false)
	mss := l.a.MSS()
	dup := func(k int) {
		s := Segment{Header: Header{Flags: ACK, Seq: l.b.irs.Add(1 + k*mss), Ack: l.b.nxt, Window: 1000}, Len: mss}
		s.Opts.HasTimestamps, s.Opts.TSVal = true, l.b.tsRecent
		l.b.HandleSegment(l.now, &s)
	}
	for _, k := range []int{1, 4, 5, 2, 7} {
		dup(k)
	}
	want := [][2]int{{1, 2}, {4, 6}, {2, 3}, {7, 8}}
	var o Out
	for i := 0; l.b.PollTransmit(l.now, &o); i++ {
		if i >= len(want) {
			t.Fatalf("more than %d ACKs", len(want))
		}
		w := SACKBlock{l.b.irs.Add(1 + want[i][0]*mss), l.b.irs.Add(1 + want[i][1]*mss)}
		if o.Ack != l.b.rcvNxt || o.Opts.NSACK != 1 || o.Opts.SACK[0] != w {
			t.Errorf("ACK %d: ack %d, blocks %v; want segments %v", i, o.Ack.Sub(l.b.irs)-1, o.Opts.SACK[:o.Opts.NSACK], want[i])
		}
	}
	if n := l.b.Stats().DSACKOut; n != uint64(len(want)) {
		t.Errorf("%d D-SACKs; want %d", n, len(want))
	}
}

// TestSuperFramesAreAcknowledgedTogether checks that one ACK is sent for all long super-frames of a burst, and one for each
// short one, whose sender may have a small window.
func TestSuperFramesAreAcknowledgedTogether(t *testing.T) {
	for _, c := range []struct{ segments, acks int }{{2, 2}, {longSuper - 1, 2}, {longSuper, 1}, {20, 1}} {
		l := newLoop(t, DefaultConfig(), 1500)
		mss := l.a.MSS()
		l.b.quickAcks, l.b.rcvLast = 0, mss
		for k := range 2 {
			s := Segment{Header: Header{Flags: ACK, Seq: l.b.rcvNxt, Ack: l.b.nxt, Window: 1000}, Len: c.segments * mss, Buf: Buf(k)}
			s.Opts.HasTimestamps, s.Opts.TSVal = true, l.b.tsRecent
			if r := l.b.HandleSegment(l.now, &s); r.Action != Deliver || r.Len != s.Len {
				t.Fatalf("%+v", r)
			}
		}
		var o Out
		acks := 0
		for l.b.PollTransmit(l.now, &o) {
			acks++
		}
		if acks != c.acks || o.Ack != l.b.rcvNxt {
			t.Errorf("%d ACKs of 2 super-frames of %d segments; want %d, the last one of everything", acks, c.segments, c.acks)
		}
	}
}

// TestBurstAfterIdle checks that after idle time no more than the restart window leaves at once, also if the data is
// one run (RFC 5681 4.1), and that slow start continues from there.
func TestBurstAfterIdle(t *testing.T) {
	for _, runs := range []bool{false, true} {
		l := newLoop(t, DefaultConfig(), 1500)
		l.runs = runs
		l.push()
		for range 10 {
			l.turn()
		}
		l.a.w.cwnd = 200 * l.a.MSS()
		l.now = l.now.Add(time.Second)
		l.turn()
		for turn := range 4 {
			before := l.a.Stats().SegsOut
			l.push()
			l.turn()
			if n, most := int(l.a.Stats().SegsOut-before), 10<<turn; n > most {
				t.Errorf("runs %v: %d segments leave in round trip %d after idle time; want at most %d", runs, n, turn, most)
			}
		}
	}
}

// TestPacingOften checks that a connection sends at the pace of its path however often its owner asks for the next segment.
func TestPacingOften(t *testing.T) {
	const size = 1000
	w := window{cwnd: 100 * size, mss: size}
	for _, every := range []time.Duration{100 * time.Nanosecond, time.Microsecond, 7 * time.Microsecond, time.Millisecond} {
		p := pacing{bucketAt: simStart}
		sent := 0
		for now := simStart; now < simStart.Add(time.Second/2); now = now.Add(every) {
			for p.wait(now, size, 90*size, &w, time.Second) == 0 {
				p.bucket -= size
				sent += size
			}
		}
		if want := w.cwnd; sent < want*9/10 || sent > want*11/10 {
			t.Errorf("asked every %v: %d bytes left in half a round trip, want about %d", every, sent, want)
		}
	}
}

// TestLostRun makes RACK find a run lost after an ACK without a SACK block: of the retransmission of an earlier segment, which was sent
// after the run.
func TestLostRun(t *testing.T) {
	cfg := DefaultConfig()
	cfg.NoTimestamps = true
	l := newLoop(t, cfg, 1500)
	c, from, mss := l.a, l.a.nxt, l.a.MSS()
	c.SetBurst(10)
	c.rack.minRTT = 10 * time.Millisecond
	poll := func(want int) {
		t.Helper()
		c.w.cwnd = 100 * mss
		n := 0
		for o := (Out{}); c.PollTransmit(l.now, &o); n += (o.Len + mss - 1) / mss {
		}
		if n != want {
			t.Fatalf("%d segments leave, want %d", n, want)
		}
		checkInvariants(t, c)
	}
	ack := func(after time.Duration, una, sackFrom, sackTo int) {
		l.now = l.now.Add(after)
		s := Segment{Header: Header{Flags: ACK, Seq: c.rcvNxt, Ack: from.Add(una * mss), Window: 1 << 15}, Buf: NoBuf}
		if sackTo > 0 {
			s.Opts.NSACK, s.Opts.SACK[0] = 1, SACKBlock{from.Add(sackFrom * mss), from.Add(sackTo * mss)}
		}
		c.HandleSegment(l.now, &s)
	}
	for k := range 5 {
		c.Push(Buf(k), mss)
	}
	poll(5)
	ack(10*time.Millisecond, 0, 1, 5)
	c.Push(5, mss)
	poll(2) // segment 0 again, and 5
	l.now = l.now.Add(9900 * time.Microsecond)
	c.Push(6, mss)
	poll(1)
	ack(100*time.Microsecond, 0, 1, 6)
	poll(1) // segment 0 for the third time, after 6
	c.rack.reordering = true
	ack(10*time.Millisecond, 6, 0, 0)
	c.PushRun(7, 3*mss, mss)
	poll(3)
	l.now = l.now.Add(3 * time.Millisecond)
	c.HandleTimeout(l.now)
	poll(1) // segment 6 again, after the run
	ack(11*time.Millisecond, 7, 0, 0)
	poll(3)
	ack(10*time.Millisecond, 7, 8, 9) // of two lost segments one is left
	poll(0)
	if !c.q.outstanding() || c.q.lostSegs+c.q.inFlight/mss != 2 {
		t.Errorf("%d segments are lost and %d in flight, want 2 together", c.q.lostSegs, c.q.inFlight/mss)
	}
}
