package dataplane

import (
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/dataplane/link"
)

// TestSilentWorker checks that a worker that does not turn is named.
func TestSilentWorker(t *testing.T) {
	a, _ := newPipe(t, link.PipeConfig{})
	e, err := New(Config{}, []Queue{{Link: a, CPU: -1}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	conns, silent := e.QueryConns(nil) // it was not started
	if len(conns) != 0 || !slices.Equal(silent, []int{0}) {
		t.Errorf("%d connections, silent %v; want 0", len(conns), silent)
	}
	for _, w := range e.workers {
		w.closeFDs()
	}
}
