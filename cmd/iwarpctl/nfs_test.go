package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestWriteWhole: a file is there whole or not at all, with the mode of the one it
// replaces, also where a link leads to it.
func TestWriteWhole(t *testing.T) {
	dir := t.TempDir()
	at := func(s string) string { return filepath.Join(dir, s) }
	if err := errors.Join(os.WriteFile(at("old"), []byte("old"), 0o600), os.Symlink("old", at("link")), os.Mkdir(at("dir"), 0o755)); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	for _, name := range []string{"old", "link", "new"} {
		if err := writeWhole(at(name), func(w io.Writer) error { _, _ = fmt.Fprint(w, "half"); return broken }); !errors.Is(err, broken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l, err := os.ReadDir(dir)
	if b, rerr := os.ReadFile(at("old")); string(b) != "old" || rerr != nil || err != nil || len(l) != 3 {
		t.Errorf("%q, %v, %v, %v", b, rerr, l, err)
	}
	whole := func(w io.Writer) error { _, err := fmt.Fprint(w, "whole"); return err }
	for _, name := range []string{"link", "new"} {
		if err := writeWhole(at(name), whole); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"old", "new"} {
		if b, err := os.ReadFile(at(name)); string(b) != "whole" || err != nil {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
	if st, err := os.Lstat(at("old")); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if st, err := os.Lstat(at("link")); err != nil || st.Mode()&fs.ModeSymlink == 0 {
		t.Errorf("%v, %v", st, err)
	}
	// What is no file is written to as it is.
	if err := writeWhole(at("dir"), whole); !errors.Is(err, unix.EISDIR) {
		t.Error(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := writeWhole(fmt.Sprintf("/proc/self/fd/%d", w.Fd()), whole); err != nil {
		t.Error(err)
	}
	w.Close()
	if b, err := io.ReadAll(r); string(b) != "whole" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}
