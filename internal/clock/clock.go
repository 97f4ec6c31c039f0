// Package clock defines the time base that all parts of iwarpd share: nanoseconds on a monotonic
// clock. Protocol cores get the time as an argument and never read a clock; only their callers call
// Now.
package clock

import "time"

// Time is a point in time, in nanoseconds since an arbitrary epoch that is
// fixed for the life of the process. The zero Time means "never": an unarmed
// timer, or no deadline.
type Time int64

// Add returns t+d. It never returns the zero Time for a non-zero t.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Sub returns t-u.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }

// Due reports whether a timer armed for t has expired at now.
func (t Time) Due(now Time) bool { return t != 0 && t <= now }

// Earliest returns the earlier of two deadlines, where zero means none.
func Earliest(a, b Time) Time {
	switch {
	case a == 0:
		return b
	case b == 0 || a < b:
		return a
	}
	return b
}

var epoch = time.Now()

// Now reads the monotonic clock. Only workers, commands and tests that need real time may call it;
// protocol cores may not.
func Now() Time { return Time(time.Since(epoch)) + 1 }
