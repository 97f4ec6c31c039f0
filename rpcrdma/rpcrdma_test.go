package rpcrdma_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
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
//	6 long: length to inline opaque of that length
//	7 two:  DDP-eligible opaque, number, another, number to the other, the numbers' sum, the one
//	8 wait: null, when the connection ends
const prog = 0x20000099

type program struct {
	mu    sync.Mutex
	notes int
	fixed bool          // skip generating and checking the data
	waits chan struct{} // one for each wait that has begun
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
		if p.fixed {
			b = b[:min(len(b), 16)]
		}
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
		if !p.fixed {
			copy(b, fill(n, 3))
		}
		r.Reply.Item(b)
	case 4:
		r.Reply.Item(r.Args.Opaque(4 << 20))
	case 5:
		p.mu.Lock()
		p.notes++
		p.mu.Unlock()
		r.Reply.Body = nil
	case 6:
		r.Reply.Opaque(make([]byte, min(r.Args.U32(), 1<<20)))
	case 7:
		a, x, b, y := r.Args.Opaque(4<<20), r.Args.U32(), r.Args.Opaque(4<<20), r.Args.U32()
		r.Reply.Item(b)
		r.Reply.U32(x + y)
		r.Reply.Item(a)
	case 8:
		p.waits <- struct{}{}
		<-ctx.Done()
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
	a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	g := &rig{t: t, ctx: ctx, a: a, b: b, prog: &program{waits: make(chan struct{}, 16)}}
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
	if g.l, err = g.se.Listen(ctx, netip.AddrPortFrom(b.Addr(), 0).String()); err != nil {
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
		t.Fatalf("echo of %d: %d bytes, %v", n, len(got), r.Err())
	}
	resp.Release()
	if r, resp, err = g.do(2, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{}); err != nil {
		t.Fatalf("put of %d: %v", n, err)
	}
	if k, s := r.U32(), r.U32(); int(k) != n || s != sum(data) {
		t.Fatalf("put of %d: %d bytes with sum %d, not %d", n, k, s, sum(data))
	}
	resp.Release()
	if r, resp, err = g.do(3, func(w *rpc.Writer) { w.U32(uint32(n)) }, rpcrdma.Call{Results: []int{n + 5}, Reply: 64}); err != nil {
		t.Fatalf("get of %d: %v", n, err)
	}
	if got := r.Result(1 << 22); !bytes.Equal(got, fill(n, 3)) || r.Err() != nil {
		t.Fatalf("get of %d: %d bytes, %v", n, len(got), r.Err())
	}
	resp.Release()
	if r, resp, err = g.do(4, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{Results: []int{n}, Reply: 64}); err != nil {
		t.Fatalf("both of %d: %v", n, err)
	}
	if got := r.Result(1 << 22); !bytes.Equal(got, data) || r.Err() != nil {
		t.Fatalf("both of %d: %d bytes, %v", n, len(got), r.Err())
	}
	resp.Release()
}

var sizes = []int{0, 1, 2, 3, 4, 5, 63, 255, 256, 257, 900, 1000, 1023, 1024, 1025, 3900, 4000, 4032, 4040, 4044, 4048, 4052, 4056, 4060, 4064, 4068, 4096, 4097, 8192, 20000, 32000, 65536, 200001}

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

