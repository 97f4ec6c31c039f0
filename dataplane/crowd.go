package dataplane

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// A crowd says whether a worker shares its CPU with a thread that does not give it away, such as one that looks at its
// memory until a message has come. The kernel then lets each run for some milliseconds in turn, and a thread that yields
// loses the rest of its time slice besides. So the worker of a crowd sleeps instead of yielding, with the shortest slice that
// there is: a thread that wakes preempts one with a longer slice (Linux 6.12). The worker must use it on a thread of its own.
type crowd struct {
	until clock.Time // 0: none

	since clock.Time    // begin of a period in which yields are looked at, or 0
	given time.Duration // time of long yields in it
}

const (
	crowdYield  = time.Millisecond       // a yield that takes as long was to a thread that does not yield
	crowdPeriod = 8 * time.Millisecond   // a crowd is one if such yields take three quarters of it: a few have other causes
	crowdSlice  = 100 * time.Microsecond // the least that Linux allows
	crowdTime   = 150 * time.Millisecond // then yields show again whether there is a crowd
)

// yielded notes that the worker had nothing to do and has yielded, which took until now.
func (c *crowd) yielded(took time.Duration, now clock.Time) {
	if c.since == 0 {
		c.since = now.Add(-took)
	}
	if took >= crowdYield {
		c.given += took
	}
	period := now.Sub(c.since)
	if period < crowdPeriod {
		return
	}
	if c.given >= period*3/4 {
		c.until = now.Add(crowdTime)
		setSlice(crowdSlice)
	}
	c.since, c.given = 0, 0
}

// at reports whether there is a crowd at now.
func (c *crowd) at(now clock.Time) bool {
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

// setSlice sets the time slice of the calling thread, which 0 makes the kernel's. A failure does
// no harm.
func setSlice(d time.Duration) {
	a, err := unix.SchedGetAttr(0, 0)
	if err != nil || a.Policy != unix.SCHED_NORMAL {
		return
	}
	a.Runtime = uint64(d)
	_ = unix.SchedSetAttr(0, a, 0)
}
