package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
)

// TestLinks checks that the links between the pages in the repository, and to its other files, lead to files, so that the
// pages can be read without the site.
func TestLinks(t *testing.T) {
	docs, err := filepath.Glob("../*.md")
	if err != nil {
		t.Fatal(err)
	}
	top, err := filepath.Glob("../../*.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, page := range slices.Concat(top, docs) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\]\(([^():#]+)[)#]`).FindAllSubmatch(text, -1) {
			seen++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), string(m[1]))); err != nil {
				t.Errorf("%s: link to %s: no such file", page, m[1])
			}
		}
	}
	if seen < 100 {
		t.Errorf("%d links found: the test looks in the wrong place", seen)
	}
}
