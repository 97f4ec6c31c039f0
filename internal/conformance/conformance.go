// Package conformance reads the tables of docs/conformance-*.md and checks them
// against the source: what a row names as code or as a test must exist.
package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Check reports what is wrong in docs/<file> of the module that the test runs in,
// two or fewer levels below its root. Plain names are of package pkg. rows says
// how many rows there must be at least of each prefix of ids.
func Check(t *testing.T, file, pkg string, rows map[string]int) {
	t.Helper()
	root := ".."
	if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
		root = filepath.Join("..", "..")
	}
	s := &source{root: root, loaded: map[string]*declared{}}
	got, errs := s.table(file, pkg)
	for _, err := range errs {
		t.Error(err)
	}
	count := map[string]int{}
	for _, r := range got {
		count[strings.TrimRight(r.ID, "0123456789")]++
	}
	for prefix, want := range rows {
		if count[prefix] < want {
			t.Errorf("%d rows %s; want %d", count[prefix], prefix, want)
		}
	}
}
