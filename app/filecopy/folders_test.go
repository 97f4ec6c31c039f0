package filecopy

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/internal/testenv/memconn"
)

// TestAttributes checks that permissions and times are copied when requested.
func TestAttributes(t *testing.T) {
	w := newWorld(t)
	name := filepath.Join(w.dir, "f")
	testenv.WriteFile(t, name, random(2500), 0o600)
	at := time.Unix(1e9, 123456000)
	if err := errors.Join(os.Chmod(name, 0o4751), os.Chtimes(name, at, at)); err != nil {
		t.Fatal(err)
	}
	w.client.Preserve = true
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.client.Put(t.Context(), f, info.Size(), AttrsOf(info), "there"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.get("there", "back"); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{filepath.Join(w.there, "there"), filepath.Join(w.dir, "back")} {
		info, err := os.Stat(p)
		if err != nil || info.Mode() != 0o751 || !info.ModTime().Equal(at) {
			t.Errorf("%s: %v, %v", p, info, err)
		}
	}
}

// TestReplaced checks that a copy does not open a file to others: one that is replaced keeps its permissions, unless those
// of the source are asked for, and its owner and its group, and a new one gets no more permissions than the source has.
func TestReplaced(t *testing.T) {
	testenv.RequireRoot(t) // others may not give files away
	w := newWorld(t)
	put := func(name string, mode uint32, preserve bool) os.FileInfo {
		t.Helper()
		w.client.Preserve = preserve
		_, err := w.client.Put(t.Context(), strings.NewReader("new"), 3, Attrs{Mode: mode}, name)
		info, serr := os.Stat(filepath.Join(w.there, name))
		if err := errors.Join(err, serr); err != nil {
			t.Fatal(err)
		}
		return info
	}
	old := filepath.Join(w.there, "old")
	if err := errors.Join(os.WriteFile(old, nil, 0o600), os.Chmod(old, 0o620), os.Chown(old, 1000, 100)); err != nil {
		t.Fatal(err)
	}
	for _, preserve := range []bool{false, true} {
		want := fs.FileMode(0o620)
		if preserve {
			want = 0o644
		}
		info := put("old", 0o644, preserve)
		if st := info.Sys().(*syscall.Stat_t); info.Mode() != want || st.Uid != 1000 || st.Gid != 100 {
			t.Errorf("replaced, -p %v: %v, %d:%d", preserve, info.Mode(), st.Uid, st.Gid)
		}
	}
	if info := put("new", 0, false); info.Mode() != 0 {
		t.Errorf("new: %v", info.Mode())
	}
}

// TestFolders checks that folders are made and listed, over several messages, and that a server cannot name files
// outside the folder.
func TestFolders(t *testing.T) {
	w := newWorld(t)
	if err := w.client.Mkdir(t.Context(), "d", Options{Attrs: Attrs{Mode: 0o755}}); err != nil {
		t.Fatal(err)
	}
	var want []string
	for i := range 2*maxEntries + 3 {
		name := fmt.Sprintf("f%02d", i)
		want = append(want, name)
		if _, err := w.put(nil, "d/"+name); err != nil {
			t.Fatal(err)
		}
	}
	testenv.WriteFile(t, filepath.Join(w.there, "d", ".iwcp-part-x"), nil, 0o600)
	var got []string
	if err := w.client.List(t.Context(), "d", func(e Entry) error { got = append(got, e.Name); return nil }); err != nil || !slices.Equal(got, want) {
		t.Errorf("List: %q, %v", got, err)
	}
	if e, err := w.client.Stat(t.Context(), "d"); err != nil || !e.Folder {
		t.Errorf("Stat of a folder: %+v, %v", e, err)
	}
	if e, err := w.client.Stat(t.Context(), ""); err != nil || !e.Folder {
		t.Errorf("Stat of the store: %+v, %v", e, err)
	}
	if _, err := w.client.Stat(t.Context(), "none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Stat of nothing: %v", err)
	}
	if err := w.client.Mkdir(t.Context(), "d/f00", Options{}); err == nil {
		t.Error("a folder was made of a file")
	}
	for _, name := range []string{"../x", "..", "a/b", "", ".iwcp-x", "b\n"} {
		a, b := memconn.Pair(recvDepth, maxMessage)
		for _, m := range []message{{Kind: kindEntry, Name: name}, {Kind: kindOK}} {
			if err := send(t.Context(), b, &m); err != nil {
				t.Fatal(err)
			}
		}
		c := &Client{Conn: a}
		if l, err := c.list(t.Context(), 0, "d", ""); err == nil {
			t.Errorf("an entry %q was taken: %+v", name, l)
		}
		a.Close()
	}
}

