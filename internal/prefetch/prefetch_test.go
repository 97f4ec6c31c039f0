package prefetch

import "testing"

// Whatever lies around the octets, nothing is touched.
func TestOctets(t *testing.T) {
	for _, fetch := range []func([]byte){Octets, ForWriting} {
		fetch(nil)
		b := make([]byte, 300)
		for n := range b {
			fetch(b[:n])
			fetch(b[n:])
		}
	}
}
