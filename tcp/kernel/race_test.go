//go:build linux && race

package kernel

func init() { raceEnabled = true }
