package filecopy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/subnet"
)

// Config returns the connection settings of both sides. They provide receives for everything that
// docs/cp.md lets the other side send at once.
func Config() *iwarp.Config {
	return &iwarp.Config{PrivateData: hello(Version), RecvDepth: recvDepth, RecvSize: maxMessage}
}

// A Server serves the clients of one listener.
type Server struct {
	Store      *Store
	MaxClients int // concurrent clients; each uses defaultSlots*defaultChunk bytes
	// Tell, if not nil, is called for every file that was copied, and for the first maxFailures failures of
	// each client in failureTime: a client may fail again at once. The Event of a client that could not be
	// served has no Name. Calls are not concurrent.
	Tell func(netip.AddrPort, Event)

	mu       sync.Mutex
	failures map[netip.Prefix]int // of each network, from since on
	since    time.Time
}

const (
	maxFailures = 10   // of one network
	maxFailing  = 1000 // networks
	failureTime = 10 * time.Second
)

// Serve serves the clients of l until ctx is done, and then returns nil. It returns after all
// clients have been notified.
func (s *Server) Serve(ctx context.Context, l *iwarp.Listener) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := &places{free: s.MaxClients, taken: make(map[netip.Prefix]int)}
	for {
		req, err := l.Request(ctx)
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil
		default:
			return err
		}
		tell := func(e Event) { s.tell(req.Remote, e) }
		net := subnet.Of(req.Remote.Addr())
		if !slots.take(net) {
			v, err := checkHello(req.PrivateData())
			if err != nil {
				v = Version
			}
			tell(Event{Err: errors.Join(errors.New("too many clients: raise --max-clients"), req.Reject(ctx, hello(v)))})
			continue
		}
		wg.Go(func() {
			defer slots.release(net)
			if err := s.serve(ctx, req, tell); err != nil && ctx.Err() == nil {
				tell(Event{Err: err})
			}
		})
	}
}

// places are those of the clients that are served, by network.
type places struct {
	mu    sync.Mutex
	free  int
	taken map[netip.Prefix]int
}

// take takes a place for a client in net, which may have at most four times as many places as are free: one network
// alone leaves some for others.
func (p *places) take(net netip.Prefix) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.taken[net] >= 4*p.free {
		return false
	}
	p.free--
	p.taken[net]++
	return true
}

// release frees a place that take has taken.
func (p *places) release(net netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free++
	if p.taken[net]--; p.taken[net] == 0 {
		delete(p.taken, net)
	}
}

func (s *Server) tell(peer netip.AddrPort, e Event) {
	if s.Tell == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.Err != nil && !s.failed(subnet.Of(peer.Addr()), time.Now()) {
		return
	}
	s.Tell(peer, e)
}

// failed counts a failure of net, and reports whether to tell it.
func (s *Server) failed(net netip.Prefix, now time.Time) bool {
	if now.Sub(s.since) >= failureTime {
		s.since, s.failures = now, make(map[netip.Prefix]int)
	}
	n, known := s.failures[net]
	if n == maxFailures || !known && len(s.failures) == maxFailing {
		return false
	}
	s.failures[net]++
	return true
}

// serve serves one client. Its error has not been passed to tell yet.
func (s *Server) serve(ctx context.Context, req *iwarp.ConnRequest, tell func(Event)) error {
	version, err := checkHello(req.PrivateData())
	if err != nil {
		return errors.Join(err, req.Reject(ctx, hello(Version)))
	}
	cfg := Config()
	cfg.PrivateData = hello(version) // the client's requests determine the format of the answers
	conn, err := req.AcceptConn(ctx, cfg)
	if err != nil {
		return err
	}
	defer conn.Close()
	w := window{Chunk: defaultChunk, Slots: defaultSlots}
	size := w.Chunk * w.Slots
	mr, err := conn.Alloc(ctx, size, iwarp.AccessLocalWrite|iwarp.AccessRemoteRead|iwarp.AccessRemoteWrite)
	if err != nil {
		err = &Error{CodeBusy, fmt.Errorf("window of %d bytes: %w", size, err)}
		fail(ctx, conn, err)
		return err
	}
	w.Bytes, w.Remote = mr.Bytes()[:size], mr.RemoteAt(0, size)
	told := false
	peer := service{conn: conn, store: s.Store, window: w, idle: defaultIdle, tell: func(e Event) {
		told = told || e.Err != nil
		tell(e)
	}}
	err = peer.run(ctx)
	if told {
		return nil
	}
	return err
}

// Dial connects to the server at addr, an "address:port", by cfg, which should be derived from
// Config(). If the server supports only an older version, Dial connects again with that version.
func Dial(ctx context.Context, dev *iwarp.Device, addr string, cfg *iwarp.Config) (*Client, error) {
	conn, err := dev.Dial(ctx, addr, cfg)
	if r, ok := errors.AsType[*iwarp.RejectError](err); ok {
		if v, e := checkHello(r.PrivateData); e == nil && v < Version {
			old := *cfg
			old.PrivateData = hello(v)
			conn, err = dev.Dial(ctx, addr, &old)
		}
	}
	if err != nil {
		return nil, explain(err)
	}
	version, err := checkHello(conn.Info().PrivateData)
	if err != nil {
		conn.Close()
		return nil, err
	}
	alloc := func(n int) ([]byte, error) {
		mr, err := conn.Alloc(ctx, n, iwarp.AccessLocalWrite)
		if err != nil {
			return nil, err
		}
		return mr.Bytes()[:n], nil
	}
	return &Client{Conn: conn, Alloc: alloc, Version: version, close: conn.Close}, nil
}

// Close ends the connection that Dial made.
func (c *Client) Close() error { return c.close() }

// explain makes an error of a version mismatch readable.
func explain(err error) error {
	r, ok := errors.AsType[*iwarp.RejectError](err)
	if !ok {
		return err
	}
	if _, e := checkHello(r.PrivateData); e != nil {
		return fmt.Errorf("%w: %w", err, e)
	}
	return fmt.Errorf("%w: the server has too many clients, or no memory or quota for another: "+
		"see its messages, or try again later", err)
}
