package sctp

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestZeroWindow checks that a closed window is probed for as long as the peer answers.
func TestZeroWindow(t *testing.T) { probeWindow(t, 0, false) }

// TestSmallWindow does so for a window that is too small for the next message, which is closed too (RFC 9260 6.1 A).
func TestSmallWindow(t *testing.T) { probeWindow(t, 1, true) }

// probeWindow closes the window to rwnd bytes. If first is set, the first probe is sent at once, since the peer may have room.
func probeWindow(t *testing.T, rwnd uint32, first bool) {
	r := listening(t, Config{})
	r.push(1000)
	r.take()
	r.send(r.a.tag, sackBytes(r.a.cumAck+1, rwnd))
	if r.a.Room() < r.a.MaxMessage() {
		t.Fatal("no room for a probe")
	}
	p := &r.a.paths[0]
	cwnd, ssthresh := p.cwnd, p.ssthresh
	r.push(1000)
	if !first {
		r.wait(p.rto - 1)
		r.none() // data sent now would be lost
		r.wait(1)
	}
	r.one(ChunkData)
	r.send(r.a.tag, sackBytes(r.a.cumAck, rwnd))
	r.wait(p.rto)
	r.one(ChunkData)
	if p.cwnd != cwnd || p.ssthresh != ssthresh {
		t.Errorf("a probe changed the window: %d, threshold %d", p.cwnd, p.ssthresh)
	}
	for range 30 {
		r.send(r.a.tag, sackBytes(r.a.cumAck, rwnd)) // dropped by the peer
		r.wait(61 * time.Second)
		if s := r.take(); len(s) == 0 {
			t.Fatal("no probe")
		}
	}
	if r.a.State() != Established {
		t.Fatalf("%v %v", r.a.State(), r.a.Err())
	}
	r.wait(2 * time.Hour) // the peer stops answering
	if r.a.State() != Closed || r.a.Err() != ErrTimeout {
		t.Errorf("%v %v", r.a.State(), r.a.Err())
	}
}

// sent returns a rig whose association has sent n messages of 1000 bytes, all of which fit its window, and the TSN
// before theirs.
func sent(t *testing.T, n int) (r *rig, base serial.Num) {
	r = listening(t, Config{MaxBurst: 100})
	r.a.paths[0].cwnd = 100000
	base = r.a.cumAck
	for range n {
		r.push(1000)
	}
	r.take()
	return r, base
}

// TestFastRetransmit checks that a hole is retransmitted once, after three reports.
func TestFastRetransmit(t *testing.T) {
	r, base := sent(t, 8)
	for i := range uint16(2) {
		r.send(r.a.tag, sackBytes(base, 100000, 2, 2+i))
		r.none()
	}
	r.send(r.a.tag, sackBytes(base, 100000, 2, 4))
	b := r.one(ChunkData)
	if be.Uint32(b[HeaderLen+4:]) != uint32(base+1) {
		t.Error("another TSN was sent again")
	}
	p := &r.a.paths[0]
	if p.cwnd != p.ssthresh || p.cwnd != 50000 {
		t.Errorf("cwnd %d ssthresh %d", p.cwnd, p.ssthresh)
	}
	for i := range uint16(3) {
		r.send(r.a.tag, sackBytes(base, 100000, 2, 5+i))
	}
	r.none()
	if p.cwnd != 50000 {
		t.Error("the window shrank twice in one recovery")
	}
	// A chunk that a gap report listed and a later one does not was dropped by the peer: it is retransmitted.
	r.send(r.a.tag, sackBytes(base, 100000))
	r.wait(5 * time.Second)
	r.send(r.a.tag, sackBytes(base+8, 100000))
	if r.a.Unacked() != 0 || r.a.State() != Established {
		t.Error(r.a.Unacked(), r.a.State())
	}
}

