// Package memconn implements an in-memory connection for tests: the methods of *iwarp.Conn that app
// uses, with checks of their rules.
package memconn

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// Conn is one end. It is safe for concurrent use.
type Conn struct {
	peer *Conn
	size int // bytes of each
	down chan struct{}
	once *sync.Once

	in chan []byte

	mu      sync.Mutex
	regions map[uint32]*region
	next    uint32

	// Fault, if not nil, is called before each operation ("send", "write", "read"). If it
	// returns an error, the connection breaks.
	Fault func(op string, n int) error
}

type region struct {
	base  uint64
	bytes []byte
}

// errDown is returned by operations on a broken connection.
var errDown = errors.New("memconn: connection is down")

// Pair returns two ends with depth receives of size bytes each. As with RDMA, a message without a
// receive breaks the connection.
func Pair(depth, size int) (a, b *Conn) {
	down, once := make(chan struct{}), new(sync.Once)
	mk := func(base uint32) *Conn {
		return &Conn{size: size, down: down, once: once, in: make(chan []byte, depth), regions: make(map[uint32]*region), next: base}
	}
	a, b = mk(0x1000), mk(0x2000)
	a.peer, b.peer = b, a
	return a, b
}

// Alloc returns memory that the peer may read and write.
func (c *Conn) Alloc(n int) ([]byte, iwarp.Remote) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	r := &region{base: uint64(c.next) << 32, bytes: make([]byte, n)}
	c.regions[c.next] = r
	return r.bytes, iwarp.Remote{Addr: r.base, RKey: c.next, Len: uint32(n)}
}

// Close closes the connection cleanly: the peer reads io.EOF after the messages already sent.
func (c *Conn) Close() { c.once.Do(func() { close(c.down) }) }

// Done returns a channel that is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.down }

func (c *Conn) check(op string, n int) error {
	select {
	case <-c.down:
		return errDown
	default:
	}
	if c.Fault != nil {
		if err := c.Fault(op, n); err != nil {
			c.Close()
			return err
		}
	}
	return nil
}

// Send sends one message.
func (c *Conn) Send(_ context.Context, b []byte) error {
	if err := c.check("send", len(b)); err != nil {
		return err
	}
	if len(b) > c.peer.size {
		c.Close()
		return fmt.Errorf("memconn: message of %d bytes for a receive of %d", len(b), c.peer.size)
	}
	select {
	case c.peer.in <- bytes.Clone(b):
		return nil
	default:
		c.Close()
		return errors.New("memconn: no receive is posted")
	}
}

// PostSend is Send.
func (c *Conn) PostSend(ctx context.Context, b []byte) error { return c.Send(ctx, b) }

// Recv receives one message.
func (c *Conn) Recv(ctx context.Context, b []byte) (int, error) {
	select {
	case m := <-c.in:
		return copy(b, m), nil
	default:
	}
	select {
	case m := <-c.in:
		return copy(b, m), nil
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-c.down:
		select {
		case m := <-c.in:
			return copy(b, m), nil
		default:
			return 0, io.EOF
		}
	}
}

func (c *Conn) region(r iwarp.Remote, n int) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	reg := c.regions[r.RKey]
	if reg == nil || r.Addr < reg.base || r.Addr-reg.base > uint64(len(reg.bytes)) || uint64(len(reg.bytes))-(r.Addr-reg.base) < uint64(n) {
		return nil, errors.New("memconn: no access to that memory")
	}
	off := r.Addr - reg.base
	return reg.bytes[off : off+uint64(n)], nil
}

// Write performs an RDMA Write.
func (c *Conn) Write(_ context.Context, r iwarp.Remote, b []byte) error {
	return c.access("write", r, b, func(far []byte) { copy(far, b) })
}

// PostWrite is Write.
func (c *Conn) PostWrite(ctx context.Context, r iwarp.Remote, b []byte) error {
	return c.Write(ctx, r, b)
}

// Read performs an RDMA Read.
func (c *Conn) Read(_ context.Context, r iwarp.Remote, b []byte) error {
	return c.access("read", r, b, func(far []byte) { copy(b, far) })
}

func (c *Conn) access(op string, r iwarp.Remote, b []byte, do func(far []byte)) error {
	if err := c.check(op, len(b)); err != nil {
		return err
	}
	far, err := c.peer.region(r, len(b))
	if err != nil || int(r.Len) < len(b) {
		c.Close()
		return errors.Join(err, errDown)
	}
	do(far)
	return nil
}
