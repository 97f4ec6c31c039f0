package embed_test

import (
	"context"
	"errors"
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
	l := listen(t, t.Context(), b, netip.AddrPortFrom(b.Addr(), 0).String(), &iwarp.Config{Backlog: backlog})
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

// TestAcceptRefused checks that the peer of a connection whose accept the daemon refuses is told at once.
func TestAcceptRefused(t *testing.T) {
	a, b, ctx := pair(t, embed.PairConfig{})
	l, err := b.Device().Listen(ctx, ":0", nil)
	if err != nil {
		t.Fatal(err)
	}
	dialed := make(chan error, 1)
	go func() {
		_, err := a.Device().Dial(ctx, dialAddr(b, l), nil)
		dialed <- err
	}()
	r, err := l.Request(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.AcceptConn(ctx, &iwarp.Config{PrivateData: make([]byte, 600)}); err == nil {
		t.Error("private data that is too long was accepted")
	}
	if err := <-dialed; !errors.Is(err, iwarp.ErrRejected) {
		t.Errorf("dialed: %v", err)
	}
}

// TestRequestGone checks that a request is gone, and is not returned any more, when its listener or its Device is closed or
// the daemon ends.
func TestRequestGone(t *testing.T) {
	for name, end := range map[string]func(*embed.Node, *iwarp.Device, *iwarp.Listener){
		"listener closed": func(_ *embed.Node, _ *iwarp.Device, l *iwarp.Listener) { l.Close() },
		"device closed":   func(_ *embed.Node, d *iwarp.Device, _ *iwarp.Listener) { d.Close() },
		"daemon gone":     func(n *embed.Node, _ *iwarp.Device, _ *iwarp.Listener) { n.Server().Close() },
	} {
		t.Run(name, func(t *testing.T) {
			a, b, ctx := pair(t, embed.PairConfig{})
			d := newDevice(t, ctx, b)
			defer d.Close()
			l, err := d.Listen(ctx, ":0", nil)
			if err != nil {
				t.Fatal(err)
			}
			for range 2 {
				go a.Device().Dial(ctx, dialAddr(b, l), nil)
			}
			r, err := l.Request(ctx)
			if err != nil {
				t.Fatal(err)
			}
			testenv.Until(t, "the other request is there too", func() bool {
				listens, err := b.Device().Admin().Listens(ctx)
				return err == nil && len(listens) == 1 && listens[0].Waiting == 2
			})
			if _, err := d.AllocPD(ctx); err != nil { // its reply comes after the event
				t.Fatal(err)
			}
			end(b, d, l)
			select {
			case <-r.Gone():
			case <-time.After(time.Minute):
				t.Error("the request is not gone")
			}
			if r, err := l.Request(ctx); err == nil {
				t.Errorf("the request of %v is still there", r.Remote)
			}
		})
	}
}
