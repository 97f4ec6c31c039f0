// Package histogram counts durations in fixed buckets.
package histogram

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Buckets is the number of buckets with an upper bound: 1 us, 2 us, 4 us, and so on to 16.8 s.
const Buckets = 25

// A Histogram counts durations. Its zero value is empty. It may be used concurrently; Add is cheap
// if only one goroutine calls it.
type Histogram struct {
	buckets [Buckets + 1]atomic.Uint64
	sum     atomic.Int64
}

// Counts are the contents of a Histogram. Buckets[i] counts durations of at most Bound(i) that are
// longer than Bound(i-1), the last bucket those longer than all bounds.
type Counts struct {
	Buckets [Buckets + 1]uint64
	Sum     time.Duration
}

// Bound returns the upper bound of bucket i.
func Bound(i int) time.Duration { return time.Microsecond << i }

// Add counts d; a negative duration counts as 0. On a nil Histogram it does nothing.
func (h *Histogram) Add(d time.Duration) {
	if h == nil {
		return
	}
	d = max(d, 0)
	i := bits.Len64(uint64(max(d-1, 0)) / uint64(time.Microsecond))
	h.buckets[min(i, Buckets)].Add(1)
	h.sum.Add(int64(d))
}

// Counts returns the contents. A duration that is being added may be missing in Sum.
func (h *Histogram) Counts() (c Counts) {
	for i := range h.buckets {
		c.Buckets[i] = h.buckets[i].Load()
	}
	c.Sum = time.Duration(h.sum.Load())
	return c
}

// Add adds the counts of o.
func (c *Counts) Add(o *Counts) {
	for i, n := range o.Buckets {
		c.Buckets[i] += n
	}
	c.Sum += o.Sum
}

// Total returns how many durations were counted.
func (c *Counts) Total() (n uint64) {
	for _, b := range c.Buckets {
		n += b
	}
	return n
}
