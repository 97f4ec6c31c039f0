package nfs_test

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// sizeOf returns the size in a post_op_attr.
func sizeOf(r *rpc.Reader) uint64 {
	r.Fixed(4 + 20)
	size := r.U64()
	r.Fixed(84 - 20 - 8)
	return size
}

// TestEndOfHugeFile checks that a READ at the end of the longest possible file says so.
func TestEndOfHugeFile(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, ""); err != nil { // ext4 has no files of this size
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	l := newLocal(t, nfs.Config{Dir: dir})
	fh := l.file("f", 0o600, root, "")
	l.want(nfsv3.NFS3_OK, root, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, math.MaxInt64); w.U32(0) })
	for _, c := range []struct {
		off      uint64
		n, count uint32
		eof      uint32
	}{
		{0, 1, 1, 0},
		{math.MaxInt64 - 10, 9, 9, 0},
		{math.MaxInt64 - 10, 10, 10, 1},
		{math.MaxInt64 - 10, 20, 10, 1},
		{math.MaxInt64, 1, 0, 1},
		{math.MaxInt64 + 1, 1, 0, 1},
		{math.MaxUint64, 1, 0, 1},
		{math.MaxInt64 - 10, 0, 0, 0},
	} {
		r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, c.off, c.n))
		if size := sizeOf(r); size != math.MaxInt64 {
			t.Errorf("size %d", size)
		}
		if n, eof := r.U32(), r.U32(); n != c.count || eof != c.eof {
			t.Errorf("%d bytes at %d: %d bytes, end %d; want %d, %d", c.n, c.off, n, eof, c.count, c.eof)
		}
	}
}

// again calls f again and again, in another goroutine, until it fails or stop is called.
func again(t *testing.T, f func() error) (stop func()) {
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if err := f(); err != nil {
				t.Error(err)
				return
			}
		}
	})
	return func() {
		close(done)
		wg.Wait()
	}
}

// TestReadWhileAppended checks that a READ tells the end of the file only where that is by the size in the same reply.
func TestReadWhileAppended(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "")
	f, err := os.OpenFile(filepath.Join(l.dir, "f"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	stop := again(t, func() error {
		if _, err := f.WriteString("more"); err != nil {
			return err
		}
		return f.Truncate(0)
	})
	defer stop()
	for range 5000 {
		r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, 0, 100))
		size := sizeOf(r)
		n, eof := r.U32(), r.U32()
		if (uint64(n) >= size) != (eof == 1) || n == 0 && eof == 0 {
			t.Fatalf("%d bytes of %d, end %d", n, size, eof)
		}
	}
}

// TestListWhileRenamed checks that the handle and the attributes of an entry are those of one file, whichever has the name.
func TestListWhileRenamed(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	l.file("a", 0o600, root, "a")
	l.file("b", 0o600, root, "b")
	a, b := filepath.Join(l.dir, "a"), filepath.Join(l.dir, "b")
	stop := again(t, func() error { return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE) })
	defer stop()
	id := func(attr []byte) uint64 { return binary.BigEndian.Uint64(attr[52:]) }
	ids := make(map[string]uint64) // by handle
	for range 2000 {
		r := l.want(nfsv3.NFS3_OK, root, pReaddirplus, func(w *rpc.Writer) { w.Opaque(l.root); w.U64(0); w.U64(0); w.U32(4096, 4096) })
		r.Fixed(4 + 84 + 8)
		for r.U32() == 1 {
			r.U64()
			r.String(255)
			r.U64()
			var attr, fh []byte
			if r.U32() == 1 {
				attr = r.Fixed(84)
			}
			if r.U32() == 1 {
				fh = r.Opaque(64)
			}
			if attr == nil || fh == nil {
				continue
			}
			if was, ok := ids[string(fh)]; ok && was != id(attr) {
				t.Fatalf("one handle has the numbers %d and %d", was, id(attr))
			}
			ids[string(fh)] = id(attr)
		}
	}
	if len(ids) != 3 { // and the directory
		t.Errorf("%d handles", len(ids))
	}
}
