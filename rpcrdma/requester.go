package rpcrdma

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Call is an RPC to be made.
type Call struct {
	Msg rpc.Msg // the call, its XID in the first word
	// Results are the maximum lengths, in bytes and in order, of the data items of the reply
	// that the binding makes DDP-eligible. Non-nil elements of Into receive them, and must be as
	// long.
	Results []int
	Into    []*Buffer
	Reply   int // maximum length of the reply without Results; 0: 1024
	// Again allows the call to be executed twice.
	Again bool
}

// Response is the reply to a Call. The caller must Release it.
type Response struct {
	rpc.Msg
	bufs []*buffer
}

// Release frees the memory of the results, except that of Into.
func (r *Response) Release() {
	for _, b := range r.bufs {
		b.release()
	}
	r.bufs = nil
}

var errShort = errors.New("rpcrdma: a buffer is shorter than its result")

// result is the outcome of a call.
type result struct {
	reply *session.Reply
	err   error
}

// part is memory that a call exposes to the peer.
type part struct {
	b      *buffer
	n      int  // bytes
	own    bool // of the call, not the caller's
	win    *window
	access iwarp.Access
	list   func(wire.Segment) // adds a segment to the chunks of the call
}

// Call sends a call and waits for the reply. It returns a *LostError, a *session.FailureError or
// another error of package session. When it returns, the memory of the Response is no longer
// exposed.
func (c *Conn) Call(ctx context.Context, q *Call) (*Response, error) {
	if err := c.awaitReady(ctx); err != nil {
		return nil, err
	}
	if len(q.Msg.Body) < 8 {
		return nil, rpc.ErrXDR
	}
	xid := binary.BigEndian.Uint32(q.Msg.Body)
	q = q.secured()
	spec := session.Spec{Body: len(q.Msg.Body), Results: q.Results, Reply: q.reply()}
	for _, it := range q.Msg.Items {
		spec.Items = append(spec.Items, len(it.Data))
	}
	c.mu.Lock()
	plan, err := c.s.PlanCall(&spec)
	c.mu.Unlock()
	if err != nil {
		return nil, err
	}
	x := &exchange{c: c, q: q, plan: plan}
	defer x.release()
	if err := x.prepare(ctx); err != nil {
		return nil, err
	}
	done := make(chan result, 1)
	c.mu.Lock()
	if err = c.err; err == nil {
		err = x.expose()
	}
	if err != nil {
		c.mu.Unlock()
		return nil, &LostError{err}
	}
	if err := c.s.Call(xid, x.body, &x.chunks); err != nil {
		c.mu.Unlock()
		return nil, errors.Join(err, x.hide())
	}
	c.calls[xid] = done
	c.turn()
	c.mu.Unlock()
	var r result
	select {
	case r = <-done:
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.calls, xid)
		c.s.Forget(xid)
		c.mu.Unlock()
		r.err = fmt.Errorf("rpcrdma: wait for a reply: %w", ctx.Err())
	}
	// The peer must lose access to the memory before the caller gets it (draft sections 4.5.1.3
	// and 4.5.2.3).
	if err := x.hide(); err != nil && r.err == nil {
		r.err = &LostError{err}
	}
	if r.err != nil {
		return nil, r.err
	}
	return x.response(r.reply), nil
}

// awaitReady waits until the connection is negotiated.
func (c *Conn) awaitReady(ctx context.Context) error {
	select {
	case <-c.ready:
		return nil
	case <-c.ctx.Done():
		return &LostError{c.cause()}
	case <-ctx.Done():
		return ctx.Err()
	}
}

// cause is Err of a connection that has ended, or is about to.
func (c *Conn) cause() error { return cmp.Or(c.Err(), errGone) }

// reply returns the maximum length of the reply.
func (q *Call) reply() int { return cmp.Or(q.Reply, 1024) }

// secured adapts q to RPCSEC_GSS: it makes room for the longest verifier, and disables chunks if
// the message must stay whole (draft section 11.2.2, RFC 8166 section 8.2.2).
func (q *Call) secured() *Call {
	cred, ok := rpc.GSS(q.Msg)
	if !ok {
		return q
	}
	g := *q
	g.Reply = q.reply() + rpc.MaxVerifier
	if cred.Whole() {
		g.Msg = rpc.Msg{Body: q.Msg.AppendFlat(nil)}
		for _, n := range q.Results {
			g.Reply += 4 + rpc.Pad(n)
		}
		g.Results, g.Into = nil, nil
	}
	return &g
}

// Post sends a call-only RPC, which has no reply and no data items.
func (c *Conn) Post(ctx context.Context, m rpc.Msg) error {
	if err := c.awaitReady(ctx); err != nil {
		return err
	}
	if len(m.Body) < 8 {
		return rpc.ErrXDR
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return &LostError{c.err}
	}
	if err := c.s.Post(binary.BigEndian.Uint32(m.Body), m.AppendFlat(nil)); err != nil {
		return err
	}
	c.turn()
	return nil
}

// exchange is an outstanding call and its memory.
type exchange struct {
	c      *Conn
	q      *Call
	plan   session.CallPlan
	body   []byte
	parts  []*part
	writes []*part // of the results, among the parts
	reply  *part   // the Reply chunk, among the parts; nil: none
	chunks session.CallChunks
}

