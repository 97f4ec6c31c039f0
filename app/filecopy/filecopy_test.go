package filecopy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/internal/testenv/memconn"
	"github.com/zeebo/blake3"
	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

const (
	testChunk = 1000
	testSlots = 3
)

// world is a server and a client that are connected through memory.
type world struct {
	t          *testing.T
	dir, there string // the client's folder, the server's
	client     *Client
	conn, far  *memconn.Conn
	store      *Store // the server's
	events     chan Event
	served     chan error
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, dir: t.TempDir(), there: t.TempDir(), events: make(chan Event, 100), served: make(chan error, 1)}
	w.conn, w.far = memconn.Pair(recvDepth, maxMessage)
	store := openStore(t, w.there)
	w.store = store
	win := window{Chunk: testChunk, Slots: testSlots}
	win.Bytes, win.Remote = w.far.Alloc(testChunk * testSlots)
	go func() {
		s := service{conn: w.far, store: store, window: win, idle: time.Minute, tell: func(e Event) { w.events <- e }}
		w.served <- s.run(context.Background())
		w.far.Close()
		store.Close()
	}()
	w.client = &Client{Conn: w.conn, Alloc: func(n int) ([]byte, error) { return make([]byte, n), nil }}
	t.Cleanup(w.conn.Close)
	return w
}

func (w *world) put(data []byte, name string) (Result, error) {
	return w.client.Put(w.t.Context(), bytes.NewReader(data), int64(len(data)), Attrs{Mode: 0o644}, name)
}

func (w *world) get(name, as string) (Result, error) {
	store := openStore(w.t, w.dir)
	return w.client.Get(w.t.Context(), name, store, as)
}

func (w *world) read(dir, name string) []byte {
	w.t.Helper()
	b := testenv.ReadFile(w.t, filepath.Join(dir, name))
	return b
}

// serveFolder makes the server of w serve dir. It is called before the first request.
func (w *world) serveFolder(dir string) {
	w.t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	w.store.root.Close()
	w.store.root, w.there = root, dir
}

// clean fails the test if dir holds anything but the given names.
func (w *world) clean(dir string, names ...string) {
	w.t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		w.t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(names, " ") {
		w.t.Errorf("folder holds %q; want %q", got, names)
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{1, 2, 3}).Read(b)
	return b
}

// TestPutAndGet copies a file of every size around the limits of a chunk and of the window to
// the server and back over one connection, with each hash, and with a server of version 2.
func TestPutAndGet(t *testing.T) {
	for _, tt := range []struct {
		name    string
		version uint8
		hash    Hash
		sum     func([]byte) [32]byte
		used    Hash
	}{
		{"default", 0, 0, xxhSum, XXH128}, {"sha256", Version, SHA256, sha256.Sum256, SHA256}, {"blake3", Version, BLAKE3, blake3.Sum256, BLAKE3},
		{"version 2", 2, 0, blake3.Sum256, BLAKE3}, {"xxh128 of version 2", 2, XXH128, blake3.Sum256, BLAKE3},
	} {
		t.Run(tt.name, func(t *testing.T) { putAndGet(t, tt.version, tt.hash, tt.sum, tt.used) })
	}
}

func xxhSum(b []byte) (sum [32]byte) {
	s := xxh3.Hash128(b).Bytes()
	copy(sum[:], s[:])
	return sum
}

