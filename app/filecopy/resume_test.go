package filecopy

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestResume checks that a copy that breaks off at any operation leaves what has arrived, and that the next copy
// continues there, or starts again if the file has changed.
func TestResume(t *testing.T) {
	data := random(20*testChunk + 5)
	for _, op := range []string{"put", "get"} {
		kept := 0
		for at := 0; at < 42; at += 3 {
			w := newWorld(t)
			src, err := os.Create(filepath.Join(w.dir, "src"))
			if err != nil {
				t.Fatal(err)
			}
			defer src.Close()
			if _, err := src.Write(data); err != nil {
				t.Fatal(err)
			}
			info, err := src.Stat()
			if err != nil {
				t.Fatal(err)
			}
			testenv.WriteFile(t, filepath.Join(w.there, "src"), data, 0o600)
			home := w.dir
			var count atomic.Int64
			w.conn.Fault = func(string, int) error {
				if count.Add(1) > int64(at) {
					return errors.New("cable cut")
				}
				return nil
			}
			do := func(w *world) (Result, error) {
				w.client.Resume = true
				if op == "get" {
					return w.get("src", "dst")
				}
				if _, err := src.Seek(0, io.SeekStart); err != nil {
					t.Fatal(err)
				}
				return w.client.Put(t.Context(), src, info.Size(), AttrsOf(info), "dst")
			}
			if _, err := do(w); err == nil {
				t.Fatalf("%s: no error though operation %d failed", op, at)
			}
			w.conn.Close()
			<-w.served
			again := newWorld(t)
			dst := filepath.Join(w.there, "dst")
			if op == "get" {
				dst = filepath.Join(home, "dst")
			}
			again.dir = home
			again.serveFolder(w.there)
			res, err := do(again)
			if err != nil || res.Sum != xxhSum(data) {
				t.Fatalf("%s, broken at %d: %+v, %v", op, at, res, err)
			}
			if res.Offset > 0 {
				kept++
			}
			if got, err := os.ReadFile(dst); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("%s, broken at %d: the file differs, %v", op, at, err)
			}
			names := []string{"src"}
			if op == "put" {
				names = []string{"dst", "src"}
			}
			w.clean(w.there, names...)
		}
		if kept == 0 {
			t.Errorf("%s: no copy went on from what was there", op)
		}
	}
}

// TestResumeOfOther checks that a partial file that is not the beginning of the source is detected and removed.
func TestResumeOfOther(t *testing.T) {
	w := newWorld(t)
	store := openStore(t, w.there)
	data := random(5 * testChunk)
	name := filepath.Join(w.dir, "f")
	testenv.WriteFile(t, name, data, 0o600)
	info, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	in, err := store.Create("f", int64(len(data)), Options{Attrs: AttrsOf(info), Resume: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(make([]byte, testChunk)); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Create("f", int64(len(data)), Options{Attrs: AttrsOf(info), Resume: true}); err == nil || !strings.Contains(err.Error(), "another copy") {
		t.Errorf("two copies of one file at a time: %v", err)
	}
	in.Abort()
	w.client.Resume = true
	_, err = w.client.Put(t.Context(), bytes.NewReader(data), info.Size(), AttrsOf(info), "f")
	if e, ok := errors.AsType[*RemoteError](err); !ok || e.Code != CodeChecksum || !strings.HasPrefix(e.Text, "f: the checksum differs: the part from an earlier copy had other content") {
		t.Errorf("going on from another file: %v", err)
	}
	w.conn.Close()
	<-w.served
	w.clean(w.there)
}
