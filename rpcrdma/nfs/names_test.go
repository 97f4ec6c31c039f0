package nfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

// newNamedTree returns a tree that follows names.
func newNamedTree(t *testing.T, limit int) *tree {
	t.Helper()
	tr, err := openTree(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tr.close() })
	tr.names = newNames(tr.fh, limit)
	return tr
}

// write makes a file.
func (t *tree) write(tb testing.TB, name string) {
	tb.Helper()
	testenv.WriteFile(tb, filepath.Join(t.path, name), []byte(name), 0o600)
}

// lookup finds a path as clients do, name by name.
func (t *tree) lookup(tb testing.TB, path string) []byte {
	tb.Helper()
	fh := t.fh
	for name := range strings.SplitSeq(path, "/") {
		dir, err := t.open(fh)
		if err != nil {
			tb.Fatalf("%s of %s: %v", name, path, err)
		}
		fd, next, err := t.find(dir, fh, name)
		unix.Close(dir)
		if err != nil {
			tb.Fatalf("%s of %s: %v", name, path, err)
		}
		unix.Close(fd)
		fh = next
	}
	return fh
}

// openFor opens the file with the handle fh with the given flags.
func (t *tree) openFor(fh []byte, flags int) (int, error) {
	fd, err := t.open(fh)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fd)
	return t.reopen(fd, flags)
}

