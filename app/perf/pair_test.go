package perf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// server runs a perf server on one of two embedded nodes that are connected by a pipe. It returns the other node and
// the server's address.
func server(t *testing.T) (client *embed.Node, addr string) {
	t.Helper()
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	addr = fmt.Sprintf("%v:%d", b.Addr(), DefaultPort)
	l, err := b.Device().Listen(ctx, addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- Serve(ctx, b.Device(), l, func(peer netip.AddrPort, err error) {
			if err != nil && ctx.Err() == nil {
				t.Errorf("server: %v: %v", peer, err)
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve: %v", err)
		}
		l.Close()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return a, addr
}

// Every operation and mode, by count and by time.
func TestMeasure(t *testing.T) {
	node, addr := server(t)
	for _, op := range []Op{Write, Read, Send} {
		for _, mode := range []Mode{Bandwidth, Latency} {
			for _, p := range []Params{
				{Size: 64, Depth: 1, Count: 50}, {Size: 64, Depth: 256, Count: 1000}, {Size: 100000, Depth: 7, Count: 20},
				{Size: 1, Depth: 32, Count: 1}, {Size: 4096, Depth: 4, Count: 20, QPs: 5}, {Size: 1 << 20, Depth: 32, Duration: 50 * time.Millisecond}, {Size: 4096, Depth: 16, Duration: 20 * time.Millisecond},
			} {
				p.Op, p.Mode = op, mode
				t.Run(fmt.Sprintf("%v %v %d deep %d", op, mode, p.Size, p.Depth), func(t *testing.T) {
					ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
					defer cancel()
					r, err := Client(ctx, node.Device(), addr, p, nil)
					if err != nil {
						t.Fatal(err)
					}
					if p.Count > 0 && r.Operations != int64(p.Count*max(p.QPs, 1)) || r.QPs != max(p.QPs, 1) || r.Least > r.Most || r.Operations == 0 || r.OpsPerSec <= 0 || (r.Latency != nil) != (mode == Latency) {
						t.Errorf("result %+v", r)
					}
				})
			}
		}
	}
}

// TestBidirectional checks that Writes and Reads run at the same time, and that they are counted meanwhile.
func TestBidirectional(t *testing.T) {
	node, addr := server(t)
	p := Params{Op: Write, Mode: Bandwidth, Size: 4096, Depth: 8, Count: 400, QPs: 2, Bidirectional: true, Done: new(atomic.Int64)}
	r, err := Client(t.Context(), node.Device(), addr, p, nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Op != "write+read" || r.QPs != 4 || r.Operations != 1600 || r.Least != 400 || r.Most != 400 {
		t.Errorf("result %+v", r)
	}
	if n := p.Done.Load(); n < 1600-4*8 || n > 1600+4*8 { // the last ones complete together
		t.Errorf("counted %d operations", n)
	}
	for _, p := range []Params{{Op: Send, Mode: Bandwidth}, {Op: Write, Mode: Latency}} {
		p.Size, p.Depth, p.Count, p.Bidirectional = 64, 1, 1, true
		if _, err := Client(t.Context(), node.Device(), addr, p, nil); err == nil {
			t.Errorf("%v %v in both directions is accepted", p.Op, p.Mode)
		}
	}
}

// A server reports why it refuses.
func TestRefused(t *testing.T) {
	node, addr := server(t)
	if _, err := Client(t.Context(), node.Device(), addr, Params{Op: Write, Mode: Bandwidth, Size: 0, Depth: 1, Count: 1}, nil); err == nil {
		t.Error("size 0 accepted")
	}
}

// TestRefusalText checks that the text of a peer is quoted without a pair of quotes that would keep its "iwarp: ", and
// without control characters.
func TestRefusalText(t *testing.T) {
	err := refused(&iwarp.RejectError{PrivateData: appendRefusal("iwarp: no memory\x1b")})
	if want := `: it says: iwarp: no memory\u001b`; !strings.HasSuffix(err.Error(), want) || !errors.Is(err, iwarp.ErrRejected) {
		t.Errorf("%v; want it to end with %s", err, want)
	}
}
