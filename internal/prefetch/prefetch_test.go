package prefetch

import "testing"

// Whatever lies around the octets, nothing is touched.
func TestOctets(t *testing.T) {
	Octets(nil)
	b := make([]byte, 300)
	for n := range b {
		Octets(b[:n])
		Octets(b[n:])
	}
}
