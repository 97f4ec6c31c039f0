package filecopy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// The window that a server offers unless told otherwise.
const (
	DefaultChunk = 1 << 20
	DefaultSlots = 8
)

// maxWindow bounds what a client registers because a server says so.
const maxWindow = 256 << 20

// A Window is the server's registered memory, for one connection: Slots times
// Chunk octets that the peer may read and write.
type Window struct {
	Bytes  []byte
	Remote iwarp.Remote
	Chunk  int
	Slots  int
}

// Event tells of one file that a server sent or took, or failed to.
type Event struct {
	Put  bool
	Name string
	Result
	Took time.Duration
	Err  error
}

// Serve answers one client on an established connection until the client goes,
// which is no error. tell, if not nil, hears of each file.
func Serve(ctx context.Context, c Conn, store *Store, w Window, idle time.Duration, tell func(Event)) error {
	for {
		m, err := recv(ctx, c, idle)
		if gone(err) {
			return nil
		}
		if err == nil {
			began := time.Now()
			ev := Event{Put: m.Kind == kindPut, Name: m.Name}
			switch m.Kind {
			case kindGet:
				ev.Result, err = serveGet(ctx, c, store, w, idle, &m)
			case kindPut:
				ev.Result, err = servePut(ctx, c, store, w, idle, &m)
			default:
				err = errTurn(&m)
			}
			ev.Took, ev.Err = time.Since(began), err
			if tell != nil {
				tell(ev)
			}
		}
		if err != nil {
			fail(ctx, c, err)
			return err
		}
	}
}

// gone reports that the peer has closed the connection in good order.
func gone(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, iwarp.ErrPeerClosed)
}

func (w *Window) open(size int64) *message {
	return &message{
		Kind: kindOpen, Size: uint64(size), Addr: w.Remote.Addr, RKey: w.Remote.RKey,
		Chunk: uint32(w.Chunk), Slots: uint16(w.Slots),
	}
}

func serveGet(ctx context.Context, c Conn, store *Store, w Window, idle time.Duration, m *message) (Result, error) {
	f, size, err := store.Open(m.Name)
	if err != nil {
		return Result{}, err
	}
	defer f.Close()
	if err := send(ctx, c, w.open(size)); err != nil {
		return Result{}, err
	}
	t := transfer{conn: c, idle: idle, size: size, chunk: w.Chunk, slots: w.Slots, buf: w.Bytes}
	return t.send(ctx, f)
}

func servePut(ctx context.Context, c Conn, store *Store, w Window, idle time.Duration, m *message) (Result, error) {
	if m.Size > math.MaxInt64 {
		return Result{}, &Error{CodeNoSpace, fmt.Errorf("%s: too large", m.Name)}
	}
	in, err := store.Create(m.Name, int64(m.Size))
	if err != nil {
		return Result{}, err
	}
	if err := send(ctx, c, w.open(int64(m.Size))); err != nil {
		in.Abort()
		return Result{}, err
	}
	t := transfer{conn: c, idle: idle, size: int64(m.Size), chunk: w.Chunk, slots: w.Slots, buf: w.Bytes}
	return t.take(ctx, in)
}

// take receives into in, commits it and says done.
func (t *transfer) take(ctx context.Context, in *Incoming) (Result, error) {
	res, err := t.receive(ctx, in)
	if err != nil {
		in.Abort()
		return res, err
	}
	if err := in.Commit(); err != nil {
		return res, err
	}
	// The file is there, whatever becomes of this message.
	return res, send(ctx, t.conn, &message{Kind: kindDone})
}

// Client copies files over an established connection.
type Client struct {
	Conn     Conn
	Alloc    func(n int) ([]byte, error) // registered memory for local use
	Idle     time.Duration               // 0: DefaultIdle
	Progress func(done, total int64)     // nil: none

	buf   []byte
	close func() error
}

// Put copies size octets from r into the server's file name by RDMA Write.
func (c *Client) Put(ctx context.Context, r io.Reader, size int64, name string) (res Result, err error) {
	defer func() { c.finish(ctx, err) }()
	if err := CheckName(name); err != nil {
		return Result{}, err
	}
	m, err := c.ask(ctx, &message{Kind: kindPut, Size: uint64(size), Name: name})
	if err != nil {
		return Result{}, err
	}
	t, err := c.transfer(m, size)
	if err != nil {
		return Result{}, err
	}
	t.move = func(ctx context.Context, off, n int) error {
		return c.Conn.Write(ctx, m.remote(off, n), t.buf[off:off+n])
	}
	return t.send(ctx, r)
}

// Get copies the server's file name by RDMA Read to the file as of store.
func (c *Client) Get(ctx context.Context, name string, store *Store, as string) (res Result, err error) {
	defer func() { c.finish(ctx, err) }()
	if err := CheckName(name); err != nil {
		return Result{}, err
	}
	m, err := c.ask(ctx, &message{Kind: kindGet, Name: name})
	if err != nil {
		return Result{}, err
	}
	if m.Size > math.MaxInt64 {
		return Result{}, &Error{CodeRequest, errMessage}
	}
	in, err := store.Create(as, int64(m.Size))
	if err != nil {
		return Result{}, err
	}
	t, err := c.transfer(m, int64(m.Size))
	if err != nil {
		in.Abort()
		return Result{}, err
	}
	t.move = func(ctx context.Context, off, n int) error {
		return c.Conn.Read(ctx, m.remote(off, n), t.buf[off:off+n])
	}
	return t.take(ctx, in)
}

func (c *Client) finish(ctx context.Context, err error) {
	if err != nil {
		fail(ctx, c.Conn, err)
	}
}

func (c *Client) idle() time.Duration {
	if c.Idle == 0 {
		return DefaultIdle
	}
	return c.Idle
}

// ask sends a request and waits for the server's window.
func (c *Client) ask(ctx context.Context, request *message) (*message, error) {
	if err := send(ctx, c.Conn, request); err != nil {
		return nil, err
	}
	m, err := recv(ctx, c.Conn, c.idle())
	if err != nil {
		return nil, err
	}
	if m.Kind != kindOpen {
		return nil, errTurn(&m)
	}
	if m.Chunk == 0 || m.Chunk > MaxChunk || m.Slots == 0 || m.Slots > MaxSlots || uint64(m.Chunk)*uint64(m.Slots) > maxWindow {
		return nil, &Error{CodeRequest, fmt.Errorf("the server offers a window of %d times %d octets: not allowed", m.Slots, m.Chunk)}
	}
	return &m, nil
}

func (c *Client) transfer(open *message, size int64) (*transfer, error) {
	t := &transfer{conn: c.Conn, idle: c.idle(), size: size, chunk: int(open.Chunk), slots: int(open.Slots)}
	if need := t.chunk * t.slots; len(c.buf) < need {
		buf, err := c.Alloc(need)
		if err != nil {
			return nil, &Error{CodeInternal, fmt.Errorf("register %d octets: %w", need, err)}
		}
		c.buf = buf
	}
	t.buf = c.buf
	if c.Progress != nil {
		t.progress = func(done int64) { c.Progress(done, size) }
	}
	return t, nil
}

// remote is the place of the octets [off,off+n) of the window.
func (m *message) remote(off, n int) iwarp.Remote {
	return iwarp.Remote{Addr: m.Addr + uint64(off), RKey: m.RKey, Len: uint32(n)}
}
