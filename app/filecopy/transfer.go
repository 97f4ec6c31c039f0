package filecopy

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"sync/atomic"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"golang.org/x/sync/errgroup"
)

// A Conn is what the protocol needs of a connection; *iwarp.Conn has it.
// Several goroutines call it at the same time.
type Conn interface {
	Send(ctx context.Context, b []byte) error
	Recv(ctx context.Context, b []byte) (int, error)
	Read(ctx context.Context, r iwarp.Remote, b []byte) error
	Write(ctx context.Context, r iwarp.Remote, b []byte) error
}

// Result tells of a file that was copied.
type Result struct {
	Size int64
	Sum  [sha256.Size]byte
}

// Times that both sides wait.
const (
	// DefaultIdle is how long a side waits for a message in the middle of a
	// transfer: writing a chunk to a slow disk must fit.
	DefaultIdle = 60 * time.Second
	// farewell is how long the side that reports an error waits for the other
	// one to go.
	farewell = 3 * time.Second
)

// transfer is one file on its way, seen from either side.
type transfer struct {
	conn     Conn
	idle     time.Duration
	size     int64
	chunk    int
	slots    int
	buf      []byte // slots of chunk octets
	progress func(done int64)

	// move does the RDMA operation for the octets at off of buf; nil on the
	// side whose window the other one accesses.
	move func(ctx context.Context, off, n int) error
}

// piece is a chunk between two stages of the transfer.
type piece struct {
	seq   uint64
	off   int // in buf
	n     int
	moved chan error // nil: nothing to wait for
	end   *message   // the end of the file instead of a chunk
}

// chunks returns the number of chunks of the file.
func (t *transfer) chunks() uint64 {
	return (uint64(t.size) + uint64(t.chunk) - 1) / uint64(t.chunk)
}

func (t *transfer) piece(seq uint64) piece {
	n := min(int64(t.chunk), t.size-int64(seq)*int64(t.chunk))
	return piece{seq: seq, off: int(seq%uint64(t.slots)) * t.chunk, n: int(n)}
}

func (p *piece) start(ctx context.Context, t *transfer) {
	if t.move == nil {
		return
	}
	moved := make(chan error, 1)
	p.moved = moved
	off, n := p.off, p.n
	go func() { moved <- t.move(ctx, off, n) }()
}