// TestBurst checks that a SACK allows four packets (6.1 D), and one for many packets as many as SACKs for every
// second packet would have.
func TestBurst(t *testing.T) {
	r := dialing(t, Config{}, Established)
	p := &r.a.paths[0]
	p.cwnd, r.a.peerRwnd = 1<<20, 1<<20
	for i := range 200 {
		r.a.Push(&Message{Buf: Buf(i), Len: 1400})
	}
	r.drain(nil)
	if n := len(r.take()); n != 4 {
		t.Fatalf("%d packets leave at first", n)
	}
	cum := r.a.cumAck
	for range 12 {
		cum++
		r.send(r.a.tag, sackBytes(cum, 1<<20))
		if n := len(r.take()); n != 4 {
			t.Fatalf("%d packets after a SACK for one", n)
		}
	}
	r.send(r.a.tag, sackBytes(cum+20, 1<<20))
	if n := len(r.take()); n != 40 {
		t.Errorf("%d packets after a SACK for 20, want four for every second one", n)
	}
	// An owner that receives three SACKs before it sends may send as much as if it had sent after each. What is not used is lost.
	cum += 20
	for range 2 {
		for range 3 {
			cum++
			h := Header{r.flow.RemotePort, r.flow.LocalPort, r.a.tag}
			r.a.HandlePacket(r.now, r.flow, r.from, append(h.Append(nil), sackBytes(cum, 1<<20)...))
		}
		r.drain(nil)
		if n := len(r.take()); n != 12 {
			t.Errorf("%d packets after three SACKs at once, want 12", n)
		}
	}
	// The limit is in packets, not bytes: these have 32 small messages each.
	r = dialing(t, Config{}, Established)
	r.a.paths[0].cwnd, r.a.peerRwnd = 1<<20, 1<<20
	for range 32 * 100 {
		r.a.Push(&Message{Buf: 1, Len: 8})
	}
	r.drain(nil)
	if n := len(r.take()); n != 4 {
		t.Fatalf("%d packets leave at first", n)
	}
	r.send(r.a.tag, sackBytes(r.a.cumAck+4*32, 1<<20))
	if n := len(r.take()); n != 8 {
		t.Errorf("%d packets after a SACK for four, want four for every second one", n)
	}
}

// TestManyInFlight checks that no more TSNs are in flight than a peer accepts after a lost one.
func TestManyInFlight(t *testing.T) {
	s := newSim(t, testenv.Seed(t), Config{}, Config{}, impair.Config{Delay: 10 * time.Millisecond, Loss: 0.002}, 1500, false)
	s.establish()
	h := s.h[0]
	for n := 0; n < 40000 || h.a.Unacked() > 0; {
		for more := true; more; s.pump(h) {
			more = false
			for ; n < 40000 && h.a.Room() >= 20; n, more = n+1, true {
				h.nextBuf++
				h.bufs[h.nextBuf] = binary.BigEndian.AppendUint32(make([]byte, 0, 20), uint32(n))
				for i := 4; i < 20; i++ {
					h.bufs[h.nextBuf] = append(h.bufs[h.nextBuf], byteAt(0, uint32(n), i))
				}
				h.bufs[h.nextBuf][4] = 0
				h.a.Push(&Message{Buf: h.nextBuf, Len: 20})
			}
		}
		if h.a.Unacked() >= rcvTSNs {
			t.Fatalf("%d messages are not acknowledged", h.a.Unacked())
		}
		if !s.step() {
			t.Fatal(s.describe())
		}
	}
	if st, n := h.a.Stats(), s.h[1].a.Stats().RxDropped; n != 0 || st.Retransmits == 0 {
		t.Errorf("%d chunks are dropped, and %d sent again", n, st.Retransmits)
	}
}

// TestSlowStart checks that a SACK increases the window by one packet or, if it acknowledges many, by one for every
// second packet.
func TestSlowStart(t *testing.T) {
	for acked, want := range map[int]int{1: 1, 2: 1, 3: 1, 4: 2, 20: 10} {
		r := dialing(t, Config{MaxBurst: 100}, Established)
		p := &r.a.paths[0]
		m := r.a.MaxMessage()
		p.cwnd, r.a.peerRwnd = 20*m, 1<<20
		for i := range 20 {
			r.a.Push(&Message{Buf: Buf(i), Len: m})
		}
		r.drain(nil)
		r.take()
		r.send(r.a.tag, sackBytes(r.a.cumAck+serial.Num(acked), 1<<20))
		if n := p.cwnd - 20*m; n != want*m {
			t.Errorf("a SACK for %d packets opens the window by %d bytes, want %d packets of %d", acked, n, want, m)
		}
	}
}

// TestWindowOpens checks that data waiting for a closed window is sent when it opens, without waiting for the probe.
func TestWindowOpens(t *testing.T) {
	r := listening(t, Config{})
	r.push(1000)
	r.take()
	r.send(r.a.tag, sackBytes(r.a.cumAck+1, 0))
	r.push(1000)
	r.none()
	r.wait(10 * time.Millisecond)
	r.send(r.a.tag, sackBytes(r.a.cumAck, 5000))
	r.one(ChunkData)
	r.send(r.a.tag, sackBytes(r.a.cumAck+1, 5000))
	r.wait(5 * time.Second)
	r.none()
	// What does not fit waits for the SACK of what is in flight.
	r.a.peerRwnd = 1500
	r.push(1000)
	r.one(ChunkData)
	r.push(1000)
	r.none()
}

