package spin

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// Contention detects that a thread which yields while it is idle shares its CPU with one that does not yield, such as
// one that polls its memory until a message has come. The kernel then runs each for some milliseconds in turn, and a
// thread that yields also loses the rest of its time slice. So it then sleeps instead of yielding, with the shortest
// time slice: a thread that wakes preempts one with a longer slice (Linux 6.12). The caller needs a thread of its own.
type Contention struct {
	until clock.Time    // until then the thread sleeps instead of yielding; 0: it yields
	spell time.Duration // length of the last such time, or 0 if there was no contention when last measured

	since clock.Time    // start of the current measuring period, or 0
	given time.Duration // time of long yields in it
}

// ShortSlice is the time slice of a thread whose CPU is shared: the least that Linux allows.
const ShortSlice = 100 * time.Microsecond

const (
	longYield   = time.Millisecond     // a yield of this length or more was to a thread that does not yield
	yieldPeriod = 8 * time.Millisecond // contention: long yields take three quarters of such a period; a few have other causes

	// The thread sleeps for leastSpell, and then yields to measure again, since the program may yield now. While it does not, the time
	// doubles up to mostSpell.
	leastSpell, mostSpell = 20 * time.Millisecond, 320 * time.Millisecond
)

// Yielded records a yield of the idle thread, which took took and ended at now.
func (c *Contention) Yielded(took time.Duration, now clock.Time) {
	if c.since == 0 {
		c.since = now.Add(-took)
	}
	if took >= longYield {
		c.given += took
	}
	period := now.Sub(c.since)
	if period < yieldPeriod {
		return
	}
	if c.given >= period*3/4 {
		c.spell = min(max(2*c.spell, leastSpell), mostSpell)
		c.until = now.Add(c.spell)
		setSlice(ShortSlice)
	} else {
		c.spell = 0
	}
	c.since, c.given = 0, 0
}

// At reports whether the thread must sleep instead of yielding at now.
func (c *Contention) At(now clock.Time) bool {
	if c.until == 0 {
		return false
	}
	if now < c.until {
		return true
	}
	c.until = 0
	setSlice(0)
	return false
}

// setSlice sets the time slice of the calling thread; 0 restores the kernel's default. A failure is harmless.
func setSlice(d time.Duration) {
	a, err := unix.SchedGetAttr(0, 0)
	if err != nil || a.Policy != unix.SCHED_NORMAL {
		return
	}
	a.Runtime = uint64(d)
	_ = unix.SchedSetAttr(0, a, 0)
}
