// Package prefetch loads memory into the processor's cache before it is used.
package prefetch

// Bytes starts loading p into the nearest cache and returns at once. It does not access p, and does
// nothing on processors for which it is not implemented.
func Bytes(p []byte) {
	if len(p) > 0 {
		fetch(&p[0], len(p))
	}
}

// ForWriting is like Bytes for memory that is about to be overwritten: it takes the cache lines
// from other cores.
func ForWriting(p []byte) {
	if len(p) > 0 {
		forWriting(&p[0], len(p))
	}
}