// TestProbeDropped checks that a message that was dropped for lack of window is retransmitted as soon as the window
// opens, without waiting for its time-out of a minute.
func TestProbeDropped(t *testing.T) {
	for probes := range 9 {
		r := listening(t, Config{})
		if probes > 0 {
			r.push(1000)
			r.take()
			r.send(r.a.tag, sackBytes(r.a.cumAck+1, 0))
			r.push(1000)
			for range probes {
				r.none()
				r.wait(r.a.Path(0).RTO)
				r.one(ChunkData)
				r.send(r.a.tag, sackBytes(r.a.cumAck, 0))
			}
		} else { // in flight while the window closed
			r.push(1000)
			r.send(r.a.tag, sackBytes(r.a.cumAck, 0))
			r.wait(r.a.Path(0).RTO)
			r.take()
		}
		r.push(1000)
		r.none()
		r.wait(time.Millisecond)
		r.send(r.a.tag, sackBytes(r.a.cumAck, 1<<20))
		if got := tsns(r.take(), r.a.cumAck+1); len(got) == 0 || got[0] != 0 {
			t.Fatalf("%d probes dropped: TSNs %v leave when the window opens", probes, got)
		}
		r.send(r.a.tag, sackBytes(r.a.cumAck, 1<<20)) // once
		r.none()
		r.send(r.a.tag, sackBytes(r.a.cumAck+1, 1<<20))
		r.send(r.a.tag, sackBytes(r.a.cumAck+serial.Num(r.a.Unacked()), 1<<20))
		checkAccounts(t, r.a)
		r.take()
		r.wait(2 * time.Minute)
		if st := r.a.Stats(); r.a.Unacked() != 0 || int(st.Timeouts) != max(probes-1, 0) && probes > 0 {
			t.Errorf("%d probes: %d not acknowledged, %d time-outs", probes, r.a.Unacked(), st.Timeouts)
		}
	}
}

// tsns returns the TSNs of the sent DATA chunks relative to base.
func tsns(s [][]byte, base serial.Num) (out []int) {
	for _, b := range s {
		for off := HeaderLen; off < len(b); {
			var c Chunk
			next, err := NextChunk(b, off, &c)
			if err != nil {
				break
			}
			if off = next; c.Type == ChunkData {
				out = append(out, serial.Num(be.Uint32(c.Body)).Sub(base))
			}
		}
	}
	return out
}

// TestTimerOfTheEarliest checks that acknowledgements of newer data do not restart T3 of the missing chunk (6.3.2
// R3), whose fast retransmission was lost too.
func TestTimerOfTheEarliest(t *testing.T) {
	r := listening(t, Config{})
	base := r.a.cumAck
	sent := 0
	for i := range uint16(50) {
		r.push(100)
		r.wait(300 * time.Millisecond)
		for _, n := range tsns(r.take(), base) {
			if n == 1 {
				sent++
			}
		}
		r.send(r.a.tag, sackBytes(base, 100000, 2, 2+i))
	}
	if sent < 4 {
		t.Errorf("the TSN that is missing was sent %d times in 15 s", sent)
	}
}

// TestTimerRestarts checks that T3 of a path restarts when its earliest chunk is acknowledged, by the cumulative TSN or by a
// gap report (6.3.2 R3).
func TestTimerRestarts(t *testing.T) {
	for _, gap := range []bool{false, true} {
		r := manyHomed(t, Config{Heartbeat: -1}, 2)
		a := r.a
		a.paths[1].confirmed = true
		base := a.cumAck
		if gap { // the missing chunk is one of another path
			r.push(100)
			a.primary = 1
		}
		p := &a.paths[a.primary]
		r.push(100)
		r.wait(p.rto / 2)
		r.push(100)
		if gap {
			r.send(a.tag, sackBytes(base, 100000, 2, 2))
		} else {
			r.send(a.tag, sackBytes(base+1, 100000))
		}
		if got, want := p.deadlines[timerT3], r.now.Add(p.rto); got != want {
			t.Errorf("gap report %v: T3 ends %v from now, want %v", gap, got.Sub(r.now), want.Sub(r.now))
		}
	}
}

