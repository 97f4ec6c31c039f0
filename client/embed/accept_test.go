package embed_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestAcceptLate checks that a listener whose program does not call Accept does not gather connections, each with its
// memory, without limit.
func TestAcceptLate(t *testing.T) {
	a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets()})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	const backlog, tries = 2, 8
	l, err := b.Device().Listen(t.Context(), netip.AddrPortFrom(b.Addr(), 0).String(), &iwarp.Config{Backlog: backlog})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	first := make(chan error)
	go func() {
		_, err := l.Accept(t.Context())
		first <- err
	}()
	made := 0
	for ; made < tries; made++ {
		ctx, cancel := context.WithCancel(t.Context())
		if made > backlog { // the program has taken one, and so many wait
			ctx, cancel = context.WithTimeout(t.Context(), 2*time.Second)
		}
		_, err := a.Device().Dial(ctx, l.Addr().String(), nil)
		cancel()
		if err != nil {
			if made <= backlog {
				t.Fatal(err)
			}
			break
		}
		if made == 0 {
			if err := <-first; err != nil {
				t.Fatal(err)
			}
		}
	}
	if made == tries {
		t.Errorf("%d connections were made; only %d may wait for Accept", made, backlog)
	}
	for range backlog {
		if _, err := l.Accept(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
