package sctp

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestConformanceDoc checks that every test that docs/conformance-sctp.md names
// exists.
func TestConformanceDoc(t *testing.T) {
	doc, err := os.ReadFile("../docs/conformance-sctp.md")
	if err != nil {
		t.Fatal(err)
	}
	var src strings.Builder
	for _, g := range []string{"*_test.go", "session/*_test.go", "../test/*/*_test.go", "../dataplane/*_test.go", "../client/embed/*_test.go"} {
		names, err := filepath.Glob(g)
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range names {
			b, err := os.ReadFile(n)
			if err != nil {
				t.Fatal(err)
			}
			src.Write(b)
		}
	}
	all := src.String()
	named := 0
	for _, m := range regexp.MustCompile("`((?:Test|Fuzz)[A-Za-z0-9]+)`").FindAllStringSubmatch(string(doc), -1) {
		named++
		if !strings.Contains(all, "func "+m[1]+"(") {
			t.Errorf("no test %s", m[1])
		}
	}
	if named < 60 {
		t.Errorf("only %d proofs found: has the form of the file changed?", named)
	}
}
