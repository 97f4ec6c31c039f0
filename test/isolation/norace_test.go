//go:build !race

package isolation

// raceEnabled reports whether this binary has the race detector.
const raceEnabled = false
