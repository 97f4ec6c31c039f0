package nfs_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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
	srv  *rpc.Server
	root []byte
	xid  atomic.Uint32
}

func newLocal(t *testing.T, cfg nfs.Config) *local {
	t.Helper()
	testenv.RequireRoot(t)
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
		if err := os.Chmod(cfg.Dir, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Async = true
	if cfg.KeyFile == "" {
		cfg.KeyFile = filepath.Join(t.TempDir(), "nfs.key")
	}
	s, err := nfs.NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	l := &local{t: t, dir: cfg.Dir, key: cfg.KeyFile, srv: &rpc.Server{}}
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
	reply, ok := l.srv.Serve(l.t.Context(), "10.0.0.9", rpc.Msg{Body: w.AppendFlat(nil)}, nil)
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
	if err := os.WriteFile(p, []byte(data), 0o600); err != nil {
		l.t.Fatal(err)
	}
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

func TestRights(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	ok, denied := nfsv3.NFS3_OK, nfsv3.NFS3ERR_ACCES
	for _, c := range []struct {
		mode         os.FileMode
		who          who
		access       uint32
		read, writes nfsv3.Nfsstat3
	}{
		{0o600, alice, 0x0d, ok, ok}, {0o600, bob, 0, denied, denied}, {0o600, root, 0x0d, ok, ok},
		{0o400, alice, 0x01, ok, ok}, // an owner may still use a file that it has open (RFC 1813 section 4.4)
		{0o711, bob, 0x20, ok, denied}, {0o640, who{2000, 100, nil}, 0x01, ok, denied}, {0o660, who{2000, 200, []uint32{7, 100}}, 0x0d, ok, ok},
		{0o604, who{2000, 100, nil}, 0, denied, denied}, // the bits of the group apply, not those of others
	} {
		fh := l.file("f", c.mode, alice, "data")
		if got := l.access(c.who, fh); got != c.access {
			t.Errorf("%o for %d: access %#x, not %#x", c.mode, c.who.uid, got, c.access)
		}
		l.want(c.read, c.who, pRead, read(fh, 0, 4))
		l.want(c.writes, c.who, pWrite, write(fh, 0, []byte("x")))
	}
	l.want(nfsv3.NFS3ERR_PERM, bob, pSetattr, func(w *rpc.Writer) { w.Opaque(l.file("f", 0o666, alice, "")); sattr(w, 0o777, -1); w.U32(0) })
	// Files that users other than root make belong to them and have the requested mode. A sticky directory protects files
	// from other users, and set-group-ID is inherited.
	l.want(ok, root, pMkdir, func(w *rpc.Writer) { name(l.root, "tmp")(w); sattr(w, 0o1777, -1) })
	tmp := l.lookup("tmp")
	l.want(ok, alice, pCreate, create(tmp, "a", 0o666))
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "tmp/a"), &st); err != nil || st.Uid != 1000 || st.Gid != 100 || st.Mode&0o7777 != 0o666 {
		t.Errorf("%+v, %v", st, err)
	}
	if r, got := l.do(bob, pRemove, name(tmp, "a")); got != nfsv3.NFS3ERR_PERM && got != denied {
		t.Errorf("another removes from a sticky directory: %v, %v", got, r.Err())
	}
	l.want(ok, alice, pRemove, name(tmp, "a"))
	if err := unix.Chown(filepath.Join(l.dir, "tmp"), 0, 555); err != nil {
		t.Fatal(err)
	}
	if err := unix.Chmod(filepath.Join(l.dir, "tmp"), 0o2777); err != nil {
		t.Fatal(err)
	}
	l.want(ok, alice, pCreate, create(tmp, "g", 0o600))
	if err := unix.Stat(filepath.Join(l.dir, "tmp/g"), &st); err != nil || st.Gid != 555 {
		t.Errorf("%+v, %v", st, err)
	}
	// A change by a user other than root removes set-user-ID.
	fh := l.file("suid", 0o4777, alice, "x")
	l.want(ok, bob, pWrite, write(fh, 0, []byte("y")))
	if err := unix.Stat(filepath.Join(l.dir, "suid"), &st); err != nil || st.Mode&unix.S_ISUID != 0 {
		t.Errorf("%o, %v", st.Mode, err)
	}
	fh = l.file("suid", 0o4777, alice, "x")
	l.want(ok, bob, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, 0); w.U32(0) })
	if err := unix.Stat(filepath.Join(l.dir, "suid"), &st); err != nil || st.Mode&unix.S_ISUID != 0 {
		t.Errorf("%o, %v", st.Mode, err)
	}
}