// TestListedDeep checks that folders in folders end, whatever the server says: what is too deep for a name is no folder.
func TestListedDeep(t *testing.T) {
	for _, n := range []int{maxName - 2, maxName - 1} { // with /f one that is allowed, and one that is too long
		a, b := memconn.Pair(recvDepth, maxMessage)
		for _, m := range []message{{Kind: kindEntry, Type: typeFolder, Name: "f"}, {Kind: kindOK}} {
			if err := send(t.Context(), b, &m); err != nil {
				t.Fatal(err)
			}
		}
		c := &Client{Conn: a}
		allowed := n+len("/f") <= maxName
		l, err := c.list(t.Context(), 0, strings.Repeat("d", n), "")
		if want := (Entry{Name: "f", Folder: allowed, Other: !allowed}); err != nil || !slices.Equal(l, []Entry{want}) {
			t.Errorf("a folder in one with a name of %d bytes: %+v, %v", n, l, err)
		}
		a.Close()
	}
}

// TestListedLate checks that the objects in a folder are looked at when they are listed, and not all of them before the
// first answer: in a large folder that takes longer than a client waits.
func TestListedLate(t *testing.T) {
	w := newWorld(t)
	names := make([]string, maxEntries+1)
	for i := range names {
		names[i] = filepath.Join(w.there, fmt.Sprintf("f%02d", i))
		if err := os.WriteFile(names[i], nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sizes := make(map[string]int64)
	err := w.client.List(t.Context(), "", func(e Entry) error {
		sizes[e.Name] = e.Size
		return os.Truncate(names[maxEntries], 5)
	})
	if got := sizes["f16"]; err != nil || len(sizes) != maxEntries+1 || got != 5 {
		t.Errorf("%d objects, %v; the last has %d bytes, want 5", len(sizes), err, got)
	}
}

// TestListed checks what the list of a folder says about links, of which those to folders may lead in circles, and about
// names that messages cannot have: a recursive copy must skip these, and say so.
func TestListed(t *testing.T) {
	w := newWorld(t)
	testenv.WriteFile(t, filepath.Join(w.there, "file"), []byte("1234"), 0o600)
	for name, to := range map[string]string{"circle": ".", "to-file": "file", "nowhere": "none", "out": "/etc"} {
		if err := os.Symlink(to, filepath.Join(w.there, name)); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a\nb", "a\tb", "x\xffy", strings.Repeat("\xff", 255)} {
		testenv.WriteFile(t, filepath.Join(w.there, name), nil, 0o600)
	}
	got := make(map[string]Entry)
	if err := w.client.List(t.Context(), "", func(e Entry) error { got[e.Name] = e; return nil }); err != nil {
		t.Fatal(err)
	}
	const odd = "\ufffd" // what is shown for bytes that are not UTF-8
	for name, other := range map[string]bool{
		"file": false, "to-file": false, "circle": true, "nowhere": true, "out": true, `a\u000ab`: true, `a\u0009b`: true, "x" + odd + "y": true, strings.Repeat(odd, 85): true,
	} {
		if e, ok := got[name]; !ok || e.Other != other || e.Folder || !other && e.Size != 4 {
			t.Errorf("%q: %+v", name, e)
		}
		delete(got, name)
	}
	if len(got) > 0 {
		t.Errorf("and %v", got)
	}
}

// TestFolderRemoved uses a store whose folder is gone.
func TestFolderRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "d")
	testenv.Mkdir(t, dir, 0o755)
	store := openStore(t, dir)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create("f", 1, Options{}); err == nil || !strings.HasPrefix(err.Error(), "f: its folder was removed") {
		t.Errorf("Create: %v", err)
	}
	if _, err := store.List(""); err == nil || err.Error() != "the folder itself: no such file or directory" {
		t.Errorf("List: %v", err)
	}
}
