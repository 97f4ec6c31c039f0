//go:build race

package bench

// underRace: the detector slows copies and sums many times over.
const underRace = true