// TestReceivesForAllReplies takes no reply from the queue before all have arrived: each must have a receive.
func TestReceivesForAllReplies(t *testing.T) {
	const window = 32
	for _, version := range []int{1, 2} {
		var g *rig
		arrived := func() (fpdus, violations uint64) {
			workers, _ := g.a.Engine().Stats()
			for _, s := range workers {
				fpdus, violations = fpdus+s.RxFPDUs, violations+s.Violations
			}
			return fpdus, violations
		}
		var all atomic.Uint64 // FPDUs received when all replies are; 0 during set-up
		var calls atomic.Int32
		var served program
		together := make(chan struct{}) // closed when all calls have come
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		wait := sync.OnceFunc(func() {
			for n, bad := arrived(); n < all.Load(); n, bad = arrived() {
				if bad > 0 || ctx.Err() != nil {
					t.Errorf("version %d: a reply found no receive", version)
					cancel()
					return
				}
				time.Sleep(time.Millisecond)
			}
		})
		g = newRig(t, func(c *rpcrdma.Config) {
			c.Session.Version, c.Session.Window = version, window
			c.Wire = func(_ *rpcrdma.Conn, sent bool, _ []byte) {
				if !sent && all.Load() > 0 {
					wait()
				}
			}
		}, func(c *rpcrdma.Config) {
			c.Session.Window, c.Server = window, &rpc.Server{}
			c.Server.Register(prog, rpc.Program{Low: 1, High: 1, Serve: func(ctx context.Context, r *rpc.Request) rpc.Status {
				if r.Proc == 0 { // a client that waits in Wire sends no more calls, so all come before the first reply
					if calls.Add(1) == window {
						close(together)
					}
					select {
					case <-together:
					case <-ctx.Done():
					}
				}
				return served.serve(ctx, r)
			}})
		})
		g.ctx = ctx
		g.check(10)
		n, _ := arrived()
		all.Store(n + window)
		var wg sync.WaitGroup
		for range window {
			wg.Go(func() {
				_, resp, err := g.do(0, nil, rpcrdma.Call{})
				if err != nil {
					t.Errorf("version %d: %v", version, err)
					return
				}
				resp.Release()
			})
		}
		wg.Wait()
	}
}

// checker checks the messages of each connection against version 2's credits, as seen by one end.
type checker struct {
	t  *testing.T
	mu sync.Mutex
	m  map[*rpcrdma.Conn]*flow
}

type flow struct{ sent, edge, most uint32 }

func (k *checker) wire(c *rpcrdma.Conn, sent bool, b []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f := k.m[c]
	if f == nil {
		f = &flow{edge: 1}
		k.m[c] = f
	}
	var h wire.Header
	if _, err := h.Decode(b); err != nil || h.Vers != 2 {
		k.t.Errorf("%x: %v", b[:min(len(b), 16)], err)
		return
	}
	if !sent {
		if int32(h.Credit-f.edge) > 0 {
			f.edge = h.Credit
		}
		return
	}
	if d := int32(f.sent - f.edge); d > 0 || d == 0 && h.Type != wire.Grant {
		k.t.Errorf("%v is message %d, with credits up to %d", h.Type, f.sent, f.edge)
	}
	if len(b) > 4096 {
		k.t.Errorf("a message of %d bytes", len(b))
	}
	f.sent++
	f.most = max(f.most, f.edge-f.sent)
}