// prepare allocates memory and windows.
func (x *exchange) prepare(ctx context.Context) (err error) {
	if err := x.reduce(ctx); err != nil {
		return err
	}
	if x.plan.External {
		p, err := x.add(ctx, nil, len(x.body), iwarp.AccessRemoteRead, func(g wire.Segment) {
			x.chunks.Call = append(x.chunks.Call, wire.ReadSegment{Segment: g})
		})
		if err != nil {
			return err
		}
		copy(p.b.b, x.body)
		x.body = nil
	}
	for i, n := range x.plan.Writes {
		var b *buffer
		if i < len(x.q.Into) && x.q.Into[i] != nil {
			if b = x.q.Into[i].b; len(b.b) < n { // the peer could write beyond it
				return errShort
			}
		}
		p, err := x.add(ctx, b, n, iwarp.AccessRemoteWrite, func(g wire.Segment) {
			x.chunks.Writes[i] = append(x.chunks.Writes[i], g)
		})
		if err != nil {
			return err
		}
		x.writes = append(x.writes, p)
	}
	x.chunks.Writes = make([]wire.Chunk, len(x.writes))
	if x.plan.Reply > 0 {
		x.reply, err = x.add(ctx, nil, x.plan.Reply, iwarp.AccessRemoteWrite, func(g wire.Segment) {
			x.chunks.Reply = append(x.chunks.Reply, g)
		})
	}
	return err
}

// add adds a part of n bytes of b, or, if that is nil, of memory of its own. list adds a segment to the chunks of the
// call.
func (x *exchange) add(ctx context.Context, b *buffer, n int, a iwarp.Access, list func(wire.Segment)) (*part, error) {
	var err error
	p := &part{b: b, n: n, own: b == nil, access: a, list: list}
	if p.own {
		if p.b, err = x.c.e.pool.alloc(ctx, n); err != nil {
			return nil, err
		}
	}
	x.parts = append(x.parts, p)
	p.win, err = x.c.window(ctx)
	return p, err
}

// reduce moves the items that the plan reduces into parts of their own, unless they are in registered memory already, and
// makes the message of the rest.
func (x *exchange) reduce(ctx context.Context) (err error) {
	m := x.q.Msg
	at, moved := 0, 0
	for i, it := range m.Items {
		x.body = append(x.body, m.Body[at:it.Pos]...)
		at = it.Pos
		if x.plan.Reduce == nil || !x.plan.Reduce[i] {
			x.body = append(x.body, it.Data...)
			for len(x.body)%4 != 0 {
				x.body = append(x.body, 0)
			}
			continue
		}
		pos := uint32(len(x.body) + moved)
		p, err := x.add(ctx, x.c.e.find(it.Data), len(it.Data), iwarp.AccessRemoteRead, func(g wire.Segment) {
			x.chunks.Reads = append(x.chunks.Reads, wire.ReadSegment{Position: pos, Segment: g})
		})
		if err != nil {
			return err
		}
		if p.own {
			copy(p.b.b, it.Data)
		}
		moved += rpc.Pad(len(it.Data))
	}
	if at == 0 {
		x.body = m.Body
	} else {
		x.body = append(x.body, m.Body[at:]...)
	}
	return nil
}

// expose binds the windows and fills in the chunks. Called with mu held.
func (x *exchange) expose() error {
	for _, p := range x.parts {
		if err := x.c.takeWindow(p); err != nil {
			return err
		}
		if x.chunks.Inv == 0 {
			x.chunks.Inv = p.win.rkey
		}
		for off := 0; off < p.n; off += x.plan.MaxSeg {
			p.list(wire.Segment{Handle: p.win.rkey, Length: uint32(min(p.n-off, x.plan.MaxSeg)), Offset: p.b.addr(off)})
		}
	}
	return nil
}

// hide invalidates the windows that the peer did not invalidate, and waits for that to complete. A
// failure ends the connection, like the failure of any work request (draft section 7.4).
func (x *exchange) hide() error {
	c := x.c
	var n int
	done := make(chan error, len(x.parts)) // buffered, so that the completion loop never blocks
	c.mu.Lock()
	for _, p := range x.parts {
		if p.win == nil || !p.win.bound {
			continue
		}
		if !c.waitRoom() {
			c.mu.Unlock()
			return c.Err()
		}
		wr := iwarp.SendWR{Op: iwarp.OpLocalInv, Inv: p.win.rkey}
		if err := c.post(&wr, &op{slot: -1, done: func(err error) { done <- err }}); err != nil {
			c.mu.Unlock()
			return err
		}
		p.win.bound = false
		n++
	}
	c.mu.Unlock()
	var err error
	for range n {
		err = errors.Join(err, <-done)
	}
	return err
}

// release frees the memory that the response does not use.
func (x *exchange) release() {
	c := x.c
	c.mu.Lock()
	gone := c.err != nil // otherwise the connection releases the windows when it ends
	if gone {            // the peer may access the memory until the queue pair is destroyed
		c.mu.Unlock()
		<-c.dead
		c.mu.Lock()
	}
	for _, p := range x.parts {
		if p.win == nil {
			continue
		}
		if gone {
			_ = p.win.mw.Close()
		} else {
			delete(c.byKey, p.win.rkey)
			c.windows = append(c.windows, p.win)
		}
	}
	c.mu.Unlock()
	for _, p := range x.parts {
		if p.own {
			p.b.release()
		}
	}
}

// response converts a reply to a Response, which takes over the memory.
func (x *exchange) response(r *session.Reply) *Response {
	out := &Response{Msg: rpc.Msg{Body: r.Body}}
	if r.Body == nil {
		out.Body = append([]byte(nil), x.reply.b.b[:r.Ext]...)
	}
	for i, p := range x.writes {
		var n uint64
		if r.Writes != nil {
			n = r.Writes[i].Len()
		}
		out.Items = append(out.Items, rpc.Item{Pos: -1, Data: p.b.b[:n]})
		if p.own {
			out.bufs = append(out.bufs, p.b)
			p.own = false
		}
	}
	return out
}

// find returns the Buffer that d is a prefix of, or nil.
func (e *Endpoint) find(d []byte) *buffer {
	if len(d) == 0 {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.buffers[&d[0]]
}
