package nfs_test

import (
	"bytes"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// who is a caller of AUTH_SYS.
type who struct {
	uid, gid uint32
	gids     []uint32
}

var root, alice, bob = who{}, who{uid: 1000, gid: 100}, who{uid: 2000, gid: 200}

// local is a server without a transport.
type local struct {
	t    *testing.T
	dir  string
	key  string // key file
	peer string // address of the client
	srv  *rpc.Server
	root []byte
	xid  atomic.Uint32
}

// newLocal returns a server that does not wait for the disk, and for which the caller root is root.
func newLocal(t *testing.T, cfg nfs.Config) *local {
	t.Helper()
	cfg.Async, cfg.NoRootSquash = true, true
	return serveLocal(t, cfg)
}

func serveLocal(t *testing.T, cfg nfs.Config) *local {
	t.Helper()
	testenv.RequireRoot(t)
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
		testenv.Chmod(t, cfg.Dir, 0o777)
	}
	if cfg.KeyFile == "" {
		cfg.KeyFile = filepath.Join(t.TempDir(), "nfs.key")
	}
	s := nfs.NewTestServer(t, cfg)
	l := &local{t: t, dir: cfg.Dir, key: cfg.KeyFile, peer: "10.0.0.9", srv: &rpc.Server{}}
	l.srv.Register(nfs.ProgramNFS, s.Program())
	l.srv.Register(nfs.ProgramMount, s.MountProgram())
	r := l.send(l.xid.Add(1), root, nfs.ProgramMount, 1, func(w *rpc.Writer) { w.String("/") })
	if r.U32() != 0 {
		t.Fatal("mount")
	}
	l.root = bytes.Clone(r.Opaque(64))
	return l
}

func (l *local) send(xid uint32, c who, prog, proc uint32, args func(*rpc.Writer)) *rpc.Reader {
	l.t.Helper()
	var w rpc.Writer
	sys := rpc.Sys{UID: c.uid, GID: c.gid, GIDs: c.gids}
	(&rpc.Call{XID: xid, Prog: prog, Vers: 3, Proc: proc, Cred: sys.Auth()}).Start(&w)
	args(&w)
	reply, ok := l.srv.Serve(l.t.Context(), l.peer, rpc.Msg{Body: w.AppendFlat(nil)}, nil)
	if !ok {
		l.t.Error("no reply")
		return rpc.NewReader(rpc.Msg{})
	}
	r, err := rpc.ParseReply(rpc.Msg{Body: reply.AppendFlat(nil)})
	if err != nil {
		l.t.Error(err)
		return rpc.NewReader(rpc.Msg{})
	}
	return r
}

// do makes a call and returns the status and the Reader of the result after it.
func (l *local) do(c who, proc uint32, args func(*rpc.Writer)) (*rpc.Reader, nfsv3.Nfsstat3) {
	l.t.Helper()
	r := l.send(l.xid.Add(1), c, nfs.ProgramNFS, proc, args)
	return r, nfsv3.Nfsstat3(r.U32())
}

// want makes a call that must return the status.
func (l *local) want(st nfsv3.Nfsstat3, c who, proc uint32, args func(*rpc.Writer)) *rpc.Reader {
	l.t.Helper()
	r, got := l.do(c, proc, args)
	if got != st {
		l.t.Errorf("procedure %d: %s, not %s", proc, nfsv3.Nfsstat3_name[got], nfsv3.Nfsstat3_name[st])
	}
	return r
}

const (
	pGetattr, pSetattr, pLookup, pAccess, pRead, pWrite, pCreate, pMkdir, pSymlink, pMknod = 1, 2, 3, 4, 6, 7, 8, 9, 10, 11
	pRemove, pRmdir, pRename, pLink, pReaddir, pReaddirplus, pFsstat, pCommit              = 12, 13, 14, 15, 16, 17, 18, 21
)

func name(dir []byte, s string) func(*rpc.Writer) {
	return func(w *rpc.Writer) { w.Opaque(dir); w.String(s) }
}

// lookup returns the handle of an entry of the root.
func (l *local) lookup(s string) []byte {
	l.t.Helper()
	r := l.want(nfsv3.NFS3_OK, root, pLookup, name(l.root, s))
	return bytes.Clone(r.Opaque(64))
}

// sattr encodes a sattr3 with a mode, with a size, or with nothing.
func sattr(w *rpc.Writer, mode, size int64) {
	if w.U32(0); mode >= 0 {
		w.Body = w.Body[:len(w.Body)-4]
		w.U32(1, uint32(mode))
	}
	if w.U32(0, 0, 0); size >= 0 {
		w.Body = w.Body[:len(w.Body)-4]
		w.U32(1)
		w.U64(uint64(size))
	}
	w.U32(0, 0)
}

func read(fh []byte, off uint64, n uint32) func(*rpc.Writer) {
	return func(w *rpc.Writer) { w.Opaque(fh); w.U64(off); w.U32(n) }
}

func write(fh []byte, off uint64, b []byte) func(*rpc.Writer) {
	return func(w *rpc.Writer) { w.Opaque(fh); w.U64(off); w.U32(uint32(len(b)), 0); w.Opaque(b) }
}

func create(dir []byte, s string, mode int64) func(*rpc.Writer) {
	return func(w *rpc.Writer) { name(dir, s)(w); w.U32(0); sattr(w, mode, -1) }
}

func (l *local) file(s string, mode os.FileMode, c who, data string) []byte {
	l.t.Helper()
	p := filepath.Join(l.dir, s)
	testenv.WriteFile(l.t, p, []byte(data), 0o600)
	if err := unix.Chown(p, int(c.uid), int(c.gid)); err != nil {
		l.t.Fatal(err)
	}
	if err := unix.Chmod(p, uint32(mode)); err != nil {
		l.t.Fatal(err)
	}
	return l.lookup(s)
}

func (l *local) access(c who, fh []byte) uint32 {
	l.t.Helper()
	r := l.want(nfsv3.NFS3_OK, c, pAccess, func(w *rpc.Writer) { w.Opaque(fh); w.U32(0x3f) })
	if r.U32() == 1 {
		r.Fixed(84)
	}
	return r.U32()
}
