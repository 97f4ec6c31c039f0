package rpcrdma

import (
	"context"
	"fmt"
	"net/netip"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
)

// TestReceives checks that a connection has Receives for its window and one more message before it processes the
// first, and two more for errors if it granted no credits for those: that many messages arrive while no completion is
// taken (draft section 4.2.1.1, RFC 8166 section 3.3.1).
func TestReceives(t *testing.T) {
	ctx, a, b := pair(t)
	e := newEndpoint(t, ctx, b.Device(), DefaultConfig(true))
	defer e.Close()
	for i, c := range []struct {
		server        bool
		version, want int // messages besides the window
	}{{true, 2, 1}, {true, 1, 3}, {false, 2, 3}, {false, 1, 3}} {
		for _, window := range []int{1, 2, 5, 64} {
			cfg := session.DefaultConfig(c.server)
			cfg.Version, cfg.Window = c.version, window
			want := max(window, 2) + c.want
			l, err := b.Device().Listen(ctx, fmt.Sprintf("%v:%d", b.Addr(), 5000+100*i+window), nil)
			if err != nil {
				t.Fatal(err)
			}
			dialed := make(chan *iwarp.Conn, 1)
			go func() {
				peer, err := a.Device().Dial(ctx, l.Addr().String(), nil)
				if err != nil {
					t.Error(err)
				}
				dialed <- peer
			}()
			r, err := l.Request(ctx)
			if err != nil {
				t.Fatal(err)
			}
			conn := openConn(t, ctx, e, netip.Addr{}, cfg)
			if _, err := r.Accept(ctx, conn.qp, nil); err != nil {
				t.Fatal(err)
			}
			peer := <-dialed
			if peer == nil {
				t.FailNow()
			}
			for n := range want + 1 { // the last one has no buffer and ends the connection
				if err := peer.Send(ctx, []byte{byte(n)}); err != nil && n < want {
					t.Fatal(n, err)
				}
			}
			over, end := context.WithCancel(ctx)
			go func() {
				<-conn.qp.Done()
				end()
			}()
			got := 0
			var wcs [16]iwarp.WC
			for got <= want {
				n, err := conn.cq.Wait(over, wcs[:])
				if err != nil { // it is over
					n = conn.cq.Poll(wcs[:])
				}
				for _, w := range wcs[:n] {
					if w.ID&recvID != 0 && w.Status == iwarp.WCSuccess {
						got++
					}
				}
				if n == 0 {
					break
				}
			}
			if got != want {
				t.Errorf("server %v, version %d, window %d: %d messages came, not %d", c.server, c.version, window, got, want)
			}
			peer.Close()
			conn.fail(errGone)
			<-conn.done
			l.Close()
		}
	}
}
