package sctp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformanceDoc checks that every row of the conformance table names existing code and tests.
func TestConformanceDoc(t *testing.T) {
	conformance.Check(t, "conformance-sctp.md", "sctp", nil)
}