func putAndGet(t *testing.T, version uint8, hash Hash, sum func([]byte) [32]byte, used Hash) {
	w := newWorld(t)
	w.client.Version, w.client.Hash = version, hash
	for _, n := range []int{0, 1, testChunk - 1, testChunk, testChunk + 1, testChunk * testSlots, testChunk*testSlots + 1, 50*testChunk + 17} {
		data := random(n)
		var last atomic.Int64
		w.client.Progress = func(done, total int64) {
			if total != int64(n) || done < last.Load() {
				t.Errorf("progress %d of %d after %d", done, total, last.Load())
			}
			last.Store(done)
		}
		put, err := w.put(data, "f")
		if err != nil {
			t.Fatalf("put %d: %v", n, err)
		}
		if put.Size != int64(n) || put.Sum != sum(data) || put.Hash != used || last.Load() != int64(n) {
			t.Errorf("put %d: %+v, progress %d", n, put, last.Load())
		}
		if !bytes.Equal(w.read(w.there, "f"), data) {
			t.Fatalf("put %d: the file differs", n)
		}
		last.Store(0)
		got, err := w.get("f", "g")
		if err != nil {
			t.Fatalf("get %d: %v", n, err)
		}
		if got.Size != put.Size || got.Sum != put.Sum || got.Hash != put.Hash || last.Load() != int64(n) {
			t.Errorf("get %d: %+v; put %+v", n, got, put)
		}
		if !bytes.Equal(w.read(w.dir, "g"), data) {
			t.Fatalf("get %d: the file differs", n)
		}
		w.clean(w.there, "f")
		w.clean(w.dir, "g")
		for _, want := range []bool{true, false} {
			if e := <-w.events; e.Put != want || e.Name != "f" || e.Err != nil || e.Sum != put.Sum {
				t.Errorf("event %+v", e)
			}
		}
	}
	w.conn.Close()
	if err := <-w.served; err != nil {
		t.Errorf("Serve = %v after the client closed", err)
	}
}

// TestSilence checks that a copy whose other side falls silent, for example since its link is down, ends and says so.
func TestSilence(t *testing.T) {
	near, _ := memconn.Pair(recvDepth, maxMessage)
	c := &Client{Conn: near, Idle: time.Millisecond}
	_, err := c.Put(t.Context(), strings.NewReader("x"), 1, Attrs{Mode: 0o644}, "f")
	if want := "the other side has sent nothing for 1ms: is that host up, and the network between?"; err == nil || err.Error() != want {
		t.Errorf("Put returned %v; want %q", err, want)
	}
}

func TestRefusedNames(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret")
	testenv.WriteFile(t, outside, []byte("secret"), 0o600)
	for _, tt := range []struct {
		name string
		code Code
	}{
		{"../secret", CodeName}, {"a/../../secret", CodeName}, {"a/../b", CodeName}, {outside, CodeName}, {"", CodeName}, {".", CodeName},
		{"a//b", CodeName}, {"a/", CodeName}, {"x\ny", CodeName}, {"x\x00y", CodeName}, {".iwcp-x", CodeName}, {strings.Repeat("n", maxName+1), CodeName},
		{"missing", CodeNotFound}, {"missing/f", CodeNotFound}, {"dir", CodeIO}, {"fifo", CodeIO}, {"link", CodeIO}, {"up/secret", CodeIO},
	} {
		for _, op := range []string{"get", "put"} {
			if op == "put" && (tt.name == "missing" || tt.name == "link") {
				continue // put makes the file in one case, and replaces it in the other
			}
			t.Run(op+" "+strings.ReplaceAll(tt.name[:min(len(tt.name), 20)], "/", "|"), func(t *testing.T) {
				w := newWorld(t)
				testenv.Mkdir(t, filepath.Join(w.there, "dir"), 0o700)
				if err := unix.Mkfifo(filepath.Join(w.there, "fifo"), 0o600); err != nil {
					t.Fatal(err)
				}
				for link, to := range map[string]string{"link": outside, "up": filepath.Dir(outside)} {
					if err := os.Symlink(to, filepath.Join(w.there, link)); err != nil {
						t.Fatal(err)
					}
				}
				// The client refuses bad names itself. Here the server must.
				m := message{Kind: kindGet, Hash: XXH128, Name: tt.name}
				if op == "put" {
					m = message{Kind: kindPut, Hash: XXH128, Name: tt.name, Size: 1}
				}
				code := tt.code
				if len(tt.name) > maxName {
					code = CodeRequest // the message cannot be decoded
				}
				err := send(t.Context(), w.conn, &m)
				if err != nil {
					t.Fatal(err)
				}
				_, err = recv(t.Context(), w.conn, time.Minute)
				var e *RemoteError
				if !errors.As(err, &e) || e.Code != code {
					t.Fatalf("answer %v; want an error of code %d", err, code)
				}
				if op == "put" && tt.name == "missing/f" && !strings.Contains(err.Error(), "missing/f: no folder missing: make it first") {
					t.Errorf("answer %v; want one that says which folder is missing", err)
				}
				if strings.Contains(err.Error(), w.there) || strings.Contains(err.Error(), "\n") {
					t.Errorf("the error tells too much or too long: %q", err)
				}
				w.conn.Close()
				if <-w.served == nil {
					t.Error("Serve returned no error")
				}
				w.clean(w.there, "dir", "fifo", "link", "up")
				if b, err := os.ReadFile(outside); err != nil || string(b) != "secret" {
					t.Errorf("the file outside: %q, %v", b, err)
				}
			})
		}
	}
}

