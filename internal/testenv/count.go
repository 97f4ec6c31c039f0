package testenv

import (
	"os"
	"strconv"
	"testing"
)

// Count returns the number of seeds, repetitions or connections of a test: the environment variable
// name, or def if that is not set.
func Count(t testing.TB, name string, def int) int {
	t.Helper()
	s := os.Getenv(name)
	if s == "" {
		return def
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s: want a number from 1 on", name, s)
	}
	return n
}
