package spin

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestContention checks that long yields for most of a period give a thread a short slice for a while, and then its former one.
func TestContention(t *testing.T) {
	runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
	slice := func() time.Duration {
		a, err := unix.SchedGetAttr(0, 0)
		if err != nil {
			t.Fatal(err)
		}
		return time.Duration(a.Runtime)
	}
	before := slice()
	if before == 0 {
		testenv.Skip(t, "the kernel has no slices of threads (before Linux 6.12)")
	}
	const short, long = time.Microsecond, 2 * longYield
	var c Contention
	now := clock.Time(time.Hour)
	yield := func(took time.Duration, total time.Duration) {
		for ; total > 0; total -= took {
			now = now.Add(took)
			c.Yielded(took, now)
		}
	}
	check := func(want bool) {
		t.Helper()
		size := before
		if want {
			size = ShortSlice
		}
		if got := c.At(now); got != want || slice() != size {
			t.Errorf("at is %v and the slice %v; want %v and %v", got, slice(), want, size)
		}
	}
	yield(short, yieldPeriod)
	check(false)
	yield(long, yieldPeriod/2)
	yield(short, yieldPeriod/2)
	check(false)
	yield(long, yieldPeriod-long)
	check(false)
	yield(long, long)
	check(true)
	now = now.Add(leastSpell - 1)
	check(true)
	now = now.Add(1)
	check(false)
	for spell := 2 * leastSpell; spell < 4*mostSpell; spell *= 2 {
		yield(long, yieldPeriod) // it is measured again
		check(true)
		now = now.Add(min(spell, mostSpell) - 1)
		check(true)
		now = now.Add(1)
		check(false)
	}
	yield(short, yieldPeriod)
	yield(long, yieldPeriod)
	check(true)
	now = now.Add(leastSpell)
	check(false)
}
