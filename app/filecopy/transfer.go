package filecopy

import (
	"context"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// conn is the part of *iwarp.Conn that the protocol uses. It must be safe for concurrent use.
type conn interface {
	Send(ctx context.Context, b []byte) error
	PostSend(ctx context.Context, b []byte) error
	Recv(ctx context.Context, b []byte) (int, error)
	Read(ctx context.Context, r iwarp.Remote, b []byte) error
	PostWrite(ctx context.Context, r iwarp.Remote, b []byte) error
	Done() <-chan struct{} // closed when the connection has ended
}

// Result describes a file that was copied.
type Result struct {
	Size   int64
	Offset int64 // bytes that the receiver had before
	Hash   Hash
	Sum    [sumSize]byte
	Times  Times
}

// Times are the busy times of the parts of a copy, which overlap.
type Times struct {
	Disk, Hash         time.Duration // of this side
	PeerDisk, PeerHash time.Duration
	Network            time.Duration // while a chunk is transferred; 0 on a server
}

// Time-outs of both sides.
const (
	// defaultIdle is how long to wait for a message during a transfer. It must allow for
	// writing a chunk to a slow disk.
	defaultIdle = 60 * time.Second
	// farewell is the time that the side which reports an error waits for the other one to
	// disconnect.
	farewell = 3 * time.Second
)

// transfer is the transfer of one file, on either side.
type transfer struct {
	name     string // of the file, in errors
	conn     conn
	idle     time.Duration
	hash     Hash
	sum      hash.Hash // hash of the file so far
	offset   int64     // bytes that the receiver already has
	size     int64     // size of the whole file
	chunk    int
	slots    int
	buf      []byte // slots of chunk bytes each; the peer may change a server's at any time
	own      []byte // the bytes that are hashed, which it cannot change
	progress func(done int64)

	// write posts the RDMA Write of n bytes of buf at off, and read performs the RDMA Read. On the
	// side whose window is accessed, the server's, they are nil.
	write, read func(ctx context.Context, off, n int) error

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

// piece is a chunk on its way.
type piece struct {
	off   int // in buf
	n     int
	moved chan error // result of the RDMA Read, or nil if there is none
	stop  func()     // stops the meter of the network, or nil
}

// chunks returns the number of chunks to send.
func (t *transfer) chunks() uint64 {
	return (uint64(t.size-t.offset) + uint64(t.chunk) - 1) / uint64(t.chunk)
}

// position returns the offset of chunk seq in the file.
func (t *transfer) position(seq uint64) int64 { return t.offset + int64(seq)*int64(t.chunk) }

func (t *transfer) piece(seq uint64) piece {
	n := min(int64(t.chunk), t.size-t.position(seq))
	return piece{off: int(seq%uint64(t.slots)) * t.chunk, n: int(n)}
}

func (t *transfer) bytes(p *piece) []byte { return t.buf[p.off : p.off+p.n] }

// stride is the number of bytes that are read or written, and hashed, at a time. It is small
// enough that they are still in the processor's cache when they are hashed.
const stride = 128 << 10

// skip hashes the first offset bytes of the file, which it reads from r.
func (t *transfer) skip(ctx context.Context, r io.Reader) error {
	const part = 64 << 20
	for left := t.offset; left > 0; left -= part {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.conn.Done():
			return t.reason(ctx, iwarp.ErrPeerClosed)
		default:
		}
		if _, err := io.CopyN(t.sum, r, min(left, part)); err != nil {
			return t.errShorter(err)
		}
	}
	return nil
}

// fill fills b from r, and hashes what it has read.
func (t *transfer) fill(r io.Reader, b []byte) error {
	for part := range slices.Chunk(b, stride) {
		own := t.own[:len(part)]
		stop := t.disk.start()
		_, err := io.ReadFull(r, own)
		stop()
		if err != nil {
			return t.errShorter(err)
		}
		t.hashed(own)
		copy(part, own)
	}
	return nil
}

// drain hashes b, and writes what it has hashed to w.
func (t *transfer) drain(w io.Writer, b []byte) error {
	for part := range slices.Chunk(b, stride) {
		own := t.own[:copy(t.own, part)]
		t.hashed(own)
		stop := t.disk.start()
		_, err := w.Write(own)
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
func (t *transfer) errShorter(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("%s: became shorter while it was copied, or is a file of /sys: copy again, or copy it to a file first", t.name)
	}
	return &Error{CodeIO, err}
}

// checkEmpty returns an error if a file has content and a size of 0, as those of /proc have.
func (t *transfer) checkEmpty(r io.Reader) error {
	if t.size > 0 {
		return nil
	}
	switch n, err := r.Read(make([]byte, 1)); {
	case n > 0:
		return &Error{CodeIO, fmt.Errorf("%s: has content but a size of 0, as files of /proc have: copy it to a file first", t.name)}
	case err != nil && err != io.EOF:
		return &Error{CodeIO, err}
	}
	return nil
}

// recv waits for one message. It returns a message of kind error as a *RemoteError.
func recv(ctx context.Context, c conn, idle time.Duration) (message, error) {
	b := make([]byte, maxMessage)
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

func send(ctx context.Context, c conn, m *message) error {
	return c.Send(ctx, m.encode())
}

// post is send for a message that needs no reply of its own.
func post(ctx context.Context, c conn, m *message) error {
	return c.PostSend(ctx, m.encode())
}

func errTurn(m *message) error {
	return &Error{CodeRequest, fmt.Errorf("message of kind %d out of turn", m.Kind)}
}

// send sends the file from r, after its first offset bytes, which are only hashed. It returns after
// the other side's done. It never waits while a slot is free, and then only for a message: a Write
// is complete when its chunk is reported free.
func (t *transfer) send(ctx context.Context, r io.Reader) (Result, error) {
	if err := t.skip(ctx, r); err != nil {
		return Result{}, err
	}
	if err := t.checkEmpty(r); err != nil {
		return Result{}, err
	}
	var freed uint64
	pending := make([]piece, t.slots)
	for seq := range t.chunks() {
		if seq-freed == uint64(t.slots) {
			if err := t.reclaim(ctx, freed, pending); err != nil {
				return Result{}, err
			}
			freed++
		}
		p := t.piece(seq)
		if err := t.fill(r, t.bytes(&p)); err != nil {
			return Result{}, err
		}
		if err := t.ship(ctx, seq, &p); err != nil {
			return Result{}, t.reason(ctx, err)
		}
		pending[seq%uint64(t.slots)] = p
	}
	end := message{Kind: kindEnd, Size: uint64(t.size), Sum: t.total()}
	end.DiskTime, end.HashTime = uint64(t.disk.time()), uint64(t.hashing.time())
	if err := send(ctx, t.conn, &end); err != nil {
		return Result{}, t.reason(ctx, err)
	}
	for ; freed < t.chunks(); freed++ {
		if err := t.reclaim(ctx, freed, pending); err != nil {
			return Result{}, err
		}
	}
	m, err := recv(ctx, t.conn, t.patience())
	if err != nil {
		return Result{}, err
	}
	if m.Kind != kindDone {
		return Result{}, errTurn(&m)
	}
	t.peer.PeerDisk, t.peer.PeerHash = time.Duration(m.DiskTime), time.Duration(m.HashTime)
	return t.result(), nil
}

// ship posts what brings chunk seq to the other side. The message arrives only when the data before
// it has been placed (RFC 5040 Section 5.5).
func (t *transfer) ship(ctx context.Context, seq uint64, p *piece) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	if t.write != nil {
		p.stop = t.network.start()
		if err := t.write(ctx, p.off, p.n); err != nil {
			return err
		}
	}
	return post(ctx, t.conn, &message{Kind: kindChunk, Seq: seq, Len: uint32(p.n)})
}

// reclaim waits until the other side reports the slot of chunk seq free, which ends its transfer.
func (t *transfer) reclaim(ctx context.Context, seq uint64, pending []piece) error {
	m, err := recv(ctx, t.conn, t.patience())
	if err != nil {
		return err
	}
	if m.Kind != kindFree || m.Seq != seq {
		return errTurn(&m)
	}
	if p := &pending[seq%uint64(t.slots)]; p.stop != nil {
		p.stop()
	}
	t.report(min(t.position(seq+1), t.size))
	return nil
}

// reason returns the error that the other side reported before the connection ended with err, or
// else err.
func (t *transfer) reason(ctx context.Context, err error) error {
	for {
		_, e := recv(ctx, t.conn, farewell)
		if _, ok := errors.AsType[*RemoteError](e); ok {
			return e
		}
		if e != nil {
			return err
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
	ctx, cancel := context.WithCancel(ctx) // ends the Reads
	defer cancel()
	if err := t.skip(ctx, prefix); err != nil {
		return Result{}, err
	}
	ahead := uint64(0)
	if t.read != nil { // one half of the slots is read while the sender fills the other
		ahead = uint64(t.slots) / 2
	}
	pending := make([]piece, t.slots)
	for told, freed := uint64(0), uint64(0); freed < t.chunks(); {
		if told < t.chunks() && told-freed <= ahead {
			p, err := t.announced(ctx, told)
			if err != nil {
				return Result{}, err
			}
			pending[told%uint64(t.slots)] = p
			told++
			continue
		}
		p := &pending[freed%uint64(t.slots)]
		if err := p.wait(ctx); err != nil {
			return Result{}, err
		}
		if err := t.drain(w, t.bytes(p)); err != nil {
			return Result{}, err
		}
		t.report(t.position(freed) + int64(p.n))
		if err := post(ctx, t.conn, &message{Kind: kindFree, Seq: freed}); err != nil {
			return Result{}, t.reason(ctx, err)
		}
		freed++
	}
	end, err := recv(ctx, t.conn, t.patience())
	if err != nil {
		return Result{}, err
	}
	if end.Kind != kindEnd {
		return Result{}, errTurn(&end)
	}
	if end.Size != uint64(t.size) || end.Sum != t.total() {
		why := "the data was corrupted in transit"
		if t.offset > 0 {
			why = "the part from an earlier copy had other content, or " + why
		}
		return Result{}, &Error{CodeChecksum, fmt.Errorf("%s: the checksum differs: %s, and was not stored: copy again", t.name, why)}
	}
	t.peer.PeerDisk, t.peer.PeerHash = time.Duration(end.DiskTime), time.Duration(end.HashTime)
	return t.result(), nil
}

// announced waits for the report that chunk seq is in its slot, and starts the RDMA Read.
func (t *transfer) announced(ctx context.Context, seq uint64) (piece, error) {
	m, err := recv(ctx, t.conn, t.patience())
	if err != nil {
		return piece{}, err
	}
	p := t.piece(seq)
	if m.Kind != kindChunk || m.Seq != seq || int(m.Len) != p.n {
		return piece{}, errTurn(&m)
	}
	if t.read != nil {
		p.moved, p.stop = make(chan error, 1), t.network.start()
		go func() {
			err := t.read(ctx, p.off, p.n)
			p.stop()
			p.moved <- err
		}()
	}
	return p, nil
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

func (t *transfer) report(done int64) {
	if t.progress != nil {
		t.progress(done)
	}
}

// fail reports err to the other side, unless the error came from there or from the connection.
// It then waits briefly for the other side to disconnect, because closing at once could
// overtake the message.
func fail(ctx context.Context, c conn, err error) {
	m := message{Kind: kindError, Code: CodeInternal, Text: "stopped"}
	var e *Error
	switch {
	case errors.As(err, &e):
		m.Code, m.Text = e.Code, printable.String(e.Error())
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
	b := make([]byte, maxMessage)
	for {
		if _, err := c.Recv(bye, b); err != nil {
			return
		}
	}
}