// TestCreditsOnTheWire has 64 calls in progress, and call-only ones, at windows
// from small to the default.
func TestCreditsOnTheWire(t *testing.T) {
	for _, window := range []int{2, 5, 64} {
		k := &checker{t: t, m: make(map[*rpcrdma.Conn]*flow)}
		set := func(c *rpcrdma.Config) { c.Session.Window, c.Wire = window, k.wire }
		g := newRig(t, set, set)
		conn, err := g.c.Conn(g.ctx)
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				g.check(100 * i)
				var w rpc.Writer
				head := rpc.Call{XID: uint32(1<<30 + i), Prog: prog, Vers: 1, Proc: 5}
				head.Start(&w)
				w.Opaque(make([]byte, 100*i))
				if err := conn.Post(g.ctx, w.Msg); err != nil {
					t.Error(err)
				}
				g.check(9_000)
			})
		}
		wg.Wait()
		k.mu.Lock()
		for _, f := range k.m {
			if f.most > uint32(window) {
				t.Errorf("window %d: %d credits ahead", window, f.most)
			}
			if f.sent < 64 {
				t.Errorf("%d messages", f.sent)
			}
		}
		k.mu.Unlock()
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
		for range 60 { // more than one message holds
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

// TestReverse makes the server call the client, at each level of support.
func TestReverse(t *testing.T) {
	for level := wire.ReverseNone; level <= wire.ReverseGeneral; level++ {
		t.Run(fmt.Sprint("level ", level), func(t *testing.T) {
			back := &program{}
			g := newRig(t, func(c *rpcrdma.Config) {
				c.Session.Props.Reverse = level
				c.Server = &rpc.Server{}
				c.Server.Register(prog, rpc.Program{Low: 1, High: 1, Serve: back.serve})
				c.Iwarp.Startup.ORD = 0 // it reads and writes too
			}, func(c *rpcrdma.Config) { c.Iwarp.Startup.IRD = 0 })
			g.check(100)
			conn := g.se.Conns()[0]
			call := func(xid, proc uint32, args func(*rpc.Writer), q rpcrdma.Call) (*rpc.Reader, error) {
				var w rpc.Writer
				head := rpc.Call{XID: xid, Prog: prog, Vers: 1, Proc: proc}
				head.Start(&w)
				args(&w)
				q.Msg = w.Msg
				resp, err := conn.Call(g.ctx, &q)
				if err != nil {
					return nil, err
				}
				return rpc.ParseReply(resp.Msg)
			}
			echo := func(n int) error {
				data := fill(n, 9)
				r, err := call(uint32(n), 1, func(w *rpc.Writer) { w.Opaque(data) }, rpcrdma.Call{Reply: n + 64})
				if err == nil && !bytes.Equal(r.Opaque(1<<20), data) {
					err = errors.New("other data")
				}
				return err
			}
			item := func() error {
				data := fill(100_000, 9)
				r, err := call(5, 4, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{Results: []int{len(data)}, Reply: 64})
				if err == nil && !bytes.Equal(r.Result(1<<20), data) {
					err = errors.New("other data")
				}
				return err
			}
			for _, c := range []struct {
				name string
				f    func() error
				from wire.Reverse
			}{
				{"simple", func() error { return echo(500) }, wire.ReverseSimple},
				{"continued", func() error { return echo(10000) }, wire.ReverseContinued},
				{"chunks", item, wire.ReverseGeneral},
			} {
				err := c.f()
				if (err == nil) != (level >= c.from) {
					t.Errorf("%s: %v", c.name, err)
				}
				if err != nil && !errors.Is(err, session.ErrReverse) && !errors.Is(err, session.ErrTooLong) {
					t.Errorf("%s: %v", c.name, err)
				}
			}
			g.check(5000) // the forward direction continues
		})
	}
}

func TestCallOnly(t *testing.T) {
	for _, v := range []int{1, 2} {
		g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version, c.Session.Window = v, 4 }, func(c *rpcrdma.Config) { c.Session.Window = 4 })
		conn, err := g.c.Conn(g.ctx)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 50 {
			var w rpc.Writer
			head := rpc.Call{XID: uint32(1000 + i), Prog: prog, Vers: 1, Proc: 5}
			head.Start(&w)
			w.Opaque(make([]byte, i*200))
			err := conn.Post(g.ctx, w.Msg)
			if v == 1 {
				if !errors.Is(err, session.ErrCallOnly) {
					t.Fatal(err)
				}
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		g.check(100)
		if v == 1 {
			continue
		}
		for g.ctx.Err() == nil {
			g.prog.mu.Lock()
			n := g.prog.notes
			g.prog.mu.Unlock()
			if n == 50 {
				break
			}
			g.check(1)
		}
		if g.ctx.Err() != nil {
			t.Error("not all came")
		}
	}
}

// TestConnectGivenUp checks that a call that is canceled before its connection is established leaves nothing behind,
// and that the next one connects.
func TestConnectGivenUp(t *testing.T) {
	g := newRig(t, nil, nil)
	ctx, cancel := context.WithCancel(g.ctx)
	cancel()
	for range 100 { // more than the pool holds
		if _, _, err := g.c.Do(ctx, rpc.Call{Prog: prog, Vers: 1}, nil, rpcrdma.Call{}); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	g.check(1000)
	if s := g.b.Server().Status(); s.Qps != 1 {
		t.Errorf("%d connections at the server", s.Qps)
	}
}

// TestReconnect breaks connections under load; all calls must complete in the end.
func TestReconnect(t *testing.T) {
	for _, v := range []int{1, 2} {
		g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version = v }, nil)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						g.check(1000 * i * i)
					}
				}
			})
		}
		broken := 0
		for broken < 3 && g.ctx.Err() == nil {
			g.check(10)
			for _, c := range g.se.Conns() {
				if c.Counters().Received > 20 {
					c.Close()
					broken++
				}
			}
		}
		close(stop)
		wg.Wait()
		if broken < 3 {
			t.Error("the connections were not broken")
		}
	}
}

