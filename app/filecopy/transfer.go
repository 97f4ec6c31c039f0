package filecopy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
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

// Result describes a file that was copied.
type Result struct {
	Size   int64
	Offset int64 // bytes that were there before
	Hash   Hash
	Sum    [sumSize]byte
	Times  Times
}

// Times is how long each part of a copy was busy; parts overlap. Those of the
// other side are 0 if it has version 1.
type Times struct {
	Disk, Hash         time.Duration // here
	PeerDisk, PeerHash time.Duration
	Network            time.Duration // with an RDMA operation outstanding; 0 on a server
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
	v2       bool
	hash     Hash
	offset   int64 // bytes that the receiver has already
	size     int64 // of the whole file
	chunk    int
	slots    int
	buf      []byte // slots of chunk bytes
	progress func(done int64)

	// move does the RDMA operation for the bytes at off of buf; nil on the
	// side whose window the other one accesses.
	move func(ctx context.Context, off, n int) error

	disk, hashing, network meter
	peer                   Times
}

// hashRate is a rate, in bytes a second, at which any disk and CPU can sum up
// what the receiver already has. The other side waits that much longer.
const hashRate = 50 << 20

// patience is how long to wait for a message.
func (t *transfer) patience() time.Duration {
	return t.idle + time.Duration(t.offset/hashRate)*time.Second
}

// A meter adds up the time in which at least one of its users is busy.
type meter struct {
	mu    sync.Mutex
	busy  int
	since time.Time
	total time.Duration
}

// start begins a use; the function that it returns ends it.
func (m *meter) start() (stop func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.busy++; m.busy == 1 {
		m.since = time.Now()
	}
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.busy--; m.busy == 0 {
			m.total += time.Since(m.since)
		}
	}
}

func (m *meter) time() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.total
}

// piece is a chunk between two stages of the transfer.
type piece struct {
	seq    uint64
	off    int // in buf
	n      int
	moved  chan error    // nil: nothing to wait for
	hashed chan struct{} // closed when the chunk is part of the sum
	end    *message      // the end of the file instead of a chunk
}

// chunks returns the number of chunks that are sent.
func (t *transfer) chunks() uint64 {
	return (uint64(t.size-t.offset) + uint64(t.chunk) - 1) / uint64(t.chunk)
}

// position is where chunk seq begins in the file.
func (t *transfer) position(seq uint64) int64 { return t.offset + int64(seq)*int64(t.chunk) }

func (t *transfer) piece(seq uint64) piece {
	n := min(int64(t.chunk), t.size-t.position(seq))
	return piece{seq: seq, off: int(seq%uint64(t.slots)) * t.chunk, n: int(n), hashed: make(chan struct{})}
}

func (t *transfer) bytes(p *piece) []byte { return t.buf[p.off : p.off+p.n] }

func (p *piece) start(ctx context.Context, t *transfer) {
	if t.move == nil {
		return
	}
	moved := make(chan error, 1)
	p.moved = moved
	off, n := p.off, p.n
	stop := t.network.start()
	go func() {
		err := t.move(ctx, off, n)
		stop()
		moved <- err
	}()
}

// wait waits until the bytes of p are where they belong. The operation ends
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

