package rpcrdma_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// The program of the tests. Procedures:
//
//	0 null
//	1 echo: inline opaque to inline opaque
//	2 put:  DDP-eligible opaque to its sum
//	3 get:  length to DDP-eligible opaque of that length
//	4 both: DDP-eligible opaque to the same
//	5 note: call-only
const prog = 0x20000099

type program struct {
	mu    sync.Mutex
	notes int
}

func sum(b []byte) (s uint32) {
	for i, x := range b {
		s += uint32(x) * uint32(i+1)
	}
	return s
}

func fill(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7) + byte(i>>8) + seed
	}
	return b
}

func (p *program) serve(ctx context.Context, r *rpc.Request) rpc.Status {
	switch r.Proc {
	case 0:
	case 1:
		r.Reply.Opaque(r.Args.Opaque(1 << 20))
	case 2:
		b := r.Args.Opaque(4 << 20)
		r.Reply.U32(uint32(len(b)), sum(b))
	case 3:
		n := int(r.Args.U32())
		if n > 4<<20 {
			return rpc.GarbageArgs
		}
		if n == 0 {
			r.Reply.Item(nil)
			break
		}
		b, err := r.Buffer(n)
		if err != nil {
			return rpc.SystemErr
		}
		copy(b, fill(n, 3))
		r.Reply.Item(b)
	case 4:
		r.Reply.Item(r.Args.Opaque(4 << 20))
	case 5:
		p.mu.Lock()
		p.notes++
		p.mu.Unlock()
		r.Reply.Body = nil
	default:
		return rpc.ProcUnavail
	}
	if r.Args.Err() != nil {
		return rpc.GarbageArgs
	}
	return rpc.Success
}

type rig struct {
	t    testing.TB
	ctx  context.Context
	a, b *embed.Node
	ce   *rpcrdma.Endpoint
	se   *rpcrdma.Endpoint
	l    *rpcrdma.Listener
	c    *rpcrdma.Client
	prog *program
}

func newRig(t testing.TB, client, server func(*rpcrdma.Config)) *rig {
	t.Helper()
	a, b, err := embed.Pair(embed.PairConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	g := &rig{t: t, ctx: ctx, a: a, b: b, prog: &program{}}
	scfg, ccfg := rpcrdma.DefaultConfig(true), rpcrdma.DefaultConfig(false)
	scfg.Pool, ccfg.Pool = 16<<20, 16<<20
	scfg.Server = &rpc.Server{}
	scfg.Server.Register(prog, rpc.Program{Low: 1, High: 1, Serve: g.prog.serve})
	if server != nil {
		server(&scfg)
	}
	if client != nil {
		client(&ccfg)
	}
	if g.se, err = rpcrdma.New(ctx, b.Device(), scfg); err != nil {
		t.Fatal(err)
	}
	if g.ce, err = rpcrdma.New(ctx, a.Device(), ccfg); err != nil {
		t.Fatal(err)
	}
	if g.l, err = g.se.Listen(ctx, fmt.Sprintf("%v:%d", b.Addr(), rpcrdma.Port)); err != nil {
		t.Fatal(err)
	}
	g.c = g.ce.Dial(g.l.Addr())
	t.Cleanup(func() {
		cancel()
		g.c.Close()
		if err := g.ce.Close(); err != nil {
			t.Error("close client:", err)
		}
		g.l.Close()
		if err := g.se.Close(); err != nil {
			t.Error("close server:", err)
		}
		a.Close()
		b.Close()
	})
	return g
}

func (g *rig) do(proc uint32, args func(*rpc.Writer), q rpcrdma.Call) (*rpc.Reader, *rpcrdma.Response, error) {
	return g.c.Do(g.ctx, rpc.Call{Prog: prog, Vers: 1, Proc: proc}, args, q)
}

func (g *rig) check(n int) {
	t := g.t
	t.Helper()
	data := fill(n, 1)
	r, resp, err := g.do(1, func(w *rpc.Writer) { w.Opaque(data) }, rpcrdma.Call{Reply: n + 64})
	if err != nil {
		t.Fatalf("echo of %d: %v", n, err)
	}
	if got := r.Opaque(1 << 20); !bytes.Equal(got, data) || r.Err() != nil || r.Left() != 0 {
		t.Fatalf("echo of %d: %d octets, %v", n, len(got), r.Err())
	}
	resp.Release()
	if r, resp, err = g.do(2, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{}); err != nil {
		t.Fatalf("put of %d: %v", n, err)
	}
	if k, s := r.U32(), r.U32(); int(k) != n || s != sum(data) {
		t.Fatalf("put of %d: %d octets with sum %d, not %d", n, k, s, sum(data))
	}
	resp.Release()
	if r, resp, err = g.do(3, func(w *rpc.Writer) { w.U32(uint32(n)) }, rpcrdma.Call{Results: []int{n + 5}, Reply: 64}); err != nil {
		t.Fatalf("get of %d: %v", n, err)
	}
	if got := r.Result(1 << 22); !bytes.Equal(got, fill(n, 3)) || r.Err() != nil {
		t.Fatalf("get of %d: %d octets, %v", n, len(got), r.Err())
	}
	resp.Release()
	if r, resp, err = g.do(4, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{Results: []int{n}, Reply: 64}); err != nil {
		t.Fatalf("both of %d: %v", n, err)
	}
	if got := r.Result(1 << 22); !bytes.Equal(got, data) || r.Err() != nil {
		t.Fatalf("both of %d: %d octets, %v", n, len(got), r.Err())
	}
	resp.Release()
}

var sizes = []int{0, 1, 2, 3, 4, 5, 63, 255, 256, 257, 900, 1000, 1023, 1024, 1025, 3900, 4000, 4032, 4040, 4044, 4048, 4052, 4056, 4060, 4064, 4068, 4096, 4097, 8192, 20000, 32000, 65536, 200001}

func TestSizesAndFormats(t *testing.T) {
	for _, v := range []struct {
		name           string
		client, server int
	}{{"2", 2, 2}, {"1", 1, 2}, {"fallback", 2, 1}} {
		t.Run("version "+v.name, func(t *testing.T) {
			g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version = v.client }, func(c *rpcrdma.Config) { c.Session.Version = v.server })
			for _, n := range sizes {
				g.check(n)
			}
			conn, err := g.c.Conn(g.ctx)
			if err != nil || conn.Version() != min(v.client, v.server) {
				t.Fatal(conn.Version(), err)
			}
			t.Logf("client %+v", conn.Counters())
			for _, s := range g.se.Conns() {
				t.Logf("server %+v", s.Counters())
			}
		})
	}
}

