package nfs_test

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// mountOn mounts a server of which serve answers all calls except FSINFO.
func mountOn(t *testing.T, ctx context.Context, serve func(*rpc.Request)) *nfs.Client {
	t.Helper()
	a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	cfg := rpcrdma.DefaultConfig(true)
	cfg.Server = &rpc.Server{}
	cfg.Server.Register(nfs.ProgramMount, rpc.Program{Low: 3, High: 3, Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
		r.Reply.U32(0)
		r.Reply.String("root")
		r.Reply.U32(0)
		return rpc.Success
	}})
	cfg.Server.Register(nfs.ProgramNFS, rpc.Program{Low: 3, High: 3, Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
		if r.Proc == 19 {
			r.Reply.U32(0, 0, 4096, 4096, 1, 4096, 4096, 1, 4096, 0, 1, 0, 1, 0)
		} else {
			serve(r)
		}
		return rpc.Success
	}})
	s, err := rpcrdma.New(ctx, b.Device(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	l, err := s.Listen(ctx, netip.AddrPortFrom(b.Addr(), 0).String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	e, err := rpcrdma.New(ctx, a.Device(), rpcrdma.DefaultConfig(false))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { e.Close() })
	c := e.Dial(l.Addr())
	t.Cleanup(func() { c.Close() })
	n, err := nfs.Mount(ctx, c, "/")
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestStandstill checks that a server that returns the same parts of a directory over and over does not keep its client
// forever.
func TestStandstill(t *testing.T) {
	for _, c := range []struct {
		what string
		next map[uint64]uint64 // the cookie of the entry after that of the key; none for the last
		seen int
	}{
		{"no entries", nil, 0},
		{"one entry", map[uint64]uint64{0: 9, 9: 9}, 2},
		{"cookies that alternate", map[uint64]uint64{0: 8, 8: 9, 9: 8}, 3},
		{"from the start again", map[uint64]uint64{0: 8, 8: 9, 9: 0}, 3},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		seen := 0
		n := mountOn(t, ctx, func(r *rpc.Request) {
			r.Args.Opaque(64)
			r.Reply.U32(0, 0, 0, 0)
			if next, ok := c.next[r.Args.U64()]; ok {
				r.Reply.U32(1, 0, 7)
				r.Reply.String("entry")
				r.Reply.U64(next)
				r.Reply.U32(0, 0)
			}
			r.Reply.U32(0, 0)
		})
		err := n.List(ctx, n.Root(), func(nfs.Info) error {
			if seen++; seen > c.seen {
				return context.Canceled
			}
			return nil
		})
		if err == nil || seen != c.seen {
			t.Errorf("%s: %d seen, not %d, %v", c.what, seen, c.seen, err)
		}
	}
}

// TestEmptyReply checks that a reply without a status is an error of its own, not one with the status NFS3_OK.
func TestEmptyReply(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	n := mountOn(t, ctx, func(*rpc.Request) {})
	if _, err := n.Getattr(ctx, n.Root()); !errors.Is(err, rpc.ErrXDR) {
		t.Errorf("%v; want %v", err, rpc.ErrXDR)
	}
}

// TestShortWriteLost checks that Put writes again what a server wrote only in part, and lost by a restart before it wrote
// the rest.
func TestShortWriteLost(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	verf := uint64(1)
	file, writes := make([]byte, 100), 0
	n := mountOn(t, ctx, func(r *rpc.Request) {
		mu.Lock()
		defer mu.Unlock()
		r.Reply.U32(0, 0, 0)
		switch r.Proc {
		case pWrite:
			r.Args.Opaque(64)
			off := r.Args.U64()
			r.Args.U64()
			data := r.Args.Opaque(100)
			if writes++; writes == 1 {
				data = data[:50]
			} else if writes == 2 { // it has restarted
				clear(file)
				verf++
			}
			copy(file[off:], data)
			r.Reply.U32(uint32(len(data)), 0)
		}
		r.Reply.U64(verf)
	})
	want := bytes.Repeat([]byte("data"), 25)
	if k, err := n.Put(ctx, n.Root(), bytes.NewReader(want)); err != nil || k != 100 {
		t.Fatal(k, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !bytes.Equal(file, want) {
		t.Errorf("the server has %q", file)
	}
}

// TestBusy checks that a call that the server is too busy for is made again, as a new one, and ends with its context.
func TestBusy(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var busy atomic.Int32
	var mu sync.Mutex
	xids := make(map[uint32]bool)
	n := mountOn(t, ctx, func(r *rpc.Request) {
		mu.Lock()
		xids[r.XID] = true
		mu.Unlock()
		if busy.Add(-1) >= 0 {
			r.Reply.U32(uint32(nfsv3.NFS3ERR_JUKEBOX), 0, 0)
		} else {
			r.Reply.U32(0, 0, 0)
			r.Reply.U64(7)
		}
	})
	busy.Store(2)
	if verf, err := n.Commit(ctx, n.Root()); err != nil || verf != 7 {
		t.Errorf("%d, %v", verf, err)
	}
	mu.Lock()
	if len(xids) != 3 {
		t.Errorf("%d calls, not 3", len(xids))
	}
	mu.Unlock()
	busy.Store(math.MaxInt32)
	short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	if _, err := n.Commit(short, n.Root()); err == nil || ctx.Err() != nil {
		t.Errorf("a server that stays busy: %v", err)
	}
}
