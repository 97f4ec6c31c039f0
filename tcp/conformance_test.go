package tcp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformanceDoc: every test and script that docs/conformance-tcp.md names is there.
func TestConformanceDoc(t *testing.T) {
	conformance.CheckProofs(t, "conformance-tcp.md", []string{"*_test.go", "*/*_test.go"}, 80)
}
