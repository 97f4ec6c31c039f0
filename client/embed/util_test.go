package embed_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

func dialAddr(n *embed.Node, l *iwarp.Listener) string {
	return netip.AddrPortFrom(n.Addr(), l.Addr().Port()).String()
}

// until polls for a state that the engine does not notify.
func until(t testing.TB, ctx context.Context, what string, ok func() bool) {
	t.Helper()
	for !ok() {
		if ctx.Err() != nil {
			t.Fatalf("timed out: %s", what)
		}
		time.Sleep(100 * time.Microsecond) // the engine may want this CPU
	}
}
