package tcp

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/serial"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

var simSeeds = flag.Int("tcp.seeds", 300, "seeds of the simulation grid")

// firstSeed returns the first seed of the grid: TEST_SEED runs that seed only.
func firstSeed(t testing.TB) (from uint64, only bool) {
	return testenv.Seed(t), os.Getenv("TEST_SEED") != ""
}

func pick[T any](r *rand.Rand, v ...T) T { return v[r.IntN(len(v))] }

// gridSim derives a whole run from a seed: the wire, both configurations, both applications.
func gridSim(t *testing.T, seed uint64) (*sim, time.Duration) {
	r := rand.New(rand.NewPCG(seed, 0x7463702d73696d))
	cfg := func() Config {
		c := DefaultConfig()
		c.NoSACK = r.IntN(6) == 0
		c.NoTimestamps = r.IntN(5) == 0
		c.NoWindowScale = r.IntN(6) == 0
		c.CongestionControl = pick(r, CUBIC, CUBIC, NewReno, DCTCP)
		c.ECN = ECN(r.IntN(3))
		c.RcvWindow = pick(r, 2<<20, 256<<10, 64<<10, 9000, 3000, 700)
		c.MaxHeld = pick(r, 1024, 1024, 64, 8)
		c.TimeWait = time.Second
		c.FinWait2 = 0 // a black-out must not end a half-closed connection
		c.MaxRTO = pick(r, 60*time.Second, 10*time.Second)
		c.DataTimeout = 600 * time.Second
		c.SynTimeout = 600 * time.Second
		if r.IntN(5) == 0 {
			c.KeepAliveIdle = 5 * time.Second
		}
		return c
	}
	wire := func() simWire {
		w := simWire{}
		w.Loss = pick(r, 0, 0, 0.001, 0.01, 0.05, 0.1, 0.2)
		w.Reorder = pick(r, 0, 0, 0.01, 0.1, 0.3)
		w.Duplicate = pick(r, 0, 0, 0.01, 0.1)
		w.Corrupt = pick(r, 0, 0, 0.01)
		w.Delay = pick(r, 20*time.Microsecond, time.Millisecond, 20*time.Millisecond, 100*time.Millisecond)
		w.Jitter = pick(r, 0, w.Delay/4, w.Delay)
		w.Hold = pick(r, w.Delay/4, w.Delay, 3*w.Delay)
		w.rate = pick(r, 0, 125_000, 1_250_000, 12_500_000)
		w.queue = pick(r, 5*time.Millisecond, 50*time.Millisecond, 500*time.Millisecond)
		w.mtu = 9000
		w.mark = pick(r, 0, 0, 0.01, 0.2)
		return w
	}
	total := func() int { return pick(r, 0, 1, 1000, 20_000, 200_000, 1_000_000) }
	a, b := newSimHost(0, cfg(), total(), seed), newSimHost(1, cfg(), total(), seed)
	for _, h := range []*simHost{a, b} {
		h.maxRec = pick(r, 0, 0, 0, 100, 2000)
		if h.maxRec == 100 {
			h.total = min(h.total, 50_000)
		}
		h.place = pick(r, 0, 0, 0.5, 1)
		if r.IntN(4) == 0 {
			h.readRate = pick(r, 20_000, 1_000_000)
		}
		if r.IntN(4) == 0 {
			h.closeAt = -2 // set below: close after the peer's bytes
		}
	}
	// At most one end waits for the other.
	if a.closeAt == -2 {
		a.closeAt, b.closeAt = b.total, -1
	} else if b.closeAt == -2 {
		b.closeAt = a.total
	}
	wa, wb := wire(), wire()
	mtu := pick(r, 1500, 1500, 9000, 1280, 576)
	v6 := r.IntN(3) == 0 && mtu >= 1280
	if r.IntN(4) == 0 {
		// The path's MTU is smaller than the link's.
		m := pick(r, 1400, 1280)
		if mtu > m {
			wa.mtu, wb.mtu = m, m
			icmp := r.IntN(2) == 0
			wa.icmp, wb.icmp = icmp, icmp
		}
	}
	if r.IntN(6) == 0 {
		from := simStart.Add(time.Duration(r.IntN(3000)) * time.Millisecond)
		d := pick(r, time.Second, 10*time.Second, 60*time.Second)
		wa.blackout[0], wa.blackout[1] = from, from.Add(d)
		if r.IntN(2) == 0 {
			wb.blackout = wa.blackout
		}
	}
	for _, h := range []*simHost{a, b} {
		w := &wa
		o := a
		if h == a {
			o = b
		} else {
			w = &wb
		}
		// Bound the work where the path or the reader is slow.
		lossy := w.Loss + w.Corrupt
		if lossy >= 0.05 || w.Delay+wb.Delay >= 100*time.Millisecond || w.Reorder >= 0.1 {
			h.total = min(h.total, 100_000)
		}
		if w.rate == 125_000 {
			h.total = min(h.total, 300_000)
		}
		if o.cfg.RcvWindow <= 9000 || o.cfg.MaxHeld <= 8 || o.readRate == 20_000 {
			h.total = min(h.total, 30_000)
		}
		if o.cfg.MaxHeld <= 8 && h.maxRec == 100 {
			h.total = min(h.total, 5000) // what fits into the window is mostly records of a few bytes, of which the peer holds 8
		}
	}
	if a.closeAt >= 0 {
		a.closeAt = b.total
	}
	if b.closeAt >= 0 {
		b.closeAt = a.total
	}
	s := newSim(t, a, b, wa, wb, seed, v6)
	s.dial(mtu)
	if r.IntN(5) == 0 {
		s.mtuAt = simStart.Add(time.Duration(r.IntN(1000)) * time.Millisecond)
		s.mtuTo = pick(r, 1500, 1280, 9000)
	}
	// The time limit of each run; a black-out adds its own length and the backed-off time-out.
	limit := 300 * time.Second
	if d := wa.blackout[1].Sub(wa.blackout[0]); d > 0 {
		limit += d + 2*max(a.cfg.MaxRTO, b.cfg.MaxRTO)
	}
	return s, limit
}

