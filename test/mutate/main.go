// Mutate breaks the code that the rows of docs/conformance-*.md name, one small
// change (a mutant) at a time, and runs the tests that the same rows name. A test
// that still passes does not prove its row.
//
// mutants.txt has mutants that break the rule of a row. A test of that row must
// notice each of them; survivors.txt says why one does not.
//
// Other mutants are derived from the syntax of the functions that a row names: a
// negated condition, a check or a statement removed, a changed constant, a swapped
// comparison, an early return. Most functions serve several rules, so a test of
// the row need not notice each of these, but it must notice one: they are tried in
// the order of a fixed hash, -tries of them at most, where none of mutants.txt
// has been noticed.
//
// All mutants are in one build: a function with mutants has a copy for each, and
// the environment variable MUTANT picks one. The sources are replaced by
// go build -overlay; the tree is not touched.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

var (
	tries   = flag.Int("tries", 16, "derived mutants of one row at most")
	sample  = flag.Int("n", 0, "rows to test, by the order of a fixed hash; 0: all")
	only    = flag.String("rows", "", "rows to test, by how their ids begin, or by their tables, as in M,D12,sctp")
	most    = flag.Float64("max", 3, "per cent of the mutants of mutants.txt that may survive")
	limit   = flag.Duration("limit", 20*time.Second, "leave out tests that take longer than this without a mutant")
	jobs    = flag.Int("jobs", runtime.NumCPU(), "tests to run at a time")
	report  = flag.String("o", "", "write the report to this file too")
	verbose = flag.Bool("v", false, "print every mutant")
)

func main() {
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	all, errs := conformance.Rows(root)
	if len(errs) > 0 {
		return fmt.Errorf("the tables are wrong: %w (%d in all); see internal/conformance", errs[0], len(errs))
	}
	listed, err := readMutants(root, all)
	if err != nil {
		return err
	}
	explained, err := readSurvivors(root)
	if err != nil {
		return err
	}

	rows := choose(all)
	src := newSource(root)
	for i := range rows {
		if err := rows[i].candidates(src, listed); err != nil {
			return err
		}
	}
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := &build{root: root, dir: dir, tests: map[string]string{}}
	if err := b.overlay(ctx, rows); err != nil {
		return err
	}
	r := newRunner(b)
	r.baseline(ctx, rows)
	r.run(ctx, rows)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return r.summary(rows, explained)
}

// choose returns the rows that -rows and -n select and that name a test.
func choose(all []conformance.Row) (rows []*row) {
	for _, r := range all {
		if row := (&row{Row: r}); len(r.Tests) > 0 && wanted(row) {
			rows = append(rows, row)
		}
	}
	if *sample > 0 && *sample < len(rows) {
		slices.SortStableFunc(rows, func(a, b *row) int { return strings.Compare(hash(a.File, a.ID), hash(b.File, b.ID)) })
		rows = rows[:*sample]
	}
	return rows
}

func wanted(r *row) bool {
	if *only == "" {
		return true
	}
	table, _, _ := strings.Cut(r.key(), " ")
	for p := range strings.SplitSeq(*only, ",") {
		if p == table {
			return true
		}
		rest, ok := strings.CutPrefix(r.ID, p)
		if ok && (rest == "" || rest[0] < '0' || rest[0] > '9' || p[len(p)-1] < '0' || p[len(p)-1] > '9') {
			return true
		}
	}
	return false
}
