package nfs

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestForgedHandle checks that data that other users of the host can read is not enough to make a handle. Before there
// was a key file, the key was a hash of /etc/machine-id.
func TestForgedHandle(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "export"), 0o755), os.WriteFile(outside, []byte("secret"), 0o600)); err != nil {
		t.Fatal(err)
	}
	s := NewTestServer(t, Config{Dir: filepath.Join(dir, "export"), KeyFile: filepath.Join(dir, "nfs.key")})
	k, _, err := unix.NameToHandleAt(unix.AT_FDCWD, outside, 0)
	if err != nil {
		t.Fatal(err)
	}
	// As root the file could be opened by its kernel handle: only the MAC prevents it.
	if fd, err := unix.OpenByHandleAt(s.tree.root, k, unix.O_RDONLY); err != nil {
		t.Fatal(err)
	} else {
		unix.Close(fd)
	}
	fsid, err := s.tree.fsid()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := os.ReadFile("/etc/machine-id")
	place := binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, s.tree.dev), s.tree.ino)
	hashed := func(parts ...[]byte) []byte { h := sha256.Sum256(bytes.Join(parts, nil)); return h[:] }
	v1 := append([]byte{1, byte(k.Size())}, binary.BigEndian.AppendUint32(nil, uint32(k.Type()))...)
	v2 := []byte{2, byte(k.Type())}
	for name, key := range map[string][]byte{
		"machine-id": hashed([]byte("iwarpd nfs handle\x00"), place, id), "no key": nil, "zeros": make([]byte, keySize),
		"tree of zeros": treeKey([keySize]byte{}, fsid, s.tree.ino), "place": place,
	} {
		for _, head := range [][]byte{v1, v2} {
			for _, size := range []int{8, macSize} {
				body := append(bytes.Clone(head), k.Bytes()...)
				h := hmac.New(sha256.New, key)
				h.Write(body)
				if fd, err := s.tree.open(append(body, h.Sum(nil)[:size]...)); err == nil {
					unix.Close(fd)
					t.Errorf("a handle of version %d with the key %q and a MAC of %d bytes opens a file outside of the export", head[0], name, size)
				}
			}
		}
	}
	// The root's handle with each bit changed, shortened, and extended.
	for i := range s.tree.fh {
		for bit := range 8 {
			fh := bytes.Clone(s.tree.fh)
			fh[i] ^= 1 << bit
			if fd, err := s.tree.open(fh); err == nil {
				unix.Close(fd)
				t.Errorf("bit %d of byte %d is not authenticated", bit, i)
			}
		}
		if fd, err := s.tree.open(s.tree.fh[:i]); err == nil {
			unix.Close(fd)
			t.Errorf("a handle of %d bytes is taken", i)
		}
	}
	if _, err := s.tree.open(append(bytes.Clone(s.tree.fh), 0)); !errors.Is(err, unix.ESTALE) {
		t.Error(err)
	}
}

// TestTreeKey checks that each key and each tree, even if another file system has one with its inode number, has its own handles.
func TestTreeKey(t *testing.T) {
	all := map[string]bool{}
	for key := range byte(2) {
		for fsid := range uint64(2) {
			for ino := range uint64(2) {
				all[string(treeKey([keySize]byte{key}, fsid, ino))] = true
			}
		}
	}
	if len(all) != 8 {
		t.Errorf("%d keys of 8 trees", len(all))
	}
}

// TestHandlesLast checks that handles are valid after a restart with the same key file, that they are valid in no other
// tree, and that they are stale without a key file or with another key.
func TestHandlesLast(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	for _, d := range []string{"one", "two"} {
		testenv.Mkdir(t, filepath.Join(dir, d), 0o755)
	}
	t.Setenv("STATE_DIRECTORY", filepath.Join(dir, "state", "iwarpd"))
	key, err := DefaultKeyFile() // makes the folder
	if err != nil {
		t.Fatal(err)
	}
	handle := func(tree, key string) []byte {
		s := NewTestServer(t, Config{Dir: filepath.Join(dir, tree), KeyFile: key})
		return s.tree.fh
	}
	valid := func(fh []byte, tree, key string) bool {
		s := NewTestServer(t, Config{Dir: filepath.Join(dir, tree), KeyFile: key})
		fd, err := s.tree.open(fh)
		if err == nil {
			unix.Close(fd)
		} else if !errors.Is(err, unix.ESTALE) {
			t.Error(err)
		}
		return err == nil
	}
	fh := handle("one", key)
	if st, err := os.Stat(key); err != nil || st.Mode() != 0o600 || st.Size() != keySize {
		t.Fatalf("%v, %v", st, err)
	}
	if st, err := os.Stat(filepath.Dir(key)); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", st, err)
	}
	if !bytes.Equal(fh, handle("one", key)) || !valid(fh, "one", key) {
		t.Error("the handle is not valid after a restart")
	}
	if valid(fh, "two", key) {
		t.Error("the handle is valid in another tree")
	}
	if valid(fh, "one", filepath.Join(dir, "state", "other")) || valid(fh, "one", "") || valid(handle("one", ""), "one", "") {
		t.Error("the handle is valid with another key")
	}
}