// simRegressions are seeds that once failed or took far too long.
var simRegressions = []uint64{345, 410, 413, 421, 464, 911, 1104, 1121, 1363, 1531, 1714, 1836, 1862, 3359}

// TestSim runs two connections against each other over bad wires, one run per seed. -tcp.seeds=1000 runs 1000.
func TestSim(t *testing.T) {
	from, only := firstSeed(t)
	n := *simSeeds
	if only {
		n = 1
	} else if testing.Short() {
		n = min(n, 60)
	}
	seeds := make([]uint64, 0, n)
	for i := range uint64(n) {
		seeds = append(seeds, from+i)
	}
	if !only {
		seeds = append(seeds, simRegressions...)
	}
	for _, seed := range seeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s, limit := gridSim(t, seed)
			s.trace = only
			s.run(limit)
			s.finish()
		})
	}
}

// TestSimBlindAttack makes an attacker who knows the addresses, the ports and even the window, but not the exact
// sequence numbers, inject RST, SYN, ACK and data into a transfer (RFC 5961). The transfer must continue without one
// wrong byte.
func TestSimBlindAttack(t *testing.T) {
	for _, ts := range []bool{false, true} {
		cfg := DefaultConfig()
		cfg.NoTimestamps = !ts
		cfg.TimeWait = time.Second
		a, b := newSimHost(0, cfg, 2_000_000, 1), newSimHost(1, cfg, 100_000, 1)
		w := simWire{rate: 12_500_000, queue: 20 * time.Millisecond}
		w.Delay = time.Millisecond
		s := newSim(t, a, b, w, w, 1, false)
		s.dial(1500)
		r := rand.New(rand.NewPCG(1, 2))
		sent := 0
		s.step = func() {
			for i, h := range s.h {
				if h.c == nil || h.c.State() != Established {
					continue
				}
				at := h.c.rcvNxt.Add(1 + r.IntN(60000))
				x := Segment{Header: Header{SrcPort: h.flow.RemotePort, DstPort: h.flow.LocalPort, Seq: at, Window: uint16(r.Uint32())}, Buf: 1 << 30}
				switch r.IntN(5) {
				case 0:
					x.Flags = RST
				case 1:
					x.Flags = RST | ACK
					x.Ack = serial.Num(r.Uint32())
				case 2:
					x.Flags = SYN
				case 3:
					x.Flags = ACK | PSH
					x.Ack = h.c.nxt.Add(1 + r.IntN(1<<30)) // acknowledges data that was not sent
					x.Len = 1000
				case 4:
					x.Flags = FIN | ACK
					x.Ack = h.c.una.Add(-h.c.maxWnd - 1 - r.IntN(1<<29))
				}
				if ts {
					x.Opts.HasTimestamps, x.Opts.TSVal = true, r.Uint32()
				}
				sent++
				if in := h.c.HandleSegment(s.now, &x); in.Action != Drop {
					t.Fatalf("host %d took %+v", i, in)
				}
			}
		}
		s.run(60 * time.Second)
		s.finish()
		st := a.c.Stats()
		if sent < 500 || st.ChallengeAcks == 0 {
			t.Errorf("%d segments, %d challenge ACKs", sent, st.ChallengeAcks)
		}
		if limit := 10 * (2 + uint64(s.now.Sub(simStart)/time.Second)); st.ChallengeAcks > limit {
			t.Errorf("%d challenge ACKs, more than %d", st.ChallengeAcks, limit)
		}
	}
}