// wait waits until the octets of p are where they belong. The operation ends
// with the connection if not before, so buf is not touched after a nil error.
func (p *piece) wait(ctx context.Context) error {
	if p.moved == nil {
		return nil
	}
	select {
	case err := <-p.moved:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// recv waits for one message. A message of kind error becomes a *RemoteError.
func recv(ctx context.Context, c Conn, idle time.Duration) (message, error) {
	b := make([]byte, MaxMessage)
	wait, cancel := context.WithTimeout(ctx, idle)
	defer cancel()
	n, err := c.Recv(wait, b)
	var m message
	switch {
	case err != nil && wait.Err() != nil && ctx.Err() == nil:
		return m, fmt.Errorf("the other side said nothing for %v", idle)
	case err != nil:
		return m, err
	}
	if err := m.decode(b[:n]); err != nil {
		return m, &Error{CodeRequest, err}
	}
	if m.Kind == kindError {
		return m, &RemoteError{m.Code, m.Text}
	}
	return m, nil
}

func send(ctx context.Context, c Conn, m *message) error {
	return c.Send(ctx, m.append(nil))
}

func errTurn(m *message) error {
	return &Error{CodeRequest, fmt.Errorf("message of kind %d out of turn", m.Kind)}
}

// send sends the whole file from r and returns after the other side's done.
func (t *transfer) send(ctx context.Context, r io.Reader) (Result, error) {
	var (
		sum     = sha256.New()
		credits = make(chan struct{}, t.slots)
		ready   = make(chan piece, t.slots)
		ended   atomic.Bool
	)
	for range t.slots {
		credits <- struct{}{}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { // fills slots
		defer close(ready)
		for seq := range t.chunks() {
			select {
			case <-credits:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			p := t.piece(seq)
			b := t.buf[p.off : p.off+p.n]
			if _, err := io.ReadFull(r, b); err != nil {
				if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
					err = errors.New("the file became shorter while it was copied")
				}
				return &Error{CodeIO, err}
			}
			p.start(ctx, t)
			sum.Write(b)
			select {
			case ready <- p:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	})
	g.Go(func() error { // tells which slots are full, in order
		var told uint64
		for p := range ready {
			if err := p.wait(ctx); err != nil {
				return err
			}
			if err := send(ctx, t.conn, &message{Kind: kindChunk, Seq: p.seq, Len: uint32(p.n)}); err != nil {
				return err
			}
			told++
		}
		if told < t.chunks() { // filling failed, and says why
			return nil
		}
		ended.Store(true)
		return send(ctx, t.conn, &message{Kind: kindEnd, Size: uint64(t.size), Sum: digest(sum)})
	})
	g.Go(func() error { // hears which slots are free again
		for next := uint64(0); ; {
			m, err := recv(ctx, t.conn, t.idle)
			switch {
			case err != nil:
				return err
			case m.Kind == kindFree && m.Seq == next && next < t.chunks():
				next++
				t.report(min(int64(next)*int64(t.chunk), t.size))
				select {
				case credits <- struct{}{}:
				default: // more freed than sent
					return errTurn(&m)
				}
			case m.Kind == kindDone && ended.Load():
				return nil
			default:
				return errTurn(&m)
			}
		}
	})
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	return Result{t.size, digest(sum)}, nil
}

// receive takes the whole file into w and checks it against the sender's sum.
// It does not say done: the file is not safe yet.
func (t *transfer) receive(ctx context.Context, w io.Writer) (Result, error) {
	var (
		sum   = sha256.New()
		ready = make(chan piece, t.slots+1)
		freed atomic.Uint64
	)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { // hears which slots are full
		defer close(ready)
		for next := uint64(0); ; next++ {
			m, err := recv(ctx, t.conn, t.idle)
			if err != nil {
				return err
			}
			if m.Kind == kindEnd && next == t.chunks() {
				ready <- piece{end: &m}
				return nil
			}
			if m.Kind != kindChunk || m.Seq != next || next >= t.chunks() || next-freed.Load() >= uint64(t.slots) {
				return errTurn(&m)
			}
			p := t.piece(next)
			if int(m.Len) != p.n {
				return errTurn(&m)
			}
			p.start(ctx, t)
			ready <- p // has room: at most slots pieces and the end are in it
		}
	})
	g.Go(func() error { // empties them
		for p := range ready {
			if p.end != nil {
				if p.end.Size != uint64(t.size) || p.end.Sum != digest(sum) {
					return &Error{CodeChecksum, errors.New("SHA-256 differs: the data changed on its way, nothing was stored")}
				}
				return nil
			}
			if err := p.wait(ctx); err != nil {
				return err
			}
			b := t.buf[p.off : p.off+p.n]
			if _, err := w.Write(b); err != nil {
				return err
			}
			sum.Write(b)
			freed.Store(p.seq + 1)
			t.report(int64(p.seq)*int64(t.chunk) + int64(p.n))
			if err := send(ctx, t.conn, &message{Kind: kindFree, Seq: p.seq}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	return Result{t.size, digest(sum)}, nil
}

func (t *transfer) report(done int64) {
	if t.progress != nil {
		t.progress(done)
	}
}

func digest(h hash.Hash) (d [sha256.Size]byte) {
	h.Sum(d[:0])
	return d
}

// fail tells the other side of err, unless err is the other side's own or the
// connection's, and waits a moment for it to go: closing at once could
// overtake the message.
func fail(ctx context.Context, c Conn, err error) {
	m := message{Kind: kindError, Code: CodeInternal, Text: "stopped"}
	var e *Error
	switch {
	case errors.As(err, &e):
		m.Code, m.Text = e.Code, printable(e.Error())
	case ctx.Err() == nil:
		return
	default:
		m.Code = CodeBusy
	}
	bye, cancel := context.WithTimeout(context.WithoutCancel(ctx), farewell)
	defer cancel()
	if send(bye, c, &m) != nil {
		return
	}
	b := make([]byte, MaxMessage)
	for {
		if _, err := c.Recv(bye, b); err != nil {
			return
		}
	}
}