// TestKeyFile checks that a key file that others can read or change, or that contains no key, is refused and never
// replaced.
func TestKeyFile(t *testing.T) {
	dir := t.TempDir()
	good := bytes.Repeat([]byte{7}, keySize)
	for _, c := range []struct {
		name string
		make func(name string) error
		want string // "": it is valid
	}{
		{"good", func(n string) error { return os.WriteFile(n, good, 0o600) }, ""},
		{"read-only", func(n string) error { return os.WriteFile(n, good, 0o400) }, ""},
		{"group reads", func(n string) error { return errors.Join(os.WriteFile(n, good, 0o600), os.Chmod(n, 0o640)) }, "mode 0640 lets others"},
		{"group writes", func(n string) error { return errors.Join(os.WriteFile(n, good, 0o600), os.Chmod(n, 0o620)) }, "mode 0620 lets others"},
		{"world reads", func(n string) error { return errors.Join(os.WriteFile(n, good, 0o600), os.Chmod(n, 0o604)) }, "mode 0604 lets others"},
		{"world writes", func(n string) error { return errors.Join(os.WriteFile(n, good, 0o600), os.Chmod(n, 0o602)) }, "mode 0602 lets others"},
		{"short", func(n string) error { return os.WriteFile(n, good[1:], 0o600) }, "31 bytes, not 32"},
		{"long", func(n string) error { return os.WriteFile(n, append(good, 1), 0o600) }, "33 bytes, not 32"},
		{"empty", func(n string) error { return os.WriteFile(n, nil, 0o600) }, "0 bytes, not 32"},
		{"zeros", func(n string) error { return os.WriteFile(n, make([]byte, keySize), 0o600) }, "only zeros"},
		{"folder", func(n string) error { return os.Mkdir(n, 0o700) }, "not a regular file"},
		{"FIFO", func(n string) error { return unix.Mkfifo(n, 0o600) }, "not a regular file"},
		{"link", func(n string) error { return os.Symlink("good", n) }, "too many levels"},
		{"broken link", func(n string) error { return os.Symlink("none", n) }, "too many levels"},
		{"other owner", func(n string) error {
			err := os.WriteFile(n, good, 0o600)
			if os.Geteuid() != 0 {
				return err
			}
			return errors.Join(err, os.Chown(n, 1234, 0))
		}, "belongs to user 1234"},
	} {
		if c.name == "other owner" && os.Geteuid() != 0 {
			continue
		}
		name := filepath.Join(dir, c.name)
		if err := c.make(name); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(name)
		if err != nil {
			t.Fatal(err)
		}
		key, err := loadKey(name)
		if c.want == "" {
			if err != nil || !bytes.Equal(key[:], good) {
				t.Errorf("%s: %x, %v", c.name, key, err)
			}
		} else if err == nil || !strings.Contains(err.Error(), c.want) || key != [keySize]byte{} {
			t.Errorf("%s: %x, %v; want %q", c.name, key, err, c.want)
		}
		after, err := os.Lstat(name)
		if err != nil || !os.SameFile(before, after) || after.Mode() != before.Mode() || after.Size() != before.Size() {
			t.Errorf("%s: changed: %v, %v", c.name, after, err)
		}
	}
	if _, err := loadKey(filepath.Join(dir, "good", "key")); err == nil {
		t.Error("a file is a folder")
	}
}

// TestKeyFileCreated checks that processes that create the file at the same time get one key, whatever the umask, and
// leave nothing else behind.
func TestKeyFileCreated(t *testing.T) {
	name := filepath.Join(t.TempDir(), "nfs.key")
	keys := make([][keySize]byte, 16)
	errs := make([]error, len(keys))
	begin := make(chan struct{})
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			<-begin
			keys[i], errs[i] = loadKey(name)
		})
	}
	close(begin)
	wg.Wait()
	for i := range keys {
		if errs[i] != nil || keys[i] != keys[0] || keys[i] == [keySize]byte{} {
			t.Errorf("%x, %v", keys[i], errs[i])
		}
	}
	l, err := os.ReadDir(filepath.Dir(name))
	if err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
	if st, err := os.Stat(name); err != nil || st.Mode() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if other, err := loadKey(name + "2"); err != nil || other == keys[0] {
		t.Errorf("%x, %v", other, err)
	}
	if err := createKey(name); !errors.Is(err, fs.ErrExist) {
		t.Errorf("an existing key is replaced: %v", err)
	}
	dir := filepath.Join(t.TempDir(), "a")
	if _, err := loadKey(filepath.Join(dir, "nfs.key")); err == nil || !strings.Contains(err.Error(), "no folder "+dir+": make it first") {
		t.Errorf("a key in no folder: %v", err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the folder of a key file was created silently")
	}
}

