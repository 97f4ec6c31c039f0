package rpcrdma

import (
	"fmt"
	"testing"
	"time"
)

// TestFailedOfOthers checks that a client whose calls end many connections does not make the server forget the call of
// another, whether it uses one address or all of its network.
func TestFailedOfOthers(t *testing.T) {
	for _, tt := range []struct {
		name string
		peer func(i uint32) string
	}{
		{"one address", func(uint32) string { return "10.0.0.2" }},
		{"a network", func(i uint32) string { return fmt.Sprintf("2001:db8::%x", i) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var f failedCalls
			now := time.Now()
			f.add("10.0.0.1", 7, now)
			for i := range uint32(2 * maxFailed) {
				f.add(tt.peer(i), i, now.Add(time.Duration(i)))
			}
			const last = 2*maxFailed - 1
			f.add(tt.peer(last), last, now.Add(last)) // again: it is one call
			if len(f.m) != maxFailed {
				t.Errorf("%d calls are remembered", len(f.m))
			}
			if !f.take("10.0.0.1", 7, now) {
				t.Error("the call of another client is forgotten")
			}
			if f.take(tt.peer(0), 0, now) || !f.take(tt.peer(last), last, now) {
				t.Error("the oldest call is remembered, or the latest is not")
			}
			for k := range f.m {
				f.take(k.peer, k.xid, now)
			}
			if len(f.m)+len(f.peers) > 0 {
				t.Errorf("%d calls and %d clients and networks are left", len(f.m), len(f.peers))
			}
		})
	}
}
