package crc32c

import "testing"

// What runs on other processors gives the same.
func TestWithoutVectors(t *testing.T) {
	defer func(v, l bool) { vectors, laned = v, l }(vectors, laned)
	for _, tt := range []struct {
		name  string
		laned bool
	}{{"lanes", laned}, {"neither", false}} {
		vectors, laned = false, tt.laned
		t.Run(tt.name, func(t *testing.T) {
			t.Run("lengths", TestEveryLength)
			t.Run("markers", TestMarkers)
			t.Run("bits", TestEveryBit)
		})
	}
}
