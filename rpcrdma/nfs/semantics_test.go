package nfs_test

import (
	"bytes"
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

// TestLinkTimes checks that the times of a symbolic link are set even with a mode, which it does not have.
func TestLinkTimes(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	l.want(nfsv3.NFS3_OK, root, pSymlink, func(w *rpc.Writer) { name(l.root, "link")(w); sattr(w, -1, -1); w.String("none") })
	l.want(nfsv3.NFS3_OK, root, pSetattr, func(w *rpc.Writer) {
		w.Opaque(l.lookup("link"))
		w.U32(1, 0o600, 0, 0, 0) // mode, owner, group, size
		w.U32(2, 1000, 1, 2, 2000, 2)
		w.U32(0) // no guard
	})
	st, err := os.Lstat(filepath.Join(l.dir, "link"))
	if err != nil || st.ModTime().UnixNano() != 2000e9+2 {
		t.Errorf("%v, %v", st.ModTime(), err)
	}
}

// TestDeviceNumbers checks that MKNOD makes the device that was asked for, or none.
func TestDeviceNumbers(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	for _, c := range []struct {
		major, minor uint32
		want         nfsv3.Nfsstat3
	}{
		{1, 3, nfsv3.NFS3_OK}, {1<<12 - 1, 1<<20 - 1, nfsv3.NFS3_OK},
		{1<<12 + 1, 3, nfsv3.NFS3ERR_INVAL}, {1, 1<<20 + 3, nfsv3.NFS3ERR_INVAL}, {math.MaxUint32, math.MaxUint32, nfsv3.NFS3ERR_INVAL},
	} {
		n := fmt.Sprint(c.major, "-", c.minor)
		l.want(c.want, root, pMknod, func(w *rpc.Writer) {
			name(l.root, n)(w)
			w.U32(4) // NF3CHR
			sattr(w, 0o600, -1)
			w.U32(c.major, c.minor)
		})
		var st unix.Stat_t
		err := unix.Stat(filepath.Join(l.dir, n), &st)
		if c.want == nfsv3.NFS3_OK && (unix.Major(st.Rdev) != c.major || unix.Minor(st.Rdev) != c.minor) || c.want != nfsv3.NFS3_OK && err != unix.ENOENT {
			t.Errorf("%s: device %d, %d, %v", n, unix.Major(st.Rdev), unix.Minor(st.Rdev), err)
		}
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
	// The client sets the mode afterwards. Until then no program of the server's host may open the file, and read it
	// later.
	st, err := os.Stat(filepath.Join(l.dir, "x"))
	if err != nil || st.Mode() != 0o600 {
		t.Errorf("an exclusive CREATE: %v, %v", st, err)
	}
	again := newLocal(t, nfs.Config{Dir: l.dir, KeyFile: l.key}) // the export restarts
	again.want(nfsv3.NFS3_OK, alice, pCreate, exclusive(0xdeadbeefcafe0123))
	guarded := func(w *rpc.Writer) { name(l.root, "g")(w); w.U32(1); sattr(w, 0o600, -1) }
	l.want(nfsv3.NFS3_OK, alice, pCreate, guarded)
	l.want(nfsv3.NFS3ERR_EXIST, alice, pCreate, guarded)
	// UNCHECKED truncates an existing file and keeps its mode.
	l.file("u", 0o640, alice, "data")
	l.want(nfsv3.NFS3_OK, alice, pCreate, func(w *rpc.Writer) { name(l.root, "u")(w); w.U32(0); sattr(w, 0o777, 2) })
	st, err = os.Stat(filepath.Join(l.dir, "u"))
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
		testenv.Mkdir(t, filepath.Join(l.dir, p), 0o755)
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
		testenv.Mkdir(t, filepath.Join(l.dir, d), 0o755)
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

// TestManyUnstable checks that the server does not keep files open without limit until a COMMIT: what exceeds the limit
// is on disk at once.
func TestManyUnstable(t *testing.T) {
	const limit = 256
	l := serveLocal(t, nfs.Config{NoRootSquash: true})
	var files [limit + 1][]byte
	for i := range files {
		files[i] = l.file(fmt.Sprint("f", i), 0o600, root, "")
	}
	before := descriptors(t)
	for i := range files { // in less than the ten seconds after which the server commits a file by itself
		if got := l.committed(files[i]); got != nfsv3.UNSTABLE {
			t.Fatalf("file %d: %d", i, got)
		}
	}
	if n := descriptors(t) - before; n < limit/2 || n > limit {
		t.Errorf("%d descriptors are kept", n)
	}
	l.want(nfsv3.NFS3_OK, root, pCommit, func(w *rpc.Writer) { w.Opaque(files[limit]); w.U64(0); w.U32(0) })
	if n := descriptors(t) - before; n >= limit {
		t.Errorf("%d descriptors are kept after a COMMIT", n)
	}
}

// committed writes to a file, and returns what the server says of the data.
func (l *local) committed(fh []byte) nfsv3.StableHow {
	l.t.Helper()
	r := l.want(nfsv3.NFS3_OK, root, pWrite, write(fh, 0, []byte("x")))
	r.Fixed(4 + 24 + 4 + 84 + 4)
	return nfsv3.StableHow(r.U32())
}

// TestUnstableOfOthers checks that the server commits the files of a client that has written to many, and not those of
// others, to make room for more of that client's: a WRITE does not wait for the data of others.
func TestUnstableOfOthers(t *testing.T) {
	l := serveLocal(t, nfs.Config{NoRootSquash: true})
	n := 0
	file := func() []byte {
		n++
		return l.file(fmt.Sprint("f", n), 0o600, root, "")
	}
	for _, c := range []struct {
		peer  string
		files int
		kept  bool // a descriptor for each, in addition to those of others
	}{{"10.0.0.9", 1, true}, {"2001:db8::1", 300, false}, {"10.0.0.9", 1, true}, {"2001:db8::2", 1, false}, {"2001:db8:1::1", 1, true}} {
		before := descriptors(t)
		l.peer = c.peer
		for range c.files {
			if got := l.committed(file()); got != nfsv3.UNSTABLE {
				t.Fatalf("%s: %d", c.peer, got)
			}
		}
		if more := descriptors(t) - before; (more == c.files) != c.kept {
			t.Errorf("%s has written to %d files: %d more descriptors are kept", c.peer, c.files, more)
		}
	}
}

// descriptors returns how many descriptors this process has.
func descriptors(t *testing.T) int {
	t.Helper()
	l, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(l)
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
			testenv.WriteFile(t, filepath.Join(l.dir, fmt.Sprintf("%s %d", k, i)), nil, 0o600)
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
		testenv.WriteFile(t, filepath.Join(l.dir, fmt.Sprintf("comes %d", round)), nil, 0o600)
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

// TestListRemoved checks that a directory that was removed, but is open in a program, is stale.
func TestListRemoved(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	dir := filepath.Join(l.dir, "d")
	testenv.Mkdir(t, dir, 0o755)
	open, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	d := l.lookup("d")
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	list := func(w *rpc.Writer) { w.Opaque(d); w.U64(0); w.U64(0); w.U32(4096) }
	l.want(nfsv3.NFS3ERR_STALE, root, pReaddir, list)
	l.want(nfsv3.NFS3ERR_STALE, root, pReaddirplus, func(w *rpc.Writer) { list(w); w.U32(4096) })
}

// TestMovedAway checks that a directory that was moved out of the export reveals nothing about its new parents.
func TestMovedAway(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"export/a/b", "out"} {
		testenv.Mkdir(t, filepath.Join(dir, d), 0o755)
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

// TestTooSmall checks that a reply without room for an entry is an error, and one with some or without more is none.
func TestTooSmall(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	list := func(cookie uint64, most uint32) func(*rpc.Writer) {
		return func(w *rpc.Writer) { w.Opaque(l.root); w.U64(cookie); w.U64(0); w.U32(most) }
	}
	plus := func(cookie uint64, most uint32) func(*rpc.Writer) {
		return func(w *rpc.Writer) { list(cookie, 4096)(w); w.U32(most) }
	}
	const one = 104 + 28 // of READDIR, with an entry of a name of one or two bytes
	l.want(nfsv3.NFS3ERR_TOOSMALL, root, pReaddir, list(0, one-1))
	l.want(nfsv3.NFS3ERR_TOOSMALL, root, pReaddirplus, plus(0, one-1))
	var last uint64
	for _, most := range []uint32{one, 4096} {
		r := l.want(nfsv3.NFS3_OK, root, pReaddir, list(0, most))
		r.Fixed(88 + 8) // attributes, verifier
		n := 0
		for ; r.U32() == 1; n++ {
			r.U64()
			r.String(255)
			last = r.U64()
		}
		if end := r.U32() == 1; r.Err() != nil || end != (most > one) || (n == 1) == end {
			t.Errorf("%d bytes: %d entries, the end %v, %v", most, n, end, r.Err())
		}
	}
	l.want(nfsv3.NFS3_OK, root, pReaddir, list(last, one-1)) // nothing follows
	l.want(nfsv3.NFS3_OK, root, pReaddirplus, plus(last, one-1))
}

// TestRelative checks that a folder that is exported by a relative path has an absolute path for clients.
func TestRelative(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	testenv.Mkdir(t, "sub", 0o755)
	l := newLocal(t, nfs.Config{Dir: "sub"})
	if r := l.send(l.xid.Add(1), root, nfs.ProgramMount, 1, func(w *rpc.Writer) { w.String(filepath.Join(dir, "sub")) }); r.U32() != 0 {
		t.Error("mount by the absolute path")
	}
	r := l.send(l.xid.Add(1), root, nfs.ProgramMount, 5, func(*rpc.Writer) {})
	if r.U32() != 1 || r.String(1024) != filepath.Join(dir, "sub") {
		t.Error("the list of exports has another path")
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

// TestNoDirectory checks that procedures on directories refuse all other objects with NFS3ERR_NOTDIR (RFC 1813 section 3.3).
func TestNoDirectory(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	l.file("file", 0o600, root, "")
	if err := os.Symlink("file", filepath.Join(l.dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(l.dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{"file", "link", "fifo"} {
		fh := l.lookup(s)
		for proc, args := range map[uint32]func(*rpc.Writer){
			pLookup: name(fh, "x"), pCreate: create(fh, "x", 0o600), pRemove: name(fh, "x"), pRmdir: name(fh, "x"),
			pRename:      func(w *rpc.Writer) { name(l.root, "file")(w); name(fh, "x")(w) },
			pReaddir:     func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U64(0); w.U32(4096) },
			pReaddirplus: func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U64(0); w.U32(4096, 4096) },
		} {
			l.want(nfsv3.NFS3ERR_NOTDIR, root, proc, args)
		}
	}
}

// TestOpened checks that a request opens the data of regular files alone, however often it comes: opening a device or
// a FIFO can have side effects.
func TestOpened(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watch)
	for _, c := range []struct {
		name string
		mode uint32
		open bool
	}{{"file", unix.S_IFREG, true}, {"fifo", unix.S_IFIFO, false}, {"device", unix.S_IFCHR, false}} {
		path := filepath.Join(l.dir, c.name)
		if err := unix.Mknod(path, c.mode|0o600, int(unix.Mkdev(1, 3))); err != nil { // the device /dev/null
			t.Fatal(err)
		}
		fh := l.lookup(c.name)
		if _, err := unix.InotifyAddWatch(watch, path, unix.IN_OPEN); err != nil {
			t.Fatal(err)
		}
		for round := range 2 {
			l.do(root, pRead, read(fh, 0, 1))
			l.do(root, pWrite, write(fh, 0, []byte("x")))
			l.do(root, pCommit, func(w *rpc.Writer) { w.Opaque(fh); w.U64(0); w.U32(0) })
			l.want(nfsv3.NFS3ERR_NOTDIR, root, pReaddir, func(w *rpc.Writer) {
				w.Opaque(fh)
				w.U64(0)
				w.U64(0)
				w.U32(4096)
			})
			l.want(nfsv3.NFS3ERR_NOTDIR, root, pRemove, name(fh, "x"))
			l.want(nfsv3.NFS3_OK, root, pGetattr, func(w *rpc.Writer) { w.Opaque(fh) })
			_, err := unix.Read(watch, make([]byte, 4096))
			if err != nil && err != unix.EAGAIN {
				t.Fatal(err)
			}
			if opened := err == nil; opened != c.open {
				t.Errorf("round %d: the %s was opened: %v", round, c.name, opened)
			}
		}
	}
}