// TestACL checks rights that the mode of a file does not show. In the mode of a file with an ACL the group's bits are
// the mask.
func TestACL(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, alice, "data")
	acl := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{0x01, 6, math.MaxUint32}, {0x02, 6, 2000}, {0x04, 0, math.MaxUint32}, {0x10, 6, math.MaxUint32}, {0x20, 0, math.MaxUint32}} {
		acl = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(acl, e.tag), e.perm), e.id)
	}
	if err := unix.Setxattr(filepath.Join(l.dir, "f"), "system.posix_acl_access", acl, 0); err != nil {
		testenv.Skip(t, "no ACLs on this file system: %v", err)
	}
	l.want(nfsv3.NFS3_OK, bob, pRead, read(fh, 0, 4))
	l.want(nfsv3.NFS3_OK, bob, pWrite, write(fh, 0, []byte("x")))
	group := who{uid: 3000, gid: 100}
	l.want(nfsv3.NFS3ERR_ACCES, group, pRead, read(fh, 0, 4))
	l.want(nfsv3.NFS3ERR_ACCES, group, pWrite, write(fh, 0, []byte("x")))
	if a, b := l.access(bob, fh), l.access(group, fh); a != 0x0d || b != 0 {
		t.Errorf("access %#x, %#x", a, b)
	}
}

func TestRootSquash(t *testing.T) {
	l := newLocal(t, nfs.Config{RootSquash: true})
	l.want(nfsv3.NFS3_OK, root, pCreate, create(l.root, "made", 0o600))
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "made"), &st); err != nil || st.Uid != 65534 || st.Gid != 65534 {
		t.Errorf("%+v, %v", st, err)
	}
	fh := l.file("f", 0o660, root, "data")
	for _, c := range []who{root, {1000, 0, nil}, {1000, 100, []uint32{0}}, {0, 0, []uint32{0}}, {1000, 1<<32 - 1, nil}, {1<<32 - 1, 100, nil}, {1000, 100, []uint32{1<<32 - 1}}} {
		l.want(nfsv3.NFS3ERR_ACCES, c, pRead, read(fh, 0, 4))
	}
}

func TestReadOnly(t *testing.T) {
	l := newLocal(t, nfs.Config{ReadOnly: true})
	fh := l.file("f", 0o666, root, "data")
	for proc, args := range map[uint32]func(*rpc.Writer){
		pSetattr: func(w *rpc.Writer) { w.Opaque(fh); sattr(w, 0o600, -1); w.U32(0) },
		pWrite:   write(fh, 0, []byte("x")), pCreate: create(l.root, "n", 0o600),
		pMkdir:   func(w *rpc.Writer) { name(l.root, "n")(w); sattr(w, 0o700, -1) },
		pSymlink: func(w *rpc.Writer) { name(l.root, "n")(w); sattr(w, -1, -1); w.String("f") },
		pMknod:   func(w *rpc.Writer) { name(l.root, "n")(w); w.U32(7); sattr(w, 0o600, -1) },
		pRemove:  name(l.root, "f"), pRmdir: name(l.root, "f"),
		pRename: func(w *rpc.Writer) { name(l.root, "f")(w); name(l.root, "n")(w) },
		pLink:   func(w *rpc.Writer) { w.Opaque(fh); name(l.root, "n")(w) },
	} {
		l.want(nfsv3.NFS3ERR_ROFS, root, proc, args)
	}
	if a := l.access(root, fh); a != 0x01 {
		t.Errorf("access %#x", a)
	}
	if d := l.access(root, l.root); d != 0x03 {
		t.Errorf("access to the directory %#x", d)
	}
	r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, 0, 10))
	r.Fixed(4 + 84 + 4 + 4)
	if s := r.String(10); s != "data" {
		t.Errorf("%q", s)
	}
}

func TestGuard(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "data")
	ctime := func() []byte {
		r := l.want(nfsv3.NFS3_OK, root, pGetattr, func(w *rpc.Writer) { w.Opaque(fh) })
		return bytes.Clone(r.Fixed(84)[76:])
	}
	set := func(guard []byte) func(*rpc.Writer) {
		return func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, 1); w.U32(1); w.Body = append(w.Body, guard...) }
	}
	l.want(nfsv3.NFS3ERR_NOT_SYNC, root, pSetattr, set([]byte{0, 0, 0, 1, 0, 0, 0, 0}))
	if b, _ := os.ReadFile(filepath.Join(l.dir, "f")); string(b) != "data" {
		t.Errorf("%q", b)
	}
	l.want(nfsv3.NFS3_OK, root, pSetattr, set(ctime()))
	if b, _ := os.ReadFile(filepath.Join(l.dir, "f")); string(b) != "d" {
		t.Errorf("%q", b)
	}
}