// summed waits until p is part of the sum.
func (p *piece) summed(ctx context.Context) error {
	if p.hashed == nil {
		return nil
	}
	select {
	case <-p.hashed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// sum adds prefix, which may be nil, and then what comes from pieces to a sum,
// in a goroutine of its own. The function that it returns waits for the end of
// pieces.
func (t *transfer) sum(g *errgroup.Group, prefix io.Reader, pieces <-chan piece) (wait func() [sumSize]byte) {
	h := t.hash.new()
	done := make(chan struct{})
	g.Go(func() error {
		defer close(done)
		if prefix != nil {
			if _, err := io.CopyN(h, prefix, t.offset); err != nil {
				return errShorter(err)
			}
		}
		for p := range pieces {
			stop := t.hashing.start()
			h.Write(t.bytes(&p))
			stop()
			close(p.hashed)
		}
		return nil
	})
	return func() (sum [sumSize]byte) {
		<-done
		h.Sum(sum[:0])
		return sum
	}
}

// errShorter is what a reader's error means of a file whose size was known.
func errShorter(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the file became shorter while it was copied")
	}
	return &Error{CodeIO, err}
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

// send sends the file from r after its first offset bytes, which the sum covers
// too, and returns after the other side's done.
func (t *transfer) send(ctx context.Context, r io.Reader) (Result, error) {
	var (
		credits = make(chan struct{}, t.slots)
		ready   = make(chan piece, t.slots)
		tosum   = make(chan piece, t.slots)
		ended   atomic.Bool
	)
	for range t.slots {
		credits <- struct{}{}
	}
	g, ctx := errgroup.WithContext(ctx)
	var prefix io.Reader
	read := make(chan struct{}) // the prefix has been read
	if t.offset > 0 {
		prefix = &atEnd{io.LimitReader(r, t.offset), t.offset, func() { close(read) }}
	} else {
		close(read)
	}
	sum := t.sum(g, prefix, tosum)
	g.Go(func() error { // fills slots
		defer close(ready)
		defer close(tosum)
		select {
		case <-read:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		used := make([]piece, t.slots) // what was in each slot before
		for seq := range t.chunks() {
			select {
			case <-credits:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			p := t.piece(seq)
			slot := &used[seq%uint64(t.slots)]
			if err := slot.summed(ctx); err != nil {
				return err
			}
			*slot = p
			stop := t.disk.start()
			_, err := io.ReadFull(r, t.bytes(&p))
			stop()
			if err != nil {
				return errShorter(err)
			}
			p.start(ctx, t)
			tosum <- p // has room: the slot was hashed
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
		if told < t.chunks() || ctx.Err() != nil { // filling failed, and says why
			return nil
		}
		end := message{Kind: kindEnd, Size: uint64(t.size), Sum: sum()}
		if t.v2 {
			end.V2, end.DiskTime, end.HashTime = true, uint64(t.disk.time()), uint64(t.hashing.time())
		}
		ended.Store(true)
		return send(ctx, t.conn, &end)
	})
	g.Go(func() error { // hears which slots are free again
		for next := uint64(0); ; {
			m, err := recv(ctx, t.conn, t.patience())
			switch {
			case err != nil:
				return err
			case m.Kind == kindFree && m.Seq == next && next < t.chunks():
				next++
				t.report(min(t.position(next), t.size))
				select {
				case credits <- struct{}{}:
				default: // more freed than sent
					return errTurn(&m)
				}
			case m.Kind == kindDone && m.V2 == t.v2 && ended.Load():
				t.peer.PeerDisk, t.peer.PeerHash = time.Duration(m.DiskTime), time.Duration(m.HashTime)
				return nil
			default:
				return errTurn(&m)
			}
		}
	})
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	return t.result(sum()), nil
}

// atEnd calls end when n bytes of r have been read.
type atEnd struct {
	r   io.Reader
	n   int64
	end func()
}

func (a *atEnd) Read(b []byte) (int, error) {
	n, err := a.r.Read(b)
	if a.n -= int64(n); a.n == 0 && n > 0 {
		a.end()
	}
	return n, err
}

func (t *transfer) result(sum [sumSize]byte) Result {
	times := t.peer
	times.Disk, times.Hash, times.Network = t.disk.time(), t.hashing.time(), t.network.time()
	return Result{t.size, t.offset, t.hash, sum, times}
}

// receive takes the file into w and checks it against the sender's sum. prefix
// holds the first offset bytes. It does not say done: the file is not safe yet.
func (t *transfer) receive(ctx context.Context, w io.Writer, prefix io.Reader) (Result, error) {
	var (
		ready   = make(chan piece, t.slots+1)
		tosum   = make(chan piece, t.slots)
		written = make(chan piece, t.slots+1)
		freed   atomic.Uint64
	)
	g, ctx := errgroup.WithContext(ctx)
	if t.offset == 0 {
		prefix = nil
	}
	sum := t.sum(g, prefix, tosum)
	g.Go(func() error { // hears which slots are full
		defer close(ready)
		for next := uint64(0); ; next++ {
			m, err := recv(ctx, t.conn, t.patience())
			if err != nil {
				return err
			}
			if m.Kind == kindEnd && m.V2 == t.v2 && next == t.chunks() {
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
	g.Go(func() error { // writes them
		defer close(written)
		defer close(tosum)
		for p := range ready {
			if p.end == nil {
				if err := p.wait(ctx); err != nil {
					return err
				}
				tosum <- p
				stop := t.disk.start()
				_, err := w.Write(t.bytes(&p))
				stop()
				if err != nil {
					return err
				}
			}
			written <- p
		}
		return nil
	})
	var end *message
	g.Go(func() error { // empties their slots when they are part of the sum too
		for p := range written {
			if end = p.end; end != nil {
				continue
			}
			if err := p.summed(ctx); err != nil {
				return err
			}
			freed.Store(p.seq + 1)
			t.report(t.position(p.seq) + int64(p.n))
			if err := send(ctx, t.conn, &message{Kind: kindFree, Seq: p.seq}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	if end.Size != uint64(t.size) || end.Sum != sum() {
		return Result{}, &Error{CodeChecksum, errors.New("the checksum differs: the data changed on its way, nothing was stored; copy again")}
	}
	t.peer.PeerDisk, t.peer.PeerHash = time.Duration(end.DiskTime), time.Duration(end.HashTime)
	return t.result(sum()), nil
}

func (t *transfer) report(done int64) {
	if t.progress != nil {
		t.progress(done)
	}
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
