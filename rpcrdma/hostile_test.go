package rpcrdma_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/conformance"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

func TestConformance(t *testing.T) {
	conformance.Check(t, "conformance-rpcrdma.md", "rpcrdma", map[string]int{"V": 124, "W": 64, "X": 8, "Y": 17, "Z": 13}) // docs/conformance.md has these numbers
}

// raw is a requester that sends arbitrary messages.
type raw struct {
	t   *testing.T
	ctx context.Context
	c   *iwarp.Conn
	mr  *iwarp.MR
	// vers is the version of what it sends.
	vers uint32
}

func (g *rig) raw() *raw {
	g.t.Helper()
	r := g.raw1()
	r.vers = 2
	r.send(wire.Header{Type: wire.ConnPropFinal}, nil)
	if h, _, err := r.recv(); err != nil || h.Type != wire.ConnPropFinal {
		g.t.Fatalf("%+v, %v", h, err)
	}
	return r
}

// own returns the address of a node, with no port. Over kernel sockets both nodes would otherwise connect from one address.
func own(n *embed.Node) netip.AddrPort { return netip.AddrPortFrom(n.Addr(), 0) }

// raw1 returns a raw of version 1.
func (g *rig) raw1() *raw {
	g.t.Helper()
	c, err := g.a.Device().Dial(g.ctx, g.l.Addr(), &iwarp.Config{LocalAddr: own(g.a), RecvDepth: 200, RecvSize: 4096})
	if err != nil {
		g.t.Fatal(err)
	}
	mr, err := c.Alloc(g.ctx, 1<<20, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
	if err != nil {
		g.t.Fatal(err)
	}
	return &raw{g.t.(*testing.T), g.ctx, c, mr, 1}
}

func (r *raw) send(h wire.Header, body []byte) {
	h.Vers, h.Credit = r.vers, 1000
	if err := r.c.Send(r.ctx, append(h.Append(nil), body...)); err != nil {
		r.t.Fatal(err)
	}
}

// recv returns the next message that is not a Grant.
func (r *raw) recv() (h wire.Header, body []byte, err error) {
	b := make([]byte, 4096)
	for {
		n, err := r.c.Recv(r.ctx, b)
		if err != nil {
			return h, nil, err
		}
		k, err := h.Decode(b[:n])
		if err != nil || h.Type != wire.Grant {
			return h, b[k:n], err
		}
	}
}

// seg describes n bytes of the requester's memory at off.
func (r *raw) seg(off, n int) wire.Segment {
	m := r.mr.RemoteAt(off, max(n, 1))
	return wire.Segment{Handle: m.RKey, Length: uint32(n), Offset: m.Addr}
}

func call(xid, proc uint32, args func(w *rpc.Writer)) []byte {
	var w rpc.Writer
	c := rpc.Call{XID: xid, Prog: prog, Vers: 1, Proc: proc}
	c.Start(&w)
	if args != nil {
		args(&w)
	}
	return w.Body
}

// TestHostileChunks checks that invalid or excessive chunk lists are answered with the draft's errors and leave
// nothing allocated in the server.
func TestHostileChunks(t *testing.T) {
	g := newRig(t, nil, func(c *rpcrdma.Config) { c.Pool = 4 << 20 })
	r := g.raw()
	reads := func(n int, pos func(i int) uint32, size int) (l []wire.ReadSegment) {
		for i := range n {
			l = append(l, wire.ReadSegment{Position: pos(i), Segment: r.seg(0, size)})
		}
		return l
	}
	writes := func(chunks, segs, size int) (l []wire.Chunk) {
		for range chunks {
			c := wire.Chunk{}
			for range segs {
				c = append(c, r.seg(0, size))
			}
			l = append(l, c)
		}
		return l
	}
	whole := call(7, 1, func(w *rpc.Writer) { w.String("in a chunk") })
	copy(r.mr.Bytes()[1000:], whole)
	huge := wire.Segment{Handle: r.mr.RKey(), Length: 1<<32 - 1, Offset: r.mr.Base()}
	for _, c := range []struct {
		name string
		h    wire.Header
		body []byte
		want wire.ErrCode // 0: a reply
		stat uint32       // of the reply
	}{
		{"a Call chunk", wire.Header{XID: 7, Type: wire.CallExternal, Call: []wire.ReadSegment{{Segment: r.seg(1000, len(whole))}}}, nil, 0, 0},
		{"a Call chunk in pieces", wire.Header{XID: 7, Type: wire.CallExternal, Call: []wire.ReadSegment{{Segment: r.seg(1000, 10)}, {Segment: r.seg(1010, 0)}, {Segment: r.seg(1010, len(whole)-10)}}}, nil, 0, 0},
		{"a Call chunk with another XID", wire.Header{XID: 8, Type: wire.CallExternal, Call: []wire.ReadSegment{{Segment: r.seg(1000, len(whole))}}}, nil, wire.ErrBadXDR, 0},
		{"a Call chunk of 4 GiB", wire.Header{XID: 7, Type: wire.CallExternal, Call: []wire.ReadSegment{{Segment: huge}}}, nil, wire.ErrSystem, 0},
		{"a Read chunk of 4 GiB", wire.Header{XID: 7, Type: wire.CallInline, Reads: []wire.ReadSegment{{Position: 44, Segment: huge}}}, whole, wire.ErrReadChunks, 0},
		{"150 Read chunks", wire.Header{XID: 7, Type: wire.CallInline, Reads: reads(150, func(i int) uint32 { return uint32(44 + 4*i) }, 4)}, whole, wire.ErrReadChunks, 0},
		{"150 segments", wire.Header{XID: 7, Type: wire.CallInline, Reads: reads(150, func(i int) uint32 { return 44 }, 4)}, whole, wire.ErrSegments, 0},
		{"200 Write chunks", wire.Header{XID: 7, Type: wire.CallInline, Writes: writes(150, 1, 1<<20)}, whole, wire.ErrWriteChunks, 0},
		{"200 segments to write", wire.Header{XID: 7, Type: wire.CallInline, Writes: writes(1, 200, 1<<20)}, whole, wire.ErrSegments, 0},
		{"200 segments for the reply", wire.Header{XID: 7, Type: wire.CallInline, Reply: writes(1, 200, 1<<20)[0]}, whole, wire.ErrSegments, 0},
		{"a Read chunk behind the message", wire.Header{XID: 7, Type: wire.CallInline, Reads: reads(1, func(int) uint32 { return 4000 }, 40)}, whole, 0, 4},
		{"a Read chunk in the middle of a word", wire.Header{XID: 7, Type: wire.CallInline, Reads: reads(1, func(int) uint32 { return 41 }, 40)}, whole, wire.ErrBadXDR, 0},
		{"a Read chunk where no item is", wire.Header{XID: 7, Type: wire.CallInline, Reads: reads(1, func(int) uint32 { return 4 }, 40)}, whole, wire.ErrBadXDR, 0},
		{"a Read chunk shorter than its item", wire.Header{XID: 7, Type: wire.CallInline, Reads: reads(1, func(int) uint32 { return 44 }, 4)}, call(7, 2, func(w *rpc.Writer) { w.U32(100) }), 0, 4},
		{"an item longer than any memory", wire.Header{XID: 7, Type: wire.CallInline}, call(7, 1, func(w *rpc.Writer) { w.U32(1<<32 - 1) }), 0, 4},
		{"an invalidation of what is not named", wire.Header{XID: 7, Type: wire.CallInline, InvHandle: 0xdeadbeef}, whole, 0, 0},
		{"Write chunks of 4 GiB for a small reply", wire.Header{XID: 7, Type: wire.CallInline, Writes: []wire.Chunk{{huge, huge}}, Reply: wire.Chunk{huge}}, whole, 0, 0},
	} {
		r.send(c.h, c.body)
		h, body, err := r.recv()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if h.XID != c.h.XID || c.want != 0 && (h.Type != wire.Error || h.Failure.Code != c.want) || c.want == 0 && h.Type != wire.ReplyInline {
			t.Errorf("%s: %v %+v", c.name, h.Type, h.Failure)
			continue
		}
		if c.want == 0 && binary.BigEndian.Uint32(body[20:]) != c.stat {
			t.Errorf("%s: %x", c.name, body)
		}
	}
	// A segment outside the requester's memory ends its connection, and no other. The call repeated on a new
	// connection gets one error reply (draft section 7.3).
	g.check(1) // the other connection, which all following cases use
	beyond := wire.Segment{Handle: r.mr.RKey(), Length: 100_000, Offset: r.mr.Base() + 1<<20 - 10}
	for _, h := range []wire.Header{
		{XID: 8, Type: wire.CallExternal, Call: []wire.ReadSegment{{Segment: wire.Segment{Handle: 0x12345600, Length: 100}}}},
		{XID: 9, Type: wire.CallInline, Reads: []wire.ReadSegment{{Position: 44, Segment: wire.Segment{Handle: r.mr.RKey(), Length: 100, Offset: 5}}}},
		{XID: 10, Type: wire.CallInline, Writes: []wire.Chunk{{{Handle: 0x12345600, Length: 100_000}}}},
		{XID: 11, Type: wire.CallInline, Writes: []wire.Chunk{{beyond}}},
		{XID: 12, Type: wire.CallInline, Reply: wire.Chunk{beyond}},
	} {
		proc := uint32(3)
		if h.Reply != nil {
			proc = 6
		}
		for i := range 3 {
			bad := g.raw()
			// Its chunk is of the same region, at another place.
			innocent := wire.Segment{Handle: r.mr.RKey(), Length: 10, Offset: r.mr.Base()}
			bad.send(wire.Header{XID: h.XID + 100, Type: wire.CallInline, Writes: []wire.Chunk{{innocent}}}, call(h.XID+100, 0, nil))
			if h, _, err := bad.recv(); err != nil || h.Type != wire.ReplyInline {
				t.Errorf("an innocent call: %v, %v", h.Type, err)
			}
			bad.send(h, call(h.XID, proc, func(w *rpc.Writer) { w.U32(50_000) }))
			switch got, _, err := bad.recv(); {
			case i != 1 && err == nil:
				t.Errorf("%+v: the connection goes on", h)
			case i == 1 && (err != nil || got.Type != wire.Error || got.Failure.Code != wire.ErrSystem || got.XID != h.XID):
				t.Errorf("%+v again: %v %+v, %v", h, got.Type, got.Failure, err)
			}
			bad.c.Close()
			testenv.Until(t, "the server knows that the connection has ended", func() bool { return len(g.se.Conns()) <= 2 })
		}
		g.check(100_000)
	}
	// All memory has been returned and can serve the largest possible call.
	if _, resp, err := g.do(2, func(w *rpc.Writer) { w.Item(make([]byte, 2<<20)) }, rpcrdma.Call{}); err != nil {
		t.Error(err)
	} else {
		resp.Release()
	}
	r.c.Close()
}

// TestSegmentWraps checks that a segment beyond the end of the address space does not end the connection, even if the
// call is repeated.
func TestSegmentWraps(t *testing.T) {
	g := newRig(t, nil, nil)
	for _, vers := range []uint32{1, 2} {
		r, want := g.raw1(), wire.ErrChunk1
		if vers == 2 {
			r, want = g.raw(), wire.ErrSystem
		}
		xid := uint32(100)
		for _, length := range []uint32{200, 100_000} {
			bad := wire.Segment{Handle: r.mr.RKey(), Length: length, Offset: 1<<64 - 100}
			for _, h := range []wire.Header{
				{Type: wire.CallExternal, Call: []wire.ReadSegment{{Segment: bad}}}, {Reads: []wire.ReadSegment{{Position: 44, Segment: bad}}},
				{Writes: []wire.Chunk{{bad}}}, {Reply: wire.Chunk{bad}}, {Writes: []wire.Chunk{{r.seg(0, 100_000)}, {bad}}},
			} {
				for range 3 {
					b := call(xid, 3, func(w *rpc.Writer) { w.U32(50_000) })
					x := h
					x.XID = xid
					switch {
					case x.Type != 0:
						b = nil
						if vers == 1 {
							x.Type, x.Reads, x.Call = wire.NoMsg1, x.Call, nil
						}
					case vers == 1:
						x.Type = wire.Msg1
					default:
						x.Type = wire.CallInline
					}
					r.send(x, b)
					if got, _, err := r.recv(); err != nil || got.XID != xid || got.Type != wire.Error && got.Type != wire.Error1 || got.Failure.Code != want {
						t.Fatalf("version %d, %+v: %+v, %v", vers, h, got, err)
					}
				}
				xid++
			}
		}
		good := wire.Header{XID: xid, Type: wire.CallInline, Writes: []wire.Chunk{{r.seg(0, 50_000)}}}
		if vers == 1 {
			good.Type = wire.Msg1
		}
		r.send(good, call(xid, 3, func(w *rpc.Writer) { w.U32(50_000) }))
		if got, _, err := r.recv(); err != nil || got.XID != xid || len(got.Writes) != 1 || got.Writes[0].Len() != 50_000 || !slices.Equal(r.mr.Bytes()[:50_000], fill(50_000, 3)) {
			t.Errorf("version %d: the next call: %+v, %v", vers, got, err)
		}
		r.c.Close()
	}
}

// TestNothingToServe checks that a server without programs answers SYSTEM.
func TestNothingToServe(t *testing.T) {
	g := newRig(t, nil, func(c *rpcrdma.Config) { c.Server = nil })
	r := g.raw()
	r.send(wire.Header{XID: 7, Type: wire.CallInline}, call(7, 0, nil))
	if h, _, err := r.recv(); err != nil || h.Failure.Code != wire.ErrSystem {
		t.Errorf("%+v, %v", h, err)
	}
	r.c.Close()
}

// TestQuietServer checks that version 1 is tried with a server that does not answer version 2 at all (draft section
// 4.3.2).
func TestQuietServer(t *testing.T) {
	// The client's time-out must also allow for a slow machine.
	var err error
	for _, setup := range []time.Duration{300 * time.Millisecond, 3 * time.Second, 30 * time.Second} {
		if err = quietServer(t, setup); err == nil {
			return
		}
	}
	t.Error(err)
}

// quietServer calls a server that speaks version 1 alone.
func quietServer(t *testing.T, setup time.Duration) error {
	g := newRig(t, func(c *rpcrdma.Config) { c.Setup = setup }, nil)
	l, err := g.b.Device().Listen(g.ctx, fmt.Sprintf("%v:4711", g.b.Addr()), nil)
	if err != nil {
		t.Fatal(err)
	}
	versions := make(chan uint32, 64)
	go func() {
		for {
			c, err := l.Accept(g.ctx)
			if err != nil {
				return
			}
			b := make([]byte, 4096)
			n, err := c.Recv(g.ctx, b)
			if err != nil {
				continue
			}
			var h wire.Header
			k, _ := h.Decode(b[:n])
			versions <- h.Vers
			if h.Vers == 1 {
				reply := rpc.GarbageReply(h.XID)
				_ = c.Send(g.ctx, append((&wire.Header{XID: h.XID, Vers: 1, Credit: 8, Type: wire.Msg1}).Append(nil), reply.Body...))
			}
			_ = k
		}
	}()
	c := g.ce.Dial(l.Addr().String())
	defer c.Close()
	defer l.Close()
	if _, _, err := c.Do(g.ctx, rpc.Call{Prog: prog, Vers: 1}, nil, rpcrdma.Call{}); !errors.Is(err, rpc.GarbageArgs) {
		return fmt.Errorf("with %v for a word: %w", setup, err)
	}
	var got []uint32
	for len(versions) > 0 {
		got = append(got, <-versions)
	}
	if !slices.Equal(got, []uint32{2, 1}) {
		return fmt.Errorf("with %v for a word: versions %v", setup, got)
	}
	return nil
}

// TestTooManyConnsAtOnce checks that connections that arrive together do not exceed the limit: their
// messages would take the whole pool.
func TestTooManyConnsAtOnce(t *testing.T) {
	const limit, tries = 3, 12
	g := newRig(t, nil, func(c *rpcrdma.Config) { c.MaxConns = limit })
	conns := make(chan *iwarp.Conn, tries)
	for range tries {
		go func() {
			c, _ := g.a.Device().Dial(g.ctx, g.l.Addr(), nil)
			conns <- c
		}()
	}
	n := 0
	for range tries {
		if c := <-conns; c != nil {
			defer c.Close()
			n++
		}
	}
	if n == 0 || n > limit {
		t.Errorf("%d connections; want at most %d", n, limit)
	}
}

// TestTooManyConns checks that connections beyond the limit are refused and existing ones continue.
func TestTooManyConns(t *testing.T) {
	g := newRig(t, nil, func(c *rpcrdma.Config) { c.MaxConns = 3 })
	g.check(1000)
	g.raw()
	g.raw()
	c, err := g.a.Device().Dial(g.ctx, g.l.Addr(), nil)
	var reject *iwarp.RejectError
	if !errors.As(err, &reject) {
		t.Errorf("a fourth: %v", err)
		if err == nil {
			c.Close()
		}
	}
	g.check(1000)
}

// TestConnsMakeRoom checks that a client that holds all connections, idle or with calls in progress, does not keep another one
// out, and that none of them gets more than its share.
func TestConnsMakeRoom(t *testing.T) {
	t.Run("idle", func(t *testing.T) { makeRoom(t, false) })
	t.Run("busy", func(t *testing.T) { makeRoom(t, true) })
}

func makeRoom(t *testing.T, busy bool) {
	g := newRig(t, nil, func(c *rpcrdma.Config) { c.MaxConns = 3 })
	for range 3 {
		r := g.raw()
		if busy {
			r.send(wire.Header{XID: 7, Type: wire.CallInline}, call(7, 8, nil))
			<-g.prog.waits
		}
	}
	cfg := rpcrdma.DefaultConfig(false)
	cfg.Pool = 4 << 20
	cfg.Iwarp.LocalAddr = own(g.b)
	e, err := rpcrdma.New(g.ctx, g.b.Device(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	c := e.Dial(g.l.Addr())
	defer c.Close()
	_, resp, err := c.Do(g.ctx, rpc.Call{Prog: prog, Vers: 1}, nil, rpcrdma.Call{})
	if err != nil {
		t.Fatal(err)
	}
	resp.Release()
	for name, n := range map[string]*embed.Node{"the client with two": g.a, "that with one": g.b} {
		c, err := n.Device().Dial(g.ctx, g.l.Addr(), &iwarp.Config{LocalAddr: own(n)})
		if !errors.As(err, new(*iwarp.RejectError)) {
			t.Errorf("%s connects once more: %v", name, err)
		}
		if err == nil {
			c.Close()
		}
	}
}
