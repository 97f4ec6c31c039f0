package rpcrdma

import (
	"testing"
	"time"
)

// TestFailedOfOthers checks that a client whose calls end many connections does not make the server forget the call of
// another.
func TestFailedOfOthers(t *testing.T) {
	var f failedCalls
	now := time.Now()
	f.add("10.0.0.1", 7, now)
	for i := range uint32(2 * maxFailed) {
		f.add("10.0.0.2", i, now.Add(time.Duration(i)))
	}
	if len(f.m) != maxFailed {
		t.Errorf("%d calls are remembered", len(f.m))
	}
	if !f.take("10.0.0.1", 7, now) {
		t.Error("the call of another client is forgotten")
	}
	if f.take("10.0.0.2", 0, now) || !f.take("10.0.0.2", 2*maxFailed-1, now) {
		t.Error("the oldest call is remembered, or the latest is not")
	}
}
