package nfs_test

import (
	"encoding/binary"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

// fuse answers the kernel on fd for a file system with one file, which has the given size and data, until it is unmounted.
func fuse(fd int, size uint64, data string) {
	const lookup, forget, getattr, open, read, statfs, initialize, opendir, root = 1, 2, 3, 14, 15, 17, 26, 27, 1
	le := binary.LittleEndian
	attr := func(node uint64) []byte {
		mode, n := uint32(unix.S_IFREG|0o644), size
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
		op, node, args := le.Uint32(req[4:]), le.Uint64(req[16:]), req[40:n]
		var out []byte
		failed := int32(0)
		switch op {
		case forget:
			continue
		case initialize: // version 7.31
			out = append(le.AppendUint32(le.AppendUint32(nil, 7), 31), make([]byte, 56)...)
			le.PutUint32(out[20:], 1<<16) // the longest write
		case lookup:
			out = append(le.AppendUint64(nil, root+1), make([]byte, 32)...)
			out = append(out, attr(root+1)...)
		case getattr:
			out = append(make([]byte, 16), attr(node)...)
		case open, opendir:
			out = make([]byte, 16)
			le.PutUint32(out[8:], 1) // FOPEN_DIRECT_IO: the size does not limit reads
		case statfs:
			out = make([]byte, 80)
		case read:
			off := min(le.Uint64(args[8:]), uint64(len(data)))
			out = []byte(data[off:])
		default:
			failed = -int32(unix.ENOSYS)
		}
		b := le.AppendUint32(le.AppendUint32(nil, uint32(16+len(out))), uint32(failed))
		_, _ = unix.Write(fd, append(append(b, req[8:16]...), out...))
	}
}

// TestReadShort checks that READs reach the end of a file that has less data than its size.
func TestReadShort(t *testing.T) {
	testenv.RequireRoot(t)
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		testenv.Skip(t, "/dev/fuse: %v", err)
	}
	dir := t.TempDir()
	if err := unix.Mount("short", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		fuse(fd, 4096, "short data")
	}()
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
		<-over
		unix.Close(fd)
	})
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
