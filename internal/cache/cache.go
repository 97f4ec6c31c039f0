// Package cache controls which memory is in the processor's caches. Its functions do nothing on
// processors for which they are not implemented.
package cache

import "time"

// Fetch starts loading p into the nearest cache and returns at once. It does not access p.
func Fetch(p []byte) {
	if len(p) > 0 {
		fetch(&p[0], len(p))
	}
}

// FetchForWriting is like Fetch for memory that is about to be overwritten: it takes the cache lines
// from other cores.
func FetchForWriting(p []byte) {
	if len(p) > 0 {
		fetchForWriting(&p[0], len(p))
	}
}

// Evict starts writing p back to memory and removes it from the caches of all cores, so that a core that
// overwrites it need not take it from another one's cache.
func Evict(p []byte) {
	if len(p) > 0 && canEvict {
		evict(&p[0], len(p))
	}
}

// PageSize is the length of the memory that Latency loads from.
const PageSize = 4096

// Latency loads some lines of page, one after the other, and returns how much longer a line took
// than from the nearest cache. It returns 0 if Evict is not implemented.
func Latency(page *[PageSize]byte) time.Duration {
	if !canEvict {
		return 0
	}
	touch(&page[0])
	began := time.Now()
	chase(&page[0])
	first := time.Since(began)
	chase(&page[0])
	return max(2*first-time.Since(began), 0) / chased
}

// chased is the number of lines that chase loads.
const chased = 8
