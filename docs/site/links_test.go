package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
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

// TestPackagedLinks checks that the links of the pages that a package installs lead to pages next to them, or to files of
// the repository.
func TestPackagedLinks(t *testing.T) {
	docs, err := filepath.Glob("../*.md")
	if err != nil {
		t.Fatal(err)
	}
	all := []string{"README.md"}
	for _, page := range docs {
		all = append(all, "docs/"+filepath.Base(page))
	}
	for _, pages := range [][]string{all, {"docs/verbs.md"}, {"docs/api.md"}} {
		dir := t.TempDir()
		if out, err := exec.Command("../../deploy/packages/pages", append([]string{dir}, pages...)...).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for _, page := range pages {
			text, err := os.ReadFile(filepath.Join(dir, filepath.Base(page)))
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range regexp.MustCompile(`\]\(([^()#]+)[)#]`).FindAllSubmatch(text, -1) {
				target := filepath.Join(dir, string(m[1]))
				if file, ok := strings.CutPrefix(string(m[1]), "https://github.com/iwarpd/iwarpd/blob/main/"); ok {
					target = filepath.Join("../..", file)
				}
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s: link to %s: no such file", page, m[1])
				}
			}
		}
	}
}