func TestConcurrent(t *testing.T) {
	for _, v := range []int{1, 2} {
		g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version = v }, nil)
		var wg sync.WaitGroup
		rnd := rand.New(rand.NewPCG(1, uint64(v)))
		for range 64 {
			n := rnd.IntN(30000)
			wg.Go(func() {
				for range 3 {
					g.check(n)
				}
			})
		}
		wg.Wait()
	}
}

func TestStatuses(t *testing.T) {
	g := newRig(t, nil, nil)
	for _, c := range []struct {
		head rpc.Call
		want error
	}{
		{rpc.Call{Prog: prog, Vers: 1, Proc: 99}, rpc.ProcUnavail},
		{rpc.Call{Prog: prog, Vers: 2}, rpc.ProgMismatch},
		{rpc.Call{Prog: 5}, rpc.ProgUnavail},
		{rpc.Call{Prog: prog, Vers: 1, Proc: 1}, rpc.GarbageArgs},
	} {
		if _, _, err := g.c.Do(g.ctx, c.head, nil, rpcrdma.Call{}); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v", c.head, err)
		}
	}
}

func TestProperties(t *testing.T) {
	g := newRig(t, func(c *rpcrdma.Config) {
		c.Session.Props.RecvSize, c.Session.Props.SendSize, c.Session.Props.Segments = 8192, 16384, 7
		for range 60 { // more than a message
			c.Session.Extra = append(c.Session.Extra, wire.Prop{ID: 1000, Data: make([]byte, 200)})
		}
	}, func(c *rpcrdma.Config) { c.Session.Props.SegmentSize = 50000 })
	for _, n := range sizes {
		g.check(n)
	}
	conn, _ := g.c.Conn(g.ctx)
	if p := conn.Properties(); p.SegmentSize != 50000 {
		t.Errorf("the server's: %+v", p)
	}
	for _, s := range g.se.Conns() {
		if p := s.Properties(); p.RecvSize != 8192 || p.Segments != 7 {
			t.Errorf("the client's: %+v", p)
		}
	}
}

var _ = session.ErrAuth
