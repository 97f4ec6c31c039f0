package testenv

import (
	"os"
	"strconv"
	"testing"
)

// Count returns how many times a test that runs over seeds should do so: the
// number in the environment variable name, else def.
func Count(t testing.TB, name string, def int) int {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s: want a number of runs", name, s)
	}
	return n
}
