package crc32c

import (
	"testing"

	"golang.org/x/sys/cpu"
)

// What runs on other processors gives the same.
func TestWithoutVectors(t *testing.T) {
	defer func(v, l, f bool) { vectors, laned, folding = v, l, f }(vectors, laned, folding)
	for _, tt := range []struct {
		name           string
		laned, folding bool
	}{{"lanes", laned, false}, {"folding", laned && cpu.X86.HasAVX, true}, {"neither", false, false}} {
		vectors, laned, folding = false, tt.laned, tt.folding
		t.Run(tt.name, func(t *testing.T) {
			t.Run("lengths", TestEveryLength)
			t.Run("markers", TestMarkers)
			t.Run("bits", TestEveryBit)
		})
	}
}
