package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/iwarpd/iwarpd/internal/conformance"
)

var errBroken = errors.New("does not compile")

// verdict is the result of a mutant.
type verdict int

const (
	broken verdict = iota // does not compile
	killed                // by a test of its row
	survived
)

type result struct {
	m       *mutant
	verdict verdict
	by      conformance.Name
}

// test is a test with what is known of it without a mutant.
type test struct {
	name conformance.Name
	once sync.Once
	took time.Duration
	err  error // why it proves nothing: it fails, skips, or takes too long
}

type runner struct {
	b      *build
	mu     sync.Mutex
	tests  map[conformance.Name]*test
	serial sync.Mutex   // held for tests that make namespaces or daemons
	alone  sync.RWMutex // write-locked by a test that no other test of this program may disturb

	cache sync.Map // mutant id and test: whether it fails
}

func newRunner(b *build) *runner {
	return &runner{b: b, tests: map[conformance.Name]*test{}}
}

// each calls f for all rows, in -jobs goroutines.
func (r *runner) each(ctx context.Context, rows []*row, f func(*row)) {
	var wg sync.WaitGroup
	sem := make(chan struct{}, *jobs)
	for _, row := range rows {
		sem <- struct{}{}
		if ctx.Err() != nil {
			break
		}
		wg.Go(func() {
			defer func() { <-sem }()
			f(row)
		})
	}
	wg.Wait()
}

// baseline runs every test of the rows without a mutant.
func (r *runner) baseline(ctx context.Context, rows []*row) {
	r.each(ctx, rows, func(row *row) {
		for _, n := range row.Tests {
			r.test(ctx, n)
		}
	})
}

// test returns a test after it has run without a mutant.
func (r *runner) test(ctx context.Context, n conformance.Name) *test {
	r.mu.Lock()
	t := r.tests[n]
	if t == nil {
		t = &test{name: n}
		r.tests[n] = t
	}
	r.mu.Unlock()
	t.once.Do(func() {
		o, err := r.exec(ctx, n, nil, *limit, false)
		if err == nil && o.fails { // the load of the machine may be the reason
			o, err = r.exec(ctx, n, nil, 3**limit, true)
		}
		t.took = o.took
		switch {
		case err != nil:
			t.err = err
		case o.late || o.cpu >= *limit:
			t.err = fmt.Errorf("takes over %v", *limit)
		case o.fails:
			t.err = fmt.Errorf("fails without a mutant:\n%s", tail(o.out))
		case bytes.Contains(o.out, []byte("no tests to run")):
			t.err = errors.New("has no such case")
		case regexp.MustCompile(`(?m)^--- SKIP`).Match(o.out):
			t.err = errors.New("skips here")
		}
		if t.err != nil {
			fmt.Fprintf(os.Stderr, "mutate: %v %v\n", n, t.err)
		}
	})
	return t
}

func tail(out []byte) []byte { return out[max(0, len(out)-1500):] }

// outcome is the result of a run of a test.
type outcome struct {
	out       []byte // the end of its output
	fails     bool   // or it did not end
	late      bool   // it did not end within the limit
	hungry    bool   // it was ended because memory ran out
	took, cpu time.Duration
}

// exec runs a test, alone or concurrently with others.
func (r *runner) exec(ctx context.Context, n conformance.Name, m *mutant, limit time.Duration, alone bool) (o outcome, err error) {
	bin, overlay, err := r.b.binary(ctx, n.Dir, m)
	if err != nil {
		return o, err
	}
	switch {
	case alone:
		r.alone.Lock()
		defer r.alone.Unlock()
	case heavy(n.Dir):
		r.serial.Lock()
		defer r.serial.Unlock()
		fallthrough
	default:
		r.alone.RLock()
		defer r.alone.RUnlock()
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	run := "^" + n.Name + "$"
	if n.Case != "" {
		run += "/^" + strings.ReplaceAll(strings.Map(space, regexp.QuoteMeta(n.Case)), "/", "$/^")
	}
	cmd := exec.CommandContext(limited, bin, "-test.run", run, "-test.v", "-test.timeout", (limit + time.Second).String())
	cmd.Dir = filepath.Join(r.b.root, n.Dir)
	cmd.Env = append(os.Environ(), "GOFLAGS=-pgo=off -overlay="+overlay, "GOTRACEBACK=none", "GOMEMLIMIT=2GiB")
	if m != nil && !m.place.constant {
		cmd.Env = append(cmd.Env, fmt.Sprintf("MUTANT=%d", m.id))
	}
	// Use a process group, so that what the test has started ends with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	var buf tailBuffer
	cmd.Stdout, cmd.Stderr = &buf, &buf
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return o, err
	}
	// If the kernel runs out of memory, it ends this process before others.
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid), []byte("1000"), 0)
	ended, hungry := make(chan struct{}), make(chan bool)
	go func() { hungry <- watchMemory(ended, cancel) }()
	_ = cmd.Wait()
	close(ended)
	s := cmd.ProcessState
	o = outcome{out: buf.Bytes(), fails: !s.Success(), late: limited.Err() == context.DeadlineExceeded, hungry: <-hungry,
		took: time.Since(began), cpu: s.UserTime() + s.SystemTime()}
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	return o, ctx.Err()
}

