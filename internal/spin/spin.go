// Package spin determines how long to poll for work before sleeping, and yields the CPU between polls.
package spin

import (
	"syscall"
	"time"
)

// A Limit is the time to poll before sleeping. Waking a thread takes the kernel about as long as Least,
// more than many round trips. While work comes soon after each sleep the limit grows, so that a
// request and its response do not wait for threads to wake in turn. After a long sleep it is Least
// again.
type Limit struct {
	Least time.Duration // more than 0
	grown time.Duration
}

// growth bounds the limit, as a multiple of Least.
const growth = 4

// Now returns the limit.
func (l *Limit) Now() time.Duration { return l.Least + l.grown }

// Slept adapts the limit after a sleep.
func (l *Limit) Slept(d time.Duration) {
	if d > growth*l.Least {
		l.grown = 0
		return
	}
	l.grown = min(l.Least+2*l.grown, (growth-1)*l.Least)
}

// Yield yields the CPU to another thread. The scheduler of Go would return after some 10 µs;
// the kernel's returns at once if no other thread is ready.
func Yield() { _, _, _ = syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