func TestCreateKinds(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	exclusive := func(verf uint64) func(*rpc.Writer) {
		return func(w *rpc.Writer) { name(l.root, "x")(w); w.U32(2); w.U64(verf) }
	}
	l.want(nfsv3.NFS3_OK, alice, pCreate, exclusive(0xdeadbeefcafe0123))
	l.want(nfsv3.NFS3_OK, alice, pCreate, exclusive(0xdeadbeefcafe0123)) // sent again
	l.want(nfsv3.NFS3ERR_EXIST, alice, pCreate, exclusive(0xdeadbeefcafe0124))
	again := newLocal(t, nfs.Config{Dir: l.dir, KeyFile: l.key}) // the export restarts
	again.want(nfsv3.NFS3_OK, alice, pCreate, exclusive(0xdeadbeefcafe0123))
	guarded := func(w *rpc.Writer) { name(l.root, "g")(w); w.U32(1); sattr(w, 0o600, -1) }
	l.want(nfsv3.NFS3_OK, alice, pCreate, guarded)
	l.want(nfsv3.NFS3ERR_EXIST, alice, pCreate, guarded)
	// UNCHECKED truncates an existing file and keeps its mode.
	l.file("u", 0o640, alice, "data")
	l.want(nfsv3.NFS3_OK, alice, pCreate, func(w *rpc.Writer) { name(l.root, "u")(w); w.U32(0); sattr(w, 0o777, 2) })
	st, err := os.Stat(filepath.Join(l.dir, "u"))
	if err != nil || st.Size() != 2 || st.Mode() != 0o640 {
		t.Errorf("%v, %v", st, err)
	}
}

// TestStale checks that a handle belongs to one object, and does not become valid again with its name or number.
func TestStale(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	for i := range 20 {
		old := l.file("f", 0o600, root, fmt.Sprint(i))
		l.want(nfsv3.NFS3_OK, root, pRemove, name(l.root, "f"))
		fh := l.file("f", 0o600, root, "new")
		for proc, args := range map[uint32]func(*rpc.Writer){pGetattr: func(w *rpc.Writer) { w.Opaque(old) }, pRead: read(old, 0, 4), pWrite: write(old, 0, []byte("no"))} {
			l.want(nfsv3.NFS3ERR_STALE, root, proc, args)
		}
		if bytes.Equal(old, fh) {
			t.Fatal("the same handle")
		}
		l.want(nfsv3.NFS3_OK, root, pRemove, name(l.root, "f"))
	}
}