// watchMemory calls end and returns true when less than an eighth of the machine's memory is left. A mutant may
// allocate without bound, also shared memory, which no limit of a process covers. It returns when stop is closed.
func watchMemory(stop <-chan struct{}, end func()) (ended bool) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return ended
		case <-tick.C:
		}
		b, _ := os.ReadFile("/proc/meminfo")
		var total, free uint64
		for l := range strings.Lines(string(b)) {
			_, _ = fmt.Sscanf(l, "MemTotal: %d", &total)
			_, _ = fmt.Sscanf(l, "MemAvailable: %d", &free)
		}
		if free < total/8 && !ended {
			ended = true
			end()
		}
	}
}

func space(r rune) rune {
	if r == ' ' {
		return '_'
	}
	return r
}

// tailBuffer keeps the end of what a mutant prints, which may be endless.
type tailBuffer struct{ bytes.Buffer }

func (l *tailBuffer) Write(b []byte) (int, error) {
	if l.Len() > 1<<20 {
		l.Next(l.Len() / 2)
	}
	return l.Buffer.Write(b)
}

// heavy reports whether tests of a folder make namespaces or daemons, and therefore run one at a time.
func heavy(dir string) bool {
	return strings.HasPrefix(dir, "test/") || dir == "client/embed" || strings.HasPrefix(dir, "cmd/") || dir == "dataplane/xsk"
}

// kills reports whether a test fails with a mutant. With again it runs the test even if the result is known.
func (r *runner) kills(ctx context.Context, n conformance.Name, m *mutant, again bool) (bool, error) {
	t := r.test(ctx, n)
	if t.err != nil {
		return false, nil
	}
	key := fmt.Sprint(m.id, n)
	if v, ok := r.cache.Load(key); ok && !again {
		return v.(bool), nil
	}
	o, err := r.exec(ctx, n, m, 5*time.Second+4*t.took, false)
	if err == nil && o.hungry { // another test's mutant may be the reason
		o, err = r.exec(ctx, n, m, 5*time.Second+4*t.took, true)
	}
	if err != nil {
		return false, err
	}
	r.cache.Store(key, o.fails)
	return o.fails, nil
}

func (r *runner) run(ctx context.Context, rows []*row) {
	var mu sync.Mutex
	done := 0
	r.each(ctx, rows, func(row *row) {
		r.row(ctx, row)
		mu.Lock()
		defer mu.Unlock()
		if done++; done%50 == 0 {
			fmt.Fprintf(os.Stderr, "mutate: %d of %d rows\n", done, len(rows))
		}
	})
}

// row tries the mutants of a row: all of mutants.txt, and the others until a test fails. What would be reported as an
// error is tried twice, so that it does not depend on chance, such as which goroutine runs first.
func (r *runner) row(ctx context.Context, row *row) {
	for _, again := range []bool{false, true} {
		for _, m := range row.mutants {
			i := slices.IndexFunc(row.results, func(res result) bool { return res.m == m })
			switch {
			case row.killed && !m.listed, again && i < 0, again && row.results[i].verdict == killed:
				continue
			}
			res := r.try(ctx, row, m, again)
			if res.verdict == broken {
				continue
			}
			if i >= 0 {
				row.results[i] = res
			} else {
				row.results = append(row.results, res)
			}
			row.killed = row.killed || res.verdict == killed
			if *verbose {
				fmt.Printf("%s: %s: %s %v\n", row.key(), m.key(), [...]string{"broken", "killed", "survived"}[res.verdict], res.by)
			}
		}
	}
}

func (r *runner) try(ctx context.Context, row *row, m *mutant, again bool) result {
	if m.broken {
		return result{m: m}
	}
	own := r.sorted(ctx, row.Tests)
	for _, n := range own {
		fails, err := r.kills(ctx, n, m, again)
		if errors.Is(err, errBroken) {
			return result{m: m}
		}
		if fails {
			return result{m, killed, n}
		}
	}
	return result{m: m, verdict: survived}
}

