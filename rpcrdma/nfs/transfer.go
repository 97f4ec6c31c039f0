package nfs

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// LeftError is the error of a transfer that failed with Err and left behind the temporary file
// Name, which could not be removed because of Why.
type LeftError struct {
	Err  error
	Name string
	Why  error
}

func (e *LeftError) Error() string { return fmt.Sprintf("%v; %s is left: %v", e.Err, e.Name, e.Why) }

// Unwrap returns both errors.
func (e *LeftError) Unwrap() []error { return []error{e.Err, e.Why} }

// PutFile atomically creates or replaces the file name in dir with the contents of r: it writes and
// commits a temporary file and renames it. The file gets the mode perm, or the permissions of the
// file that it replaces, and its owner and group as far as the server allows it. PutFile returns fs.ErrExist if name
// is not a file, and a LeftError if it could not remove the temporary file after a failure.
func (n *Client) PutFile(ctx context.Context, dir []byte, name string, perm uint32, r io.Reader) (done int64, err error) {
	old, err := n.Lookup(ctx, dir, name)
	there := err == nil
	switch {
	case there && old.Type != nfsv3.NF3REG:
		return 0, &Error{"put " + name, nfsv3.NFS3ERR_EXIST}
	case there:
		perm = 0o600 // not accessible to others before it has its owner and its group
	case !errors.Is(err, fs.ErrNotExist):
		return 0, err
	}
	temp := ".iwarpctl-" + crand.Text()
	refused := false // the server refused it
	defer func() {
		if e, ok := errors.AsType[*Error](err); ok { // the user knows the file by its name
			e.Op = strings.Replace(e.Op, temp, name, 1)
		}
		if err != nil && !refused { // even if ctx is done
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidy)
			defer cancel()
			if rerr := n.Remove(ctx, dir, temp); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
				err = &LeftError{Err: err, Name: temp, Why: rerr}
			}
		}
	}()
	fh, err := n.Create(ctx, dir, temp, perm)
	if err != nil {
		refused = errors.Is(err, fs.ErrPermission)
		return 0, err
	}
	if there {
		if err := n.succeed(ctx, fh, &old); err != nil {
			return 0, err
		}
	}
	if done, err = n.Put(ctx, fh, r); err != nil {
		return done, err
	}
	err = n.Rename(ctx, dir, temp, dir, name)
	if errors.Is(err, fs.ErrNotExist) { // it was done before the server restarted, and repeated
		if i, lerr := n.Lookup(ctx, dir, name); lerr == nil && bytes.Equal(i.Handle, fh) {
			err = nil
		}
	}
	return done, err
}

// succeed gives a file the permissions of old, and its owner and its group where the server allows it: users may not
// give files away, but may choose among their groups. The file does not get set-user-ID, since another user has
// written it. On file systems such as VFAT, where nobody can set permissions, it may have them already.
func (n *Client) succeed(ctx context.Context, fh []byte, old *Info) (err error) {
	perm := old.Perm & 0o777
	for _, attrs := range [][]uint32{{1, perm, 1, old.UID, 1, old.GID}, {1, perm, 0, 1, old.GID}, {1, perm, 0, 0}} {
		err = n.change(ctx, "setattr", 2, func(w *rpc.Writer) {
			w.Opaque(fh)
			w.U32(attrs...)
			w.U32(0, 0, 0, 0) // no size, no times, no guard
		})
		if _, refused := errors.AsType[*Error](err); !refused {
			return err
		}
	}
	if i, gerr := n.Getattr(ctx, fh); gerr == nil && i.Perm&0o777 == perm {
		return nil
	}
	return err
}

// tidy bounds the time spent on removing an incomplete file.
const tidy = 10 * time.Second

// window is the number of outstanding READs or WRITEs of a transfer.
const window = 8

// ErrShrunk means that a file became shorter while it was read.
var ErrShrunk = errors.New("nfs: the file became shorter while it was read")

