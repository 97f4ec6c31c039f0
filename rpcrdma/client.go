package rpcrdma

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Client makes RPCs to one server. It connects on demand, reconnects after a connection breaks, and
// then resends outstanding calls with the same XIDs.
type Client struct {
	e    *Endpoint
	addr string
	xid  atomic.Uint32
	told atomic.Bool // Config.Silent was called

	mu      sync.Mutex
	conn    *Conn
	dialing chan struct{} // closed when the goroutine that is connecting is done
	version int           // highest version that the server supports; 0: unknown
	closed  bool
}

// Dial returns a Client of the server at addr, such as "10.0.0.1:20049". The client connects at its
// first call.
func (e *Endpoint) Dial(addr string) *Client {
	c := &Client{e: e, addr: addr}
	c.xid.Store(rand.Uint32())
	return c
}

// XID returns a new transaction ID, never 0.
func (c *Client) XID() uint32 {
	for {
		if x := c.xid.Add(1); x != 0 {
			return x
		}
	}
}

// Buffer allocates registered memory, as Endpoint.Buffer.
func (c *Client) Buffer(ctx context.Context, n int) (*Buffer, error) { return c.e.Buffer(ctx, n) }

// Close ends the connection.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	conn := c.conn
	c.mu.Unlock()
	if conn != nil {
		return conn.Close()
	}
	return nil
}

// Conn returns the current connection, and connects if there is none.
func (c *Client) Conn(ctx context.Context) (*Conn, error) {
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, ErrClosed
		}
		if c.conn != nil && c.conn.ctx.Err() == nil {
			defer c.mu.Unlock()
			return c.conn, nil
		}
		if wait := c.dialing; wait != nil {
			c.mu.Unlock()
			select {
			case <-wait:
				continue
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		done := make(chan struct{})
		c.dialing = done
		c.mu.Unlock()
		conn, err := c.dial(ctx)
		c.mu.Lock()
		c.conn, c.dialing = conn, nil
		closed := c.closed
		c.mu.Unlock()
		close(done)
		if err == nil && closed {
			conn.Close()
			return nil, ErrClosed
		}
		return conn, err
	}
}

// dial connects with the highest version that the server is known to support. A server that does
// not respond to version 2 at all is assumed not to support it (draft section 4.3.2).
func (c *Client) dial(ctx context.Context) (*Conn, error) {
	for {
		conn, quiet, err := c.connect(ctx)
		if err == nil {
			c.mu.Lock()
			c.version = conn.Version()
			c.mu.Unlock()
			return conn, nil
		}
		c.mu.Lock()
		cfg := &c.e.cfg.Session
		again := quiet && c.version == 0 && cfg.Version > 1 && cfg.MinVersion <= 1 && c.e.cfg.Auth == nil
		if again {
			c.version = 1
		}
		c.mu.Unlock()
		if !again || ctx.Err() != nil {
			return nil, err
		}
	}
}

// connect makes one attempt. quiet reports that MPA start-up succeeded, but the server sent no
// RPC-over-RDMA message.
func (c *Client) connect(ctx context.Context) (conn *Conn, quiet bool, err error) {
	e := c.e
	ctx, cancel := context.WithTimeout(ctx, e.cfg.Setup)
	defer cancel()
	cfg := e.cfg.session(nil)
	c.mu.Lock()
	if c.version == 1 {
		cfg.Version = 1
	}
	c.mu.Unlock()
	server, _ := netip.ParseAddrPort(c.addr)
	if conn, err = e.newConn(ctx, server.Addr(), cfg); err != nil {
		return nil, false, err
	}
	icfg := e.cfg.Iwarp
	icfg.PrivateData = e.cfg.private()
	info, err := conn.qp.Connect(ctx, c.addr, &icfg)
	if err != nil {
		conn.fail(err)
		return nil, false, fmt.Errorf("rpcrdma: %w", err)
	}
	agree(&cfg, info.PrivateData)
	conn.mu.Lock()
	conn.s.SetVersion1(cfg.Send1, cfg.Recv1, cfg.Invalidate)
	conn.mu.Unlock()
	conn.start()
	select {
	case <-conn.ready:
		return conn, false, nil
	case <-conn.ctx.Done():
		err := conn.cause()
		return nil, errors.Is(err, iwarp.ErrPeerClosed) || errors.As(err, new(*iwarp.TerminateError)), &LostError{err}
	case <-ctx.Done():
		conn.fail(ctx.Err())
		return nil, true, fmt.Errorf("rpcrdma: wait for the server's first message: %w", ctx.Err())
	}
}

