//go:build race

package embed_test

// The engine's own goroutine would wait on the link while the application turns it, which the race detector reports.
func init() { raceEnabled = true }