// TestPatience checks that a call fails when its server stays away, and that the caller is warned before, even if the
// timer runs very late.
func TestPatience(t *testing.T) {
	for _, patience := range []time.Duration{1, time.Second} {
		told := make(chan string, 100)
		g := newRig(t, func(c *rpcrdma.Config) {
			c.Patience = patience
			c.Silent = func(addr string, _ error) { told <- addr }
		}, nil)
		g.check(10)
		g.l.Close()
		for _, c := range g.se.Conns() {
			c.Close()
		}
		start := time.Now()
		if _, _, err := g.do(0, nil, rpcrdma.Call{Again: true}); err == nil || g.ctx.Err() != nil || time.Since(start) < patience {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		if n := len(told); n != 1 || <-told != g.l.Addr() {
			t.Errorf("patience of %v: notified %d times", patience, n)
		}
	}
}

// TestRecovery checks errors that a requester may answer with other formats or more memory (draft sections 7.3.1 to
// 7.3.5).
func TestRecovery(t *testing.T) {
	t.Run("no Read chunks", func(t *testing.T) {
		g := newRig(t, nil, func(c *rpcrdma.Config) { c.Session.Limits.ReadChunks = 0 })
		g.check(100_000)
	})
	t.Run("no Write chunks", func(t *testing.T) {
		g := newRig(t, nil, func(c *rpcrdma.Config) { c.Session.Limits.WriteChunks = 0 })
		g.check(100_000)
	})
	for _, again := range []bool{true, false} {
		t.Run(fmt.Sprint("too small a Write chunk, again ", again), func(t *testing.T) {
			g := newRig(t, nil, func(c *rpcrdma.Config) { c.Session.Continue = 0 })
			r, resp, err := g.do(3, func(w *rpc.Writer) { w.U32(50_000) }, rpcrdma.Call{Results: []int{10_000}, Reply: 64, Again: again})
			if again {
				if err != nil || !bytes.Equal(r.Result(1<<20), fill(50_000, 3)) {
					t.Fatal(err)
				}
				resp.Release()
				return
			}
			var f *session.FailureError
			if !errors.As(err, &f) || f.Failure != (wire.Failure{Code: wire.ErrWriteResource, Index: 1, Needed: 50_000}) {
				t.Errorf("%v", err)
			}
		})
		t.Run(fmt.Sprint("too small a Reply chunk, again ", again), func(t *testing.T) {
			g := newRig(t, nil, func(c *rpcrdma.Config) { c.Session.Continue = 0 })
			data := fill(30_000, 3)
			r, resp, err := g.do(1, func(w *rpc.Writer) { w.Opaque(data) }, rpcrdma.Call{Reply: 9000, Again: again})
			if again {
				if err != nil || !bytes.Equal(r.Opaque(1<<20), data) {
					t.Fatal(err)
				}
				resp.Release()
				return
			}
			var f *session.FailureError
			if !errors.As(err, &f) || f.Code != wire.ErrReplyResource || f.Needed != 30_028 {
				t.Errorf("%v", err)
			}
		})
	}
	t.Run("the reply is continued where its chunk is too small", func(t *testing.T) {
		g := newRig(t, nil, nil)
		data := fill(20_000, 3)
		r, _, err := g.do(1, func(w *rpc.Writer) { w.Opaque(data) }, rpcrdma.Call{Reply: 1000})
		if err != nil || !bytes.Equal(r.Opaque(1<<20), data) {
			t.Fatal(err)
		}
		if n := g.se.Conns()[0].Counters().Continued[1]; n != 1 {
			t.Errorf("%d continued replies", n)
		}
		for _, n := range []int{27_808, 27_809, 100_000, 1_000_000} { // more than fits eight messages
			r, _, err := g.do(6, func(w *rpc.Writer) { w.U32(uint32(n)) }, rpcrdma.Call{Reply: 1000})
			if err != nil || len(r.Opaque(1<<20)) != n {
				t.Fatalf("a continued reply of %d: %v", n, err)
			}
		}
	})
}

// TestIneligible checks that an item that the binding does not make DDP-eligible is not accepted in a chunk (RFC 8166
// section 6.1).
func TestIneligible(t *testing.T) {
	for _, v := range []int{1, 2} {
		g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version = v }, func(c *rpcrdma.Config) {
			p := &program{}
			c.Server = &rpc.Server{}
			c.Server.Register(prog, rpc.Program{Low: 1, High: 1, Serve: p.serve, Items: func(_, proc uint32) bool { return proc == 2 }})
		})
		data := fill(10_000, 1)
		var f *session.FailureError
		if _, _, err := g.do(1, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{Reply: 11_000}); !errors.As(err, &f) || f.Code != wire.ErrBadXDR {
			t.Errorf("version %d: %v", v, err)
		}
		if _, resp, err := g.do(2, func(w *rpc.Writer) { w.Item(data) }, rpcrdma.Call{}); err != nil {
			t.Errorf("version %d: %v", v, err)
		} else {
			resp.Release()
		}
	}
}