// TestAfterTimeout checks that one packet is in flight until something is acknowledged (7.2.3).
func TestAfterTimeout(t *testing.T) {
	r := listening(t, Config{})
	base := r.a.cumAck
	for range 4 {
		r.push(800) // two do not fit one packet, and one does not fill it
	}
	r.take()
	r.wait(time.Second)
	if got := tsns(r.take(), base); !slices.Equal(got, []int{1}) {
		t.Fatalf("a time-out sends %v, want 1 alone", got)
	}
	r.send(r.a.tag, sackBytes(base+1, 100000))
	if got := tsns(r.take(), base); !slices.Equal(got, []int{2, 3, 4}) {
		t.Errorf("then %v, want what fits the window", got)
	}
}

// TestRevokedReport checks that a chunk that one report lists and a later one omits is in flight and not
// retransmitted at once: a peer may report only some of its blocks (6.2.1 D iii).
func TestRevokedReport(t *testing.T) {
	r, base := sent(t, 8)
	r.send(r.a.tag, sackBytes(base, 100000, 2, 2, 4, 4))
	flight := r.a.outstanding
	r.send(r.a.tag, sackBytes(base, 100000, 2, 2))
	r.none()
	if r.a.outstanding != flight+1000 {
		t.Errorf("%d bytes in flight, want %d and 1000", r.a.outstanding, flight)
	}
	r.send(r.a.tag, sackBytes(base+2, 100000, 2, 2))
	if r.none(); r.a.outstanding != flight-1000 {
		t.Errorf("%d bytes in flight, want %d less 1000", r.a.outstanding, flight)
	}
	r.wait(time.Second)
	if got := tsns(r.take(), base); !slices.Equal(got, []int{3}) {
		t.Errorf("T3 sends %v", got)
	}
}

// TestAbsurdReports checks that invalid gap blocks are harmless.
func TestAbsurdReports(t *testing.T) {
	for name, c := range map[string]struct {
		gaps []uint16
		ack  int // messages that they acknowledge
	}{
		"backwards":            {[]uint16{5, 2}, 0},
		"nothing":              {[]uint16{0, 0}, 0},
		"from the cumulative":  {[]uint16{0, 3}, 0},
		"beyond what was sent": {[]uint16{100, 65535}, 0},
		"all there is":         {[]uint16{1, 65535}, 8},
		"overlapping":          {[]uint16{2, 4, 3, 6, 2, 2}, 5},
		"from the end":         {[]uint16{7, 7, 5, 5, 2, 2}, 1},
		"twice":                {[]uint16{3, 3, 3, 3}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, base := sent(t, 8)
			for range 5 {
				r.send(r.a.tag, sackBytes(base, 100000, c.gaps...))
				checkAccounts(t, r.a)
			}
			if r.a.gapAcked != c.ack {
				t.Errorf("%d are acknowledged, want %d", r.a.gapAcked, c.ack)
			}
			r.wait(3 * time.Second)
			checkAccounts(t, r.a)
			r.send(r.a.tag, sackBytes(base+8, 100000))
			if r.a.Unacked() != 0 || r.a.outstanding != 0 || r.a.State() != Established {
				t.Error(r.a.Unacked(), r.a.outstanding, r.a.State(), r.a.Err())
			}
		})
	}
	t.Run("an old one", func(t *testing.T) {
		r, base := sent(t, 8)
		r.send(r.a.tag, sackBytes(base+4, 100000))
		room := r.a.peerRwnd
		r.send(r.a.tag, sackBytes(base+2, 0, 4, 4))
		if r.a.peerRwnd != room || r.a.gapAcked != 0 || r.a.Stats().Sacks != 1 {
			t.Errorf("a window of %d, was %d; %d acknowledged", r.a.peerRwnd, room, r.a.gapAcked)
		}
	})
	t.Run("of what waits to be sent", func(t *testing.T) {
		r, base := sent(t, 1)
		r.a.Push(&Message{Buf: 1, Len: 1000})
		r.send(r.a.tag, sackBytes(base+2, 100000))
		if r.a.State() != Closed || r.a.Err() != ErrProtocol {
			t.Error(r.a.State(), r.a.Err())
		}
	})
	t.Run("while it recovers", func(t *testing.T) {
		r, base := sent(t, 30)
		for i := range uint16(3) {
			r.send(r.a.tag, sackBytes(base, 100000, 2, 2+i)) // 1 is lost
		}
		r.take()
		for i := range serial.Num(4) {
			r.send(r.a.tag, sackBytes(base+4+i, 100000, 2, 2, 60000, 60000))
		}
		if got := tsns(r.take(), base); slices.ContainsFunc(got, func(n int) bool { return n > 9 }) {
			t.Errorf("a block beyond all that was sent has %v sent again", got)
		}
	})
}

