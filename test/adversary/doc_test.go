// Package adversary tests iwarpd against a peer that breaks the rules: a whole daemon with several clients at one end
// of a wire, and package peer's raw speaker at the other. Each attack must be answered with the exact bytes that the
// RFCs require, must not change memory that it has no right to, and must not affect another connection.
package adversary

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.RunApart(m)) }

var row = regexp.MustCompile(`\b[MEDRA][0-9]+\b`)

// checkRules checks that the rows that attacks name exist in the conformance tables.
func checkRules(t *testing.T, name, rules string) {
	t.Helper()
	for _, r := range row.FindAllString(rules, -1) {
		if !rows(t)[r] {
			t.Errorf("attack %q names row %s, which no conformance table has", name, r)
		}
	}
}

var known map[string]bool

func rows(t *testing.T) map[string]bool {
	t.Helper()
	if known != nil {
		return known
	}
	known = make(map[string]bool)
	for _, f := range []string{"mpa", "rdmap"} {
		b := testenv.ReadFile(t, "../../docs/conformance-"+f+".md")
		for _, m := range regexp.MustCompile(`(?m)^\| ([MEDRAIS][0-9]+) \|`).FindAllStringSubmatch(string(b), -1) {
			known[m[1]] = true
		}
	}
	return known
}

// TestIndex checks the numbers in docs/conformance.md against the tables.
func TestIndex(t *testing.T) {
	count := make(map[string]int)
	for r := range rows(t) {
		count[r[:1]]++
	}
	b := testenv.ReadFile(t, "../../docs/conformance.md")
	said := regexp.MustCompile(`\| ([A-Z]): (\d+) \|`).FindAllStringSubmatch(string(b), -1)
	if len(said) != len(count) {
		t.Errorf("%d numbers in the index, %d tables", len(said), len(count))
	}
	for _, m := range said {
		if m[2] != strconv.Itoa(count[m[1]]) {
			t.Errorf("the index says %s rows %s; there are %d", m[2], m[1], count[m[1]])
		}
	}
}