// TestNoCopy checks that large data moves only by RDMA, directly from and into the caller's memory.
func TestNoCopy(t *testing.T) {
	for _, v := range []int{1, 2} {
		g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version = v }, nil)
		in, err := g.ce.Buffer(g.ctx, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		out, err := g.ce.Buffer(g.ctx, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		copy(in.Bytes(), fill(1<<20, 5))
		r, resp, err := g.do(4, func(w *rpc.Writer) { w.Item(in.Bytes()) }, rpcrdma.Call{Results: []int{1 << 20}, Into: []*rpcrdma.Buffer{out}, Reply: 64})
		if err != nil {
			t.Fatal(err)
		}
		if got := r.Result(1 << 20); &got[0] != &out.Bytes()[0] || !bytes.Equal(out.Bytes(), in.Bytes()) {
			t.Error("not into the memory of the caller")
		}
		resp.Release()
		s := g.se.Conns()[0].Counters()
		if s.ReadBytes != 1<<20 || s.WriteBytes != 1<<20 || s.InlineBytes > 2000 {
			t.Errorf("%+v", s)
		}
		in.Release()
		out.Release()
	}
}

// TestShortBuffer checks that a call whose result may be longer than the buffer for it is not made: the server could write beyond
// the buffer.
func TestShortBuffer(t *testing.T) {
	g := newRig(t, nil, nil)
	buf, err := g.c.Buffer(g.ctx, 5000)
	if err != nil {
		t.Fatal(err)
	}
	defer buf.Release()
	for _, n := range []int{5000, 5001} {
		_, resp, err := g.do(3, func(w *rpc.Writer) { w.U32(uint32(n)) }, rpcrdma.Call{Results: []int{n}, Into: []*rpcrdma.Buffer{buf}, Reply: 64})
		if err == nil {
			resp.Release()
		}
		if (err == nil) != (n == 5000) {
			t.Errorf("a result of %d bytes: %v", n, err)
		}
	}
}
