// Command site checks the built documentation site: the targets of all links and anchors within
// it exist, and the search index contains the words that users look for.
package main

import (
	"encoding/json"
	"fmt"
	"html"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// searched are words that the index must lead from.
var searched = []string{"mpa", "ord", "xdp-mode", "terminate", "keep-alive"}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: site DIR")
		os.Exit(2)
	}
	faults, err := check(os.DirFS(os.Args[1]))
	if err != nil {
		fmt.Fprintln(os.Stderr, "site:", err)
		os.Exit(1)
	}
	for _, f := range faults {
		fmt.Fprintln(os.Stderr, "site:", f)
	}
	if len(faults) > 0 {
		os.Exit(1)
	}
}

var (
	idAttr  = regexp.MustCompile(`\bid="([^"]+)"`)
	linkRef = regexp.MustCompile(`\b(?:href|src)="([^"]*)"`)
)

// check returns the errors of the site in dir.
func check(dir fs.FS) ([]string, error) {
	ids := make(map[string]map[string]bool) // of each page
	links := make(map[string][]string)
	err := fs.WalkDir(dir, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".html" {
			return err
		}
		b, err := fs.ReadFile(dir, name)
		if err != nil {
			return err
		}
		ids[name] = map[string]bool{"": true}
		for _, m := range idAttr.FindAllStringSubmatch(string(b), -1) {
			ids[name][html.UnescapeString(m[1])] = true
		}
		for _, m := range linkRef.FindAllStringSubmatch(string(b), -1) {
			links[name] = append(links[name], html.UnescapeString(m[1]))
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if len(ids) < 2 {
		return nil, fmt.Errorf("%d pages: is this the folder of the site?", len(ids))
	}
	var faults []string
	for page, refs := range links {
		for _, ref := range refs {
			if why := broken(dir, ids, page, ref); why != "" {
				faults = append(faults, fmt.Sprintf("%s: link to %q: %s", page, ref, why))
			}
		}
	}
	missing, err := unknown(dir)
	slices.Sort(faults)
	return append(slices.Compact(faults), missing...), err
}

// broken returns why the target of ref on page does not exist, or "".
func broken(dir fs.FS, ids map[string]map[string]bool, page, ref string) string {
	u, err := url.Parse(ref)
	if err != nil {
		return err.Error()
	}
	if u.Scheme != "" || u.Host != "" || page == "404.html" { // 404 names its files from the root
		return ""
	}
	target := page
	if u.Path != "" {
		target = path.Join(path.Dir(page), u.Path)
	}
	if info, err := fs.Stat(dir, target); err == nil && info.IsDir() {
		target = path.Join(target, "index.html")
	}
	if _, err := fs.Stat(dir, target); err != nil {
		return "no such file"
	}
	if known, ok := ids[target]; ok && !known[u.Fragment] && u.Fragment != "__skip" {
		return "no such section"
	}
	return ""
}

// unknown returns a fault for each word that the search does not find.
func unknown(dir fs.FS) ([]string, error) {
	b, err := fs.ReadFile(dir, "search/search_index.json")
	if err != nil {
		return nil, err
	}
	var index struct {
		Docs []struct{ Title, Text string }
	}
	if err := json.Unmarshal(b, &index); err != nil {
		return nil, fmt.Errorf("search index: %w", err)
	}
	var faults []string
	for _, word := range searched {
		if !slices.ContainsFunc(index.Docs, func(d struct{ Title, Text string }) bool {
			return strings.Contains(strings.ToLower(d.Title+" "+d.Text), word)
		}) {
			faults = append(faults, fmt.Sprintf("search does not know %q", word))
		}
	}
	return faults, nil
}
