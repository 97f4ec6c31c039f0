package sctp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// Every row of the table of conformance names code and tests that exist.
func TestConformanceDoc(t *testing.T) {
	conformance.Check(t, "conformance-sctp.md", "sctp", nil)
}