func TestLinksAndRename(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "f")
	l.file("over", 0o600, root, "over")
	l.want(nfsv3.NFS3_OK, root, pLink, func(w *rpc.Writer) { w.Opaque(fh); name(l.root, "h")(w) })
	if !bytes.Equal(l.lookup("h"), fh) {
		t.Error("a hard link has another handle")
	}
	l.want(nfsv3.NFS3ERR_EXIST, root, pLink, func(w *rpc.Writer) { w.Opaque(fh); name(l.root, "over")(w) })
	if _, st := l.do(root, pLink, func(w *rpc.Writer) { w.Opaque(l.root); name(l.root, "d")(w) }); st == nfsv3.NFS3_OK {
		t.Error("a hard link to a directory")
	}
	over := l.lookup("over")
	move := func(from, to string) func(*rpc.Writer) {
		return func(w *rpc.Writer) { name(l.root, from)(w); name(l.root, to)(w) }
	}
	l.want(nfsv3.NFS3_OK, root, pRename, move("f", "over"))
	if !bytes.Equal(l.lookup("over"), fh) {
		t.Error("renamed, another handle")
	}
	l.want(nfsv3.NFS3ERR_STALE, root, pGetattr, func(w *rpc.Writer) { w.Opaque(over) })
	l.want(nfsv3.NFS3ERR_NOENT, root, pLookup, name(l.root, "f"))
	l.want(nfsv3.NFS3_OK, root, pRename, move("over", "h")) // both are names of one file, and both remain
	l.lookup("over")
	for _, p := range []string{"full/x", "empty"} {
		if err := os.MkdirAll(filepath.Join(l.dir, p), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, st := l.do(root, pRename, move("empty", "full")); st != nfsv3.NFS3ERR_NOTEMPTY && st != nfsv3.NFS3ERR_EXIST {
		t.Errorf("over a full directory: %v", st)
	}
	l.want(nfsv3.NFS3ERR_ISDIR, root, pRename, move("h", "empty"))
	l.want(nfsv3.NFS3ERR_NOTDIR, root, pRename, move("empty", "h"))
	l.want(nfsv3.NFS3ERR_INVAL, root, pRename, func(w *rpc.Writer) { name(l.root, "full")(w); name(l.lookup("full"), "in")(w) })
	l.want(nfsv3.NFS3_OK, root, pRename, move("full", "empty"))
}

func TestNames(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	var odd []string
	for b := 1; b < 256; b++ {
		if s := "n" + string([]byte{byte(b)}); b != '/' {
			odd = append(odd, s)
		}
	}
	odd = append(odd, strings.Repeat("x", 255), "...", " ", "-rf", "\xff\xfe", "a\nb")
	for _, s := range odd {
		l.want(nfsv3.NFS3_OK, root, pCreate, create(l.root, s, 0o600))
		if _, err := os.Lstat(filepath.Join(l.dir, s)); err != nil {
			t.Errorf("%q: %v", s, err)
		}
		l.want(nfsv3.NFS3_OK, root, pRemove, name(l.root, s))
	}
	long := strings.Repeat("x", 256)
	f := l.file("f", 0o600, root, "")
	for proc, args := range map[uint32]func(*rpc.Writer){
		pLookup: name(l.root, long), pCreate: create(l.root, long, 0o600), pRemove: name(l.root, long),
		pRename: func(w *rpc.Writer) { name(l.root, "f")(w); name(l.root, long)(w) },
		pLink:   func(w *rpc.Writer) { w.Opaque(f); name(l.root, long)(w) },
	} {
		l.want(nfsv3.NFS3ERR_NAMETOOLONG, root, proc, args)
	}
}

func TestLargeOffsets(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "")
	const at = 5<<30 + 3
	l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, at, []byte("far")))
	r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, at-2, 100))
	r.Fixed(4 + 84 + 4)
	if eof := r.U32(); eof != 1 {
		t.Error("no end")
	}
	if s := r.String(100); s != "\x00\x00far" {
		t.Errorf("%q", s)
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "f"), &st); err != nil || st.Size != at+3 || st.Blocks > 100 {
		t.Errorf("%d bytes in %d blocks, %v", st.Size, st.Blocks, err)
	}
	l.want(nfsv3.NFS3ERR_FBIG, root, pWrite, write(fh, math.MaxInt64-1, []byte("far")))
	l.want(nfsv3.NFS3ERR_FBIG, root, pWrite, write(fh, math.MaxUint64, []byte("far")))
	for _, off := range []uint64{at + 3, math.MaxInt64, math.MaxInt64 + 1, math.MaxUint64} {
		r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, off, 1000))
		r.Fixed(4 + 84)
		if n, eof := r.U32(), r.U32(); n != 0 || eof != 1 {
			t.Errorf("at %d: %d bytes, end %d", off, n, eof)
		}
	}
}

// TestMoved checks that handles stay valid when a client renames or links a file or a directory above it, or removes a
// link.
func TestMoved(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	for _, d := range []string{"a/b", "c"} {
		if err := os.MkdirAll(filepath.Join(l.dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	a, c := l.lookup("a"), l.lookup("c")
	b := bytes.Clone(l.want(nfsv3.NFS3_OK, root, pLookup, name(a, "b")).Opaque(64))
	l.want(nfsv3.NFS3_OK, root, pCreate, create(b, "f", 0o644))
	fh := bytes.Clone(l.want(nfsv3.NFS3_OK, root, pLookup, name(b, "f")).Opaque(64))
	valid := func(what string, handles ...[]byte) {
		t.Helper()
		for _, fh := range handles {
			if _, st := l.do(root, pGetattr, func(w *rpc.Writer) { w.Opaque(fh) }); st != nfsv3.NFS3_OK {
				t.Errorf("%s: %s", what, nfsv3.Nfsstat3_name[st])
			}
		}
		l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, 0, []byte(what)))
		l.want(nfsv3.NFS3_OK, root, pRead, read(fh, 0, 4))
	}
	move := func(from []byte, old string, to []byte, as string) {
		t.Helper()
		l.want(nfsv3.NFS3_OK, root, pRename, func(w *rpc.Writer) { name(from, old)(w); name(to, as)(w) })
	}
	link := func(dir []byte, as string) {
		t.Helper()
		l.want(nfsv3.NFS3_OK, root, pLink, func(w *rpc.Writer) { w.Opaque(fh); name(dir, as)(w) })
	}
	move(b, "f", b, "g")
	valid("renamed", b, a)
	move(b, "g", c, "g")
	valid("moved", c)
	move(l.root, "c", b, "c")
	valid("with the directory above", a, b, c)
	move(l.root, "a", l.root, "z")
	valid("with the directory on top", a, b, c)
	link(b, "second")
	l.want(nfsv3.NFS3_OK, root, pRemove, name(c, "g"))
	valid("the first link removed", a, b, c)
	for _, as := range []string{"third", "fourth"} {
		link(c, as)
		l.want(nfsv3.NFS3_OK, root, pRemove, name(c, as))
		valid("the newer link removed", a, b, c)
	}
	if s, err := os.ReadFile(filepath.Join(l.dir, "z/b/second")); err != nil || !strings.HasPrefix(string(s), "the newer") {
		t.Errorf("%q, %v", s, err)
	}
}

// TestVerifier checks that the verifier is the same while the server runs and changes when it restarts. Handles do not
// change.
func TestVerifier(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "data")
	verf := func(l *local) uint64 {
		r := l.want(nfsv3.NFS3_OK, root, pCommit, func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U32(0) })
		r.Fixed(4 + 24 + 4 + 84)
		return r.U64()
	}
	a := verf(l)
	r := l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, 0, []byte("x")))
	r.Fixed(4 + 24 + 4 + 84 + 4 + 4)
	if b := r.U64(); a != b || verf(l) != a {
		t.Error("it changes")
	}
	again := newLocal(t, nfs.Config{Dir: l.dir, KeyFile: l.key})
	if os.Getenv(noHandles) != "" {
		again.want(nfsv3.NFS3ERR_STALE, root, pGetattr, func(w *rpc.Writer) { w.Opaque(fh) })
		again.lookup("f")
	}
	if verf(again) == a {
		t.Error("the same after a start")
	}
	if !bytes.Equal(again.root, l.root) {
		t.Error("another root")
	}
}