// Get copies a file to w. It copies the size that the file has when Get starts, or returns
// ErrShrunk.
func (n *Client) Get(ctx context.Context, fh []byte, w io.Writer) (int64, error) {
	i, err := n.Getattr(ctx, fh)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	parts := make(chan chan part, window-1)
	go func() {
		defer close(parts)
		for off := uint64(0); off < i.Size; off += uint64(n.io) {
			c := make(chan part, 1)
			select {
			case parts <- c:
			case <-ctx.Done():
				return
			}
			go func() {
				c <- n.part(ctx, fh, off, int(min(uint64(n.io), i.Size-off)))
			}()
		}
	}()
	var done int64
	for c := range parts {
		p := <-c
		if p.err != nil {
			if err == nil { // later errors are due to the cancellation
				err = p.err
			}
			cancel()
			continue
		}
		if err == nil {
			var k int
			k, err = w.Write(p.b)
			done += int64(k)
		}
		p.release()
		if err != nil {
			cancel()
		}
	}
	if err == nil && uint64(done) < i.Size { // the file is shorter than expected
		err = ctx.Err()
	}
	return done, err
}

// part is a piece of a file that Get copies. release returns b if err is nil.
type part struct {
	b       []byte
	release func()
	err     error
}

// part reads want bytes at off.
func (n *Client) part(ctx context.Context, fh []byte, off uint64, want int) part {
	b, _, release, err := n.read(ctx, fh, off, want)
	if err == nil && len(b) < want {
		release()
		// A short READ: copy the rest.
		b = make([]byte, want)
		var k int
		k, err = n.ReadAt(ctx, fh, b, off)
		if errors.Is(err, io.EOF) {
			err = nil
		}
		b, release = b[:k], func() {}
	}
	if err == nil && len(b) < want {
		err = ErrShrunk
	}
	return part{b, release, err}
}

// Put writes the contents of r to a file, from its start, and commits it. If the server restarts in
// the meantime, Put rewrites what was lost if r is an io.Seeker.
func (n *Client) Put(ctx context.Context, fh []byte, r io.Reader) (int64, error) {
	for try := 0; ; try++ {
		done, lost, err := n.put(ctx, fh, r)
		if err != nil || !lost {
			return done, err
		}
		s, ok := r.(io.Seeker)
		if !ok || try == 3 {
			return done, errors.New("nfs: the server lost written data")
		}
		if _, err := s.Seek(0, io.SeekStart); err != nil {
			return done, err
		}
	}
}

func (n *Client) put(ctx context.Context, fh []byte, r io.Reader) (done int64, lost bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan sent, window)
	flying := 0
	verfs := make(map[uint64]bool)
	take := func() {
		s := <-results
		flying--
		if s.err != nil && err == nil {
			err = s.err
			cancel()
		}
		done += int64(s.n)
		for _, v := range s.verfs {
			verfs[v] = true
		}
	}
	var off uint64
	for err == nil {
		if flying == window {
			take()
			continue
		}
		// Read into registered memory, so that the data is sent without a copy.
		buf, berr := n.rpc.Buffer(ctx, n.io)
		if berr != nil {
			err = berr
			break
		}
		k, rerr := io.ReadFull(r, buf.Bytes())
		if k == 0 {
			buf.Release()
		} else {
			b, at := buf.Bytes()[:k], off
			off += uint64(k)
			flying++
			go func() {
				defer buf.Release()
				results <- n.send(ctx, fh, at, b)
			}()
		}
		if rerr == io.EOF || rerr == io.ErrUnexpectedEOF {
			break
		}
		if rerr != nil {
			err = rerr
		}
	}
	for flying > 0 {
		take()
	}
	if err != nil || len(verfs) == 0 {
		return done, false, err
	}
	verf, err := n.Commit(ctx, fh)
	if err != nil {
		return done, false, err
	}
	return done, len(verfs) != 1 || !verfs[verf], nil
}

// sent is the result of writing a piece of a file.
type sent struct {
	n     int
	verfs []uint64 // of what is not committed
	err   error
}

// send writes b at off, by several WRITEs if the server writes less than it is sent.
func (n *Client) send(ctx context.Context, fh []byte, off uint64, b []byte) (s sent) {
	for len(b) > 0 {
		c, committed, verf, err := n.write(ctx, fh, off, b)
		if err == nil && c == 0 {
			err = io.ErrShortWrite
		}
		if err != nil {
			s.err = err
			return s
		}
		if s.n += c; !committed {
			s.verfs = append(s.verfs, verf)
		}
		b, off = b[c:], off+uint64(c)
	}
	return s
}
