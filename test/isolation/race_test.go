//go:build race

package isolation

// raceEnabled: this binary has the race detector in it.
const raceEnabled = true
