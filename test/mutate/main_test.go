package main

import (
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

// TestLists checks that every mutant of mutants.txt has its row, that its code exists, and that every reason in
// survivors.txt belongs to one of them or to a row.
func TestLists(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	rows, errs := conformance.Rows(root)
	for _, err := range errs {
		t.Error(err)
	}
	listed, err := readMutants(root, rows)
	if err != nil {
		t.Error(err)
	}
	known := map[string]bool{}
	for _, r := range rows {
		known[(&row{Row: r}).key()] = true
	}
	for key, ms := range listed {
		for _, m := range ms {
			known[key+": "+m.key()] = true
		}
	}
	explained, err := readSurvivors(root)
	if err != nil {
		t.Fatal(err)
	}
	for key := range explained {
		if !known[key] {
			t.Errorf("survivors.txt explains %q, which is not there", key)
		}
	}
}

// A file with mutants must be valid Go, have a copy of the function for each, and keep everything else unchanged.
func TestWeave(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	src := newSource(root)
	ms := src.find(conformance.Name{Dir: "mpa", Name: "Framer.MULPDU"})
	if len(ms) < 5 {
		t.Fatalf("%d mutants of Framer.MULPDU", len(ms))
	}
	for i, m := range ms {
		m.id = i + 1
	}
	text, spans := weave(ms)
	if len(spans) != len(ms) {
		t.Errorf("%d copies of %d mutants", len(spans), len(ms))
	}
	lines := strings.Split(text, "\n")
	for _, s := range spans {
		if !strings.HasPrefix(lines[s.first-1], "func (f *Framer) MULPDU__m") || lines[s.last-1] != "}" && !strings.HasSuffix(lines[s.last-1], "}") {
			t.Errorf("mutant %d: lines %d to %d begin with %q and end with %q", s.m.id, s.first, s.last, lines[s.first-1], lines[s.last-1])
		}
	}
}

// A listed mutant may replace the line of its function that begins with func.
func TestWeaveFunc(t *testing.T) {
	root, err := moduleRoot()
	if err != nil {
		t.Fatal(err)
	}
	line := "func (f *Framer) MULPDU(emss int) int {"
	m, err := newSource(root).listed("mpa.Framer.MULPDU", []string{line}, []string{line + " return 1"})
	if err != nil {
		t.Fatal(err)
	}
	m.id = 7
	text, _ := weave([]*mutant{m})
	if want := "func (f *Framer) MULPDU__m7(emss int) int { return 1"; !strings.Contains(text, want) {
		t.Errorf("there is no %q", want)
	}
}
