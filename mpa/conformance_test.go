package mpa

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformance checks that every row of the conformance table names existing code and tests, or says why there are
// none.
func TestConformance(t *testing.T) {
	conformance.Check(t, "conformance-mpa.md", "mpa", map[string]int{"M": 128, "E": 57})
}
