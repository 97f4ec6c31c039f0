package embed_test

import (
	"regexp"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
)

// TestDrivenEngineSleeps checks that the goroutine of an engine waits for a timer, and not in a system call, while the
// application drives the engine. In a system call it would keep a processor of Go's scheduler, whose monitor then
// interrupts the application ten thousand times a second.
func TestDrivenEngineSleeps(t *testing.T) {
	a, _, _ := pair(t, embed.PairConfig{InlineProgress: true})
	asleep := regexp.MustCompile(`(?s)^goroutine \d+ \[select.*\(\*worker\)\.fillIn`)
	stacks := make([]byte, 1<<20)
	for end := time.Now().Add(30 * time.Second); ; {
		for range 1000 {
			a.Engine().Turn()
		}
		n := runtime.Stack(stacks, true)
		if slices.ContainsFunc(regexp.MustCompile(`\n\n`).Split(string(stacks[:n]), -1), asleep.MatchString) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("no engine sleeps by a timer:\n%s", stacks[:n])
		}
	}
}
