// Package impair decides what a bad wire does to each frame: it loses,
// duplicates, reorders, corrupts, delays and slows down, all from a seed. It is used by
// link.Pipe, by simulations, and by the program test/impair.
package impair

import (
	"math/rand/v2"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// Config says how bad one direction of a wire is. Probabilities are 0..1 per
// frame. The zero Config is a perfect wire.
type Config struct {
	Loss      float64 // frame vanishes
	Duplicate float64 // frame arrives twice
	Reorder   float64 // frame is held back by Hold, so that later ones overtake it
	Corrupt   float64 // one bit of the frame flips

	Delay  time.Duration // of every frame
	Jitter time.Duration // uniform 0..Jitter on top of Delay; order is kept
	Hold   time.Duration // see Reorder; 0 means DefaultHold

	// Bursts of loss (Gilbert's model): Burst is the probability that one begins
	// with a frame, BurstLen how many frames it has on the average; 0 means 10.
	Burst    float64
	BurstLen float64

	Rate  int // bits a second; 0: any. What comes faster waits, in order
	Queue int // bytes that may wait; more are lost. 0: a tenth of a second of Rate
	MTU   int // bytes of a packet behind an Ethernet header; longer ones vanish. 0: any

	Seed uint64
}

// DefaultHold is how long a reordered frame is held back: at a few microseconds
// a frame some tens of others overtake it.
const DefaultHold = 100 * time.Microsecond

// Perfect reports whether nothing happens to frames.
func (c *Config) Perfect() bool {
	return c.Loss <= 0 && c.Duplicate <= 0 && c.Reorder <= 0 && c.Corrupt <= 0 && c.Delay <= 0 && c.Jitter <= 0 &&
		c.Burst <= 0 && c.Rate <= 0 && c.MTU <= 0
}

// Delivery is one arrival of a frame.
type Delivery struct {
	At  clock.Time
	Bit int // the bit that flips, counted from the first byte; -1: none
}

// MaxDeliveries is the most that Decide returns for a frame.
const MaxDeliveries = 2

// Stats counts what a Decider did.
type Stats struct {
	Frames, Lost, Duplicated, Reordered, Corrupted uint64
	Overflowed                                     uint64 // found no room in the queue
	TooBig                                         uint64 // longer than the MTU
}

// Add adds what another Decider did.
func (s *Stats) Add(o *Stats) {
	s.Frames += o.Frames
	s.Lost += o.Lost
	s.Duplicated += o.Duplicated
	s.Reordered += o.Reordered
	s.Corrupted += o.Corrupted
	s.Overflowed += o.Overflowed
	s.TooBig += o.TooBig
}

// Decider draws the fate of each frame of one direction. Its decisions depend
// on the seed and on the order and length of frames; their times also on now.
type Decider struct {
	cfg   Config
	rng   *rand.Rand
	burst *rand.Rand
	in    bool       // a burst
	free  clock.Time // when the bottleneck has sent what waits
	last  clock.Time // of the latest delivery that kept order
	stats Stats
}

// NewDecider returns a Decider.
func NewDecider(cfg Config) *Decider {
	if cfg.Hold <= 0 {
		cfg.Hold = DefaultHold
	}
	if cfg.BurstLen < 1 {
		cfg.BurstLen = 10
	}
	if cfg.Queue <= 0 {
		cfg.Queue = cfg.Rate / 80
	}
	return &Decider{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x697761727064)), burst: rand.New(rand.NewPCG(cfg.Seed, 0x6275727374))}
}

// Decide appends to dst the deliveries of a frame of n bytes sent at now: none
// when it is lost, two when it is duplicated.
func (d *Decider) Decide(now clock.Time, n int, dst []Delivery) []Delivery {
	d.stats.Frames++
	// Each draw is made for each frame, so that one probability does not
	// shift the decisions of the others.
	lost := d.draw(d.cfg.Loss)
	dup := d.draw(d.cfg.Duplicate)
	late := d.draw(d.cfg.Reorder)
	bad := d.draw(d.cfg.Corrupt)
	jitter := time.Duration(d.rng.Float64() * float64(d.cfg.Jitter))
	bit := d.rng.IntN(max(n, 1) * 8)
	lost = d.inBurst() || lost
	if d.cfg.MTU > 0 && n-ethernet > d.cfg.MTU {
		d.stats.TooBig++
		return dst
	}
	at, ok := d.bottleneck(now, n)
	if !ok {
		d.stats.Overflowed++
		return dst
	}
	if lost {
		d.stats.Lost++
		return dst
	}
	at = at.Add(d.cfg.Delay + jitter)
	if late {
		d.stats.Reordered++
		at = at.Add(d.cfg.Hold)
	} else {
		at = max(at, d.last)
		d.last = at
	}
	del := Delivery{At: at, Bit: -1}
	if bad && n > 0 {
		d.stats.Corrupted++
		del.Bit = bit
	}
	dst = append(dst, del)
	if dup {
		// The copy is made before the damage.
		d.stats.Duplicated++
		dst = append(dst, Delivery{At: at, Bit: -1})
	}
	return dst
}

// ethernet is the bytes of an Ethernet header.
const ethernet = 14

// inBurst reports whether the next frame is part of a burst of loss.
func (d *Decider) inBurst() bool {
	if d.cfg.Burst <= 0 {
		return false
	}
	if d.in {
		d.in = d.burst.Float64() >= 1/d.cfg.BurstLen
	} else {
		d.in = d.burst.Float64() < d.cfg.Burst
	}
	return d.in
}

// bottleneck returns when n bytes that came now have left at Rate, and whether there
// was room for them to wait.
func (d *Decider) bottleneck(now clock.Time, n int) (clock.Time, bool) {
	if d.cfg.Rate <= 0 {
		return now, true
	}
	took := func(octets int) time.Duration {
		return time.Duration(float64(octets) * 8 / float64(d.cfg.Rate) * float64(time.Second))
	}
	begin := max(now, d.free)
	if begin.Sub(now) > took(d.cfg.Queue) {
		return 0, false
	}
	d.free = begin.Add(took(n))
	return d.free, true
}

// Stats returns the counts so far.
func (d *Decider) Stats() Stats { return d.stats }

func (d *Decider) draw(p float64) bool { return d.rng.Float64() < p }
