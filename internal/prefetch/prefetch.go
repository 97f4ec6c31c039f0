// Package prefetch asks the processor for memory that is about to be used.
package prefetch

// Bytes has p on its way to the nearest cache, while the caller does something
// else. It touches nothing, and does nothing where it is not written for the
// processor.
func Bytes(p []byte) {
	if len(p) > 0 {
		octets(&p[0], len(p))
	}
}

// ForWriting is Bytes for p that is about to be written, as a whole: no other
// core's cache will have it then.
func ForWriting(p []byte) {
	if len(p) > 0 {
		forWriting(&p[0], len(p))
	}
}
