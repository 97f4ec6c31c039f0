package nfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
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
	if err := os.WriteFile(filepath.Join(t.path, name), []byte(name), 0o600); err != nil {
		tb.Fatal(err)
	}
}

// lookup finds a path as clients do, name by name.
func (t *tree) lookup(tb testing.TB, path string) []byte {
	tb.Helper()
	fh := t.fh
	for name := range strings.SplitSeq(path, "/") {
		dir, err := t.open(fh, unix.O_PATH)
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

// content returns what is in the file with the handle fh.
func (t *tree) content(fh []byte) (string, error) {
	fd, err := t.open(fh, unix.O_RDONLY)
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
	for _, flags := range []int{unix.O_PATH, unix.O_RDONLY} {
		if fd, err := t.open(fh, flags); err != unix.ESTALE {
			tb.Errorf("%s: %d, %v", what, fd, err)
		}
	}
}

// TestNamesReplaced checks that a handle opens no file but its own, whatever takes its name.
func TestNamesReplaced(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	for _, d := range []string{"d", "other"} {
		if err := os.Mkdir(filepath.Join(tr.path, d), 0o700); err != nil {
			t.Fatal(err)
		}
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
		if fd, err := tr.open(bad, unix.O_PATH); err == nil {
			unix.Close(fd)
			t.Errorf("byte %d is not authenticated", i)
		}
	}
	other := newNamedTree(t, maxNames)
	other.write(t, "f")
	tr.wantStale(t, "a handle of another tree", other.lookup(t, "f"))
}

// TestNamesEvicted checks that what was not used for the longest time is forgotten, and no directory before what is in it.
func TestNamesEvicted(t *testing.T) {
	const limit = 20
	tr := newNamedTree(t, limit)
	if err := os.MkdirAll(filepath.Join(tr.path, "a/b"), 0o700); err != nil {
		t.Fatal(err)
	}
	tr.write(t, "a/b/kept")
	kept := tr.lookup(t, "a/b/kept")
	var l [][]byte
	for i := range 2 * limit {
		n := fmt.Sprint("a/", i)
		tr.write(t, n)
		l = append(l, tr.lookup(t, n))
		if _, err := tr.content(kept); err != nil {
			t.Fatalf("after %d others: %v", i, err)
		}
	}
	const left = limit - 3 // a, b and kept
	for i, fh := range l {
		if i < len(l)-left {
			tr.wantStale(t, fmt.Sprint(i), fh)
		} else if s, err := tr.content(fh); s != fmt.Sprint("a/", i) || err != nil {
			t.Errorf("%d: %q, %v", i, s, err)
		}
	}
	if n := len(tr.names.files); n != limit || tr.names.used.Len() != n {
		t.Errorf("%d, %d entries", n, tr.names.used.Len())
	}
	if fh := tr.lookup(t, "a/0"); !bytes.Equal(fh, l[0]) {
		t.Error("found again, another handle")
	}
	if _, err := tr.content(l[0]); err != nil {
		t.Error(err)
	}
}

// TestNamesDeep checks a path that is longer than the kernel takes.
func TestNamesDeep(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	fh, name := tr.fh, strings.Repeat("n", 255)
	for i := range 40 {
		dir, err := tr.open(fh, unix.O_PATH)
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
	fd, err := tr.open(fh, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(fd)
	if _, _, ok := tr.names.path(keyOf(fh), 1); ok {
		t.Error("a second place")
	}
	// A loop of places, which renames on the host can cause, ends.
	a := tr.lookup(t, name)
	tr.learn(a, fh, "loop")
	tr.learn(a, fh, "loop2")
	tr.wantStale(t, "a loop", fh)
}

// TestNamesMove checks that a file can be opened all the time while clients rename the directories above it.
func TestNamesMove(t *testing.T) {
	tr := newNamedTree(t, maxNames)
	if err := os.MkdirAll(filepath.Join(tr.path, "a/b"), 0o700); err != nil {
		t.Fatal(err)
	}
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
		if err := tr.rename(tr.root, names[i%2], tr.root, tr.fh, names[(i+1)%2]); err != nil {
			t.Error(err)
			break
		}
	}
	close(done)
	wg.Wait()
}