// A put over a symbolic link replaces the link, not what it points to.
func TestPutOverLink(t *testing.T) {
	w := newWorld(t)
	outside := filepath.Join(t.TempDir(), "o")
	testenv.WriteFile(t, outside, []byte("old"), 0o600)
	if err := os.Symlink(outside, filepath.Join(w.there, "l")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.put([]byte("new"), "l"); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(outside); string(b) != "old" {
		t.Errorf("the file outside became %q", b)
	}
	if got := w.read(w.there, "l"); string(got) != "new" {
		t.Errorf("the file is %q", got)
	}
}

// TestBrokenConnection lets each operation fail and checks that both sides report it and that neither keeps a file.
func TestBrokenConnection(t *testing.T) {
	errCut := errors.New("cable cut")
	data := random(20 * testChunk)
	for _, op := range []string{"put", "get"} {
		for at := range 40 {
			w := newWorld(t)
			if op == "get" {
				testenv.WriteFile(t, filepath.Join(w.there, "f"), data, 0o600)
			}
			var count atomic.Int64
			w.conn.Fault = func(string, int) error {
				if count.Add(1) > int64(at) {
					return errCut
				}
				return nil
			}
			var err error
			if op == "put" {
				_, err = w.put(data, "f")
			} else {
				_, err = w.get("f", "f")
			}
			if err == nil {
				t.Fatalf("%s: no error though operation %d failed", op, at)
			}
			w.conn.Close()
			<-w.served
			if op == "put" {
				w.clean(w.there)
			} else {
				w.clean(w.there, "f")
				w.clean(w.dir)
			}
		}
	}
}

// Data that changes on the way is detected, and nothing is stored.
func TestCorruption(t *testing.T) {
	w := newWorld(t)
	data := random(5 * testChunk)
	w.far.Fault = func(op string, n int) error { return nil }
	flip := &flipper{Conn: w.conn}
	w.client.Conn = flip
	_, err := w.put(data, "f")
	var e *RemoteError
	if !errors.As(err, &e) || e.Code != CodeChecksum {
		t.Errorf("put of changed bytes: %v", err)
	}
	w.clean(w.there)

	w = newWorld(t)
	testenv.WriteFile(t, filepath.Join(w.there, "f"), data, 0o600)
	flip = &flipper{Conn: w.conn}
	w.client.Conn = flip
	_, err = w.get("f", "f")
	var le *Error
	if !errors.As(err, &le) || le.Code != CodeChecksum {
		t.Errorf("get of changed bytes: %v", err)
	}
	w.clean(w.dir)
	var re *RemoteError
	if err := <-w.served; !errors.As(err, &re) || re.Code != CodeChecksum {
		t.Errorf("the server heard %v", err)
	}
}

// When a disk is full, the side with the disk reports it, and the other side gets the error.
func TestDiskFull(t *testing.T) {
	testenv.RequireRoot(t)
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=64k"); err != nil {
		testenv.Skip(t, "cannot mount a tmpfs: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(small, 0) })
	data := random(1 << 20)

	w := newWorld(t)
	store := openStore(t, small)
	testenv.WriteFile(t, filepath.Join(w.there, "f"), data, 0o600)
	_, err := w.client.Get(t.Context(), "f", store, "f")
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeNoSpace || !strings.Contains(err.Error(), "disk full") {
		t.Errorf("get to a full disk: %v", err)
	}
	var re *RemoteError
	if err := <-w.served; !errors.As(err, &re) || re.Code != CodeNoSpace {
		t.Errorf("the server heard %v", err)
	}
	w.clean(small)

	// The disk fills up while the data arrives, although space was reserved.
	in, err := store.Create("g", 0, Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = in.Write(data)
	if !errors.As(err, &e) || e.Code != CodeNoSpace {
		t.Errorf("write to a full disk: %v", err)
	}
	in.Abort()
	w.clean(small)
}

// A canceled client tells the server, which keeps nothing.
func TestCanceled(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := w.client.Put(ctx, &stopper{cancel: cancel, after: 3}, 100*testChunk, Attrs{Mode: 0o644}, "f")
	if err == nil {
		t.Fatal("no error")
	}
	w.conn.Close()
	if err := <-w.served; err == nil {
		t.Error("the server noticed nothing")
	}
	w.clean(w.there)
}

// TestWrongSize copies files that have more or less content than their size says: one that becomes shorter or is of
// /sys, and one of /proc.
func TestWrongSize(t *testing.T) {
	for size, want := range map[int64]string{5000: "f: became shorter", 0: "f: has content but a size of 0"} {
		w := newWorld(t)
		_, err := w.client.Put(t.Context(), bytes.NewReader(random(10)), size, Attrs{Mode: 0o644}, "f")
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("size %d: %v; want %q", size, err, want)
		}
		var re *RemoteError
		w.conn.Close()
		if err := <-w.served; !errors.As(err, &re) || re.Code != CodeIO {
			t.Errorf("size %d: the server received %v", size, err)
		}
		w.clean(w.there)
	}
}

// TestUnreadableEmpty checks that a file of size 0 whose first read fails, such as /proc/self/mem, is not copied as an
// empty one.
func TestUnreadableEmpty(t *testing.T) {
	w := newWorld(t)
	_, err := w.client.Put(t.Context(), iotest.ErrReader(unix.EIO), 0, Attrs{Mode: 0o644}, "f")
	if e, ok := errors.AsType[*Error](err); !ok || e.Code != CodeIO || !errors.Is(err, unix.EIO) {
		t.Errorf("%v; want %v", err, unix.EIO)
	}
	w.conn.Close()
	if err := <-w.served; err == nil {
		t.Error("the server stored it")
	}
	w.clean(w.there)
}

// A peer that breaks the protocol gets an error, and the server survives.
func TestHostilePeer(t *testing.T) {
	put := message{Kind: kindPut, Hash: XXH128, Name: "f", Size: 10 * testChunk}
	chunk := func(seq uint64, n uint32) message { return message{Kind: kindChunk, Seq: seq, Len: n} }
	for _, tt := range []struct {
		name string
		send []message
	}{
		{"chunk first", []message{chunk(0, testChunk)}},
		{"chunk out of order", []message{put, chunk(1, testChunk)}},
		{"chunk too long", []message{put, chunk(0, testChunk+1)}},
		{"chunk too short", []message{put, chunk(0, 1)}},
		{"end too early", []message{put, {Kind: kindEnd, Size: 10 * testChunk}}},
		{"put in a put", []message{put, put}},
		{"done in a put", []message{put, {Kind: kindDone}}},
		{"free in a put", []message{put, {Kind: kindFree}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			for i := range tt.send {
				if err := send(t.Context(), w.conn, &tt.send[i]); err != nil {
					t.Fatal(err)
				}
			}
			for {
				_, err := recv(t.Context(), w.conn, time.Minute)
				if err == nil {
					continue // open
				}
				var e *RemoteError
				if !errors.As(err, &e) || e.Code != CodeRequest {
					t.Errorf("answer %v", err)
				}
				break
			}
			w.conn.Close()
			<-w.served
			w.clean(w.there)
		})
	}
	w := newWorld(t)
	if err := send(t.Context(), w.conn, &message{Kind: kindPut, Hash: XXH128, Name: "f", Size: 1 << 63}); err != nil {
		t.Fatal(err)
	}
	var e *RemoteError
	if _, err := recv(t.Context(), w.conn, time.Minute); !errors.As(err, &e) || e.Code != CodeNoSpace {
		t.Errorf("a file of 2^63 bytes: %v", err)
	}
}

// answered returns a client whose first request the server answers with m, which must not make it begin: it fails the test
// if the client allocates memory. over returns when the client has told the server what is wrong.
func answered(t *testing.T, m message) (c *Client, over func()) {
	t.Helper()
	a, b := memconn.Pair(recvDepth, maxMessage)
	if err := send(t.Context(), b, &m); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		_, _ = recv(context.Background(), b, time.Minute) // the request
		_, _ = recv(context.Background(), b, time.Minute) // the error
		b.Close()
		close(done)
	}()
	c = &Client{Conn: a, Alloc: func(n int) ([]byte, error) {
		t.Errorf("%+v: the client allocates %d bytes", m, n)
		return nil, errors.New("no")
	}}
	return c, func() { <-done }
}

// A server offers a window that would make the client allocate without bound.
func TestHostileWindow(t *testing.T) {
	for _, m := range []message{
		{Chunk: 0, Slots: 1}, {Chunk: 1, Slots: 0}, {Chunk: maxChunk + 1, Slots: 1}, {Chunk: 1, Slots: maxSlots + 1}, {Chunk: maxChunk, Slots: maxSlots},
	} {
		m.Kind, m.Size, m.Hash = kindOpen, 1, XXH128
		c, over := answered(t, m)
		_, err := c.Put(t.Context(), bytes.NewReader(nil), 1, Attrs{Mode: 0o644}, "f")
		if err == nil || !strings.Contains(err.Error(), "not allowed") {
			t.Errorf("%+v: %v", m, err)
		}
		over()
	}
}

// TestHostileOpen checks that a client begins no transfer that is not the one that it has asked for.
func TestHostileOpen(t *testing.T) {
	for _, tt := range []struct {
		name        string
		get, resume bool
		m           message
	}{
		{"beyond the end", false, true, message{Size: 1, Hash: XXH128, Offset: 2}},
		{"another checksum", false, false, message{Size: 1, Hash: SHA256}},
		{"another size", false, false, message{Size: 2, Hash: XXH128}},
		{"in the middle", false, false, message{Size: 1, Hash: XXH128, Offset: 1}},
		{"a get in the middle", true, false, message{Size: 1, Hash: XXH128, Offset: 1}},
		{"a get of 2^63 bytes", true, false, message{Size: 1 << 63, Hash: XXH128}},
	} {
		tt.m.Kind, tt.m.Chunk, tt.m.Slots = kindOpen, 1, 1
		c, over := answered(t, tt.m)
		c.Resume = tt.resume
		dir := t.TempDir()
		var err error
		if tt.get {
			_, err = c.Get(t.Context(), "f", openStore(t, dir), "f")
		} else {
			_, err = c.Put(t.Context(), bytes.NewReader(nil), 1, Attrs{Mode: 0o644}, "f")
		}
		if left, _ := os.ReadDir(dir); err == nil || len(left) > 0 {
			t.Errorf("%s: %v, and %v", tt.name, err, left)
		}
		over()
	}
}

// flipper changes one byte of the third RDMA operation.
type flipper struct {
	*memconn.Conn
	n atomic.Int64
}

func (f *flipper) PostWrite(ctx context.Context, r iwarp.Remote, b []byte) error {
	if f.n.Add(1) == 3 {
		b = bytes.Clone(b)
		b[len(b)/2] ^= 1
	}
	return f.Conn.PostWrite(ctx, r, b)
}

func (f *flipper) Read(ctx context.Context, r iwarp.Remote, b []byte) error {
	err := f.Conn.Read(ctx, r, b)
	if f.n.Add(1) == 3 {
		b[len(b)/2] ^= 1
	}
	return err
}

// stopper is an endless file that cancels after some reads.
type stopper struct {
	cancel func()
	after  int
}

func (s *stopper) Read(b []byte) (int, error) {
	if s.after--; s.after == 0 {
		s.cancel()
	}
	return len(b), nil
}

var _ io.Reader = (*stopper)(nil)

// openStore opens a folder until the test ends.
func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := OpenStore(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}
