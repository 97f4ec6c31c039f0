package dataplane

import (
	"testing"
	"weak"

	"github.com/iwarpd/iwarpd/dataplane/link"
)

// TestCommandsFreed checks that a function that the worker has called is not kept until the next one comes: it may refer to a client.
func TestCommandsFreed(t *testing.T) {
	w := newSim(t, link.PipeConfig{}).hosts[0].w
	post := func() weak.Pointer[ClientBinding] {
		cb := new(ClientBinding)
		w.post(func(*worker) { cb.Doorbells = nil })
		return weak.Make(cb)
	}
	p := post()
	w.turn()
	if !freed(p) {
		t.Error("the worker keeps what a function that it has called refers to")
	}
}
