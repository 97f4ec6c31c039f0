package filecopy

import (
	"bytes"
	"context"
	"errors"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// part creates the file that a copy with --resume of size bytes writes to.
func part(t *testing.T, size int64) (*Store, *incoming) {
	t.Helper()
	store := openStore(t, t.TempDir())
	in, err := store.Create("f", size, Options{Resume: true})
	if err != nil {
		t.Fatal(err)
	}
	return store, in
}

// TestPartReservesNothing checks that an incomplete file does not keep the disk space that was reserved for the rest, and
// that no file is left if nothing was received. Otherwise a peer could fill the disk without sending anything.
func TestPartReservesNothing(t *testing.T) {
	const size = 64 << 20
	for _, got := range []int{0, 5000} {
		store, in := part(t, size)
		if _, err := in.Write(make([]byte, got)); err != nil {
			t.Fatal(err)
		}
		blocks := func() int64 {
			info, err := store.root.Stat(in.temp)
			if errors.Is(err, os.ErrNotExist) {
				return -1
			}
			if err != nil {
				t.Fatal(err)
			}
			return info.Sys().(*syscall.Stat_t).Blocks
		}
		if blocks() < size/512 {
			testenv.Skip(t, "the file system reserves nothing")
		}
		in.Abort()
		if n := blocks(); got == 0 && n >= 0 {
			t.Errorf("a part of 0 bytes is left, with %d blocks", n)
		} else if got > 0 && (n < 1 || n > 1<<10) {
			t.Errorf("a part of %d bytes has %d blocks", got, n)
		}
	}
}

// TestPartTooLong checks that bytes after the end of the file, which the checksum does not cover, are not stored.
func TestPartTooLong(t *testing.T) {
	store, in := part(t, 100)
	if _, err := in.Write(make([]byte, 150)); err != nil {
		t.Fatal(err)
	}
	in.Abort()
	in, err := store.Create("f", 100, Options{Resume: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := in.Commit(); err != nil {
		t.Fatal(err)
	}
	if info, err := store.root.Stat("f"); err != nil || info.Size() != 100 {
		t.Errorf("%v, %v; want 100 bytes", info.Size(), err)
	}
}

// TestPartOfAnother checks that a copy does not continue a file that another user may change afterwards.
func TestPartOfAnother(t *testing.T) {
	testenv.RequireRoot(t)
	store, in := part(t, 100)
	if _, err := in.Write(make([]byte, 50)); err != nil {
		t.Fatal(err)
	}
	in.Abort()
	if err := store.root.Chown(in.temp, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create("f", 100, Options{Resume: true}); err == nil || !strings.Contains(err.Error(), "another user") {
		t.Errorf("got %v; want a refusal", err)
	}
}

// TestPartPermissions checks the permissions of an incomplete file, and of the complete one, if the file that the copy
// was to replace is removed, or made, before the copy is resumed.
func TestPartPermissions(t *testing.T) {
	old := syscall.Umask(0o027)
	defer syscall.Umask(old)
	for _, removed := range []bool{true, false} {
		dir := t.TempDir()
		f, store := filepath.Join(dir, "f"), openStore(t, dir)
		want := fs.FileMode(0o640)
		first, second := func() { testenv.WriteFile(t, f, nil, 0o600) }, func() { os.Remove(f) }
		if !removed {
			first, second = func() {}, first
			want = 0o600
		}
		o := Options{Attrs: Attrs{Mode: 0o666}, Resume: true}
		first()
		in, err := store.Create("f", 100, o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := in.Write(make([]byte, 50)); err != nil {
			t.Fatal(err)
		}
		in.Abort()
		second()
		if in, err = store.Create("f", 100, o); err != nil {
			t.Fatal(err)
		}
		if info, err := in.file.Stat(); err != nil || info.Size() != 50 || info.Mode() != want {
			t.Errorf("removed %v: part of %d bytes with %v, %v", removed, info.Size(), info.Mode(), err)
		}
		if err := in.Commit(); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(f); err != nil || info.Mode() != want {
			t.Errorf("removed %v: %v, %v; want %v", removed, info.Mode(), err, want)
		}
		if l, err := os.ReadDir(dir); err != nil || len(l) != 1 {
			t.Errorf("removed %v: %v, %v", removed, l, err)
		}
	}
}

// TestPartInUse checks the error of a copy to a file that another copy writes.
func TestPartInUse(t *testing.T) {
	store, in := part(t, 100)
	defer in.Abort()
	want := "f: another copy of this file is in progress: wait for its end"
	if _, err := store.Create("f", 100, Options{Resume: true}); err == nil || err.Error() != want {
		t.Errorf("got %v; want %s", err, want)
	}
}

// zeros returns up to 1 GiB of zeros, and calls first at the first read.
type zeros struct {
	n     int
	first func()
}

func (z *zeros) Read(b []byte) (int, error) {
	if z.n == 0 {
		z.first()
	}
	if z.n += len(b); z.n > 1<<30 {
		return 0, io.EOF
	}
	clear(b)
	return len(b), nil
}

// TestSkipEnds checks that the hashing of the part that the receiver already has ends with the connection and with the
// context, however long the part is, on either side.
func TestSkipEnds(t *testing.T) {
	for side, run := range map[string]func(*transfer, context.Context, io.Reader) error{
		"sender": func(tr *transfer, ctx context.Context, r io.Reader) error { _, err := tr.send(ctx, r); return err },
		"receiver": func(tr *transfer, ctx context.Context, r io.Reader) error {
			_, err := tr.receive(ctx, io.Discard, r)
			return err
		},
	} {
		for _, end := range []string{"connection", "context"} {
			w := newWorld(t)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			first, want := cancel, context.Canceled
			if end == "connection" {
				first, want = w.far.Close, iwarp.ErrPeerClosed
			}
			m := message{Hash: XXH128, Size: 1 << 50, Offset: 1 << 50, Chunk: testChunk, Slots: testSlots}
			z := &zeros{first: first}
			if err := run(m.transfer(w.conn, time.Minute, "f"), ctx, z); !errors.Is(err, want) {
				t.Errorf("%s, end of the %s: %v", side, end, err)
			}
			if z.n > 1<<30 {
				t.Errorf("%s: everything was read after the end of the %s", side, end)
			}
		}
	}
}

// TestPartRenamed checks that a copy that has waited for another one to end does not continue with its file, which has
// got its final name.
func TestPartRenamed(t *testing.T) {
	store, in := part(t, 100)
	late := &incoming{store: store, name: "f", temp: in.temp, keep: true}
	var err error
	if late.file, err = store.root.OpenFile(late.temp, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	defer late.file.Close()
	if err := in.Commit(); err != nil {
		t.Fatal(err)
	}
	if err := late.lock(0o600); err == nil || !strings.Contains(err.Error(), "another copy") {
		t.Errorf("got %v; want a refusal", err)
	}
}

// A hostile changes its window in each call, as a client can that writes to it all the time, and keeps what it was given.
type hostile struct {
	hash.Hash
	window []byte
	seen   bytes.Buffer
}

func (h *hostile) change() {
	for i := range h.window {
		h.window[i]++
	}
}

func (h *hostile) Write(b []byte) (int, error) {
	defer h.change()
	return h.seen.Write(b)
}

func (h *hostile) Read(b []byte) (int, error) {
	defer h.change()
	clear(b)
	return len(b), nil
}

// TestSumOfFile checks that the checksum is that of the file, also if the client changes the server's window meanwhile:
// the server says what it has stored, or read.
func TestSumOfFile(t *testing.T) {
	const size = 2*stride + 5
	window := make([]byte, size)
	open := message{Hash: XXH128, Size: size, Chunk: size, Slots: 1}
	tr := open.transfer(nil, 0, "f")
	sum, file := &hostile{window: window}, &hostile{window: window}
	tr.buf, tr.sum = window, sum
	if err := tr.drain(file, window); err != nil || sum.seen.Len() != size || !bytes.Equal(sum.seen.Bytes(), file.seen.Bytes()) {
		t.Errorf("other bytes were written than hashed (%d): %v", sum.seen.Len(), err)
	}
	sum.seen.Reset()
	if err := tr.fill(file, window); err != nil || !bytes.Equal(sum.seen.Bytes(), make([]byte, size)) {
		t.Errorf("other bytes were hashed (%d) than read: %v", sum.seen.Len(), err)
	}
}