// TestManySACKs checks that only the first SACK of a packet counts.
func TestManySACKs(t *testing.T) {
	r, base := sent(t, 8)
	r.send(r.a.tag, sackBytes(base+2, 100000), sackBytes(base+4, 100000), chunk(ChunkHeartbeat, 0, nil), sackBytes(base+6, 100000))
	if n, sacks := r.a.Unacked(), r.a.Stats().Sacks; n != 6 || sacks != 1 {
		t.Errorf("%d messages unacknowledged, %d SACKs; want 6 and 1", n, sacks)
	}
	r.send(r.a.tag, sackBytes(base+8, 100000))
	if n := r.a.Unacked(); n != 0 {
		t.Errorf("%d messages unacknowledged", n)
	}
}

// TestIdleWindow checks that the congestion window decays after idle time (7.2.1).
func TestIdleWindow(t *testing.T) {
	r := dialing(t, Config{Heartbeat: -1}, Established)
	p := &r.a.paths[0]
	m := r.a.MaxMessage()
	r.push(100)
	r.send(r.a.tag, sackBytes(r.a.cumAck+1, 1<<20))
	p.cwnd, r.a.burst = 100*m, 1000
	for range 2 { // a pause shorter than the RTO
		r.wait(p.rto / 2)
		r.push(100)
		r.send(r.a.tag, sackBytes(r.a.cumAck+1, 1<<20))
		if p.cwnd < 100*m {
			t.Fatalf("cwnd %d after half an RTO", p.cwnd)
		}
	}
	r.take()
	r.wait(2 * p.rto)
	r.a.burst = 1000
	for range 50 {
		r.a.Push(&Message{Buf: 1, Len: m})
	}
	r.drain(nil)
	if p.cwnd != 25*m || p.ssthresh != 100*m {
		t.Errorf("cwnd %d, ssthresh %d after two RTOs; want a quarter of %d, and that", p.cwnd, p.ssthresh, 100*m)
	}
	if n := len(r.take()); n != 4 {
		t.Errorf("%d packets leave at once, want 4", n)
	}
	r.send(r.a.tag, sackBytes(r.a.cumAck+4, 1<<20))
	for r.a.Unacked() > 0 {
		r.send(r.a.tag, sackBytes(r.a.cumAck+serial.Num(r.a.next-r.a.first), 1<<20))
	}
	r.wait(time.Hour)
	r.push(100)
	if p.cwnd != 4*m {
		t.Errorf("cwnd %d after an hour, want %d", p.cwnd, 4*m)
	}
}

// TestGapReports checks the states of the chunks in flight after SACKs with random gap reports, which repeat, extend, merge and
// take back what earlier ones reported.
func TestGapReports(t *testing.T) {
	rng := rand.New(rand.NewPCG(testenv.Seed(t), 5))
	r := listening(t, Config{})
	a := r.a
	const flight = 300
	var gaps []uint16 // of the last SACK
	for range 20_000 {
		a.paths[0].cwnd, a.peerRwnd, a.burst = 1<<20, 1<<20, 1<<20
		for a.last-a.first < flight {
			a.Push(&Message{Buf: NoBuf, Len: 4})
		}
		r.drain(nil)
		r.take()
		n := 0
		switch rng.IntN(4) {
		case 0: // others
			gaps = gaps[:0]
			for at := 2 + rng.IntN(20); at < flight; at += 2 + rng.IntN(30) {
				end := min(at+rng.IntN(40), flight)
				gaps = append(gaps, uint16(at), uint16(end))
				at = end
			}
		case 1: // a longer one
			if k := len(gaps); k > 0 {
				gaps[k-1] = uint16(min(int(gaps[k-1])+rng.IntN(9), flight))
			}
		case 2: // two become one
			if k := 2 * rng.IntN(len(gaps)/2+1); k+3 < len(gaps) {
				gaps = slices.Delete(gaps, k+1, k+3)
			}
		case 3: // the first chunks arrive
			for n = rng.IntN(5); len(gaps) > 0 && n+1 >= int(gaps[0]); gaps = gaps[2:] {
				n = max(n, int(gaps[1]))
			}
			for i := range gaps {
				gaps[i] -= uint16(n)
			}
		}
		r.now++ // what SACKs may cost at one time is limited
		r.send(a.tag, sackBytes(a.cumAck.Add(n), 1<<20, gaps...))
		count, outstanding, run := 0, 0, 0
		for p := a.first; p != a.next; p++ {
			it, off := a.at(p), int(p-a.first)+1
			want := false
			for i := 0; i < len(gaps); i += 2 {
				want = want || int(gaps[i]) <= off && off <= int(gaps[i+1])
			}
			if (it.state == acked) != want {
				t.Fatalf("chunk %d: state %d after a SACK of %v", off, it.state, gaps)
			}
			if run = max(run, int(it.run)); it.state != acked && run > 0 {
				t.Fatalf("chunk %d is in a run, after a SACK of %v", off, gaps)
			}
			run--
			switch it.state {
			case acked:
				count++
			case inFlight:
				outstanding += int(it.len)
			}
		}
		if count != a.gapAcked || outstanding != a.outstanding || outstanding != a.paths[0].flight {
			t.Fatalf("%d acknowledged, %d bytes in flight; counted %d, %d", count, outstanding, a.gapAcked, a.outstanding)
		}
	}
}

