package rpcrdma_test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// gss is a credential of RPCSEC_GSS (RFC 2203 section 5), with a long handle.
func gss(proc, service uint32) rpc.Auth {
	var w rpc.Writer
	w.U32(1, proc, 1, service)
	w.Opaque(make([]byte, 300))
	return rpc.Auth{Flavor: rpc.AuthGSS, Body: w.Body}
}

// TestGSS checks that calls by RPCSEC_GSS with integrity or privacy, calls about its context, and their replies are
// not reduced (RFC 8166 section 8.2.2).
func TestGSS(t *testing.T) {
	for _, v := range []int{1, 2} {
		for _, c := range []struct {
			name  string
			cred  rpc.Auth
			whole bool
		}{
			{"AUTH_SYS", (&rpc.Sys{}).Auth(), false}, {"authentication", gss(0, 1), false}, {"a channel's protection", gss(0, 4), false}, {"integrity", gss(0, 2), true},
			{"privacy", gss(0, 3), true}, {"context", gss(1, 1), true}, {"end of context", gss(3, 1), true}, {"nonsense", rpc.Auth{Flavor: rpc.AuthGSS}, true},
		} {
			t.Run(fmt.Sprintf("version %d, %s", v, c.name), func(t *testing.T) {
				var mu sync.Mutex
				apart := 0
				g := newRig(t, func(cfg *rpcrdma.Config) {
					cfg.Session.Version = v
					cfg.Wire = func(_ *rpcrdma.Conn, sent bool, b []byte) {
						mu.Lock()
						defer mu.Unlock()
						var h wire.Header
						if _, err := h.Decode(b); err != nil {
							t.Error(err)
						}
						apart += len(h.Writes)
						for _, r := range h.Reads {
							apart += int(min(r.Position, 1))
						}
					}
				}, nil)
				for _, n := range []int{0, 10, 2000, 100_000, 300_001} {
					data := fill(n, byte(n))
					r, resp, err := g.c.Do(g.ctx, rpc.Call{Prog: prog, Vers: 1, Proc: 4, Cred: c.cred}, func(w *rpc.Writer) { w.Item(data) },
						rpcrdma.Call{Results: []int{n}, Reply: 64})
					if err != nil {
						t.Fatal(n, err)
					}
					if got := r.Result(1 << 20); !bytes.Equal(got, data) || r.Err() != nil || r.Left() != 0 {
						t.Errorf("%d bytes: %d came back, %v", n, len(got), r.Err())
					}
					resp.Release()
				}
				mu.Lock()
				defer mu.Unlock()
				if c.whole != (apart == 0) {
					t.Errorf("%d chunks of data items", apart)
				}
			})
		}
	}
}

// TestGSSVerifier checks that a reply to a call by RPCSEC_GSS has room for the longest verifier.
func TestGSSVerifier(t *testing.T) {
	var mu sync.Mutex
	var sent wire.Header
	g := newRig(t, func(cfg *rpcrdma.Config) {
		cfg.Wire = func(_ *rpcrdma.Conn, out bool, b []byte) {
			mu.Lock()
			defer mu.Unlock()
			if out && wire.Type(b[15]) == wire.CallInline {
				if _, err := sent.Decode(b); err != nil {
					t.Error(err)
				}
			}
		}
	}, nil)
	for _, c := range []struct {
		cred rpc.Auth
		room int // in a Reply chunk; without the verifier none is needed
	}{{(&rpc.Sys{}).Auth(), 0}, {gss(0, 1), 3900 + rpc.MaxVerifier}} {
		_, resp, err := g.c.Do(g.ctx, rpc.Call{Prog: prog, Vers: 1, Cred: c.cred}, nil, rpcrdma.Call{Reply: 3900})
		if err != nil {
			t.Fatal(err)
		}
		resp.Release()
		mu.Lock()
		if n := sent.Reply.Len(); n != uint64(c.room) {
			t.Errorf("flavor %d: a Reply chunk of %d bytes, not %d", c.cred.Flavor, n, c.room)
		}
		mu.Unlock()
	}
}

// TestGSSResponder checks that a server refuses calls that were reduced against this rule, and leaves the Write
// chunks of others unused.
func TestGSSResponder(t *testing.T) {
	g := newRig(t, nil, nil)
	r := g.raw()
	const n = 5000
	message := func(xid, proc uint32, cred rpc.Auth, args func(w *rpc.Writer)) []byte {
		var w rpc.Writer
		(&rpc.Call{XID: xid, Prog: prog, Vers: 1, Proc: proc, Cred: cred}).Start(&w)
		args(&w)
		return w.Body
	}
	b := message(7, 2, gss(0, 2), func(w *rpc.Writer) { w.U32(n) })
	r.send(wire.Header{XID: 7, Type: wire.CallInline, Reads: []wire.ReadSegment{{Position: uint32(len(b)), Segment: r.seg(0, n)}}}, b)
	if h, _, err := r.recv(); err != nil || h.Type != wire.Error || h.XID != 7 || h.Failure.Code != wire.ErrBadXDR {
		t.Errorf("%+v, %v", h, err)
	}
	for xid, c := range map[uint32]struct {
		cred  rpc.Auth
		apart uint64
	}{8: {gss(0, 1), n}, 9: {gss(0, 3), 0}} {
		b := message(xid, 3, c.cred, func(w *rpc.Writer) { w.U32(n) })
		r.send(wire.Header{XID: xid, Type: wire.CallInline, Writes: []wire.Chunk{{r.seg(0, n)}}, Reply: wire.Chunk{r.seg(n+n%4, 8000)}}, b)
		h, _, err := r.recv()
		if err != nil || h.XID != xid || h.Type == wire.Error || len(h.Writes) != 1 || h.Writes[0].Len() != c.apart {
			t.Errorf("%+v, %v", h, err)
		}
	}
}