// content returns what is in the file with the handle fh.
func (t *tree) content(fh []byte) (string, error) {
	fd, err := t.openFor(fh, unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	b, err := io.ReadAll(f)
	return string(b), err
}

func (t *tree) wantStale(tb testing.TB, what string, fh []byte) {
	tb.Helper()
	if fd, err := t.open(fh); err != unix.ESTALE {
		tb.Errorf("%s: %d, %v", what, fd, err)
	}
}

// TestNamesReplaced checks that a handle opens no file but its own, whatever takes its name.
func TestNamesReplaced(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	for _, d := range []string{"d", "other"} {
		testenv.Mkdir(t, filepath.Join(tr.path, d), 0o700)
		tr.write(t, d+"/f")
	}
	outside := filepath.Join(t.TempDir(), "d")
	if err := errors.Join(os.Mkdir(outside, 0o700), os.WriteFile(filepath.Join(outside, "f"), []byte("secret"), 0o600)); err != nil {
		t.Fatal(err)
	}
	fh := tr.lookup(t, "d/f")
	if s, err := tr.content(fh); s != "d/f" || err != nil {
		t.Fatal(s, err)
	}
	d, f := filepath.Join(tr.path, "d"), filepath.Join(tr.path, "d/f")
	for _, c := range []struct {
		what string
		swap func() error
	}{
		{"another file", func() error { return errors.Join(os.Rename(f, f+"2"), os.WriteFile(f, []byte("new"), 0o600)) }},
		{"a link to another file", func() error { return errors.Join(os.Remove(f), os.Symlink(filepath.Join(outside, "f"), f)) }},
		{"a link to the file itself", func() error { return errors.Join(os.Remove(f), os.Symlink("f2", f)) }},
		{"a directory", func() error { return errors.Join(os.Remove(f), os.Mkdir(f, 0o700)) }},
		{"nothing", func() error { return os.Remove(f) }},
		{"another directory above", func() error { return errors.Join(os.Rename(d, d+"2"), os.Rename(filepath.Join(tr.path, "other"), d)) }},
		{"a link out above", func() error { return errors.Join(os.RemoveAll(d), os.Symlink(outside, d)) }},
		{"a link to the directory above", func() error { return errors.Join(os.Remove(d), os.Symlink("d2", d)) }},
		{"a file above", func() error { return errors.Join(os.Remove(d), os.WriteFile(d, nil, 0o600)) }},
	} {
		if err := c.swap(); err != nil {
			t.Fatal(c.what, err)
		}
		tr.wantStale(t, c.what, fh)
	}
	// Found again, the file has the same handle.
	if again := tr.lookup(t, "d2/f2"); !bytes.Equal(again, fh) {
		t.Error("another handle")
	}
	if s, err := tr.content(fh); s != "d/f" || err != nil {
		t.Error(s, err)
	}
}

// TestNamesForged checks that a MAC is needed where names are followed, too.
func TestNamesForged(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	tr.write(t, "f")
	fh := tr.lookup(t, "f")
	for i := range fh {
		bad := bytes.Clone(fh)
		bad[i] ^= 1
		if fd, err := tr.open(bad); err == nil {
			unix.Close(fd)
			t.Errorf("byte %d is not authenticated", i)
		}
	}
	other := newNamedTree(t, maxNames)
	other.write(t, "f")
	tr.wantStale(t, "a handle of another tree", other.lookup(t, "f"))
}

// checkSize checks the count of the memory of the names.
func (t *tree) checkSize(tb testing.TB) {
	tb.Helper()
	n, size := t.names, 0
	for e := n.used.Front(); e != nil; e = e.Next() {
		size += e.Value.(*file).size()
	}
	if size != n.size || n.size > n.limit || len(n.files) != n.used.Len() {
		tb.Errorf("%d bytes of %d files are counted as %d, with a limit of %d; %d files are in the list", size, len(n.files), n.size, n.limit, n.used.Len())
	}
}

// TestNamesEvicted checks that what was not used for the longest time is forgotten, and no directory before what is in it.
func TestNamesEvicted(t *testing.T) {
	const files = 20
	tr := newNamedTree(t, files*(fileSize+placeSize+10))
	testenv.Mkdir(t, filepath.Join(tr.path, "a/b"), 0o700)
	tr.write(t, "a/b/kept")
	kept := tr.lookup(t, "a/b/kept")
	var l [][]byte
	for i := range 3 * files {
		n := fmt.Sprint("a/", i)
		tr.write(t, n)
		l = append(l, tr.lookup(t, n))
		if _, err := tr.content(kept); err != nil {
			t.Fatalf("after %d others: %v", i, err)
		}
	}
	first := slices.IndexFunc(l, func(fh []byte) bool { return len(tr.names.paths(keyOf(fh))) > 0 })
	if first < 0 || len(l)-first < files-3 { // a, b and kept
		t.Fatalf("%d of %d are known", len(l)-first, len(l))
	}
	for i, fh := range l {
		if i < first {
			tr.wantStale(t, fmt.Sprint(i), fh)
		} else if s, err := tr.content(fh); s != fmt.Sprint("a/", i) || err != nil {
			t.Errorf("%d: %q, %v", i, s, err)
		}
	}
	tr.checkSize(t)
	if fh := tr.lookup(t, "a/0"); !bytes.Equal(fh, l[0]) {
		t.Error("found again, another handle")
	}
	if _, err := tr.content(l[0]); err != nil {
		t.Error(err)
	}
}

// TestNamesMemory checks that the limit is that of the memory, however long the names are and however many links a file has. It
// fills several trees, since the memory of a map depends on its seed.
func TestNamesMemory(t *testing.T) {
	const limit = 4 << 20
	used := func() int {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	for _, tt := range []struct{ length, links int }{{8, 1}, {60, 1}, {255, 1}, {255, 1000}} {
		most, size := 0, limit
		for try := 0; try < 10 && most < limit/2 && size > limit*9/10; try++ {
			before := used()
			var root [macSize]byte
			tr := &tree{names: newNames(root[:], limit)}
			var fh [macSize]byte
			for i := range 50_000 {
				binary.BigEndian.PutUint32(fh[:], 1+uint32(i/tt.links))
				tr.names.learn(fh[:], root[:], fmt.Sprintf("%0*d", tt.length, i))
			}
			n := used() - before
			if n > limit {
				t.Errorf("%+v: %d files take %d bytes; the limit is %d", tt, len(tr.names.files), n, limit)
			}
			most, size = max(most, n), tr.names.size // n is too small if what other tests left is freed meanwhile
			tr.checkSize(t)
		}
		if most < limit/2 && size > limit*9/10 {
			t.Errorf("%+v: at most %d bytes are taken, %d are counted", tt, most, size)
		}
	}
}

// TestNamesLinks checks that a file with many links can be opened as long as any that was seen is there, though others come
// and go.
func TestNamesLinks(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	tr.write(t, "f")
	fh := tr.lookup(t, "f")
	link := func(name string) {
		t.Helper()
		if err := os.Link(filepath.Join(tr.path, "f"), filepath.Join(tr.path, name)); err != nil {
			t.Fatal(err)
		}
		tr.lookup(t, name)
	}
	for i := range 2 * maxPlaces {
		name := fmt.Sprint("lock", i)
		link(name)
		var err error
		if i%2 == 0 {
			err = tr.unlink(tr.root, tr.fh, name, 0)
		} else if err = tr.rename(tr.root, tr.fh, name, tr.root, tr.fh, "same"); err == nil {
			err = tr.unlink(tr.root, tr.fh, "same", 0)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range maxPlaces - 1 {
		link(fmt.Sprint(i))
	}
	for i := range maxPlaces - 1 { // by others than clients
		if err := os.Remove(filepath.Join(tr.path, fmt.Sprint(maxPlaces-2-i))); err != nil {
			t.Fatal(err)
		}
		if s, err := tr.content(fh); s != "f" || err != nil {
			t.Fatalf("with %d links: %q, %v", maxPlaces-1-i, s, err)
		}
	}
	if err := tr.unlink(tr.root, tr.fh, "f", 0); err != nil {
		t.Fatal(err)
	}
	tr.wantStale(t, "without links", fh)
	tr.checkSize(t)
}

// plain runs f in a thread without the rights that root has over files.
func plain(t *testing.T, f func()) {
	t.Helper()
	testenv.RequireRoot(t)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		err := unix.Capget(&hdr, &caps[0])
		if err == nil {
			for _, c := range []int{unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_FSETID} {
				caps[0].Effective &^= 1 << c
			}
			err = unix.Capset(&hdr, &caps[0])
		}
		if err == nil {
			f()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// TestReopenSetID checks that an owner may write read-only files that have the set-user-ID or set-group-ID bits, if these can
// be kept.
func TestReopenSetID(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	tr.write(t, "f")
	fh, name := tr.lookup(t, "f"), filepath.Join(tr.path, "f")
	for _, tt := range []struct {
		mode uint32
		gid  int
		want error
	}{{0o400, 0, nil}, {0o4555, 0, nil}, {0o2555, 0, nil}, {0o6000, 0, nil}, {0o4400, 12345, nil}, {0o2550, 12345, unix.EACCES}} {
		if err := errors.Join(os.Chown(name, 0, tt.gid), unix.Chmod(name, tt.mode)); err != nil {
			t.Fatal(err)
		}
		var fd int
		var err error
		plain(t, func() { fd, err = tr.openFor(fh, unix.O_WRONLY) })
		if err == nil {
			unix.Close(fd)
		}
		var st unix.Stat_t
		if serr := unix.Stat(name, &st); err != tt.want || serr != nil || st.Mode&0o7777 != tt.mode {
			t.Errorf("%+v: %v; %v, then mode %o", tt, err, serr, st.Mode&0o7777)
		}
	}
}

// TestCommitUnreadable checks that data can be committed in a file that the exporting user may write but not read.
func TestCommitUnreadable(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	tr.write(t, "f")
	fh, name := tr.lookup(t, "f"), filepath.Join(tr.path, "f")
	if err := errors.Join(os.Chown(name, 12345, 12345), unix.Chmod(name, 0o622)); err != nil {
		t.Fatal(err)
	}
	s := &Server{tree: tr}
	ctx := context.WithValue(t.Context(), exchangeKey{}, &exchange{})
	h := nfsv3.NfsFh3{Data: fh}
	plain(t, func() {
		w, _ := s.NfsV3Nfsproc3Write(ctx, &nfsv3.Write3args{File: h, Count: 1, Data: []byte("x")})
		c, _ := s.NfsV3Nfsproc3Commit(ctx, &nfsv3.Commit3args{File: h})
		size := nfsv3.Sattr3{Size: &nfsv3.SetSize3_TRUE{Size: 1}}
		a, _ := s.NfsV3Nfsproc3Setattr(ctx, &nfsv3.Setattr3args{Object: h, NewAttributes: size})
		if w.GetStatus() != nfsv3.NFS3_OK || c.GetStatus() != nfsv3.NFS3_OK || a.GetStatus() != nfsv3.NFS3_OK {
			t.Errorf("WRITE: %v, COMMIT: %v, SETATTR: %v", w.GetStatus(), c.GetStatus(), a.GetStatus())
		}
	})
}

// TestChangeUnreadable checks that entries can be made, renamed and removed in a directory of another user that the
// exporting user may write but not read, such as one for letters, and that its times can be set.
func TestChangeUnreadable(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	dir := filepath.Join(tr.path, "d")
	testenv.Mkdir(t, dir, 0o700)
	d := nfsv3.NfsFh3{Data: tr.lookup(t, "d")}
	if err := errors.Join(os.Chown(dir, 12345, 12345), unix.Chmod(dir, 0o733)); err != nil {
		t.Fatal(err)
	}
	s := &Server{tree: tr}
	ctx := context.WithValue(t.Context(), exchangeKey{}, &exchange{})
	at := func(name string) nfsv3.Diropargs3 { return nfsv3.Diropargs3{Dir: d, Name: []byte(name)} }
	plain(t, func() {
		c, _ := s.NfsV3Nfsproc3Create(ctx, &nfsv3.Create3args{Where: at("f"), How: &nfsv3.Createhow3_GUARDED{}})
		m, _ := s.NfsV3Nfsproc3Mkdir(ctx, &nfsv3.Mkdir3args{Where: at("e")})
		mv, _ := s.NfsV3Nfsproc3Rename(ctx, &nfsv3.Rename3args{From: at("f"), To: at("g")})
		rm, _ := s.NfsV3Nfsproc3Remove(ctx, &nfsv3.Remove3args{Object: at("g")})
		rd, _ := s.NfsV3Nfsproc3Rmdir(ctx, &nfsv3.Rmdir3args{Object: at("e")})
		now := nfsv3.Sattr3{
			Atime: &nfsv3.SetAtime_default{SetIt: nfsv3.SET_TO_SERVER_TIME},
			Mtime: &nfsv3.SetMtime_default{SetIt: nfsv3.SET_TO_SERVER_TIME},
		}
		a, _ := s.NfsV3Nfsproc3Setattr(ctx, &nfsv3.Setattr3args{Object: d, NewAttributes: now})
		for _, r := range []interface{ GetStatus() nfsv3.Nfsstat3 }{c, m, mv, rm, rd, a} {
			if st := r.GetStatus(); st != nfsv3.NFS3_OK {
				t.Errorf("%T: %v", r, st)
			}
		}
	})
}

// TestNotMadeReplaced checks that an object that another has put in the place of a new one, whose attributes cannot be
// set, is removed only by who may remove it.
func TestNotMadeReplaced(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	s := NewTestServer(t, Config{Dir: dir, Async: true})
	file := filepath.Join(dir, "f")
	if err := errors.Join(unix.Chmod(dir, 0o1777), os.WriteFile(file, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	where := nfsv3.Diropargs3{Dir: nfsv3.NfsFh3{Data: s.tree.fh}, Name: []byte("f")}
	_, _, err := s.create(&cred{uid: 1000, gid: 100}, &where, func(int, string) (*nfsv3.Sattr3, bool, error) {
		return &nfsv3.Sattr3{Mode: &nfsv3.SetMode3_TRUE{Mode: 0o777}}, true, nil // the file has just been renamed to f
	})
	if _, serr := os.Stat(file); err != unix.EPERM || serr != nil {
		t.Errorf("%v; %v", err, serr)
	}
}

// TestReopenUnseen checks that no client sees the mode that reopenOwn sets for a moment.
func TestReopenUnseen(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	tr.write(t, "f")
	testenv.Chmod(t, filepath.Join(tr.path, "f"), 0o400)
	fh, dir := tr.lookup(t, "f"), object{fd: tr.root}
	if err := tr.stat(tr.root, &dir.st); err != nil {
		t.Fatal(err)
	}
	s := &Server{tree: tr}
	done := make(chan struct{})
	var wg sync.WaitGroup
	check := func(what string, read func() (uint32, error)) {
		wg.Go(func() {
			for {
				if mode, err := read(); err != nil || mode&0o777 != 0o400 {
					t.Errorf("%s: mode %o, %v", what, mode, err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	check("attributes", func() (uint32, error) {
		o, err := s.object(nfsv3.NfsFh3{Data: fh}, unix.O_PATH)
		defer o.close()
		return o.st.Mode, err
	})
	check("attributes after a request", func() (uint32, error) {
		o, err := s.object(nfsv3.NfsFh3{Data: fh}, unix.O_PATH)
		defer o.close()
		a, ok := s.post(o.fd).(*nfsv3.PostOpAttr_TRUE)
		if !ok {
			return 0, err
		}
		return a.Attributes.Mode, err
	})
	check("entry", func() (uint32, error) {
		_, st, err := tr.entry(&dir, tr.fh, "f")
		return st.Mode, err
	})
	plain(t, func() {
		for range 10000 {
			fd, err := tr.openFor(fh, unix.O_WRONLY)
			if err != nil {
				t.Error(err)
				break
			}
			unix.Close(fd)
		}
	})
	close(done)
	wg.Wait()
}

// TestNamesDeep checks a path that is longer than the kernel takes.
func TestNamesDeep(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	fh, name := tr.fh, strings.Repeat("n", 255)
	for i := range 40 {
		dir, err := tr.open(fh)
		if err != nil {
			t.Fatal(i, err)
		}
		err = unix.Mkdirat(dir, name[i:], 0o700)
		fd, next, ferr := tr.find(dir, fh, name[i:])
		unix.Close(dir)
		if err != nil || ferr != nil {
			t.Fatal(i, err, ferr)
		}
		unix.Close(fd)
		fh = next
	}
	fd, err := tr.openFor(fh, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	if n := len(tr.names.paths(keyOf(fh))); n != 1 {
		t.Errorf("%d places", n)
	}
	// A loop of places, which renames on the host can cause, ends.
	a := tr.lookup(t, name)
	tr.learn(a, fh, "loop")
	tr.learn(a, fh, "loop2")
	tr.wantStale(t, "a loop", fh)
}

// TestNamesTooDeep checks that nothing is made or found where it could not be opened by name afterwards.
func TestNamesTooDeep(t *testing.T) {
	s := NewTestServer(t, Config{Dir: t.TempDir()})
	tr := s.tree
	tr.names = newNames(tr.fh, maxNames)
	testenv.Mkdir(t, filepath.Join(tr.path, strings.Repeat("d/", maxDepth+1)), 0o700)
	tr.write(t, "f")
	deepest := tr.lookup(t, strings.TrimSuffix(strings.Repeat("d/", maxDepth), "/"))
	d, err := s.object(nfsv3.NfsFh3{Data: deepest}, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if fd, _, err := tr.find(d.fd, deepest, "."); err != nil {
		t.Error(err)
	} else {
		unix.Close(fd)
	}
	if _, _, err := tr.find(d.fd, deepest, "d"); err != unix.ENAMETOOLONG {
		t.Errorf("find: %v", err)
	}
	if _, _, err := tr.entry(&d, deepest, "d"); err != unix.ENAMETOOLONG {
		t.Errorf("entry: %v", err)
	}
	if _, err := s.change(nfsv3.NfsFh3{Data: deepest}, []byte("new"), nil, func(*object, string) error { return errors.New("called") }); err != unix.ENAMETOOLONG {
		t.Errorf("change: %v", err)
	}
	in := func(dir []byte, name string) nfsv3.Diropargs3 {
		return nfsv3.Diropargs3{Dir: nfsv3.NfsFh3{Data: dir}, Name: nfsv3.Filename3(name)}
	}
	if _, err := s.rename(&cred{}, &nfsv3.Rename3args{From: in(tr.fh, "f"), To: in(deepest, "f")}, "f", new(nfsv3.WccData)); err != unix.ENAMETOOLONG {
		t.Errorf("rename: %v", err)
	}
}

// TestNamesMove checks that a file can be opened all the time while clients rename the directories above it.
func TestNamesMove(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	testenv.Mkdir(t, filepath.Join(tr.path, "a/b"), 0o700)
	tr.write(t, "a/b/f")
	fh := tr.lookup(t, "a/b/f")
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				if s, err := tr.content(fh); s != "a/b/f" || err != nil {
					t.Errorf("time %d: %q, %v", n, s, err)
					return
				}
				select {
				case <-done:
					return
				default:
				}
			}
		})
	}
	names := [2]string{"a", "moved"}
	for i := range 500 {
		if err := tr.rename(tr.root, tr.fh, names[i%2], tr.root, tr.fh, names[(i+1)%2]); err != nil {
			t.Error(err)
			break
		}
	}
	close(done)
	wg.Wait()
}
