package nfs_test

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// The file "f" of fuse, the operations that a file system may answer late, and the flag to let the kernel cache writes.
const fuseF, fuseWrite, fuseFsync, fuseFsyncdir, fuseCached = 2, 16, 20, 30, 1 << 16

// fuse answers the kernel on fd for a file system with the files f and g, which have the given size and data, until it is
// unmounted. It calls late for each write and fsync, and answers when that returns, with its errno. flags are fuseCached
// or 0.
func fuse(fd int, size uint64, data string, flags uint32, late func(op uint32, node uint64) unix.Errno) {
	const lookup, forget, getattr, setattr, rename, open, read, statfs, initialize, opendir, root = 1, 2, 3, 4, 12, 14, 15, 17, 26, 27, 1
	le := binary.LittleEndian
	answer := func(id []byte, failed unix.Errno, out []byte) {
		b := le.AppendUint32(le.AppendUint32(nil, uint32(16+len(out))), uint32(-int32(failed)))
		_, _ = unix.Write(fd, append(append(b, id...), out...))
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	modes := map[uint64]uint32{} // that were set
	attr := func(node uint64) []byte {
		mode, n := unix.S_IFREG|cmp.Or(modes[node], 0o644), size
		if node == root {
			mode, n = unix.S_IFDIR|0o755, 0
		}
		b := le.AppendUint64(le.AppendUint64(nil, node), n)
		b = le.AppendUint32(append(b, make([]byte, 4*8+3*4)...), mode)
		return append(le.AppendUint32(b, 1), make([]byte, 5*4)...)
	}
	req := make([]byte, 1<<20)
	for {
		n, err := unix.Read(fd, req)
		if err != nil {
			return
		}
		op, id, node, args := le.Uint32(req[4:]), bytes.Clone(req[8:16]), le.Uint64(req[16:]), req[40:n]
		var out []byte
		failed := unix.Errno(0)
		switch op {
		case forget:
			continue
		case initialize: // version 7.31
			out = append(le.AppendUint32(le.AppendUint32(nil, 7), 31), make([]byte, 56)...)
			le.PutUint32(out[12:], flags)
			le.PutUint32(out[20:], 1<<16) // the longest write
		case lookup:
			child := uint64(fuseF)
			if args[0] == 'g' {
				child++
			}
			out = append(le.AppendUint64(nil, child), make([]byte, 32)...)
			out = append(out, attr(child)...)
		case setattr:
			if le.Uint32(args)&1 != 0 { // FATTR_MODE
				modes[node] = le.Uint32(args[68:]) & 0o7777
			}
			fallthrough
		case getattr:
			out = append(make([]byte, 16), attr(node)...)
		case open, opendir:
			out = make([]byte, 16)
			le.PutUint32(out[8:], 1) // FOPEN_DIRECT_IO: the size does not limit reads
			if flags == fuseCached {
				le.PutUint32(out[8:], 2) // FOPEN_KEEP_CACHE
			}
		case statfs:
			out = make([]byte, 80)
		case read:
			off := min(le.Uint64(args[8:]), uint64(len(data)))
			out = []byte(data[off:])
		case fuseWrite:
			size := append(bytes.Clone(args[16:20]), 0, 0, 0, 0)
			wg.Go(func() { answer(id, late(op, node), size) })
			continue
		case rename:
		case fuseFsync, fuseFsyncdir:
			wg.Go(func() { answer(id, late(op, node), nil) })
			continue
		default:
			failed = unix.ENOSYS
		}
		answer(id, failed, out)
	}
}

// mountFuse mounts fuse, and returns the directory.
func mountFuse(
	t *testing.T, size uint64, data string, flags uint32, late func(op uint32, node uint64) unix.Errno,
) (dir string) {
	t.Helper()
	testenv.RequireRoot(t)
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		testenv.Skip(t, "/dev/fuse: %v", err)
	}
	dir = t.TempDir()
	if err := unix.Mount("short", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		fuse(fd, size, data, flags, late)
	}()
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		<-over
		unix.Close(fd)
	})
	return dir
}

// TestSetUserIDOfFuse checks that a write removes set-user-ID also where the kernel leaves that to the file system, which
// sees the server.
func TestSetUserIDOfFuse(t *testing.T) {
	dir := mountFuse(t, 10, "", 0, func(uint32, uint64) unix.Errno { return 0 })
	l := newLocal(t, nfs.Config{Dir: dir})
	if err := unix.Chmod(filepath.Join(dir, "f"), 0o4777); err != nil {
		t.Fatal(err)
	}
	l.want(nfsv3.NFS3_OK, bob, pWrite, write(l.lookup("f"), 0, []byte("y")))
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(dir, "f"), &st); err != nil || st.Mode&0o7777 != 0o777 {
		t.Errorf("%#o, %v", st.Mode, err)
	}
}

