package rpcrdma

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// pair returns two nodes joined by a wire, with a context of two minutes.
func pair(t *testing.T) (ctx context.Context, a, b *embed.Node) {
	t.Helper()
	a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(func() {
		cancel()
		b.Close()
		a.Close()
	})
	return ctx, a, b
}

// endpoint returns a server's endpoint.
func endpoint(t *testing.T) (context.Context, *Endpoint) {
	t.Helper()
	ctx, _, b := pair(t)
	e := newEndpoint(t, ctx, b.Device(), DefaultConfig(true))
	t.Cleanup(func() { e.Close() })
	return ctx, e
}

// TestBuffersOfBrokenConn checks that buffers that Writes may still read are not reused before the queue pair is
// destroyed; otherwise the peer would get another client's data.
func TestBuffersOfBrokenConn(t *testing.T) {
	ctx, e := endpoint(t)
	free := func() (n int) {
		e.pool.mu.Lock()
		defer e.pool.mu.Unlock()
		for _, x := range e.pool.free {
			n += x.n
		}
		return n
	}
	all := free()
	for _, x := range []struct {
		name string
		fail func(c *Conn)
	}{
		{"there is no room", func(c *Conn) { c.fail(errGone) }},
		{"a Write is not taken", func(c *Conn) { _ = c.qp.Close() }},
	} {
		c := openConn(t, ctx, e, netip.Addr{}, session.DefaultConfig(true))
		c.started = true // nothing reads completions, so close waits for c.loop
		var msg, w rpc.Writer
		(&rpc.Call{XID: 7, Prog: 1, Vers: 1}).Start(&msg)
		const n = 100_000
		h := wire.Header{XID: 7, Vers: 2, Credit: 100, Type: wire.CallInline, Writes: []wire.Chunk{{{Handle: 1, Length: n}}}}
		c.s.HandleMessage((&wire.Header{Vers: 2, Credit: 100, Type: wire.ConnPropFinal}).Append(nil))
		c.s.HandleMessage(append(h.Append(nil), msg.Body...))
		var in *session.Call
		for in == nil {
			ev, ok := c.s.PollEvent()
			if !ok {
				t.Fatal("no call")
			}
			in = ev.Call
		}
		buf, err := e.pool.alloc(ctx, n)
		if err != nil {
			t.Fatal(err)
		}
		w.U32(7)
		w.U32(1)
		w.Item(buf.b)
		held := []*buffer{buf}
		x.fail(c)
		before := free()
		c.reply(in, w.Msg, &held)
		for _, b := range held { // as answer does
			b.release()
		}
		if c.Err() == nil || free() != before {
			t.Errorf("%s: %d bytes back before the end, %v", x.name, free()-before, c.Err())
		}
		_ = c.qp.Close() // it was never connected, so there is no end to wait for
		close(c.loop)
		select {
		case <-c.done:
		case <-ctx.Done():
			t.Fatal("no end")
		}
		if free() != all {
			t.Errorf("%s: %d bytes of %d back after the end", x.name, free(), all)
		}
	}
}

// TestSendFails checks that a message that cannot be posted ends the connection and all calls on it (draft section
// 7.4, RFC 8166 section 4.5.4).
func TestSendFails(t *testing.T) {
	ctx, e := endpoint(t)
	c, err := e.newConn(ctx, netip.Addr{}, session.DefaultConfig(false)) // it has a first message to send
	if err != nil {
		t.Fatal(err)
	}
	_ = c.qp.Close()
	done := make(chan result, 1)
	c.calls[7] = done
	c.start()
	select {
	case r := <-done:
		var lost *LostError
		if !errors.As(r.err, &lost) {
			t.Errorf("the call ends with %v", r.err)
		}
	case <-ctx.Done():
		t.Fatal("the connection goes on")
	}
	select {
	case <-c.Done():
	case <-ctx.Done():
		t.Error("the connection goes on")
	}
}

// TestClosedBeforeStart checks that a connection that was closed while it was established is not started: Endpoint.Close
// and a server that needs its place may close it then.
func TestClosedBeforeStart(t *testing.T) {
	ctx, e := endpoint(t)
	c := openConn(t, ctx, e, netip.Addr{}, session.DefaultConfig(true))
	c.Close()
	c.start()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.started {
		t.Error("a closed connection was started")
	}
}

// TestWindowsOfEndedConn checks that a call releases its windows if the connection ends just after the call has: it must not leave them to
// a connection that has released its own.
func TestWindowsOfEndedConn(t *testing.T) {
	ctx, e := endpoint(t)
	c := openConn(t, ctx, e, netip.Addr{}, session.DefaultConfig(true))
	x := &exchange{c: c}
	for range 3 {
		win, err := c.window(ctx)
		if err != nil {
			t.Fatal(err)
		}
		x.parts = append(x.parts, &part{win: win})
	}
	c.Close()
	c.ctx = ctx // as a goroutine saw it that was descheduled since
	x.release()
	if n := len(c.windows); n != 0 {
		t.Errorf("%d windows are left to a connection that has ended", n)
	}
	for _, p := range x.parts {
		if err := p.win.mw.Close(); !errors.Is(err, iwarp.ErrNoObject) {
			t.Errorf("a window was not released: %v", err)
		}
	}
}

func newEndpoint(t *testing.T, ctx context.Context, dev *iwarp.Device, cfg Config) *Endpoint {
	t.Helper()
	e, err := New(ctx, dev, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func openConn(t *testing.T, ctx context.Context, e *Endpoint, peer netip.Addr, cfg session.Config) *Conn {
	t.Helper()
	c, err := e.newConn(ctx, peer, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}
