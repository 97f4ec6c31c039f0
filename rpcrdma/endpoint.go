// Package rpcrdma carries ONC RPC over iWARP: RPC-over-RDMA version 2
// (draft-ietf-nfsv4-rpcrdma-version-two-07) and version 1 (RFC 8166). Large data items move by RDMA
// Read and Write between registered memory, without a copy.
//
// An Endpoint owns registered memory. Listen serves programs (package rpc) to clients of either
// version. Dial returns a Client, which connects on demand and reconnects when a connection breaks.
package rpcrdma

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/subnet"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// Port is the port of NFS over RDMA (RFC 8267 section 9).
const Port = 20049

// Config configures an Endpoint and its connections. Start from DefaultConfig.
type Config struct {
	Session session.Config
	// Auth, if set, returns the authentication handshake for a new connection.
	Auth func() session.Handshake
	// Server handles incoming calls: those of clients, or calls in the reverse direction on a
	// client's connections. The latter requires Session.Props.Reverse.
	Server *rpc.Server
	Pool   int // bytes of registered memory of an Endpoint
	// MaxConns bounds the connections of a server, each of which uses about 0.5 MiB of the Pool for
	// messages. A further one takes the place of one whose client has at least two more, or that has
	// been idle for six minutes, and is refused otherwise.
	MaxConns int
	Setup    time.Duration // time-out for negotiating version and properties
	Patience time.Duration // how long a call of a Client tries to reach the server; 0: until its context is done
	Iwarp    iwarp.Config  // MPA
	// Silent, if set, is called when a Client has failed to reach a server for some seconds. It
	// is called again only after the server has answered a call.
	Silent func(addr string, err error)
	// Refused, if set, is called when a Listener has not accepted a connection of peer. Several goroutines may call it
	// at a time.
	Refused func(peer netip.AddrPort, err error)
	// Wire, if set, is called with every message sent or received.
	Wire func(c *Conn, sent bool, b []byte)
}

// DefaultConfig returns the default Config of a server or of a client.
func DefaultConfig(server bool) Config {
	c := Config{Session: session.DefaultConfig(server), Pool: 32 << 20, MaxConns: 24, Setup: 10 * time.Second}
	if server {
		c.Iwarp.Startup.IRD = -1 // only servers issue RDMA Reads and Writes
	} else {
		c.Iwarp.Startup.ORD = -1
	}
	return c
}

// Endpoint is a pool of registered memory and the connections that use it.
type Endpoint struct {
	dev    *iwarp.Device
	pd     *iwarp.PD
	cfg    Config
	pool   *pool
	failed failedCalls

	opWait time.Duration // opWait, except in tests

	mu      sync.Mutex
	conns   map[*Conn]struct{}
	live    int                   // connections in conns, and those that are being made
	shares  subnet.Peers[holding] // of the peers that have connections
	buffers map[*byte]*buffer     // the caller's, by their first byte
	closed  bool
}

// ErrClosed is returned for an Endpoint, Client or Conn that was closed.
var ErrClosed = errors.New("rpcrdma: closed")

// New creates an Endpoint on dev. The caller must close dev itself.
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
	return &Endpoint{dev: dev, pd: pd, cfg: cfg, pool: p, opWait: opWait, conns: make(map[*Conn]struct{}), shares: make(subnet.Peers[holding]), buffers: make(map[*byte]*buffer)}, nil
}

// Close closes all connections and frees the memory.
func (e *Endpoint) Close() error {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	for _, c := range e.Conns() {
		c.Close()
	}
	err := e.pool.mr.Close()
	return errors.Join(err, e.pd.Close())
}

var (
	errFull     = errors.New("rpcrdma: too many connections")
	errReplaced = errors.New("rpcrdma: another client needed the place of the connection")
)

