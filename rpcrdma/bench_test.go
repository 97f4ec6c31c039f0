package rpcrdma_test

import (
	"context"
	"net/netip"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

func BenchmarkNullCall(b *testing.B) {
	g := newRig(b, nil, nil)
	g.ctx = context.Background()
	for b.Loop() {
		_, resp, err := g.do(0, nil, rpcrdma.Call{})
		if err != nil {
			b.Fatal(err)
		}
		resp.Release()
	}
}

// BenchmarkMove moves 1 MiB at a time, 8 at once: by READ-like and WRITE-like calls and, for comparison, by plain
// RDMA Writes and Reads of a connection.
func BenchmarkMove(b *testing.B) {
	const size, parallel = 1 << 20, 4
	calls := func(b *testing.B, f func(g *rig, buf *rpcrdma.Buffer) error) {
		g := newRig(b, nil, nil)
		g.ctx = context.Background()
		g.prog.fixed = true
		b.SetBytes(size)
		b.SetParallelism(parallel)
		b.RunParallel(func(pb *testing.PB) {
			buf, err := g.ce.Buffer(g.ctx, size)
			if err != nil {
				b.Error(err)
				return
			}
			defer buf.Release()
			for pb.Next() {
				if err := f(g, buf); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	b.Run("call with a Write chunk", func(b *testing.B) {
		calls(b, func(g *rig, buf *rpcrdma.Buffer) error {
			_, resp, err := g.do(3, func(w *rpc.Writer) { w.U32(size) }, rpcrdma.Call{Results: []int{size}, Into: []*rpcrdma.Buffer{buf}, Reply: 64})
			if err == nil {
				resp.Release()
			}
			return err
		})
	})
	b.Run("call with a Read chunk", func(b *testing.B) {
		calls(b, func(g *rig, buf *rpcrdma.Buffer) error {
			_, resp, err := g.do(2, func(w *rpc.Writer) { w.Item(buf.Bytes()) }, rpcrdma.Call{})
			if err == nil {
				resp.Release()
			}
			return err
		})
	})
	for _, op := range []string{"RDMA Write", "RDMA Read"} {
		b.Run(op, func(b *testing.B) {
			g := newRig(b, nil, nil)
			ctx := context.Background()
			l, err := g.b.Device().Listen(ctx, ":0", nil)
			if err != nil {
				b.Fatal(err)
			}
			defer l.Close()
			accepted := make(chan *iwarp.Conn, 1)
			go func() {
				c, err := l.Accept(ctx)
				if err != nil {
					b.Error(err)
				}
				accepted <- c
			}()
			c, err := g.a.Device().Dial(ctx, netip.AddrPortFrom(g.b.Addr(), l.Addr().Port()).String(), nil)
			if err != nil {
				b.Fatal(err)
			}
			peer := <-accepted
			b.SetBytes(size)
			b.SetParallelism(parallel)
			b.RunParallel(func(pb *testing.PB) {
				far, err := peer.Alloc(ctx, size, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
				if err != nil {
					b.Error(err)
					return
				}
				near, err := c.Alloc(ctx, size, iwarp.AccessLocalWrite)
				if err != nil {
					b.Error(err)
					return
				}
				for pb.Next() {
					if op == "RDMA Read" {
						err = c.Read(ctx, far.Remote(), near.Bytes())
					} else {
						err = c.Write(ctx, far.Remote(), near.Bytes())
					}
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
			c.Close()
			peer.Close()
		})
	}
}
