// Package conformance checks the tables of docs/conformance-*.md against the source: the code and
// the tests that a row names must exist.
package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Check reports errors in docs/<file> of the module that contains the calling test, which must be
// at most two levels below the root. Unqualified names refer to package pkg. rows maps each prefix
// of row IDs to the least number of rows that it must have.
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
