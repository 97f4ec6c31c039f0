package main

import (
	"slices"
	"testing"
	"testing/fstest"
)

func TestCheck(t *testing.T) {
	index := `{"docs":[{"title":"MPA","text":"ord xdp-mode Terminate keep-alive"}]}`
	tests := []struct {
		name, page, index string
		want              []string
	}{
		{"good", `<a href="b.html#there"></a><a href="#own" id="own"></a><a href="https://example.org/x"></a><img src="p/x.svg">`, index, nil},
		{"no page", `<a href="c.html"></a>`, index, []string{`a.html: link to "c.html": no such file`}},
		{"no section", `<a href="b.html#gone"></a>`, index, []string{`a.html: link to "b.html#gone": no such section`}},
		{"no picture", `<img src="p/y.svg">`, index, []string{`a.html: link to "p/y.svg": no such file`}},
		{"search", "", `{"docs":[{"title":"MPA","text":"ord Terminate keep-alive"}]}`, []string{`search does not know "xdp-mode"`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := check(fstest.MapFS{
				"a.html":                   {Data: []byte(tt.page)},
				"b.html":                   {Data: []byte(`<h2 id="there">`)},
				"p/x.svg":                  {},
				"search/search_index.json": {Data: []byte(tt.index)},
			})
			if err != nil || !slices.Equal(got, tt.want) {
				t.Errorf("check: %q, %v; want %q", got, err, tt.want)
			}
		})
	}
}