func TestFsstat(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	var f unix.Statfs_t
	if err := unix.Statfs(l.dir, &f); err != nil {
		t.Fatal(err)
	}
	r := l.want(nfsv3.NFS3_OK, root, pFsstat, func(w *rpc.Writer) { w.Opaque(l.root) })
	r.Fixed(88)
	total, free, avail, files := r.U64(), r.U64(), r.U64(), r.U64()
	if total != f.Blocks*uint64(f.Frsize) || free > total || avail > free || files != f.Files || free == 0 {
		t.Errorf("%d, %d, %d bytes, %d files of %+v", total, free, avail, files, f)
	}
}

// TestCookies checks that entries that exist all the time are listed exactly once while others are created and
// removed.
func TestCookies(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	for i := range 600 {
		for _, k := range []string{"stays", "goes"} {
			if err := os.WriteFile(filepath.Join(l.dir, fmt.Sprintf("%s %d", k, i)), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	seen := make(map[string]int)
	var cookie, verf uint64
	gone := 0
	for round := 0; ; round++ {
		r := l.want(nfsv3.NFS3_OK, root, pReaddirplus, func(w *rpc.Writer) { w.Opaque(l.root); w.U64(cookie); w.U64(verf); w.U32(1000, 4000) })
		r.Fixed(88)
		verf = r.U64()
		for r.U32() == 1 {
			r.U64()
			seen[r.String(255)]++
			cookie = r.U64()
			if r.U32() == 1 {
				r.Fixed(84)
			}
			if r.U32() == 1 {
				r.Opaque(64)
			}
		}
		if r.U32() == 1 {
			break
		}
		if r.Err() != nil || round > 1000 {
			t.Fatal(round, r.Err())
		}
		for range 20 {
			_ = os.Remove(filepath.Join(l.dir, fmt.Sprintf("goes %d", gone)))
			gone++
		}
		if err := os.WriteFile(filepath.Join(l.dir, fmt.Sprintf("comes %d", round)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 600 {
		if n := seen[fmt.Sprintf("stays %d", i)]; n != 1 {
			t.Errorf("stays %d: %d times", i, n)
		}
	}
	for s, n := range seen {
		if n > 1 {
			t.Errorf("%q: %d times", s, n)
		}
	}
}

// TestAgain checks that a repeated call that is not idempotent is done once.
func TestAgain(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "data")
	twice := func(proc uint32, args func(*rpc.Writer), between func()) {
		xid := l.xid.Add(1)
		for i := range 2 {
			if st := l.send(xid, root, nfs.ProgramNFS, proc, args).U32(); st != 0 {
				t.Errorf("procedure %d, time %d: %d", proc, i, st)
			}
			if between != nil && i == 0 {
				between()
			}
		}
	}
	twice(pMkdir, func(w *rpc.Writer) { name(l.root, "d")(w); sattr(w, 0o700, -1) }, nil)
	twice(pRmdir, name(l.root, "d"), nil)
	twice(pRename, func(w *rpc.Writer) { name(l.root, "f")(w); name(l.root, "g")(w) }, nil)
	twice(pLink, func(w *rpc.Writer) { w.Opaque(fh); name(l.root, "h")(w) }, nil)
	twice(pRemove, name(l.root, "h"), nil)
	// A WRITE that is repeated after a later one does not overwrite it.
	twice(pWrite, write(fh, 0, []byte("first")), func() { l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, 0, []byte("later"))) })
	if b, _ := os.ReadFile(filepath.Join(l.dir, "g")); string(b) != "later" {
		t.Errorf("%q", b)
	}
}

// TestWcc checks that the attributes before and after in a reply belong to that one request. Otherwise a client would
// take another client's change for its own, and keep stale data in its cache.
func TestWcc(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, root, "")
	var mu sync.Mutex
	before := make(map[uint64]int)
	var next atomic.Uint64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 200 {
				off := next.Add(1) * 10
				r := l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, off, []byte("ten bytes")))
				r.U32()
				a := r.U64()
				r.Fixed(16 + 4 + 20)
				if b := r.U64(); b > a { // it extended the file
					mu.Lock()
					before[a]++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	for size, n := range before {
		if n > 1 {
			t.Fatalf("%d requests found the file with %d bytes, and made it longer", n, size)
		}
	}
}

// TestOtherExport checks that handles of a previous export are stale.
func TestOtherExport(t *testing.T) {
	old := newLocal(t, nfs.Config{})
	f := old.file("f", 0o600, root, "old")
	l := newLocal(t, nfs.Config{})
	for _, fh := range [][]byte{old.root, f} {
		l.want(nfsv3.NFS3ERR_STALE, root, pGetattr, func(w *rpc.Writer) { w.Opaque(fh) })
	}
}

// TestMountBelow checks that users can mount those folders of the export that they may enter, by their paths, and
// nothing else.
func TestMountBelow(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for d, mode := range map[string]os.FileMode{"a": 0o755, "a/b c": 0o755, "closed": 0o700, "closed/in": 0o755} {
		if err := errors.Join(os.MkdirAll(filepath.Join(dir, d), 0o755), os.Chmod(filepath.Join(dir, d), mode)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "file"), nil, 0o644), os.Symlink("a", filepath.Join(dir, "link")), os.Symlink("/etc", filepath.Join(dir, "out"))); err != nil {
		t.Fatal(err)
	}
	l := newLocal(t, nfs.Config{Dir: dir})
	for _, c := range []struct {
		path string
		who  who
		want uint32
		is   string // name of the object that the handle belongs to
	}{
		{"/", alice, 0, ""}, {"", root, 0, ""}, {dir, root, 0, ""}, {dir + "/", root, 0, ""},
		{"/a", alice, 0, "a"}, {"/a/", root, 0, "a"}, {"a/./b c/..", root, 0, "a"}, {dir + "/a", alice, 0, "a"}, {"/a/b c", root, 0, "a/b c"},
		{"/closed/in", root, 0, "closed/in"}, {"/closed/in", alice, 13, ""}, {"/closed", alice, 0, "closed"},
		{"/none", root, 2, ""}, {dir + "x", root, 2, ""}, {"/../etc", root, 2, ""}, {"/a/../../etc", root, 2, ""}, {"/etc", root, 2, ""},
		{"/file", root, 20, ""}, {"/file/x", root, 20, ""}, {"/link", root, 20, ""}, {"/link/b c", root, 13, ""}, {"/out/ssh", root, 13, ""},
		{"/a\x00", root, 22, ""}, {"/" + strings.Repeat("n", 256), root, 63, ""},
	} {
		r := l.send(l.xid.Add(1), c.who, nfs.ProgramMount, 1, func(w *rpc.Writer) { w.String(c.path) })
		if st := r.U32(); st != c.want {
			t.Errorf("mount of %q: status %d, not %d", c.path, st, c.want)
			continue
		}
		if c.want != 0 {
			continue
		}
		fh, want := bytes.Clone(r.Opaque(64)), l.root
		for n := range strings.SplitSeq(c.is, "/") {
			if n != "" {
				want = bytes.Clone(l.want(nfsv3.NFS3_OK, root, pLookup, name(want, n)).Opaque(64))
			}
		}
		if !bytes.Equal(fh, want) {
			t.Errorf("mount of %q: another handle", c.path)
		}
	}
}

// TestMountBeneath checks that where another file system is mounted below the export, clients see the whole directory
// under the mount, and cannot remove it.
func TestMountBeneath(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	there := filepath.Join(dir, "there")
	if err := os.Mkdir(there, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(there, "covered"), []byte("c"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", there, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(there, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if err := os.WriteFile(filepath.Join(there, "inner"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	l := newLocal(t, nfs.Config{Dir: dir})
	l.want(nfsv3.NFS3ERR_ACCES, root, pRmdir, name(l.root, "there"))
	fh := l.lookup("there")
	l.want(nfsv3.NFS3_OK, root, pLookup, name(fh, "covered"))
	l.want(nfsv3.NFS3ERR_NOENT, root, pLookup, name(fh, "inner"))
	l.want(nfsv3.NFS3_OK, alice, pCreate, create(l.root, "file", 0o600))
	l.want(nfsv3.NFS3_OK, root, pRename, func(w *rpc.Writer) { name(l.root, "file")(w); name(fh, "moved")(w) })
	up := l.want(nfsv3.NFS3_OK, root, pLookup, name(fh, ".."))
	if !bytes.Equal(up.Opaque(64), l.root) {
		t.Error("its parent is another")
	}
	r := l.want(nfsv3.NFS3_OK, root, pReaddirplus, func(w *rpc.Writer) { w.Opaque(l.root); w.U64(0); w.U64(0); w.U32(4096, 4096) })
	if r.U32() == 1 {
		r.Fixed(84)
	}
	r.U64()
	seen := false
	for r.U32() == 1 {
		r.U64()
		n := r.String(255)
		r.U64()
		attr := r.U32() == 1
		if attr {
			r.Fixed(84)
		}
		h := []byte(nil)
		if r.U32() == 1 {
			h = r.Opaque(64)
		}
		if n == "there" {
			seen = attr && bytes.Equal(h, fh)
		}
	}
	if r.Err() != nil || !seen {
		t.Errorf("READDIRPLUS tells nothing of it: %v", r.Err())
	}
	if _, err := os.Lstat(filepath.Join(there, "moved")); err == nil {
		t.Error("moved into what is mounted")
	}
}

// TestMovedAway checks that a directory that was moved out of the export reveals nothing about its new parents.
func TestMovedAway(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"export/a/b", "out"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	l := newLocal(t, nfs.Config{Dir: filepath.Join(dir, "export")})
	a := l.lookup("a")
	r := l.want(nfsv3.NFS3_OK, root, pLookup, name(a, "b"))
	b := bytes.Clone(r.Opaque(64))
	r = l.want(nfsv3.NFS3_OK, root, pLookup, name(b, ".."))
	if !slices.Equal(r.Opaque(64), a) {
		t.Error("the parent is another")
	}
	if err := os.Rename(filepath.Join(dir, "export/a"), filepath.Join(dir, "out/a")); err != nil {
		t.Fatal(err)
	}
	l.want(nfsv3.NFS3ERR_STALE, root, pLookup, name(b, ".."))
	l.want(nfsv3.NFS3ERR_STALE, root, pLookup, name(a, ".."))
}

// TestBadCookie checks an impossible place in a directory.
func TestBadCookie(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	l.want(nfsv3.NFS3ERR_BAD_COOKIE, root, pReaddir, func(w *rpc.Writer) { w.Opaque(l.root); w.U64(1 << 63); w.U64(0); w.U32(4096) })
	l.want(nfsv3.NFS3ERR_BAD_COOKIE, root, pReaddirplus, func(w *rpc.Writer) { w.Opaque(l.root); w.U64(math.MaxUint64); w.U64(0); w.U32(4096, 4096) })
}

// TestRelative checks that a folder that is exported by a relative path has an absolute path for clients.
func TestRelative(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	if err := os.Mkdir("sub", 0o755); err != nil {
		t.Fatal(err)
	}
	l := newLocal(t, nfs.Config{Dir: "sub"})
	if r := l.send(l.xid.Add(1), root, nfs.ProgramMount, 1, func(w *rpc.Writer) { w.String(filepath.Join(dir, "sub")) }); r.U32() != 0 {
		t.Error("mount by the absolute path")
	}
	r := l.send(l.xid.Add(1), root, nfs.ProgramMount, 5, func(*rpc.Writer) {})
	if r.U32() != 1 || r.String(1024) != filepath.Join(dir, "sub") {
		t.Error("the list of exports has another path")
	}
}

// TestFlavors checks that unsupported credentials are rejected with an error.
func TestFlavors(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	many := rpc.Sys{GIDs: make([]uint32, 17)}
	for _, c := range []struct {
		name string
		cred rpc.Auth
		err  error
	}{
		{"AUTH_NONE", rpc.Auth{}, nil}, {"AUTH_SYS", (&rpc.Sys{GIDs: make([]uint32, 16)}).Auth(), nil}, {"17 groups", many.Auth(), rpc.AuthError},
		{"AUTH_SHORT", rpc.Auth{Flavor: 2, Body: make([]byte, 8)}, rpc.AuthError},
		{"RPCSEC_GSS", rpc.Auth{Flavor: rpc.AuthGSS, Body: []byte{0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}}, rpc.AuthError},
	} {
		for _, prog := range []uint32{nfs.ProgramNFS, nfs.ProgramMount} {
			var w rpc.Writer
			(&rpc.Call{XID: l.xid.Add(1), Prog: prog, Vers: 3, Cred: c.cred}).Start(&w)
			reply, ok := l.srv.Serve(t.Context(), "10.0.0.9", w.Msg, nil)
			if _, err := rpc.ParseReply(reply); !ok || err != c.err {
				t.Errorf("%s, program %d: %v, not %v", c.name, prog, err, c.err)
			}
		}
	}
}

// TestEligible checks that the data items that may go by chunks are those of RFC 8267 section 4: the arguments of
// WRITE and SYMLINK, and the results of READ and READLINK.
func TestEligible(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o644, root, "data")
	if err := os.Symlink("target", filepath.Join(l.dir, "link")); err != nil {
		t.Fatal(err)
	}
	link := l.lookup("link")
	serve := func(prog, proc uint32, args func(*rpc.Writer)) (rpc.Msg, bool) {
		var w rpc.Writer
		sys := rpc.Sys{}
		(&rpc.Call{XID: l.xid.Add(1), Prog: prog, Vers: 3, Proc: proc, Cred: sys.Auth()}).Start(&w)
		args(&w)
		return l.srv.Serve(t.Context(), "10.0.0.9", w.Msg, nil)
	}
	for proc := range uint32(22) {
		_, ok := serve(nfs.ProgramNFS, proc, func(w *rpc.Writer) { w.Item([]byte("12345678")) })
		if want := proc == pWrite || proc == pSymlink; ok != want {
			t.Errorf("an argument of procedure %d in a chunk: done %v", proc, ok)
		}
	}
	if _, ok := serve(nfs.ProgramMount, 1, func(w *rpc.Writer) { w.Item([]byte("/sub")) }); ok {
		t.Error("an argument of MOUNT in a chunk is taken")
	}
	const pReadlink = 5
	for proc, args := range map[uint32]func(*rpc.Writer){
		pGetattr: func(w *rpc.Writer) { w.Opaque(fh) }, pLookup: name(l.root, "f"), pRead: read(fh, 0, 100), pReadlink: func(w *rpc.Writer) { w.Opaque(link) },
		pReaddir:     func(w *rpc.Writer) { w.Opaque(l.root); w.U64(0); w.U64(0); w.U32(4096) },
		pReaddirplus: func(w *rpc.Writer) { w.Opaque(l.root); w.U64(0); w.U64(0); w.U32(4096, 4096) },
	} {
		reply, ok := serve(nfs.ProgramNFS, proc, args)
		want := 0
		if proc == pRead || proc == pReadlink {
			want = 1
		}
		if !ok || len(reply.Items) != want {
			t.Errorf("procedure %d: %d results may go by chunks", proc, len(reply.Items))
		}
	}
}

// TestParentOfRoot checks that listing the root tells nothing of the folder above, which is not exported: ".." is the root itself.
func TestParentOfRoot(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	var st unix.Stat_t
	if err := unix.Stat(l.dir, &st); err != nil {
		t.Fatal(err)
	}
	for _, plus := range []bool{false, true} {
		proc := uint32(pReaddir)
		if plus {
			proc = pReaddirplus
		}
		r := l.want(nfsv3.NFS3_OK, root, proc, func(w *rpc.Writer) {
			w.Opaque(l.root)
			w.U64(0)
			w.U64(0)
			w.U32(4096)
			if plus {
				w.U32(4096)
			}
		})
		if r.U32() == 1 {
			r.Fixed(84)
		}
		r.U64()
		seen := 0
		for r.U32() == 1 {
			ino, name := r.U64(), r.String(255)
			r.U64()
			if plus {
				if r.U32() == 1 {
					r.Fixed(84)
				}
				if r.U32() == 1 {
					r.Opaque(64)
				}
			}
			if name == "." || name == ".." {
				seen++
				if ino != st.Ino {
					t.Errorf("procedure %d: %s is %d, the root is %d", proc, name, ino, st.Ino)
				}
			}
		}
		if r.Err() != nil || seen != 2 {
			t.Errorf("procedure %d: %d entries, %v", proc, seen, r.Err())
		}
	}
}
