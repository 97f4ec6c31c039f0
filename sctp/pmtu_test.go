package sctp

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/impair"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// probes is a rig whose path carries IP packets up to a size and drops longer ones, silently unless icmp is set. It
// answers HEARTBEATs and acknowledges DATA.
type probes struct {
	*rig
	carries int
	icmp    bool
	pads    bool         // the peer accepts packets with PAD
	cum     serial.Num   // cumulative TSN of our DATA
	sizes   []int        // of the sent probes
	times   []clock.Time // and when
}

func probing(t *testing.T, cfg Config, carries int) *probes {
	r := listening(t, cfg)
	return &probes{rig: r, carries: carries, pads: true, cum: r.a.cumAck}
}

// run runs the path and the peer for a while.
func (p *probes) run(d time.Duration) {
	p.t.Helper()
	for end := p.now.Add(d); ; {
		for s := p.take(); len(s) > 0; s = p.take() {
			for _, b := range s {
				p.carry(b)
			}
		}
		at := p.a.Deadline()
		if at == 0 || at > end {
			p.now = end
			return
		}
		p.wait(max(at.Sub(p.now), 0))
	}
}

func (p *probes) carry(b []byte) {
	p.t.Helper()
	size, kinds := p.a.paths[0].overhead-HeaderLen+len(b), types(b)
	pad := slices.Contains(kinds, ChunkPad)
	if pad {
		if !slices.Equal(kinds, []ChunkType{ChunkHeartbeat, ChunkPad}) {
			p.t.Fatalf("a probe of %v", kinds)
		}
		p.sizes, p.times = append(p.sizes, size), append(p.times, p.now)
	}
	if mtu := p.a.Path(0).MTU; !pad && kinds[0] == ChunkData && size > mtu {
		size = mtu // IP fragments
	}
	switch {
	case size > p.carries && p.icmp:
		p.a.HandleICMP(p.now, &pkt.ICMPError{Flow: p.flow, Proto: 132, Kind: pkt.TooBig, MTU: p.carries, Seq: p.a.peerTag})
		p.drain(nil)
		return
	case size > p.carries, pad && !p.pads:
		return
	}
	for off := HeaderLen; off < len(b); {
		var c Chunk
		next, err := NextChunk(b, off, &c)
		if err != nil {
			p.t.Fatal(err)
		}
		off = next
		switch c.Type {
		case ChunkHeartbeat:
			p.send(p.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
		case ChunkData:
			if tsn := serial.Num(be.Uint32(c.Body)); tsn == p.cum+1 {
				p.cum++
			}
			p.send(p.a.tag, sackBytes(p.cum, 100000))
		}
	}
}

// TestMTURaised checks that a search begins ten minutes after ICMP has lowered the MTU, and that there is none while
// there is nothing to gain (RFC 8899 5.3).
func TestMTURaised(t *testing.T) {
	for _, c := range []struct {
		name    string
		carries int // once the search begins
		icmp    bool
		sizes   []int
		mtu     int
	}{
		{"again as at first", 1500, false, []int{1500}, 1500},
		{"as before", 1000, false, []int{1500, 1500, 1500, 1420, 1420, 1420, 1280, 1280, 1280, 1004, 1004, 1004}, 1000},
		{"a tunnel", 1440, false, []int{1500, 1500, 1500, 1420, 1476, 1476, 1476, 1448, 1448, 1448}, 1420},
		{"a tunnel that says so", 1440, true, []int{1500, 1440}, 1440},
		{"as before, and it says so", 1000, true, []int{1500}, 1000},
		{"less, and it says so", 800, true, []int{1500}, 800},
	} {
		p := probing(t, Config{Heartbeat: -1}, 1500)
		p.run(time.Hour)
		p.carries, p.icmp = 1000, true
		p.push(1452)
		p.run(time.Second)
		if mtu := p.a.Path(0).MTU; mtu != 1000 || p.a.Unacked() != 0 || len(p.sizes) != 0 {
			t.Fatalf("%s: MTU %d, %d messages left, probes %v", c.name, mtu, p.a.Unacked(), p.sizes)
		}
		begin := p.now
		p.run(9*time.Minute + 58*time.Second)
		if len(p.sizes) != 0 {
			t.Fatalf("%s: probes %v in the first ten minutes", c.name, p.sizes)
		}
		p.carries, p.icmp = c.carries, c.icmp
		p.run(9 * time.Minute)
		if !slices.Equal(p.sizes, c.sizes) || p.a.Path(0).MTU != c.mtu || p.a.MaxMessage() != (c.mtu-32)&^3-16 {
			t.Errorf("%s: probes %v, want %v; MTU %d, want %d; messages of up to %d", c.name, p.sizes, c.sizes, p.a.Path(0).MTU, c.mtu, p.a.MaxMessage())
		}
		for i := 1; i < len(p.times); i++ {
			if d := p.times[i].Sub(p.times[i-1]); p.sizes[i] == p.sizes[i-1] && d < probeWait {
				t.Errorf("%s: a probe %v after another that was not answered", c.name, d)
			}
		}
		// While a larger MTU is possible it is probed every ten minutes.
		p.sizes = nil
		p.run(time.Hour)
		if n := len(p.sizes); (c.mtu == 1500) != (n == 0) || n > 6*len(c.sizes) {
			t.Errorf("%s: %d probes in an hour after that", c.name, n)
		}
		if p.a.State() != Established || p.a.Stats().BlackHoles != 0 || p.now.Sub(begin) < time.Hour {
			t.Errorf("%s: %v, %+v", c.name, p.a.State(), p.a.Stats())
		}
	}
}

// TestMTUBlackHole drops long packets silently. Data in flight is sent in IP fragments, and the size that gets
// through is found (RFC 8899 4.3).
func TestMTUBlackHole(t *testing.T) {
	for _, c := range []struct {
		name    string
		carries int
		pads    bool
		mtu     int // MTU soon after, and after the whole search
		found   int
	}{
		{"a tunnel", 1450, true, 1200, 1450},
		{"1280", 1280, true, 1200, 1280},
		{"the base", 1200, true, 1200, 1200},
		{"less than the base", 1100, true, 576, 1006},
		{"a peer that takes no PAD", 1450, false, 576, 576},
	} {
		p := probing(t, Config{}, 1500)
		p.push(1452)
		p.run(time.Second)
		p.carries, p.pads = c.carries, c.pads
		for range 3 {
			p.push(1452)
		}
		p.run(6900 * time.Millisecond)
		if p.a.Path(0).MTU != 1500 {
			t.Fatalf("%s: lowered after %d time-outs", c.name, p.a.Stats().Timeouts)
		}
		for range 20 {
			if p.a.Stats().BlackHoles != 0 {
				break
			}
			p.run(time.Second)
		}
		p.run(10 * time.Millisecond)
		if st := p.a.Stats(); st.BlackHoles != 1 || p.a.Path(0).MTU != c.mtu || p.a.Unacked() != 0 {
			t.Fatalf("%s: MTU %d, want %d; %d messages left; %+v", c.name, p.a.Path(0).MTU, c.mtu, p.a.Unacked(), st)
		}
		for range 300 { // neither traffic nor its end stops the search
			p.push(100)
			p.run(2 * time.Second)
		}
		want := c.found &^ 3
		if got := p.a.Path(0).MTU &^ 3; got != want || p.a.Stats().BlackHoles != 1 {
			t.Errorf("%s: MTU %d, want %d; probes %v", c.name, p.a.Path(0).MTU, c.found, p.sizes)
		}
		p.carries, p.pads = 1500, true
		p.run(11 * time.Minute)
		if p.a.Path(0).MTU != 1500 {
			t.Errorf("%s: MTU %d eleven minutes after the path takes all", c.name, p.a.Path(0).MTU)
		}
	}
}

// TestMTUOutage checks that a path that carries nothing for a while is not taken for a black hole, nor is one that
// delivers a long packet in between; lost short packets do not count.
func TestMTUOutage(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int
		probes bool
	}{{"long", 1452, true}, {"short", 1000, false}} {
		p := probing(t, Config{}, 1500)
		p.carries = 0
		p.push(c.size)
		p.run(50 * time.Second)
		p.carries = 1500
		p.run(2 * time.Minute)
		if st := p.a.Stats(); p.a.Path(0).MTU != 1500 || st.BlackHoles != 0 || p.a.Unacked() != 0 || (st.MTUProbes > 0) != c.probes {
			t.Errorf("%s: MTU %d, %d messages left, %+v", c.name, p.a.Path(0).MTU, p.a.Unacked(), st)
		}
	}
	p := probing(t, Config{}, 1500)
	for range 10 {
		p.carries = 1400
		p.push(1452)
		p.run(2 * time.Second) // one time-out; the next one sends a probe
		p.carries = 1500
		p.run(time.Minute)
		p.push(100) // measures the RTO
		p.run(time.Second)
	}
	if st := p.a.Stats(); p.a.Path(0).MTU != 1500 || st.BlackHoles != 0 || st.MTUProbes != 10 || st.Timeouts != 20 {
		t.Errorf("MTU %d, %+v", p.a.Path(0).MTU, st)
	}
}