// reserve reserves a place for a connection of peer before its memory is allocated, and returns the share of the peer. A
// server with MaxConns closes another connection for it, or returns errFull.
func (e *Endpoint) reserve(ctx context.Context, peer netip.Addr, server bool) (*share, error) {
	for {
		e.mu.Lock()
		if e.closed {
			e.mu.Unlock()
			return nil, ErrClosed
		}
		s := e.shares.Find(peer, nil)
		if !server || e.live < e.cfg.MaxConns {
			e.live++
			e.shares.Add(s)
			e.mu.Unlock()
			return s, nil
		}
		victim := replaceable(e.conns, s, time.Now())
		e.mu.Unlock()
		if victim == nil {
			return nil, errFull
		}
		victim.fail(errReplaced)
		select {
		case <-victim.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// idleWait is the time after which a full server may close an idle connection for any client, as Linux's does. Clients
// connect again when they have a call to make.
const idleWait = 6 * time.Minute

// replaceable returns the connection to close for one of the peer s, or nil. Its peer crowds s, or it has been idle for
// idleWait. Connections without a call in progress come first, then the least recently used.
func replaceable(conns map[*Conn]struct{}, s *share, now time.Time) (victim *Conn) {
	wasBusy := false
	for c := range conns {
		if !c.accepted {
			continue
		}
		busy := c.serving.Load() > 0
		if !c.held.Crowds(s) && (busy || now.Sub(c.lastUsed()) < idleWait) {
			continue
		}
		if victim == nil || wasBusy && !busy || wasBusy == busy && c.lastUsed().Before(victim.lastUsed()) {
			victim, wasBusy = c, busy
		}
	}
	return victim
}

// remove frees the place of a connection.
func (e *Endpoint) remove(c *Conn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.conns, c)
	e.live--
	e.shares.Remove(c.held)
}

// Conns returns the current connections.
func (e *Endpoint) Conns() []*Conn {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Keys(e.conns))
}

// Buffer is registered memory owned by the caller. Arguments in it are sent, and results are
// received into it, without a copy.
type Buffer struct {
	e *Endpoint
	b *buffer
}

// Buffer allocates n bytes. It waits until enough memory is free.
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

// Release frees the memory.
func (b *Buffer) Release() {
	b.e.mu.Lock()
	delete(b.e.buffers, &b.b.b[0])
	b.e.mu.Unlock()
	b.b.release()
}

// private returns the private data for MPA (RFC 8797).
func (c *Config) private() []byte {
	return wire.Private{
		Invalidate: true, SendSize: int(c.Session.Props.SendSize), RecvSize: int(c.Session.Props.RecvSize),
	}.Append(nil)
}

// agree sets the fields of s that depend on the peer's private data.
func agree(s *session.Config, private []byte) {
	p, ok := wire.FindPrivate(private)
	if !ok {
		return
	}
	s.Send1 = min(p.RecvSize, int(s.Props.SendSize))
	s.Recv1 = min(p.SendSize, int(s.Props.RecvSize))
	s.Invalidate = session.InvalidateNone
	if p.Invalidate { // private announces the same
		s.Invalidate = session.InvalidateAny
	}
}

// session returns the Config of a Session with a peer that sent the given private data.
func (c *Config) session(private []byte) session.Config {
	s := c.Session
	agree(&s, private)
	if c.Auth != nil {
		s.Auth = c.Auth()
	}
	return s
}

// Listener accepts connections.
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

// Addr returns the local address.
func (l *Listener) Addr() string { return l.l.Addr().String() }

// Done returns a channel that is closed when the Listener has ended; Err returns why.
func (l *Listener) Done() <-chan struct{} { return l.done }

// Err returns why the Listener ended.
func (l *Listener) Err() error { return l.err }

// Close stops listening. Established connections are not closed.
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
			if err := l.e.accept(actx, r); err != nil && ctx.Err() == nil && l.e.cfg.Refused != nil {
				l.e.cfg.Refused(r.Remote, err)
			}
		})
	}
}

func (e *Endpoint) accept(ctx context.Context, r *iwarp.ConnRequest) error {
	c, err := e.newConn(ctx, r.Remote.Addr(), e.cfg.session(r.PrivateData()))
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
