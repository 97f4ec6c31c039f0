package sctp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestConformanceDoc: every test that docs/conformance-sctp.md names is there.
func TestConformanceDoc(t *testing.T) {
	conformance.CheckProofs(t, "conformance-sctp.md", []string{
		"*_test.go", "session/*_test.go", "../test/*/*_test.go", "../dataplane/*_test.go", "../ctrl/*_test.go", "../client/embed/*_test.go",
	}, 60)
}