// TestMTUProbeForged checks that an answer that matches no probe does not raise the MTU.
func TestMTUProbeForged(t *testing.T) {
	p := probing(t, Config{Heartbeat: -1}, 1000)
	p.icmp = true
	p.push(1452)
	p.run(time.Second)
	p.icmp = false
	p.wait(10 * time.Minute)
	var c Chunk
	if _, err := NextChunk(p.one(ChunkHeartbeat), HeaderLen, &c); err != nil {
		t.Fatal(err)
	}
	body := slices.Clone(c.Body)
	if nonce := be.Uint64(body[len(body)-8:]); nonce < 1<<32 {
		t.Errorf("the nonce %d can be guessed", nonce)
	}
	body[len(body)-1] ^= 1
	p.send(p.a.tag, chunk(ChunkHeartbeatAck, 0, body))
	if p.a.Path(0).MTU != 1000 {
		t.Fatal("an answer with a wrong nonce raises the MTU")
	}
	p.send(p.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
	p.send(p.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
	if p.a.Path(0).MTU != 1500 {
		t.Fatal("the answer to a probe does not raise the MTU")
	}
	// PAD is skipped, and not reported (RFC 4820).
	p.send(p.a.tag, chunk(ChunkHeartbeat, 0, []byte{0, 1, 0, 8, 1, 2, 3, 4}), chunk(ChunkPad, 0, make([]byte, 700)), dataBytes(7|flagImmediate, rigTSN, 0, 0, "x"))
	if s := p.take(); len(s) != 1 || !slices.Equal(types(s[0]), []ChunkType{ChunkHeartbeatAck, ChunkSack}) || p.a.Stats().UnknownChunks != 0 {
		t.Errorf("sent %v", describe(s))
	}
}

// TestMTUSearchWaits checks that probes that are lost while a path does not answer say nothing of their size, and that the
// answer to one does not stand for that to data (RFC 9260 8.1).
func TestMTUSearchWaits(t *testing.T) {
	r := listening(t, Config{Heartbeat: -1})
	p := &r.a.paths[0]
	r.a.HandleICMP(r.now, &pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: pkt.TooBig, MTU: 1000, Seq: r.a.peerTag})
	r.wait(raiseAfter)
	r.one(ChunkHeartbeat)
	p.errors = 1
	r.wait(10 * time.Minute)
	r.none()
	p.errors = 0
	r.wait(probeWait + p.rto)
	b := r.one(ChunkHeartbeat)
	if len(b)+20 != 1500 {
		t.Errorf("then a probe of %d bytes", len(b)+20)
	}
	r.push(500)
	p.errors = 1
	var c Chunk
	NextChunk(b, HeaderLen, &c)
	r.send(r.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
	if p.errors != 1 || p.mtu != 1500 {
		t.Errorf("after its answer: %d errors, MTU %d", p.errors, p.mtu)
	}
}

// TestMTUOfPaths checks that each address of a peer has its own MTU, independent of losses on others, and that probes
// go to the address that is searched.
func TestMTUOfPaths(t *testing.T) {
	r := manyHomed(t, Config{}, 2)
	for range 20 {
		r.heartbeats(func(int) bool { return true })
		r.wait(100 * time.Millisecond)
	}
	r.a.SetMTU(1, 1400)
	flow := r.flow
	flow.Remote = r.a.Path(1).Addr.As16()
	r.a.HandleICMP(r.now, &pkt.ICMPError{Flow: flow, Proto: 132, Kind: pkt.TooBig, MTU: 1000, Seq: r.a.peerTag})
	if a, b := r.a.Path(0).MTU, r.a.Path(1).MTU; a != 1500 || b != 1000 {
		t.Fatalf("MTUs %d and %d", a, b)
	}
	n := [2]int{}
	for range 6600 {
		to := r.to
		for k, b := range r.take() {
			var c Chunk
			NextChunk(b, HeaderLen, &c)
			if kinds := types(b); len(kinds) == 2 && kinds[1] == ChunkPad {
				if n[to[k]]++; len(b)+20 != 1400 {
					t.Errorf("a probe of %d bytes", len(b)+20)
				}
			}
			r.sendFrom(to[k], r.a.tag, chunk(ChunkHeartbeatAck, 0, c.Body))
		}
		r.wait(100 * time.Millisecond)
	}
	if a, b := r.a.Path(0).MTU, r.a.Path(1).MTU; a != 1500 || b != 1400 || n != [2]int{0, 1} {
		t.Errorf("MTUs %d and %d after probes %v", a, b, n)
	}
	// The MTU of the first hop is also that of addresses that the peer adds.
	d := dialing(t, Config{}, CookieWait)
	d.a.SetMTU(0, 1400)
	ack := appendParam(d.initChunk(ChunkInitAck, []byte("cookie")), paramIPv4, []byte{10, 0, 1, 1})
	be.PutUint16(ack[2:], uint16(len(ack)))
	d.send(d.a.tag, ack)
	if n := d.a.Paths(); n != 2 || d.a.Path(1).MTU != 1400 {
		t.Errorf("%d paths, the last with an MTU of %d", n, d.a.Path(n-1).MTU)
	}
}

// TestMTUBundle checks that every message of a packet that was too long is retransmitted at once, and no other.
func TestMTUBundle(t *testing.T) {
	r := listening(t, Config{})
	tooBig := func(mtu int) {
		r.take()
		r.a.HandleICMP(r.now, &pkt.ICMPError{Flow: r.flow, Proto: 132, Kind: pkt.TooBig, MTU: mtu, Seq: r.a.peerTag})
		r.drain(nil)
	}
	r.push(300)
	for n := range 10 {
		r.a.Push(&Message{Buf: Buf(n), Len: 100})
	}
	r.drain(nil)
	tooBig(800)
	if n := r.a.Stats().Retransmits; n != 10 {
		t.Errorf("%d messages are retransmitted after one packet with 10 was too long", n)
	}
	tooBig(700)
	if n := r.a.Stats().Retransmits; n < 15 || n > 17 {
		t.Errorf("%d messages are retransmitted after the longer of its two packets was too long again", n-10)
	}
}

// TestMTUTransfer narrows and widens the path of a transfer without ICMP errors. All messages must arrive.
func TestMTUTransfer(t *testing.T) {
	base := testenv.Seed(t)
	seeds := 40
	if testing.Short() {
		seeds = 10
	}
	holes := uint64(0)
	for i := range seeds {
		seed := base + uint64(i)
		rng := rand.New(rand.NewPCG(seed, 8899))
		wire := impair.Config{Delay: time.Duration(50+rng.IntN(20000)) * time.Microsecond}
		if rng.IntN(2) == 0 {
			wire.Loss, wire.Duplicate, wire.Reorder = rng.Float64()*0.05, rng.Float64()*0.05, rng.Float64()*0.1
			wire.Hold = 5 * time.Millisecond
		}
		v6 := rng.IntN(3) == 0
		mtu := []int{1500, 4000, 9000}[rng.IntN(3)]
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := newSim(t, seed, Config{}, Config{}, wire, mtu, v6)
			s.narrow = 1280 + rng.IntN(200)
			from := s.now.Add(time.Duration(rng.IntN(100)) * time.Millisecond)
			s.narrowed = [2]clock.Time{from, from.Add(time.Duration(1+rng.IntN(1000)) * time.Second)}
			s.transfer(200+rng.IntN(400), 200+rng.IntN(400))
			for _, h := range s.h {
				holes += h.a.Stats().BlackHoles
			}
		})
	}
	if holes < uint64(seeds)/2 {
		t.Errorf("%d black holes in %d transfers", holes, seeds)
	}
}