// retries is how many times a call is repeated in another form after an error that asks for it.
// terminates is how many times it is repeated after a connection ended by a Terminate, since the
// call itself may be the cause (draft section 7.3).
const retries, terminates = 4, 8

// silence is how long a server must be unreachable before Config.Silent is called.
const silence = 5 * time.Second

// Call makes an RPC, like Conn.Call. If the connection breaks, it reconnects and resends the call
// with the same XID until ctx is done or Config.Patience has elapsed. After an error from which a
// requester can recover, it repeats the call with other formats, or with more memory if q.Again is
// set.
func (c *Client) Call(ctx context.Context, q *Call) (*Response, error) {
	tries, ended := 0, 0
	wait := 10 * time.Millisecond
	var since time.Time // the first of the failures
	call := *q
	for {
		conn, err := c.Conn(ctx)
		var r *Response
		if err == nil {
			r, err = conn.Call(ctx, &call)
		}
		if err == nil {
			c.told.Store(false)
			return r, nil
		}
		var f *session.FailureError
		var lost *LostError
		switch {
		case ctx.Err() != nil || errors.Is(err, ErrClosed) || errors.Is(err, iwarp.ErrDaemonGone) || errors.Is(err, iwarp.ErrClosed):
			return nil, err
		case errors.As(err, &f):
			tries++
			if tries > retries || !c.adapt(&call, f) {
				return nil, err
			}
			continue // with the same XID, since the call was not executed
		case errors.As(err, &lost) && errors.As(err, new(*iwarp.TerminateError)) && ended == terminates:
			return nil, err
		case errors.As(err, &lost), errors.Is(err, iwarp.ErrRefused), errors.Is(err, iwarp.ErrUnreachable), errors.Is(err, iwarp.ErrTimeout):
			if errors.As(err, new(*iwarp.TerminateError)) {
				ended++
			}
			if since.IsZero() {
				since = time.Now()
			}
			gone, tell, patience := time.Since(since), silence, c.e.cfg.Patience
			if patience > 0 {
				tell = min(tell, patience/2)
			}
			if f := c.e.cfg.Silent; f != nil && gone >= tell && c.told.CompareAndSwap(false, true) {
				f(c.addr, err)
			}
			if patience > 0 && gone >= patience {
				return nil, err
			}
			select {
			case <-time.After(wait):
				wait = min(2*wait, time.Second)
			case <-ctx.Done():
				return nil, err
			}
			continue
		}
		return nil, err
	}
}

// adapt changes a call as the responder's error demands. It returns false if that is not possible.
func (c *Client) adapt(q *Call, f *session.FailureError) bool {
	switch f.Code {
	case wire.ErrReadChunks, wire.ErrWriteChunks:
		return true // the session has noted the limit
	case wire.ErrWriteResource:
		if !q.Again || f.Index == 0 || f.Needed == 0 || int(f.Index) > len(q.Results) || int(f.Needed) > c.e.cfg.Pool/2 {
			return false
		}
		q.Results = append([]int(nil), q.Results...)
		q.Results[f.Index-1] = max(int(f.Needed), q.Results[f.Index-1])
		q.Into = nil
		return true
	case wire.ErrReplyResource:
		if !q.Again || f.Needed == 0 || int(f.Needed) > c.e.cfg.Pool/2 {
			return false
		}
		q.Reply = max(int(f.Needed), q.Reply)
		return true
	}
	return false
}

// Do calls a procedure of a program. args writes the arguments; the returned Reader is positioned
// at the results.
func (c *Client) Do(ctx context.Context, head rpc.Call, args func(*rpc.Writer), q Call) (*rpc.Reader, *Response, error) {
	var w rpc.Writer
	head.XID = c.XID()
	head.Start(&w)
	if args != nil {
		args(&w)
	}
	q.Msg = w.Msg
	resp, err := c.Call(ctx, &q)
	if err != nil {
		return nil, nil, err
	}
	if len(resp.Body) < 4 || binary.BigEndian.Uint32(resp.Body) != head.XID {
		resp.Release()
		return nil, nil, rpc.ErrXDR
	}
	r, err := rpc.ParseReply(resp.Msg)
	if err != nil {
		resp.Release()
		return nil, nil, err
	}
	return r, resp, nil
}
