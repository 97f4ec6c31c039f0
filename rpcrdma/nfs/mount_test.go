package nfs_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

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
	testenv.Chmod(t, dir, 0o755)
	for d, mode := range map[string]os.FileMode{"a": 0o755, "a/b c": 0o755, "closed": 0o700, "closed/in": 0o755, "Zürich": 0o755, "\xff": 0o755} {
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
		{"/Zürich", root, 0, "Zürich"}, {"/\xff", root, 0, "\xff"},
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

// TestMountNames checks the procedures of MOUNT with paths that are not ASCII.
func TestMountNames(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "Zürich\xff")
	testenv.Mkdir(t, filepath.Join(dir, "é"), 0o755)
	l := newLocal(t, nfs.Config{Dir: dir}) // mounts "/"
	send := func(proc uint32, args ...string) *rpc.Reader {
		return l.send(l.xid.Add(1), root, nfs.ProgramMount, proc, func(w *rpc.Writer) {
			for _, a := range args {
				w.String(a)
			}
		})
	}
	dump := func() (dirs []string) {
		r := send(2)
		if n := r.Left(); n > 33<<10 {
			t.Errorf("DUMP: a reply of %d bytes", n)
		}
		for r.U32() == 1 {
			r.String(255)
			dirs = append(dirs, r.String(1024))
		}
		if r.Err() != nil || r.Left() != 0 {
			t.Errorf("DUMP: %v, %d bytes left", r.Err(), r.Left())
		}
		slices.Sort(dirs)
		return dirs
	}
	if r := send(5); r.U32() != 1 || r.String(1024) != dir || r.U32() != 0 || r.U32() != 0 || r.Err() != nil || r.Left() != 0 {
		t.Error("EXPORT has another reply")
	}
	inner := filepath.Join(dir, "é")
	if st := send(1, inner).U32(); st != 0 {
		t.Errorf("MNT: status %d", st)
	}
	if got := dump(); !slices.Equal(got, []string{"/", inner}) {
		t.Errorf("DUMP after MNT: %q", got)
	}
	send(3, inner)
	if got := dump(); !slices.Equal(got, []string{"/"}) {
		t.Errorf("DUMP after UMNT: %q", got)
	}
	// The latest mounts are listed, though the list is full of older ones.
	for i := range 1024 {
		send(1, strings.Repeat("/", i+1))
	}
	send(1, inner)
	if got := dump(); len(got) < 30 || !slices.Contains(got, inner) {
		t.Errorf("DUMP after many MNTs: %d entries, %q", len(got), got[len(got)-1])
	}
	send(4)
	if got := dump(); got != nil {
		t.Errorf("DUMP after UMNTALL: %q", got)
	}
}

// TestMountBeneath checks that where another file system is mounted below the export, clients see the whole directory
// under the mount, and cannot remove it.
func TestMountBeneath(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	there := filepath.Join(dir, "there")
	testenv.Mkdir(t, there, 0o755)
	testenv.WriteFile(t, filepath.Join(there, "covered"), []byte("c"), 0o644)
	if err := unix.Mount("tmpfs", there, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(there, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	testenv.WriteFile(t, filepath.Join(there, "inner"), nil, 0o644)
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
