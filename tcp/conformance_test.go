package tcp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformanceDoc: every test and script that docs/conformance-tcp.md names is there.
func TestConformanceDoc(t *testing.T) {
	conformance.Check(t, "conformance-tcp.md", "tcp", nil)
}
