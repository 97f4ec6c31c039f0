//go:build race

package embed_test

// The engine's own goroutine waits on the link while the application turns: the
// race detector objects.
func init() { raceEnabled = true }
