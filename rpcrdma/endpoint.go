// Package rpcrdma carries ONC RPC over iWARP: RPC-over-RDMA version 2
// (draft-ietf-nfsv4-rpcrdma-version-two-07) and version 1 (RFC 8166). Large
// data items move by RDMA Read and Write between registered memory, without a
// copy.
//
// An Endpoint has the memory. Listen serves programs (package rpc) to clients
// of either version; Dial makes a Client, which connects when it has something
// to say, and again when a connection breaks.
package rpcrdma

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Port is that of NFS over RDMA (RFC 8267 section 9).
const Port = 20049

// Config is what connections are made of. Start from DefaultConfig.
type Config struct {
	Session session.Config
	// Auth, if set, makes the handshake of each connection.
	Auth func() session.Handshake
	// Server serves calls that come in: of clients, or, on a client's connections,
	// in the reverse direction. The latter needs Session.Props.Reverse.
	Server *rpc.Server
	Pool   int // bytes of registered memory of an Endpoint
	// MaxConns bounds how many connections an Endpoint has; more are refused. Each
	// takes about 0.5 MiB of the Pool for messages.
	MaxConns int
	Setup    time.Duration // bound on a connection's start: version and properties
	Patience time.Duration // how long a Client's call tries to reach a server that is gone; 0: until its context is done
	Iwarp    iwarp.Config  // MPA
	// Silent, if set, hears of a server that a Client has tried to reach for some
	// seconds, once until it answers a call again.
	Silent func(addr string, err error)
	// Wire, if set, sees every message that is sent or received.
	Wire func(c *Conn, sent bool, b []byte)
}

// DefaultConfig returns a Config for one kind of endpoint.
func DefaultConfig(server bool) Config {
	c := Config{Session: session.DefaultConfig(server), Pool: 32 << 20, MaxConns: 24, Setup: 10 * time.Second}
	if server {
		c.Iwarp.Startup.IRD = -1 // only servers read and write
	} else {
		c.Iwarp.Startup.ORD = -1
	}
	return c
}

// Endpoint is registered memory and what uses it.
type Endpoint struct {
	dev    *iwarp.Device
	pd     *iwarp.PD
	cfg    Config
	pool   *pool
	guilty guilty

	opWait time.Duration // but for tests the constant

	mu      sync.Mutex
	conns   map[*Conn]struct{}
	buffers map[*byte]*buffer // the caller's, by their first byte
	closed  bool
}

// ErrClosed is an Endpoint, Client or Conn that was closed.
var ErrClosed = errors.New("rpcrdma: closed")

// New makes an Endpoint on dev, which stays the caller's.
func New(ctx context.Context, dev *iwarp.Device, cfg Config) (*Endpoint, error) {
	pd, err := dev.AllocPD(ctx)
	if err != nil {
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	p, err := newPool(ctx, pd, cfg.Pool)
	if err != nil {
		pd.Close()
		return nil, err
	}
	return &Endpoint{dev: dev, pd: pd, cfg: cfg, pool: p, opWait: opWait, conns: make(map[*Conn]struct{}), buffers: make(map[*byte]*buffer)}, nil
}

// Close ends all connections and gives the memory back.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	e.closed = true
	var l []*Conn
	for c := range e.conns {
		l = append(l, c)
	}
	e.mu.Unlock()
	for _, c := range l {
		c.Close()
	}
	err := e.pool.mr.Close()
	return errors.Join(err, e.pd.Close())
}

// Conns returns the connections there are.
func (e *Endpoint) Conns() []*Conn {
	e.mu.Lock()
	defer e.mu.Unlock()
	l := make([]*Conn, 0, len(e.conns))
	for c := range e.conns {
		l = append(l, c)
	}
	return l
}

// Buffer is registered memory of the caller's, from which arguments go, and
// into which results come, without a copy.
type Buffer struct {
	e *Endpoint
	b *buffer
}

// Buffer allocates n bytes. It waits while others have them.
func (e *Endpoint) Buffer(ctx context.Context, n int) (*Buffer, error) {
	b, err := e.pool.alloc(ctx, n)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	e.buffers[&b.b[0]] = b
	e.mu.Unlock()
	return &Buffer{e, b}, nil
}

// Bytes returns the memory.
func (b *Buffer) Bytes() []byte { return b.b.b }

// Release gives it back.
func (b *Buffer) Release() {
	b.e.mu.Lock()
	delete(b.e.buffers, &b.b.b[0])
	b.e.mu.Unlock()
	b.b.release()
}

// private is what we say in MPA's private data (RFC 8797).
func (c *Config) private() []byte {
	return wire.Private{
		Invalidate: true, SendSize: int(c.Session.Props.SendSize), RecvSize: int(c.Session.Props.RecvSize),
	}.Append(nil)
}

// agree sets in s what the peer's private data decide.
func agree(s *session.Config, private []byte) {
	p, ok := wire.FindPrivate(private)
	if !ok {
		return
	}
	s.Send1 = min(p.RecvSize, int(s.Props.SendSize))
	s.Recv1 = min(p.SendSize, int(s.Props.RecvSize))
	s.Invalidate = session.InvalidateNone
	if p.Invalidate { // and we set our flag
		s.Invalidate = session.InvalidateAny
	}
}

// session gives the Config of a Session with a peer that sent that private data.
func (c *Config) session(private []byte) session.Config {
	s := c.Session
	agree(&s, private)
	if c.Auth != nil {
		s.Auth = c.Auth()
	}
	return s
}

// Listener takes connections of clients.
type Listener struct {
	e      *Endpoint
	l      *iwarp.Listener
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

// Listen serves the Config's Server at addr until Close.
func (e *Endpoint) Listen(ctx context.Context, addr string) (*Listener, error) {
	l, err := e.dev.Listen(ctx, addr, &e.cfg.Iwarp)
	if err != nil {
		return nil, fmt.Errorf("rpcrdma: %w", err)
	}
	run, cancel := context.WithCancel(context.Background())
	ln := &Listener{e: e, l: l, cancel: cancel, done: make(chan struct{})}
	go ln.run(run)
	return ln, nil
}

// Addr returns the endpoint as text.
func (l *Listener) Addr() string { return l.l.Addr().String() }

// Done is closed when the Listener is over; Err says why.
func (l *Listener) Done() <-chan struct{} { return l.done }

// Err returns why it is over.
func (l *Listener) Err() error { return l.err }

// Close ends listening. Connections stay.
func (l *Listener) Close() error {
	l.cancel()
	err := l.l.Close()
	<-l.done
	return err
}

func (l *Listener) run(ctx context.Context) {
	defer close(l.done)
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		r, err := l.l.Request(ctx)
		if err != nil {
			if ctx.Err() == nil {
				l.err = err
			}
			return
		}
		wg.Go(func() {
			actx, cancel := context.WithTimeout(ctx, l.e.cfg.Setup)
			defer cancel()
			_ = l.e.accept(actx, r)
		})
	}
}

func (e *Endpoint) accept(ctx context.Context, r *iwarp.ConnRequest) error {
	e.mu.Lock()
	full := len(e.conns) >= e.cfg.MaxConns
	e.mu.Unlock()
	if full {
		return r.Reject(ctx, nil)
	}
	c, err := e.newConn(ctx, r.Remote.Addr().String(), e.cfg.session(r.PrivateData()))
	if err != nil {
		_ = r.Reject(ctx, nil)
		return err
	}
	cfg := e.cfg.Iwarp
	cfg.PrivateData = e.cfg.private()
	if _, err := r.Accept(ctx, c.qp, &cfg); err != nil {
		c.fail(err)
		return err
	}
	c.start()
	return nil
}
