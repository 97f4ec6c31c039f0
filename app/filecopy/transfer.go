package filecopy

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"golang.org/x/sync/errgroup"
)

// A Conn is the part of *iwarp.Conn that the protocol uses. It must be safe for concurrent use.
type Conn interface {
	Send(ctx context.Context, b []byte) error
	Recv(ctx context.Context, b []byte) (int, error)
	Read(ctx context.Context, r iwarp.Remote, b []byte) error
	Write(ctx context.Context, r iwarp.Remote, b []byte) error
}

// Result describes a file that was copied.
type Result struct {
	Size   int64
	Offset int64 // bytes that the receiver had before
	Hash   Hash
	Sum    [sumSize]byte
	Times  Times
}

// Times are the busy times of the parts of a copy, which overlap. Those of the other side are 0 if
// it has version 1.
type Times struct {
	Disk, Hash         time.Duration // of this side
	PeerDisk, PeerHash time.Duration
	Network            time.Duration // with an RDMA operation outstanding; 0 on a server
}

// Time-outs of both sides.
const (
	// DefaultIdle is how long to wait for a message during a transfer. It must allow for
	// writing a chunk to a slow disk.
	DefaultIdle = 60 * time.Second
	// farewell is the time that the side which reports an error waits for the other one to
	// disconnect.
	farewell = 3 * time.Second
)

// transfer is the transfer of one file, on either side.
type transfer struct {
	conn     Conn
	idle     time.Duration
	v2       bool
	hash     Hash
	sum      hash.Hash // hash of the file so far
	offset   int64     // bytes that the receiver already has
	size     int64     // size of the whole file
	chunk    int
	slots    int
	buf      []byte // slots of chunk bytes each
	progress func(done int64)

	// move performs the RDMA operation for n bytes of buf at off. It is nil on the side whose
	// window is accessed.
	move func(ctx context.Context, off, n int) error

	disk, hashing, network meter
	peer                   Times
}

// hashRate is a rate in bytes per second at which every host can hash the part that the receiver
// already has. The other side waits that much longer.
const hashRate = 50 << 20

// patience returns how long to wait for a message.
func (t *transfer) patience() time.Duration {
	return t.idle + time.Duration(t.offset/hashRate)*time.Second
}

// A meter adds up the time during which it has at least one user.
type meter struct {
	mu    sync.Mutex
	busy  int
	since time.Time
	total time.Duration
}

// start adds a user; the returned function removes it.
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

// piece is a chunk on its way through the stages of a transfer.
type piece struct {
	seq   uint64
	off   int // in buf
	n     int
	moved chan error // result of the RDMA operation, or nil if there is none
	end   *message   // the last message of the file, or nil for a chunk
}

// chunks returns the number of chunks to send.
func (t *transfer) chunks() uint64 {
	return (uint64(t.size-t.offset) + uint64(t.chunk) - 1) / uint64(t.chunk)
}

// position returns the offset of chunk seq in the file.
func (t *transfer) position(seq uint64) int64 { return t.offset + int64(seq)*int64(t.chunk) }

func (t *transfer) piece(seq uint64) piece {
	n := min(int64(t.chunk), t.size-t.position(seq))
	return piece{seq: seq, off: int(seq%uint64(t.slots)) * t.chunk, n: int(n)}
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

// wait waits until the bytes of p have been transferred. The operation ends with the connection at
// the latest, so nothing accesses the slot after a nil error.
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

// stride is the number of bytes that are read or written, and hashed, at a time. It is small
// enough that they are still in the processor's cache when they are hashed.
const stride = 128 << 10

// skip hashes the first offset bytes of the file, which it reads from r.
func (t *transfer) skip(ctx context.Context, r io.Reader) error {
	const part = 64 << 20
	for left := t.offset; left > 0; left -= part {
		if ctx.Err() != nil { // the peer may be gone
			return context.Cause(ctx)
		}
		if _, err := io.CopyN(t.sum, r, min(left, part)); err != nil {
			return errShorter(err)
		}
	}
	return nil
}

// read fills b from r, and hashes it.
func (t *transfer) read(r io.Reader, b []byte) error {
	for part := range slices.Chunk(b, stride) {
		stop := t.disk.start()
		_, err := io.ReadFull(r, part)
		stop()
		if err != nil {
			return errShorter(err)
		}
		t.hashed(part)
	}
	return nil
}

// write hashes b, and writes it to w.
func (t *transfer) write(w io.Writer, b []byte) error {
	for part := range slices.Chunk(b, stride) {
		t.hashed(part)
		stop := t.disk.start()
		_, err := w.Write(part)
		stop()
		if err != nil {
			return err
		}
	}
	return nil
}

// hashed adds b to the hash of the file.
func (t *transfer) hashed(b []byte) {
	defer t.hashing.start()()
	t.sum.Write(b)
}

// total returns the hash of all bytes so far.
func (t *transfer) total() (sum [sumSize]byte) {
	t.sum.Sum(sum[:0])
	return sum
}

// errShorter converts the EOF of a file whose size was known.
func errShorter(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = errors.New("the file became shorter while it was copied")
	}
	return &Error{CodeIO, err}
}