// TestKeyInTree checks that a key that clients could read is refused, also under an indirect name.
func TestKeyInTree(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	export := filepath.Join(dir, "export")
	if err := errors.Join(os.MkdirAll(filepath.Join(export, "sub"), 0o755), os.Symlink("export/sub", filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{export + "/key", export + "/sub/key", dir + "/link/key", export + "/../export/key"} {
		s, err := NewServer(Config{Dir: export, KeyFile: key})
		if err == nil || !strings.Contains(err.Error(), "--key-file") {
			t.Errorf("%s: %v", key, err)
		}
		if err == nil {
			s.Close()
		}
	}
	s, err := NewServer(Config{Dir: export, KeyFile: export + "/../key"})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

// TestDefaultKeyFile checks that each user has a key file of its own.
func TestDefaultKeyFile(t *testing.T) {
	for _, c := range []struct{ dir, xdg, home, root, user string }{
		{"/var/lib/x", "/s", "/h", "/var/lib/x/nfs.key", "/var/lib/x/nfs.key"},
		{"/var/lib/x:/var/lib/y", "/s", "/h", "/var/lib/x/nfs.key", "/var/lib/x/nfs.key"},
		{"", "/s", "/h", "/var/lib/iwarpd/nfs.key", "/s/iwarpd/nfs.key"},
		{"", "relative", "/h", "/var/lib/iwarpd/nfs.key", "/h/.local/state/iwarpd/nfs.key"},
		{"", "", "", "/var/lib/iwarpd/nfs.key", ""},
	} {
		t.Setenv("STATE_DIRECTORY", c.dir)
		t.Setenv("XDG_STATE_HOME", c.xdg)
		t.Setenv("HOME", c.home)
		for uid, want := range map[int]string{0: c.root, 1000: c.user} {
			if got, err := defaultKeyFile(uid); got != want || (err == nil) != (want != "") {
				t.Errorf("%+v: %d: %q, %v", c, uid, got, err)
			}
		}
	}
}

// TestCapabilities checks that calls for users other than root are made without root's privileges over files and
// quotas, and that the thread has them again afterwards.
func TestCapabilities(t *testing.T) {
	testenv.RequireRoot(t)
	s := NewTestServer(t, Config{Dir: t.TempDir()})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	effective := func() uint64 {
		c, err := capabilitiesOf()
		if err != nil {
			t.Fatal(err)
		}
		return uint64(c.root[1].Effective)<<32 | uint64(c.root[0].Effective)
	}
	all := effective()
	if all&(1<<unix.CAP_DAC_OVERRIDE) == 0 {
		t.Fatalf("root has %#x", all)
	}
	var none uint64
	for _, n := range notOthers {
		none |= 1 << n
	}
	for _, c := range []struct {
		cred cred
		want uint64
	}{{cred{uid: 1000, gid: 100}, all &^ none}, {cred{uid: 1000}, all &^ none}, {cred{gid: 100}, all}, {cred{}, all}} {
		var got uint64
		if err := s.as(&c.cred, func() error { got = effective(); return nil }); err != nil || got != c.want {
			t.Errorf("%+v: %#x, not %#x, %v", c.cred, got, c.want, err)
		}
		if got := effective(); got != all {
			t.Errorf("%+v: %#x afterwards, not %#x", c.cred, got, all)
		}
	}
}

// NewTestServer makes a server that is closed when the test ends.
func NewTestServer(t testing.TB, cfg Config) *Server {
	t.Helper()
	s, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// TestAlone checks that the server of a root that cannot act for other users does not start if it would serve nobody, and
// says whom it serves otherwise.
func TestAlone(t *testing.T) {
	testenv.RequireRoot(t)
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	for _, missing := range []uint{unix.CAP_SETUID, unix.CAP_SETGID} {
		all, err := capabilitiesOf()
		if err != nil {
			t.Fatal(err)
		}
		less := all.root
		less[0].Effective &^= 1 << missing
		if !setCaps(&less) {
			t.Fatal("capset")
		}
		if s, err := NewServer(Config{Dir: t.TempDir()}); !errors.Is(err, errAlone) {
			t.Errorf("without capability %d: %+v, %v", missing, s, err)
		}
		if s := NewTestServer(t, Config{Dir: t.TempDir(), NoRootSquash: true}); !strings.Contains(s.actsAs(), "nobody else") {
			t.Errorf("without capability %d: %s", missing, s.actsAs())
		}
		if !setCaps(&all.root) {
			t.Fatal("capset")
		}
		if s := NewTestServer(t, Config{Dir: t.TempDir(), NoRootSquash: true}); s.actsAs() != "the clients' root is root" {
			t.Errorf("with all: %s", s.actsAs())
		}
	}
}
