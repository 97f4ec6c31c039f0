// Package rpcgen runs programs that go-xdr's compiler generates from XDR as
// programs of package rpc, so that any ONC RPC program can use RPC-over-RDMA.
package rpcgen

import (
	"context"
	"io"

	"github.com/buildbarn/go-xdr/pkg/protocols/rpcv2"

	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// Service is what the compiler's New…Service functions return.
type Service func(ctx context.Context, vers, proc uint32, args io.ReadCloser, result func(int) io.Writer) (rpcv2.AcceptedReplyData, error)

// Serve does one call by a generated service. An error of the service's is one
// of the arguments: implementations should return none, but have a result that
// says what is wrong.
func Serve(ctx context.Context, f Service, r *rpc.Request) rpc.Status {
	x := &exchange{r: r}
	w := &writer{x: x}
	a, err := f(context.WithValue(ctx, exchangeKey{}, x), r.Vers, r.Proc, r.Args, func(int) io.Writer { return w })
	if err != nil {
		return rpc.GarbageArgs
	}
	if a == nil {
		return rpc.Success
	}
	return rpc.Status(a.GetStat())
}

// Program makes a program of a generated service.
func Program(f Service, low, high uint32) rpc.Program {
	return rpc.Program{Low: low, High: high, Serve: func(ctx context.Context, r *rpc.Request) rpc.Status { return Serve(ctx, f, r) }}
}

// exchange is a call that is being done.
type exchange struct {
	r    *rpc.Request
	item []byte
}

type exchangeKey struct{}

// Request returns the call that an implementation is asked to do.
func Request(ctx context.Context) *rpc.Request { return ctx.Value(exchangeKey{}).(*exchange).r }

// Item makes b, an opaque<> of the result, DDP-eligible. The result must have
// this very slice.
func Item(ctx context.Context, b []byte) { ctx.Value(exchangeKey{}).(*exchange).item = b }

// Write encodes a result of a procedure that was decoded by hand. f is the
// generated WriteTo, and item what is DDP-eligible of the result, or nil.
func Write(r *rpc.Request, item []byte, f func(io.Writer) (int64, error)) error {
	_, err := f(&writer{x: &exchange{r: r, item: item}})
	return err
}

// writer takes what a generated encoder writes. It writes an opaque by one
// Write of the very slice, and its padding by another: so the item is known.
type writer struct {
	x   *exchange
	pad int // bytes of padding to come, which an item has not
}

func (w *writer) Write(p []byte) (int, error) {
	out := w.x.r.Reply
	switch {
	case len(p) == 0:
	case w.pad > 0 && len(p) == w.pad:
		w.pad = 0
	case len(p) == len(w.x.item) && &p[0] == &w.x.item[0]:
		out.Items = append(out.Items, rpc.Item{Pos: len(out.Body), Data: p})
		w.pad = -len(p) & 3
		w.x.item = nil
	default:
		w.pad = 0
		out.Body = append(out.Body, p...)
	}
	return len(p), nil
}
