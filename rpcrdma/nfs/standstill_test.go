package nfs_test

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// TestStandstill checks that a server that returns the same part of a directory over and over does not keep its client
// forever.
func TestStandstill(t *testing.T) {
	for _, entries := range []int{0, 1} {
		a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets()})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		defer b.Close()
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
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
				return rpc.Success
			}
			r.Reply.U32(0, 0, 0, 0)
			for range entries {
				r.Reply.U32(1, 0, 7)
				r.Reply.String("entry")
				r.Reply.U32(0, 9, 0, 0)
			}
			r.Reply.U32(0, 0)
			return rpc.Success
		}})
		s, err := rpcrdma.New(ctx, b.Device(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		l, err := s.Listen(ctx, netip.AddrPortFrom(b.Addr(), 0).String())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		e, err := rpcrdma.New(ctx, a.Device(), rpcrdma.DefaultConfig(false))
		if err != nil {
			t.Fatal(err)
		}
		defer e.Close()
		c := e.Dial(l.Addr())
		defer c.Close()
		n, err := nfs.Mount(ctx, c, "/")
		if err != nil {
			t.Fatal(err)
		}
		seen := 0
		if err := n.List(ctx, n.Root(), func(nfs.Info) error { seen++; return nil }); err == nil || ctx.Err() != nil || seen > 2*entries {
			t.Errorf("%d entries: %d seen, %v", entries, seen, err)
		}
	}
}
