//go:build !race

package testenv

// Race reports whether the test was built with the race detector, which slows most code several
// times over and allocates.
const Race = false
