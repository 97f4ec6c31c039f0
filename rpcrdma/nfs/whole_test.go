package nfs_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// readerFunc is an io.Reader.
type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

// writerFunc is an io.Writer.
type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestPutFile checks that a file exists whole or not at all, however its transfer ends.
func TestPutFile(t *testing.T) {
	g := start(t, 2)
	n, ctx, root := g.n, g.ctx, g.n.Root()
	at := func(s string) string { return filepath.Join(g.dir, s) }
	is := func(name, data string, perm os.FileMode) {
		t.Helper()
		b, err := os.ReadFile(at(name))
		st, serr := os.Stat(at(name))
		if err != nil || serr != nil || string(b) != data || st.Mode() != perm {
			t.Errorf("%s: %d bytes, %v, %v %v", name, len(b), st, err, serr)
		}
		l, _ := os.ReadDir(g.dir)
		for _, e := range l {
			if strings.HasPrefix(e.Name(), ".") {
				t.Errorf("left behind: %s", e.Name())
			}
		}
	}
	if k, err := n.PutFile(ctx, root, "new", 0o640, strings.NewReader("data")); k != 4 || err != nil {
		t.Fatal(k, err)
	}
	is("new", "data", 0o640)
	if _, err := n.PutFile(ctx, root, "new", 0o755, strings.NewReader("other data")); err != nil {
		t.Fatal(err)
	}
	is("new", "other data", 0o640)
	large := func(end func() (int, error)) io.Reader {
		left := 12 << 20
		return readerFunc(func(b []byte) (int, error) {
			if left <= 0 {
				return end()
			}
			k := min(len(b), left)
			left -= k
			return k, nil
		})
	}
	broken := errors.New("broken")
	for _, name := range []string{"new", "none"} {
		if _, err := n.PutFile(ctx, root, name, 0o600, large(func() (int, error) { return 0, broken })); !errors.Is(err, broken) {
			t.Error(err)
		}
		ctx, cancel := context.WithCancel(ctx)
		if _, err := n.PutFile(ctx, root, name, 0o600, large(func() (int, error) { cancel(); return 0, ctx.Err() })); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		is("new", "other data", 0o640)
	}
	if _, err := os.Lstat(at("none")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	// What is not a regular file is not changed.
	if err := errors.Join(os.Mkdir(at("dir"), 0o755), unix.Mkfifo(at("fifo"), 0o600), os.Symlink("new", at("link"))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dir", "fifo", "link"} {
		before, _ := os.Lstat(at(name))
		if _, err := n.PutFile(ctx, root, name, 0o600, strings.NewReader("x")); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s: %v", name, err)
		}
		if after, err := os.Lstat(at(name)); err != nil || !os.SameFile(before, after) {
			t.Errorf("%s: %v, %v", name, after, err)
		}
	}
	is("new", "other data", 0o640)
}

// TestPutLeft checks that the error of a failed transfer names a file that could not be removed.
func TestPutLeft(t *testing.T) {
	g := start(t, 2)
	broken := errors.New("broken")
	var temp string
	_, err := g.n.PutFile(g.ctx, g.n.Root(), "f", 0o600, readerFunc(func([]byte) (int, error) {
		l, err := os.ReadDir(g.dir)
		if err != nil || len(l) != 1 {
			t.Error(l, err)
			return 0, broken
		}
		temp = l[0].Name()
		if err := errors.Join(os.Remove(filepath.Join(g.dir, temp)), os.Mkdir(filepath.Join(g.dir, temp), 0o755)); err != nil {
			t.Error(err)
		}
		return 0, broken
	}))
	left, ok := errors.AsType[*nfs.LeftError](err)
	if !ok || !errors.Is(err, broken) || temp == "" || left.Name != temp || !strings.Contains(err.Error(), temp) {
		t.Errorf("%v; the file was %q", err, temp)
	}
}

