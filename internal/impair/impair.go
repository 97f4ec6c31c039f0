// Package impair decides what a bad wire does to each frame: it loses,
// duplicates, reorders, corrupts and delays, all from a seed. It is used by
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

	Seed uint64
}

// DefaultHold is how long a reordered frame is held back: at a few microseconds
// a frame some tens of others overtake it.
const DefaultHold = 100 * time.Microsecond

// Perfect reports whether nothing happens to frames.
func (c *Config) Perfect() bool {
	return c.Loss <= 0 && c.Duplicate <= 0 && c.Reorder <= 0 && c.Corrupt <= 0 && c.Delay <= 0 && c.Jitter <= 0
}

// Delivery is one arrival of a frame.
type Delivery struct {
	At  clock.Time
	Bit int // the bit that flips, counted from the first octet; -1: none
}

// MaxDeliveries is the most that Decide returns for a frame.
const MaxDeliveries = 2

// Stats counts what a Decider did.
type Stats struct {
	Frames, Lost, Duplicated, Reordered, Corrupted uint64
}

// Decider draws the fate of each frame of one direction. Its decisions depend
// on the seed and on the order and length of frames; their times also on now.
type Decider struct {
	cfg   Config
	rng   *rand.Rand
	last  clock.Time // of the latest delivery that kept order
	stats Stats
}

// NewDecider returns a Decider.
func NewDecider(cfg Config) *Decider {
	if cfg.Hold <= 0 {
		cfg.Hold = DefaultHold
	}
	return &Decider{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 0x697761727064))}
}

// Decide appends to dst the deliveries of a frame of n octets sent at now: none
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
	if lost {
		d.stats.Lost++
		return dst
	}
	at := now.Add(d.cfg.Delay + jitter)
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

// Stats returns the counts so far.
func (d *Decider) Stats() Stats { return d.stats }

func (d *Decider) draw(p float64) bool { return d.rng.Float64() < p }
