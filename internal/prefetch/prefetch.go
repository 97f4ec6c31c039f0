// Package prefetch asks the processor for memory that is about to be read.
package prefetch

// Octets has p on its way to the nearest cache, while the caller does something
// else. It touches nothing, and does nothing where it is not written for the
// processor.
func Octets(p []byte) {
	if len(p) > 0 {
		octets(&p[0], len(p))
	}
}