// TestPutOver checks that a file that replaces another has its owner and its permissions, but no set-user-ID, and
// that a file that could not be made is not reported as left behind.
func TestPutOver(t *testing.T) {
	g := start(t, 2)
	p := filepath.Join(g.dir, "f")
	if err := errors.Join(os.WriteFile(p, []byte("theirs"), 0o600), os.Chown(p, 1000, 100), os.Chmod(p, 0o750|fs.ModeSetuid|fs.ModeSetgid)); err != nil {
		t.Fatal(err)
	}
	if _, err := g.n.PutFile(g.ctx, g.n.Root(), "f", 0o600, strings.NewReader("ours")); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(p, &st); err != nil || st.Uid != 1000 || st.Gid != 100 || st.Mode != unix.S_IFREG|0o750 {
		t.Errorf("%d:%d %#o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	// A user who may not give files away still keeps the group, by which others share the file.
	if err := errors.Join(os.Chown(p, 2000, 555), os.Chmod(p, 0o660)); err != nil {
		t.Fatal(err)
	}
	var n *nfs.Client
	var err error
	testenv.AsUser(t, 1000, 100, []int{555}, func() { n, err = nfs.Mount(g.ctx, g.c, "/") })
	if err == nil {
		_, err = n.PutFile(g.ctx, n.Root(), "f", 0o600, strings.NewReader("ours"))
	}
	err = errors.Join(err, unix.Stat(p, &st))
	if err != nil || st.Uid != 1000 || st.Gid != 555 || st.Mode != unix.S_IFREG|0o660 {
		t.Errorf("another user's: %d:%d %#o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	g = start(t, 2, func(cfg *nfs.Config) { cfg.ReadOnly = true })
	_, err = g.n.PutFile(g.ctx, g.n.Root(), "f", 0o600, strings.NewReader("x"))
	if !errors.Is(err, fs.ErrPermission) || err.Error() != "nfs: create f: the export is read-only" {
		t.Error(err)
	}
}

// TestPutOverAtFirst checks that others cannot open the file that replaces another before it has its owner and its
// group.
func TestPutOverAtFirst(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var mode atomic.Uint32
	n := mountOn(t, ctx, func(r *rpc.Request) {
		if r.Proc == pLookup {
			r.Reply.U32(0)
			r.Reply.String("old")
			r.Reply.U32(1, uint32(nfsv3.NF3REG), 0o644)
			r.Reply.U32(make([]uint32, 20)...)
			return
		}
		r.Args.Opaque(64)
		r.Args.String(255)
		if how, set := r.Args.U32(), r.Args.U32(); r.Proc == pCreate && how == 0 && set == 1 {
			mode.Store(r.Args.U32())
		}
		r.Reply.U32(uint32(nfsv3.NFS3ERR_ACCES), 0, 0)
	})
	_, err := n.PutFile(ctx, n.Root(), "f", 0o644, strings.NewReader("new"))
	if !errors.Is(err, fs.ErrPermission) || mode.Load() != 0o600 {
		t.Errorf("made with mode %#o, %v", mode.Load(), err)
	}
}

// TestPutWithoutModes checks that a file on a file system that does not let users set permissions is replaced if the
// new file has those of the old one anyway, and only then.
func TestPutWithoutModes(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var made, renamed atomic.Uint32 // the mode of new files; the files that were renamed
	attrs := func(r *rpc.Request, mode uint32) {
		r.Reply.U32(uint32(nfsv3.NF3REG), mode)
		r.Reply.U32(make([]uint32, 19)...)
	}
	n := mountOn(t, ctx, func(r *rpc.Request) {
		switch r.Proc {
		case pGetattr:
			r.Reply.U32(0)
			attrs(r, made.Load())
		case pSetattr:
			r.Reply.U32(uint32(nfsv3.NFS3ERR_PERM), 0, 0)
		case pLookup:
			r.Reply.U32(0)
			r.Reply.String("old")
			r.Reply.U32(1)
			attrs(r, 0o777)
			r.Reply.U32(0)
		case pCreate:
			r.Reply.U32(0, 1)
			r.Reply.String("new")
			r.Reply.U32(0, 0, 0)
		case pWrite:
			r.Reply.U32(0, 0, 0, 4, uint32(nfsv3.FILE_SYNC), 0, 0)
		case pRename:
			renamed.Add(1)
			r.Reply.U32(0, 0, 0, 0, 0)
		default: // REMOVE
			r.Reply.U32(0, 0, 0)
		}
	})
	for mode, want := range map[uint32]error{0o777: nil, 0o755: fs.ErrPermission} {
		made.Store(mode)
		renamed.Store(0)
		_, err := n.PutFile(ctx, n.Root(), "f", 0o644, strings.NewReader("data"))
		if k := renamed.Load(); !errors.Is(err, want) || (k == 1) != (want == nil) {
			t.Errorf("mode %#o: %v, renamed %d times", mode, err, k)
		}
	}
}

// TestGetCancelled checks that a transfer that is canceled when all requested data has arrived does not count as
// complete.
func TestGetCancelled(t *testing.T) {
	g := start(t, 2)
	const size = 40 << 20
	if err := errors.Join(os.WriteFile(filepath.Join(g.dir, "f"), nil, 0o600), os.Truncate(filepath.Join(g.dir, "f"), size)); err != nil {
		t.Fatal(err)
	}
	i, err := g.n.Lookup(g.ctx, g.n.Root(), "f")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(g.ctx)
	defer cancel()
	k, err := g.n.Get(ctx, i.Handle, writerFunc(func(b []byte) (int, error) {
		if ctx.Err() == nil {
			for range 200 { // they are answered after the READs in flight
				if _, err := g.n.Getattr(g.ctx, i.Handle); err != nil {
					return 0, err
				}
			}
			cancel()
		}
		return len(b), nil
	}))
	if k >= size || !errors.Is(err, context.Canceled) {
		t.Errorf("%d bytes, %v", k, err)
	}
}

// TestShrunk checks that a file that is truncated while it is read does not count as complete.
func TestShrunk(t *testing.T) {
	g := start(t, 2)
	p := filepath.Join(g.dir, "f")
	if err := errors.Join(os.WriteFile(p, bytes.Repeat([]byte("x"), 100), 0o600), os.Truncate(p, 40<<20)); err != nil {
		t.Fatal(err)
	}
	i, err := g.n.Lookup(g.ctx, g.n.Root(), "f")
	if err != nil {
		t.Fatal(err)
	}
	first := true
	k, err := g.n.Get(g.ctx, i.Handle, writerFunc(func(b []byte) (int, error) {
		if first {
			first = false
			return len(b), os.Truncate(p, 20<<20-5)
		}
		return len(b), nil
	}))
	if !errors.Is(err, nfs.ErrShrunk) || k > 20<<20 {
		t.Errorf("%d, %v", k, err)
	}
	if k, err := g.n.Get(g.ctx, i.Handle, io.Discard); k != 20<<20-5 || err != nil {
		t.Errorf("%d, %v", k, err)
	}
}
