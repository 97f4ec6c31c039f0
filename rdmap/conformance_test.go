package rdmap

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformance checks that every row of the conformance table names existing code and tests, or says why there are
// none.
func TestConformance(t *testing.T) {
	conformance.Check(t, "conformance-rdmap.md", "rdmap", map[string]int{"D": 138, "R": 168, "A": 72, "I": 49, "S": 26})
}