// TestSackCost checks that SACKs that report the same chunks walk neither over these each time nor over those in flight beyond:
// however many there are, a SACK takes about the same time.
func TestSackCost(t *testing.T) {
	few, many := sackCost(t, 200, 10), sackCost(t, rcvTSNs-1, 1000)
	if many > 5*few {
		t.Errorf("a thousand SACKs take %v, and %v if few chunks are in flight", many, few)
	}
}

// sackCost returns the time that a thousand SACKs take when so many chunks are in flight, of which they report twice half and some
// more. It is the shortest of many times, since other programs may take the CPU meanwhile.
func sackCost(t *testing.T, chunks, half int) time.Duration {
	r := listening(t, Config{})
	a := r.a
	a.paths[0].cwnd, a.peerRwnd, a.burst = 1<<20, 1<<20, 1<<20
	for range chunks {
		a.Push(&Message{Buf: NoBuf, Len: 4})
	}
	r.drain(nil)
	r.take()
	base, fastest := a.cumAck, time.Hour
	for i := range 100 {
		began := time.Now()
		for range 1000 {
			r.now++ // what SACKs may cost at one time is limited
			a.HandlePacket(r.now, r.flow, 0, sackPacket(r, base, 2, uint16(half), uint16(half+2), uint16(2*half+min(i, 90))))
		}
		fastest = min(fastest, time.Since(began))
	}
	if a.gapAcked != half-1+half-1+90 {
		t.Errorf("%d chunks acknowledged", a.gapAcked)
	}
	return fastest
}

func sackPacket(r *rig, cum serial.Num, gaps ...uint16) []byte {
	h := Header{r.flow.RemotePort, r.flow.LocalPort, r.a.tag}
	return append(h.Append(nil), sackBytes(cum, 1<<20, gaps...)...)
}

// TestContrarySacks checks that SACKs that contradict each other make us look at few chunks at one time, and that their gap
// reports count again later.
func TestContrarySacks(t *testing.T) {
	const most = 4000
	r := listening(t, Config{})
	a := r.a
	a.paths[0].cwnd, a.peerRwnd, a.burst = 1<<20, 1<<20, 1<<20
	for range most {
		a.Push(&Message{Buf: NoBuf, Len: 4})
	}
	r.drain(nil)
	r.take()
	changed := 0
	sack := func(gaps ...uint16) {
		had := a.gapAcked
		a.HandlePacket(r.now, r.flow, 0, sackPacket(r, a.cumAck, gaps...))
		if a.gapAcked != had {
			changed++
		}
	}
	for limit, last := range map[int]uint16{5: most, 10: 2} { // also what is renounced makes us look at all
		changed = 0
		for range 100 {
			sack(2, last)
			sack()
		}
		if changed == 0 || changed > limit {
			t.Errorf("%d of 200 SACKs made us look at all chunks", changed)
		}
		r.now++
		sack()
	}
	r.now++
	for i := range uint16(100) {
		sack(most-i, most) // each makes us look at all chunks before
	}
	if a.gapAcked == 0 || a.gapAcked > 5 {
		t.Errorf("%d of 100 SACKs that report the last chunks made us look at those before", a.gapAcked)
	}
	for _, gaps := range [][]uint16{nil, {2, most}, nil} {
		r.now++
		if sack(gaps...); (a.gapAcked > 0) != (gaps != nil) {
			t.Errorf("%d chunks are acknowledged after a SACK of %v", a.gapAcked, gaps)
		}
	}
}
