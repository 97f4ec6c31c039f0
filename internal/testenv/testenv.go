// Package testenv provides helpers for tests: seeds, privileges, programs, network namespaces with
// veth pairs, and detection of leaked goroutines.
package testenv

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Seed returns the seed of a randomized test: TEST_SEED if set, or else a constant. It is logged,
// so that a failure can be reproduced.
func Seed(t testing.TB) uint64 {
	t.Helper()
	seed := uint64(1)
	if s := os.Getenv("TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 0, 64)
		if err != nil {
			t.Fatalf("TEST_SEED: %v", err)
		}
		seed = n
	}
	t.Logf("TEST_SEED=%d", seed)
	return seed
}

// Rand returns a generator seeded by Seed.
func Rand(t testing.TB) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(Seed(t), 0))
}

// Skip skips the test because the machine lacks something. In CI, where the machine is under our
// control, it fails the test instead, so that a skip cannot hide a failure.
func Skip(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("cannot run under CI: "+format, args...)
	}
	t.Skipf(format, args...)
}

// RequireRoot skips a test that needs privileges it does not have.
func RequireRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "needs root")
	}
}

// RequireTool returns the path of a program, and skips the test if it is not installed.
func RequireTool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Skip(t, "needs %s: %v", name, err)
	}
	return path
}

// patience bounds waits for events that must occur, generously, since a machine may be busy.
var patience = time.Minute

// Until polls until ok returns true, for a state of which there is no notification; what describes that state.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for began := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(began) > patience {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// NoGoroutineLeaks fails the test if goroutines of this module are left when the test and its other
// cleanups are done. Call it first.
func NoGoroutineLeaks(t testing.TB) {
	t.Helper()
	before := map[string]bool{}
	for _, g := range goroutines() {
		before[id(g)] = true
	}
	t.Cleanup(func() {
		var left []string
		// A goroutine that is stopping may need a moment.
		for began, wait := time.Now(), time.Millisecond; ; wait = min(2*wait, time.Second) {
			left = left[:0]
			for _, g := range goroutines() {
				if !before[id(g)] && strings.Contains(g, "github.com/iwarpd/iwarpd/") && !strings.Contains(g, "testing.tRunner") {
					left = append(left, g)
				}
			}
			if len(left) == 0 {
				return
			}
			if time.Since(began) > patience {
				break
			}
			time.Sleep(wait)
		}
		t.Errorf("%d goroutines leaked:\n%s", len(left), strings.Join(left, "\n\n"))
	})
}

// goroutines returns the stack of each goroutine except the caller's.
func goroutines() []string {
	buf := make([]byte, 1<<20)
	buf = buf[:runtime.Stack(buf, true)]
	return strings.Split(string(buf), "\n\n")[1:]
}

// id returns the "goroutine 12" of a stack.
func id(stack string) string {
	name, _, _ := strings.Cut(stack, " [")
	return name
}
