package filecopy

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestNoNewFiles checks the error for a folder that exists but in which the kernel makes no files.
func TestNoNewFiles(t *testing.T) {
	testenv.RequireRoot(t) // others get a permission error
	s := openStore(t, "/proc")
	for _, name := range []string{"f", "sys/f"} {
		_, err := s.Create(name, 1, Options{})
		var e *Error
		if !errors.As(err, &e) || e.Code != CodePermission || !strings.HasPrefix(err.Error(), name+": its folder was removed, or the file system there takes no new files") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestNoSetuid checks that of a peer's mode only the permissions count.
func TestNoSetuid(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	o := Options{Attrs: Attrs{Mode: uint32(0o750 | fs.ModeSetuid | fs.ModeSetgid | fs.ModeSticky)}, Preserve: true}
	in, err := s.Create("file", 0, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(in.Commit(), s.Mkdir("folder", o)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{"file": 0o750, "folder": fs.ModeDir | 0o750} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode() != want {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode(), err, want)
		}
	}
}

// TestMissingFolder checks that the error for a missing folder names it.
func TestMissingFolder(t *testing.T) {
	s := openStore(t, t.TempDir())
	_, create := s.Create("new/f", 1, Options{})
	for _, err := range []error{create, s.Mkdir("new/f", Options{})} {
		var e *Error
		if want := "new/f: no folder new: make it first"; !errors.As(err, &e) || e.Code != CodeNotFound || err.Error() != want {
			t.Errorf("got %v; want %s", err, want)
		}
	}
}

// TestReadOnly checks the error for a file system that cannot be written.
func TestReadOnly(t *testing.T) {
	err := fileError("f", &os.PathError{Op: "open", Path: "f", Err: unix.EROFS})
	var e *Error
	if want := "f: read-only file system: choose a folder that can be written"; !errors.As(err, &e) || e.Code != CodePermission || err.Error() != want {
		t.Errorf("got %v; want %s", err, want)
	}
}

// TestBadPaths checks the errors for a path below a file, and for a name that no file can have.
func TestBadPaths(t *testing.T) {
	dir := t.TempDir()
	testenv.WriteFile(t, filepath.Join(dir, "file"), nil, 0o600)
	s := openStore(t, dir)
	for name, want := range map[string]string{
		"file/f": "is a file, not a folder", "file/d/f": "is a file, not a folder", strings.Repeat("n", 300): "choose a shorter one",
	} {
		_, err := s.Create(name, 1, Options{})
		var e *Error
		if !errors.As(err, &e) || e.Code != CodeIO || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", name, err, want)
		}
	}
}

// TestLinksOut checks the error for a symbolic link that a Store does not follow.
func TestLinksOut(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Symlink("/etc/passwd", filepath.Join(dir, "absolute")), os.Symlink("../..", filepath.Join(dir, "up"))); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, dir)
	_, _, absolute := s.Open("absolute")
	_, stat := s.Stat("up/f")
	_, list := s.List("up")
	_, create := s.Create("up/f", 1, Options{})
	for _, err := range []error{absolute, stat, list, create, s.Mkdir("up/d", Options{})} {
		if err == nil || !strings.Contains(err.Error(), "is not followed: make it relative") {
			t.Errorf("got %v", err)
		}
	}
}

// TestNoFolder checks that a Store of what is not a folder is refused, without waiting for the writer of a FIFO.
func TestNoFolder(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{fifo, "/dev/null"} {
		if _, err := OpenStore(name); err == nil || err.Error() != name+": not a directory" {
			t.Errorf("got %v", err)
		}
	}
}

// TestFarTimes checks that a time which the protocol cannot represent becomes the nearest one that it can.
func TestFarTimes(t *testing.T) {
	for _, tt := range []struct {
		at   time.Time
		want int64
	}{
		{time.Unix(1, 2), 1e9 + 2},
		{time.Unix(-1, 0), -1e9},
		{time.Date(2300, 1, 1, 0, 0, 0, 0, time.UTC), math.MaxInt64},
		{time.Date(1600, 1, 1, 0, 0, 0, 0, time.UTC), math.MinInt64},
	} {
		info, err := fstest.MapFS{"f": {ModTime: tt.at}}.Stat("f")
		if err != nil {
			t.Fatal(err)
		}
		if got := AttrsOf(info).Mtime; got != tt.want {
			t.Errorf("%v: %d, want %d", tt.at, got, tt.want)
		}
	}
}
