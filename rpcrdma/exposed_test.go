package rpcrdma_test

import (
	"errors"
	"fmt"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// TestServerMemory checks that a peer cannot write to the memory in which a server serves calls, of which it learns STags by the Reads of
// its chunks (RFC 5042, Appendix A). It cannot read either: a server takes no Read Requests.
func TestServerMemory(t *testing.T) {
	g := newRig(t, nil, nil)
	pool := g.se.PoolMR()
	at := len(pool.Bytes()) - 1 // no call of this test uses the end of the pool
	r := g.raw()
	if err := r.c.Write(g.ctx, pool.RemoteAt(at, 1), []byte{7}); err != nil {
		t.Fatal(err)
	}
	_ = r.c.Send(g.ctx, call(7, 0, nil)) // its answer would show that the Write was accepted
	_, err := r.c.Recv(g.ctx, make([]byte, 4096))
	if terminated := new(iwarp.TerminateError); !errors.As(err, &terminated) || pool.Bytes()[at] != 0 {
		t.Errorf("%v, the byte is %d", err, pool.Bytes()[at])
	}
}

// TestExposed checks that a server can access only the memory that a call names, only for the chunk's purpose, and
// only during the call, and that each call has its own keys (draft section 11.1, RFC 8166 section 8.1).
func TestExposed(t *testing.T) {
	t.Run("memory of the pool", func(t *testing.T) { exposed(t, false) })
	t.Run("buffers longer than the data", func(t *testing.T) { exposed(t, true) })
}

// exposed makes calls whose data is in the caller's Buffers, which are longer, or not.
func exposed(t *testing.T, buffers bool) {
	const n = 5000 // not a multiple of a page: the bytes after it also belong to the pool
	g := newRig(t, func(c *rpcrdma.Config) { c.Session.Version = 1 }, nil)
	l, err := g.b.Device().Listen(g.ctx, fmt.Sprintf("%v:4712", g.b.Addr()), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	remote := func(s wire.Segment, off int) iwarp.Remote {
		return iwarp.Remote{Addr: s.Offset + uint64(off), RKey: s.Handle, Len: s.Length}
	}
	var last wire.Segment // of the previous call
	for _, c := range []struct {
		name string
		do   func(c *iwarp.Conn, read, write wire.Segment) error
		ok   bool
	}{
		{"what is named", func(c *iwarp.Conn, read, write wire.Segment) error {
			return errors.Join(c.Read(g.ctx, remote(read, 0), make([]byte, n)), c.Write(g.ctx, remote(write, 0), make([]byte, n)))
		}, true},
		{"a write beyond the end", func(c *iwarp.Conn, _, write wire.Segment) error { return c.Write(g.ctx, remote(write, n), []byte{1}) }, false},
		{"a write before the start", func(c *iwarp.Conn, _, write wire.Segment) error { return c.Write(g.ctx, remote(write, -1), []byte{1}) }, false},
		{"a read beyond the end", func(c *iwarp.Conn, read, _ wire.Segment) error {
			return c.Read(g.ctx, remote(read, n-3), make([]byte, 4))
		}, false},
		{"a read before the start", func(c *iwarp.Conn, read, _ wire.Segment) error {
			return c.Read(g.ctx, remote(read, -1), make([]byte, 4))
		}, false},
		{"a write into arguments", func(c *iwarp.Conn, read, _ wire.Segment) error { return c.Write(g.ctx, remote(read, 0), []byte{1}) }, false},
		{"a read of room for results", func(c *iwarp.Conn, _, write wire.Segment) error {
			return c.Read(g.ctx, remote(write, 0), make([]byte, 4))
		}, false},
		{"memory of the call before", func(c *iwarp.Conn, _, _ wire.Segment) error { return c.Write(g.ctx, remote(last, 0), []byte{1}) }, false},
	} {
		served := make(chan error, 1)
		go func() {
			served <- func() error {
				conn, err := l.Accept(g.ctx)
				if err != nil {
					return err
				}
				defer conn.Close()
				for i := range 3 { // the first two do nothing
					b := make([]byte, 4096)
					k, err := conn.Recv(g.ctx, b)
					if err != nil {
						return err
					}
					var h wire.Header
					if _, err := h.Decode(b[:k]); err != nil || len(h.Reads) != 1 || len(h.Writes) != 1 || len(h.Writes[0]) != 1 {
						return fmt.Errorf("%+v, %w", h, err)
					}
					read, write := h.Reads[0].Segment, h.Writes[0][0]
					if i == 2 {
						if err := c.do(conn, read, write); err != nil {
							return err
						}
					} else if i == 1 && (last.Handle == write.Handle || last.Handle == read.Handle) {
						return fmt.Errorf("the key %#x is used again", last.Handle)
					}
					last = write
					var w rpc.Writer
					w.U32(h.XID, 1, 0, 0, 0, 0, n)
					out := wire.Header{XID: h.XID, Vers: 1, Credit: 8, Type: wire.Msg1, Writes: []wire.Chunk{{write}}}
					if err := conn.Send(g.ctx, append(out.Append(nil), w.Body...)); err != nil {
						return err
					}
				}
				_, _ = conn.Recv(g.ctx, make([]byte, 4096)) // until the client closes
				return nil
			}()
		}()
		cl := g.ce.Dial(l.Addr().String())
		conn, err := cl.Conn(g.ctx)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3 {
			var w rpc.Writer
			(&rpc.Call{XID: uint32(10 + i), Prog: prog, Vers: 1, Proc: 4}).Start(&w)
			args, into := make([]byte, n), []*rpcrdma.Buffer(nil)
			if buffers {
				for range 2 {
					b, err := g.ce.Buffer(g.ctx, 2*n)
					if err != nil {
						t.Fatal(err)
					}
					defer b.Release()
					into = append(into, b)
				}
				args, into = into[0].Bytes()[:n], into[1:]
			}
			w.Item(args)
			var resp *rpcrdma.Response
			if resp, err = conn.Call(g.ctx, &rpcrdma.Call{Msg: w.Msg, Results: []int{n}, Into: into, Reply: 64}); err == nil {
				resp.Release()
			} else if i < 2 {
				t.Fatalf("%s: call %d: %v, %v", c.name, i, err, <-served)
			}
		}
		cl.Close()
		serr := <-served
		if (err == nil) != c.ok || c.ok && serr != nil {
			t.Errorf("%s: the call ends with %v, the server with %v", c.name, err, serr)
		}
	}
}