// sorted puts the fast tests first.
func (r *runner) sorted(ctx context.Context, names []conformance.Name) []conformance.Name {
	out := slices.Clone(names)
	for _, n := range out {
		r.test(ctx, n)
	}
	slices.SortStableFunc(out, func(a, b conformance.Name) int {
		return int(r.test(ctx, a).took.Milliseconds()/50 - r.test(ctx, b).took.Milliseconds()/50)
	})
	return out
}

// summary prints the report. It counts as errors the mutants of mutants.txt that survive without a reason in
// survivors.txt, and the rows whose tests notice none of their mutants.
func (r *runner) summary(rows []*row, explained map[string]string) error {
	w := io.Writer(os.Stdout)
	if *report != "" {
		f, err := os.Create(*report)
		if err != nil {
			return err
		}
		defer f.Close()
		w = io.MultiWriter(w, f)
	}
	files := map[string]*tally{}
	var open, unproven []string
	for _, row := range rows {
		c := files[row.File]
		if c == nil {
			c = &tally{}
			files[row.File] = c
		}
		for _, key := range c.count(row) {
			if why := explained[key]; why != "" {
				fmt.Fprintf(w, "survived: %s: %s\n", key, why)
			} else {
				open = append(open, key)
			}
		}
		switch key := row.key(); {
		case row.killed:
		case row.Reason && !slices.ContainsFunc(row.results, func(r result) bool { return r.m.listed }):
		case explained[key] != "":
			fmt.Fprintf(w, "not noticed: %s: %s\n", key, explained[key])
		case len(row.results) == 0:
			unproven = append(unproven, key+": no mutant of "+names(row.Code))
		default:
			unproven = append(unproven, key+": "+names(row.Tests))
		}
	}
	for _, t := range sortedTests(r.tests) {
		if t.err != nil {
			fmt.Fprintf(w, "test not used: %v %s\n", t.name, strings.Split(t.err.Error(), "\n")[0])
		}
	}
	print := func(what string, list []string) {
		slices.Sort(list)
		for _, s := range list {
			fmt.Fprintf(w, "%s: %s\n", what, s)
		}
	}
	print("no test of the row notices a mutant", unproven)
	print("survived, unexplained", open)
	var all tally
	line := func(name string, c *tally) {
		fmt.Fprintf(w, "%-24s %4d rows; mutants of mutants.txt: %d killed, %d survived; derived: %d, %d of them noticed\n",
			name, c.rows, c.listed-c.survived, c.survived, c.derived, c.noticed)
	}
	for _, f := range slices.Sorted(maps.Keys(files)) {
		c := files[f]
		line(f, c)
		all.rows, all.listed, all.survived = all.rows+c.rows, all.listed+c.listed, all.survived+c.survived
		all.derived, all.noticed = all.derived+c.derived, all.noticed+c.noticed
	}
	line("all", &all)
	rate := 100 * float64(all.survived) / float64(max(all.listed, 1))
	fmt.Fprintf(w, "%d mutants; of those of mutants.txt %.1f %% survived; %d rows without a mutant that their tests notice\n",
		all.listed+all.derived, rate, len(unproven))
	switch {
	case len(open) > 0:
		return fmt.Errorf("%d survivors that test/mutate/survivors.txt does not explain", len(open))
	case len(unproven) > 0:
		return fmt.Errorf("%d rows whose tests notice no mutant", len(unproven))
	case rate >= *most:
		return fmt.Errorf("%.1f %% survived; at most %g may", rate, *most)
	}
	return nil
}

// A tally counts rows and their mutants: those of mutants.txt, which are listed, and derived ones.
type tally struct{ rows, listed, survived, derived, noticed int }

// count adds a row. It returns the listed mutants that survived.
func (c *tally) count(row *row) (keys []string) {
	c.rows++
	for _, res := range row.results {
		if !res.m.listed {
			c.derived++
			if res.verdict == killed {
				c.noticed++
			}
			continue
		}
		c.listed++
		if res.verdict == survived {
			c.survived++
			keys = append(keys, row.key()+": "+res.m.key())
		}
	}
	return keys
}

func names(list []conformance.Name) string {
	var s []string
	for _, n := range list {
		s = append(s, n.String())
	}
	return strings.Join(s, ", ")
}

func sortedTests(m map[conformance.Name]*test) []*test {
	out := make([]*test, 0, len(m))
	for _, t := range m {
		out = append(out, t)
	}
	slices.SortFunc(out, func(a, b *test) int { return strings.Compare(a.name.String(), b.name.String()) })
	return out
}