// TestReadShort checks that READs reach the end of a file that has less data than its size.
func TestReadShort(t *testing.T) {
	dir := mountFuse(t, 4096, "short data", 0, nil)
	l := newLocal(t, nfs.Config{Dir: dir, ReadOnly: true})
	fh := l.lookup("f")
	for _, c := range []struct{ off, count, eof uint32 }{{0, 10, 0}, {10, 0, 1}} {
		r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, uint64(c.off), 100))
		sizeOf(r)
		if n, eof := r.U32(), r.U32(); n != c.count || eof != c.eof {
			t.Errorf("at %d: %d bytes, end %d; want %d, %d", c.off, n, eof, c.count, c.eof)
		}
	}
}

// TestVerifierOfLoss checks the verifiers of a WRITE and of a COMMIT during which other data is lost: that of the WRITE is the one from
// before it, that of the COMMIT the one from after it. So a client that gets the same by both knows that nothing was lost in between.
func TestVerifierOfLoss(t *testing.T) {
	began, end := make(chan struct{}), make(chan struct{})
	dir := mountFuse(t, 0, "", 0, func(op uint32, node uint64) unix.Errno {
		if node != fuseF {
			return unix.EIO
		}
		for _, c := range []chan struct{}{began, end} {
			select {
			case c <- struct{}{}:
			case <-t.Context().Done():
			}
		}
		return 0
	})
	l := serveLocal(t, nfs.Config{Dir: dir, NoRootSquash: true})
	f, g := l.lookup("f"), l.lookup("g")
	wait := func(c chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(time.Minute):
			t.Fatal("nothing happens")
		}
	}
	commit := func(fh []byte) func(w *rpc.Writer) {
		return func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U32(0) }
	}
	// verifier returns the verifier of a call on f, while which data of g is lost if lost is set.
	verifier := func(proc uint32, args func(*rpc.Writer), lost bool) uint64 {
		reply := make(chan uint64, 1)
		go func() {
			r := l.want(nfsv3.NFS3_OK, root, proc, args)
			if r.Fixed(4 + 24 + 4 + 84); proc == pWrite {
				r.Fixed(4 + 4)
			}
			reply <- r.U64()
		}()
		wait(began)
		if lost {
			l.want(nfsv3.NFS3ERR_IO, root, pCommit, commit(g))
		}
		wait(end)
		return <-reply
	}
	first := verifier(pCommit, commit(f), false)
	if v := verifier(pWrite, write(f, 0, []byte("x")), true); v != first {
		t.Errorf("a WRITE during a loss: verifier %x, before it %x", v, first)
	}
	second := verifier(pCommit, commit(f), false)
	v := verifier(pCommit, commit(f), true)
	if third := verifier(pCommit, commit(f), false); first == second || second == third || v != third {
		t.Errorf("a COMMIT during a loss: verifier %x; before it %x and %x, after it %x", v, first, second, third)
	}
}

// TestLossSeenByHost checks that no COMMIT succeeds for data that was lost, even if a program of the host has called
// fsync first: the kernel then does not report the loss to descriptors that are opened later.
func TestLossSeenByHost(t *testing.T) {
	dir := mountFuse(t, 0, "", fuseCached, func(op uint32, _ uint64) unix.Errno {
		if op == fuseWrite {
			return unix.EIO
		}
		return 0
	})
	l := serveLocal(t, nfs.Config{Dir: dir, NoRootSquash: true})
	fh := l.lookup("f")
	r := l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, 0, []byte("x")))
	r.Fixed(4 + 24 + 4 + 84 + 4 + 4)
	before := r.U64()
	// os.OpenFile would wait for FUSE, which is this process, without telling the runtime.
	f, err := unix.Open(filepath.Join(dir, "f"), unix.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(f)
	if err := unix.Fsync(f); !errors.Is(err, unix.EIO) {
		t.Fatalf("fsync: %v", err)
	}
	r, st := l.do(root, pCommit, func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U32(0) })
	if r.Fixed(4 + 24 + 4 + 84); st == nfsv3.NFS3_OK && r.U64() == before {
		t.Error("COMMIT says that the data is on disk")
	}
	l.want(nfsv3.NFS3_OK, root, pCommit, func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U32(0) }) // reported once
}

// TestInterrupted checks that a client repeats what a signal for the server has interrupted.
func TestInterrupted(t *testing.T) {
	dir := mountFuse(t, 0, "", 0, func(uint32, uint64) unix.Errno { return unix.EINTR })
	l := serveLocal(t, nfs.Config{Dir: dir, NoRootSquash: true})
	f := l.lookup("f")
	l.want(nfsv3.NFS3ERR_JUKEBOX, root, pCommit, func(w *rpc.Writer) { w.Opaque(f); w.U64(0); w.U32(0) })
}

// TestRenameCommits checks that a RENAME within a directory commits it to disk once.
func TestRenameCommits(t *testing.T) {
	var commits atomic.Int32
	dir := mountFuse(t, 0, "", 0, func(op uint32, node uint64) unix.Errno {
		if op == fuseFsyncdir {
			commits.Add(1)
		}
		return 0
	})
	l := serveLocal(t, nfs.Config{Dir: dir, NoRootSquash: true})
	l.want(nfsv3.NFS3_OK, root, pRename, func(w *rpc.Writer) { name(l.root, "f")(w); name(l.root, "g")(w) })
	if n := commits.Load(); n != 1 {
		t.Errorf("%d times", n)
	}
}
