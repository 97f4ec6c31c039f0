// Package impair models a bad link. It loses, duplicates, reorders, corrupts, delays and
// rate-limits frames, driven by a seed. link.Pipe, the simulations and the program test/impair use
// it.
package impair

import (
	"math/rand/v2"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// Config describes the impairment of one direction. Probabilities are 0..1 per frame. The zero
// Config is a perfect link.
type Config struct {
	Loss      float64 // frame vanishes
	Duplicate float64 // frame arrives twice
	Reorder   float64 // frame is held back by Hold, so that later ones overtake it
	Corrupt   float64 // one bit of the frame flips

	Delay  time.Duration // of every frame
	Jitter time.Duration // uniform 0..Jitter in addition to Delay; order is kept
	Hold   time.Duration // see Reorder; 0 means defaultHold

	// Burst is the probability that a burst of losses begins at a frame (Gilbert's model).
	// BurstLen is the mean number of frames in a burst; 0 means 10.
	Burst    float64
	BurstLen float64

	Rate  int // bits per second; 0 means unlimited. Excess frames are queued in order
	Queue int // bytes that may be queued; further frames are lost. 0 means a tenth of a second at Rate
	MTU   int // longest Ethernet payload in bytes; longer ones are lost. 0 means unlimited

	Seed uint64
}

// defaultHold is the time for which a reordered frame is held. At a few microseconds per frame,
// some tens of others overtake it.
const defaultHold = 100 * time.Microsecond

// Perfect reports whether c impairs nothing.
func (c *Config) Perfect() bool {
	return c.Loss <= 0 && c.Duplicate <= 0 && c.Reorder <= 0 && c.Corrupt <= 0 && c.Delay <= 0 && c.Jitter <= 0 &&
		c.Burst <= 0 && c.Rate <= 0 && c.MTU <= 0
}

// Delivery is one arrival of a frame.
type Delivery struct {
	At  clock.Time
	Bit int // index of the flipped bit, counted from the first byte, or -1
}

// MaxDeliveries is the most deliveries that Decide returns for a frame.
const MaxDeliveries = 2

// Stats counts the decisions of a Decider.
type Stats struct {
	Frames, Lost, Duplicated, Reordered, Corrupted uint64
	Overflowed                                     uint64 // lost because the queue was full
	TooBig                                         uint64 // longer than the MTU
}

// Add adds o to s.
func (s *Stats) Add(o *Stats) {
	s.Frames += o.Frames
	s.Lost += o.Lost
	s.Duplicated += o.Duplicated
	s.Reordered += o.Reordered
	s.Corrupted += o.Corrupted
	s.Overflowed += o.Overflowed
	s.TooBig += o.TooBig
}

// Decider decides what happens to each frame of one direction. Decisions depend only on the seed
// and on the order and length of the frames; delivery times also depend on now.
type Decider struct {
	cfg   Config
	rng   *rand.Rand
	burst *rand.Rand
	in    bool       // in a burst of losses
	free  clock.Time // when the bottleneck will have sent its queue
	last  clock.Time // latest delivery that was not reordered
	stats Stats
}

// NewDecider returns a Decider for cfg.
func NewDecider(cfg Config) *Decider {
	if cfg.Hold <= 0 {
		cfg.Hold = defaultHold
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
	// Draw every probability for every frame, so that changing one does not change the
	// decisions of the others.
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

// ethernet is the length of an Ethernet header.
const ethernet = 14

// inBurst reports whether the next frame belongs to a burst of losses.
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

// bottleneck returns when n bytes that arrive now will have been sent at Rate, and whether the
// queue had room for them.
func (d *Decider) bottleneck(now clock.Time, n int) (clock.Time, bool) {
	if d.cfg.Rate <= 0 {
		return now, true
	}
	took := func(n int) time.Duration {
		return time.Duration(float64(n) * 8 / float64(d.cfg.Rate) * float64(time.Second))
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
