package mpa

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// Every row of the table of conformance names code and tests that exist, or says
// why there are none.
func TestConformance(t *testing.T) {
	conformance.Check(t, "conformance-mpa.md", "mpa", map[string]int{"M": 128, "E": 57})
}
