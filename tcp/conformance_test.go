package tcp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformanceDoc checks that every test and script that docs/conformance-tcp.md names exists.
func TestConformanceDoc(t *testing.T) {
	conformance.Check(t, "conformance-tcp.md", "tcp", nil)
}