// recv waits for one message. It returns a message of kind error as a *RemoteError.
func recv(ctx context.Context, c Conn, idle time.Duration) (message, error) {
	b := make([]byte, MaxMessage)
	wait, cancel := context.WithTimeout(ctx, idle)
	defer cancel()
	n, err := c.Recv(wait, b)
	var m message
	switch {
	case err != nil && wait.Err() != nil && ctx.Err() == nil:
		return m, fmt.Errorf("the other side has sent nothing for %v: is that host up, and the network between?", idle)
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

// send sends the file from r, after its first offset bytes, which are only hashed. It returns after
// the other side's done.
func (t *transfer) send(ctx context.Context, r io.Reader) (Result, error) {
	var (
		credits = make(chan struct{}, t.slots)
		ready   = make(chan piece, t.slots)
		ended   atomic.Bool
	)
	for range t.slots {
		credits <- struct{}{}
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return t.fill(ctx, r, credits, ready) })
	g.Go(func() error { return t.announce(ctx, ready, &ended) })
	g.Go(func() error { return t.reclaim(ctx, credits, &ended) })
	if err := g.Wait(); err != nil {
		return Result{}, err
	}
	return t.result(), nil
}

// fill reads the file into slots, each of which takes a credit, and starts their transfer.
func (t *transfer) fill(ctx context.Context, r io.Reader, credits <-chan struct{}, ready chan<- piece) error {
	defer close(ready)
	if err := t.skip(ctx, r); err != nil {
		return err
	}
	for seq := range t.chunks() {
		select {
		case <-credits:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		p := t.piece(seq)
		if err := t.read(r, t.bytes(&p)); err != nil {
			return err
		}
		p.start(ctx, t)
		select {
		case ready <- p:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// announce reports full slots, in order, and then the end of the file.
func (t *transfer) announce(ctx context.Context, ready <-chan piece, ended *atomic.Bool) error {
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
	if told < t.chunks() || ctx.Err() != nil { // filling failed with its own error
		return nil
	}
	end := message{Kind: kindEnd, Size: uint64(t.size), Sum: t.total()}
	if t.v2 {
		end.V2, end.DiskTime, end.HashTime = true, uint64(t.disk.time()), uint64(t.hashing.time())
	}
	ended.Store(true)
	return send(ctx, t.conn, &end)
}

// reclaim returns the credits of slots that the other side reports free, until it is done.
func (t *transfer) reclaim(ctx context.Context, credits chan<- struct{}, ended *atomic.Bool) error {
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
			default: // more slots reported free than were sent
				return errTurn(&m)
			}
		case m.Kind == kindDone && m.V2 == t.v2 && ended.Load():
			t.peer.PeerDisk, t.peer.PeerHash = time.Duration(m.DiskTime), time.Duration(m.HashTime)
			return nil
		default:
			return errTurn(&m)
		}
	}
}

func (t *transfer) result() Result {
	times := t.peer
	times.Disk, times.Hash, times.Network = t.disk.time(), t.hashing.time(), t.network.time()
	return Result{t.size, t.offset, t.hash, t.total(), times}
}

// receive writes the file to w and compares its hash with the sender's. prefix holds the first
// offset bytes. It does not send done, since the file is not on disk yet.
func (t *transfer) receive(ctx context.Context, w io.Writer, prefix io.Reader) (Result, error) {
	var (
		ready   = make(chan piece, t.slots+1)
		written = make(chan piece, t.slots+1)
		freed   atomic.Uint64
	)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { // receives reports of full slots
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
			ready <- p // does not block: at most slots pieces and the end are queued
		}
	})
	g.Go(func() error { // writes them
		defer close(written)
		if err := t.skip(ctx, prefix); err != nil {
			return err
		}
		for p := range ready {
			if p.end == nil {
				if err := p.wait(ctx); err != nil {
					return err
				}
				if err := t.write(w, t.bytes(&p)); err != nil {
					return err
				}
			}
			written <- p
		}
		return nil
	})
	var end *message
	g.Go(func() error { // frees slots
		for p := range written {
			if end = p.end; end != nil {
				continue
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
	if end.Size != uint64(t.size) || end.Sum != t.total() {
		return Result{}, &Error{CodeChecksum, errors.New("the checksum differs: the data was corrupted in transit, and was not stored: copy again")}
	}
	t.peer.PeerDisk, t.peer.PeerHash = time.Duration(end.DiskTime), time.Duration(end.HashTime)
	return t.result(), nil
}

func (t *transfer) report(done int64) {
	if t.progress != nil {
		t.progress(done)
	}
}

// fail reports err to the other side, unless the error came from there or from the connection.
// It then waits briefly for the other side to disconnect, because closing at once could
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
