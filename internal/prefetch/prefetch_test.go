package prefetch

import "testing"

// Whatever lies around the bytes, nothing is touched.
func TestBytes(t *testing.T) {
	for _, fetch := range []func([]byte){Bytes, ForWriting} {
		fetch(nil)
		b := make([]byte, 300)
		for n := range b {
			fetch(b[:n])
			fetch(b[n:])
		}
	}
}
