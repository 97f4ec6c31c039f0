// Package serial orders 32-bit numbers that wrap: TCP sequence numbers, SCTP
// TSNs, DDP MSNs (RFC 1982, RFC 9293 section 3.4).
package serial

// Num is a number modulo 2^32. Two numbers can be compared only if they are less than 2^31 apart.
type Num uint32

// Less reports whether a comes before b.
func (a Num) Less(b Num) bool { return int32(a-b) < 0 }

// LessEq reports whether a comes before b or equals it.
func (a Num) LessEq(b Num) bool { return int32(a-b) <= 0 }

// Add returns the number n steps after a (before it, for a negative n).
func (a Num) Add(n int) Num { return a + Num(n) }

// Sub returns the signed distance from b to a.
func (a Num) Sub(b Num) int { return int(int32(a - b)) }

// In reports whether a lies in the n numbers that start at first.
func (a Num) In(first Num, n uint32) bool { return uint32(a-first) < n }

// Max returns the later of a and b.
func Max(a, b Num) Num {
	if a.Less(b) {
		return b
	}
	return a
}

// Min returns the earlier of a and b.
func Min(a, b Num) Num {
	if b.Less(a) {
		return b
	}
	return a
}
