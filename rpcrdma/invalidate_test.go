package rpcrdma

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestInvalidateFlag checks that Send with Invalidate is used if both ends set R in their private data, never
// otherwise with version 1, and never if the client's R is 0 (RFC 8797 section 4.1).
func TestInvalidateFlag(t *testing.T) {
	ctx, a, b := pair(t)
	scfg := DefaultConfig(true)
	scfg.Server = &rpc.Server{}
	scfg.Server.Register(7, rpc.Program{Low: 1, High: 1, Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
		r.Reply.Item(make([]byte, 100_000))
		return rpc.Success
	}})
	se := newEndpoint(t, ctx, b.Device(), scfg)
	defer se.Close()
	l, err := se.Listen(ctx, netip.AddrPortFrom(b.Addr(), 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ce := newEndpoint(t, ctx, a.Device(), DefaultConfig(false))
	defer ce.Close()
	for _, c := range []struct {
		version int
		private []byte
		want    uint64
	}{
		{1, nil, 0}, {1, wire.Private{}.Append(nil), 0}, {1, wire.Private{Invalidate: true}.Append(nil), 1},
		{2, nil, 1}, {2, wire.Private{}.Append(nil), 0}, {2, wire.Private{Invalidate: true}.Append(nil), 1},
		{1, nil, 0}, // nothing is remembered from one connection to the next
	} {
		cfg := ce.cfg.Session
		cfg.Version = c.version
		conn := openConn(t, ctx, ce, netip.MustParseAddrPort(l.Addr()).Addr(), cfg)
		icfg := ce.cfg.Iwarp
		icfg.PrivateData = c.private
		info, err := conn.qp.Connect(ctx, l.Addr(), &icfg)
		if err != nil {
			t.Fatal(err)
		}
		if p, ok := wire.FindPrivate(info.PrivateData); !ok || !p.Invalidate {
			t.Errorf("the server says %+v, %v: it invalidates, so its R is 1", p, ok)
		}
		conn.start()
		var w rpc.Writer
		(&rpc.Call{XID: 5, Prog: 7, Vers: 1}).Start(&w)
		resp, err := conn.Call(ctx, &Call{Msg: w.Msg, Results: []int{100_000}, Reply: 64})
		if err != nil {
			t.Fatal(err)
		}
		resp.Release()
		if n := conn.Counters().Invalidated; n != c.want {
			t.Errorf("version %d, private data %x: %d invalidations, not %d", c.version, c.private, n, c.want)
		}
		conn.Close()
	}
	if p, ok := wire.FindPrivate(ce.cfg.private()); !ok || !p.Invalidate {
		t.Errorf("a client says %+v, %v", p, ok)
	}
}

// TestPrivateSizes checks that the smaller of the sizes in both ends' private data is used, and 1024 without private
// data (RFC 8797 sections 4.2 and 5.1).
func TestPrivateSizes(t *testing.T) {
	both := func(send, recv int) []byte { return wire.Private{SendSize: send, RecvSize: recv}.Append(nil) }
	for _, c := range []struct {
		private    []byte
		send, recv int
	}{
		{nil, 1024, 1024}, {[]byte("of another protocol"), 1024, 1024}, {both(1024, 1024), 1024, 1024}, {both(2048, 3072), 3072, 2048},
		{both(8192, 8192), 8192, 4096}, {both(1<<18, 1<<18), 8192, 4096}, {append([]byte{1, 2, 3}, both(2048, 3072)...), 3072, 2048},
		{both(2048, 3072)[:7], 1024, 1024}, {append([]byte{0xf6, 0xab, 0x0e, 0x18, 2}, 0, 1, 1), 1024, 1024},
	} {
		cfg := DefaultConfig(true)
		cfg.Session.Props.SendSize, cfg.Session.Props.RecvSize = 8192, 4096
		s := cfg.session(c.private)
		if s.Send1 != c.send || s.Recv1 != c.recv {
			t.Errorf("%x: %d and %d, not %d and %d", c.private, s.Send1, s.Recv1, c.send, c.recv)
		}
		if cfg.Session.Send1 != 1024 || cfg.Session.Recv1 != 1024 || cfg.Session.Invalidate != session.InvalidateNamed {
			t.Error("it stays for the next connection")
		}
	}
}

// TestInvalidationFails checks that when memory cannot be invalidated after the reply has arrived, the connection is
// closed and the call fails before any result is delivered (draft section 7.4, RFC 8166 section 4.5.4). The test's
// provider fails the invalidating work request.
func TestInvalidationFails(t *testing.T) {
	for _, version := range []int{1, 2} {
		ctx, a, b := pair(t)
		scfg, ccfg := DefaultConfig(true), DefaultConfig(false)
		scfg.Server = &rpc.Server{}
		scfg.Server.Register(7, rpc.Program{Low: 1, High: 1, Serve: func(_ context.Context, r *rpc.Request) rpc.Status {
			r.Reply.Item(r.Args.Opaque(1 << 20))
			return rpc.Success
		}})
		se := newEndpoint(t, ctx, b.Device(), scfg)
		l, err := se.Listen(ctx, netip.AddrPortFrom(b.Addr(), 0).String())
		if err != nil {
			t.Fatal(err)
		}
		forgotten := 0
		ccfg.Session.Version = version
		ccfg.Wire = func(c *Conn, sent bool, _ []byte) {
			if sent {
				return
			}
			for _, w := range c.byKey {
				if w.bound {
					forgotten++
					if err := w.mw.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		}
		ce := newEndpoint(t, ctx, a.Device(), ccfg)
		c := ce.Dial(l.Addr())
		conn, err := c.Conn(ctx)
		if err != nil {
			t.Fatal(err)
		}
		sc := se.Conns()[0]
		later := time.Now().Add(time.Hour)
		sc.mu.Lock()
		sc.doneAt = later
		sc.mu.Unlock()
		var w rpc.Writer
		(&rpc.Call{XID: c.XID(), Prog: 7, Vers: 1}).Start(&w)
		w.Item(make([]byte, 100_000))
		resp, err := conn.Call(ctx, &Call{Msg: w.Msg, Results: []int{100_000}, Reply: 64})
		var lost *LostError
		if resp != nil || !errors.As(err, &lost) || forgotten == 0 {
			t.Errorf("version %d: a reply %v, %v with %d windows forgotten", version, resp != nil, err, forgotten)
		}
		select {
		case <-conn.Done():
		case <-ctx.Done():
			t.Errorf("version %d: the connection stays", version)
		}
		sc.mu.Lock()
		if !sc.doneAt.Before(later) {
			t.Errorf("version %d: a Read was done, which was not noted", version)
		}
		sc.mu.Unlock()
		c.Close()
		if err := ce.Close(); err != nil {
			t.Error(err)
		}
		l.Close()
		if err := se.Close(); err != nil {
			t.Error(err)
		}
	}
}
