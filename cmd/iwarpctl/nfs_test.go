package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

// TestWriteWhole checks that a file is written whole or not at all, with the mode of the file that it replaces, also
// through a symbolic link.
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
	if err := writeWhole(at("no/file"), whole); !errors.Is(err, fs.ErrNotExist) || strings.Contains(err.Error(), ".iwarpctl-") {
		t.Error(err)
	}
	closed := func(w io.Writer) error { _ = w.(io.Closer).Close(); return whole(w) }
	if err := writeWhole(at("new"), closed); !errors.Is(err, os.ErrClosed) || !strings.Contains(err.Error(), "write "+at("new")+": ") {
		t.Error(err)
	}
	// What is not a regular file is written in place.
	if err := writeWhole(at("dir"), whole); !errors.Is(err, unix.EISDIR) {
		t.Error(err)
	}
	if err := unix.Mkfifo(at("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := writeWhole(at("fifo"), whole); err == nil || !strings.Contains(err.Error(), "start its reader first") {
		t.Error(err)
	}
	r, w := testenv.Pipe(t)
	if err := writeWhole(fmt.Sprintf("/proc/self/fd/%d", w.Fd()), whole); err != nil {
		t.Error(err)
	}
	w.Close()
	// A file that no longer has a name is not replaced either.
	f, err := os.Create(at("gone"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(os.Remove(at("gone")), writeWhole(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), whole)); err != nil {
		t.Error(err)
	}
	if b, err := io.ReadAll(f); string(b) != "whole" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if b, err := io.ReadAll(r); string(b) != "whole" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}

// TestWriteOwner checks that root does not change the owner of a file, and that other users cannot open the temporary
// file in place of a file that they cannot open.
func TestWriteOwner(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	p := filepath.Join(dir, "f")
	if err := errors.Join(os.WriteFile(p, nil, 0o600), os.Chown(p, 1000, 100), os.Chmod(p, 0o640|fs.ModeSetuid)); err != nil {
		t.Fatal(err)
	}
	is := func(p string, mode uint32) {
		t.Helper()
		var st unix.Stat_t
		if err := unix.Stat(p, &st); err != nil || st.Uid != 1000 || st.Gid != 100 || st.Mode != unix.S_IFREG|mode {
			t.Errorf("%d:%d %#o, %v", st.Uid, st.Gid, st.Mode, err)
		}
	}
	err := writeWhole(p, func(io.Writer) error {
		l, err := filepath.Glob(filepath.Join(dir, ".iwarpctl-*"))
		if len(l) == 1 {
			is(l[0], 0o640)
		}
		return errors.Join(err, os.Chmod(p, 0o600))
	})
	if err != nil {
		t.Error(err)
	}
	is(p, 0o640)
	// A user who may not give files away still keeps the group, by which others share the file.
	err = errors.Join(os.Chmod(dir, 0o777), os.Chmod(filepath.Dir(dir), 0o755), os.Chown(p, 2000, 555))
	if err != nil {
		t.Fatal(err)
	}
	testenv.AsUser(t, 1000, 100, []int{555}, func() { err = writeWhole(p, func(io.Writer) error { return nil }) })
	var st unix.Stat_t
	err = errors.Join(err, unix.Stat(p, &st))
	if err != nil || st.Uid != 1000 || st.Gid != 555 || st.Mode != unix.S_IFREG|0o640 {
		t.Errorf("another user's: %d:%d %#o, %v", st.Uid, st.Gid, st.Mode, err)
	}
}

// TestWriteACL checks that a file that is replaced keeps its access control list. Without it the mask, which the mode
// shows as the rights of the group, would become these.
func TestWriteACL(t *testing.T) {
	p := filepath.Join(t.TempDir(), "f")
	testenv.WriteFile(t, p, nil, 0o600)
	// user::rw- user:2000:rw- group::--- mask::rw- other::---
	acl, err := hex.DecodeString("0200000001000600ffffffff02000600d007000004000000ffffffff10000600ffffffff20000000ffffffff")
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(p, "system.posix_acl_access", acl, 0); err != nil {
		testenv.Skip(t, "no ACLs on this file system: %v", err)
	}
	if err := writeWhole(p, func(io.Writer) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if got := filecopy.ACL(p); !bytes.Equal(got, acl) {
		t.Errorf("list %x; want %x", got, acl)
	}
}

// TestWriteWithoutModes checks that a file on a file system that does not let users set permissions is replaced if the
// new file has those of the old one anyway, and only then.
func TestWriteWithoutModes(t *testing.T) {
	dir := t.TempDir()
	p := filepath.Join(dir, "f")
	done := make(chan error)
	for _, mode := range []fs.FileMode{0o600, 0o640} {
		if err := errors.Join(os.WriteFile(p, []byte("old"), 0o600), os.Chmod(p, mode)); err != nil {
			t.Fatal(err)
		}
		go func() {
			runtime.LockOSThread() // for good: the thread, in which fchmod(2) fails, ends with the goroutine
			filter := []unix.SockFilter{
				{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the system call
				{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: unix.SYS_FCHMOD},
				{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
				{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
			}
			prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
			err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
			if err == nil {
				err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0)
			}
			if err == nil {
				err = writeWhole(p, func(w io.Writer) error { _, err := fmt.Fprint(w, "new"); return err })
			}
			done <- err
		}()
		err, want, data := <-done, error(nil), "new"
		if mode != 0o600 {
			want, data = unix.EPERM, "old"
		}
		if b, rerr := os.ReadFile(p); !errors.Is(err, want) || string(b) != data {
			t.Errorf("mode %#o: %v, %q, %v", mode, err, b, rerr)
		}
	}
}

// TestUntil checks that a reader without input does not delay the end.
func TestUntil(t *testing.T) {
	r, w := testenv.Pipe(t)
	defer w.Close()
	ctx, cancel := context.WithCancel(t.Context())
	in := until(ctx, r)
	b := make([]byte, 10)
	if _, err := io.WriteString(w, "some"); err != nil {
		t.Fatal(err)
	}
	if n, err := io.ReadFull(in, b[:4]); string(b[:n]) != "some" || err != nil {
		t.Errorf("%q, %v", b[:n], err)
	}
	cancel()
	if n, err := io.ReadFull(in, b); n != 0 || !errors.Is(err, context.Canceled) {
		t.Errorf("%d, %v", n, err)
	}
	if b, err := io.ReadAll(until(t.Context(), strings.NewReader("whole"))); string(b) != "whole" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}

// TestExportPortTaken checks that an export says what to do if its ports are taken, or its address is that of another host.
func TestExportPortTaken(t *testing.T) {
	testenv.RequireRoot(t)
	t.Setenv("STATE_DIRECTORY", t.TempDir())
	l := testenv.Listen(t)
	_, taken, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ flag, want string }{
		{"--mount-port", "nfs: MOUNT: listen tcp 127.0.0.1:" + taken + ": bind: address already in use: each export of an address needs a port of its own"},
		{"--tcp-port", "nfs: NFS over TCP: listen tcp 127.0.0.1:" + taken + ": bind: address already in use: give another"},
	} {
		args := []string{"nfs", "export", t.TempDir(), "--listen", "127.0.0.1:20049", "--portmap-port", "0", "--mount-port", "0", c.flag, taken}
		code, out, errOut := ctl(t, args...)
		if code != exitFailure || !strings.Contains(errOut, c.want) || !strings.Contains(errOut, c.flag) || strings.Count(errOut, "\n") != 1 || out != "" {
			t.Errorf("%s: exit code %d: %q, %q", c.flag, code, errOut, out)
		}
	}
	elsewhere := []string{"nfs", "export", t.TempDir(), "--listen", "192.0.2.1:20049", "--portmap-port", "0"}
	if code, _, errOut := ctl(t, elsewhere...); code != exitUsage || !strings.Contains(errOut, "give an address of this host with --listen") {
		t.Errorf("exit code %d: %q", code, errOut)
	}
}

// TestExportKeyFile checks that the key of file handles is created at --key-file, or in the state directory, and that
// a key file that others can read is refused.
func TestExportKeyFile(t *testing.T) {
	testenv.RequireRoot(t)
	state, none := t.TempDir(), filepath.Join(t.TempDir(), "none")
	t.Setenv("STATE_DIRECTORY", state)
	named := filepath.Join(t.TempDir(), "named")
	args := []string{"--socket", none, "nfs", "export", t.TempDir(), "--listen", "127.0.0.1:20049", "--portmap-port", "0", "--mount-port", "0"}
	for _, c := range []struct {
		args []string
		file string
	}{{args, filepath.Join(state, "nfs.key")}, {append(args, "--key-file", named), named}} {
		if code, _, errOut := ctl(t, c.args...); code != exitDaemon {
			t.Errorf("exit code %d: %q", code, errOut)
		}
		if st, err := os.Stat(c.file); err != nil || st.Mode() != 0o600 {
			t.Errorf("%v, %v", st, err)
		}
		testenv.Chmod(t, c.file, 0o644)
		code, _, errOut := ctl(t, c.args...)
		if want := "key file " + c.file + ": mode 0644"; code != exitFile || !strings.Contains(errOut, want) || strings.Count(errOut, "\n") != 1 {
			t.Errorf("exit code %d: %q; want %q", code, errOut, want)
		}
	}
}

// objects gives the objects l to nfsShow.
func objects(l ...nfs.Info) func(func(nfs.Info) error) error {
	return func(show func(nfs.Info) error) (err error) {
		for _, i := range l {
			err = errors.Join(err, show(i))
		}
		return err
	}
}

// TestLongListing checks that nfs ls prints a folder while it is listed, instead of holding all of it in memory, and ends
// what it has printed if that fails.
func TestLongListing(t *testing.T) {
	for _, asJSON := range []bool{false, true} {
		var out strings.Builder
		c := &command{out: &out, json: asJSON}
		failed := errors.New("failed")
		err := c.nfsShow(func(show func(nfs.Info) error) error {
			for range nfsAligned + 1 {
				if err := show(nfs.Info{Name: "a"}); err != nil {
					return err
				}
			}
			if n := strings.Count(out.String(), `"a"`); n < nfsAligned {
				t.Errorf("JSON %v: %d of %d are printed", asJSON, n, nfsAligned+1)
			}
			return failed
		})
		if n := strings.Count(out.String(), `"a"`); n != nfsAligned+1 || !errors.Is(err, failed) || asJSON && !json.Valid([]byte(out.String())) {
			t.Errorf("JSON %v: %d of %d at the end, %v", asJSON, n, nfsAligned+1, err)
		}
	}
}

// TestListing checks the lines of nfs ls: special permissions, and an entry whose attributes the server does not tell, as
// that of a folder that the user may read but not search, and a type that NFS does not have.
func TestListing(t *testing.T) {
	var out strings.Builder
	c := &command{out: &out}
	l := []nfs.Info{
		{Name: "a", Type: nfsv3.NF3REG, Perm: 0o4755, Nlink: 1, UID: 1, GID: 2, Size: 3, Mtime: time.Unix(0, 0)},
		{Name: "b", Type: nfsv3.NF3REG, Perm: 0o6644, Mtime: time.Unix(0, 0)},
		{Name: "c", Type: nfsv3.NF3DIR, Perm: 0o1777, Mtime: time.Unix(0, 0)},
		{Name: "d", Fileid: 7},
		{Name: "e", Type: 8, Perm: 0o7777, Mtime: time.Unix(0, 0)},
	}
	if err := c.nfsShow(objects(l...)); err != nil {
		t.Fatal(err)
	}
	want := `-rwsr-xr-x  1  1  2  3  1970-01-01 00:00:00  "a"
-rwSr-Sr--  0  0  0  0  1970-01-01 00:00:00  "b"
drwxrwxrwt  0  0  0  0  1970-01-01 00:00:00  "c"
??????????  ?  ?  ?  ?  ?                    "d"
?rwsrwsrwt  0  0  0  0  1970-01-01 00:00:00  "e"
`
	if out.String() != want {
		t.Errorf("%s\nwant\n%s", &out, want)
	}
	out.Reset()
	c.json = true
	if err := c.nfsShow(objects(l[3])); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(strings.Fields(out.String()), ""); got != `[{"name":"d","id":7}]` {
		t.Error(got)
	}
}

// TestNameJSON checks that JSON has the bytes of a name that is not UTF-8.
func TestNameJSON(t *testing.T) {
	var out strings.Builder
	c := &command{out: &out, json: true}
	if err := c.nfsShow(objects(nfs.Info{Name: "caf\xe9", Type: nfsv3.NF3REG}, nfs.Info{Name: "café", Type: nfsv3.NF3REG})); err != nil {
		t.Fatal(err)
	}
	var got []struct {
		Name string `json:"name"`
		Raw  []byte `json:"name_base64"`
	}
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil || len(got) != 2 || got[0].Name != "caf\ufffd" || string(got[0].Raw) != "caf\xe9" || got[1].Name != "café" || got[1].Raw != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// TestRootIsNobody checks that root learns why a server denies what root may do elsewhere.
func TestRootIsNobody(t *testing.T) {
	denied := &nfs.Error{Op: "create f", Status: nfsv3.NFS3ERR_ACCES}
	const plain = "10.0.0.1:/: nfs: create f: permission denied"
	for uid, want := range map[int]string{0: plain + ": root is the user nobody there, unless the server exports with --no-root-squash", 7: plain} {
		err := nfsFailed("10.0.0.1:/", uid, denied)
		if err.Error() != want || exitCode(t.Context(), err) != exitFile {
			t.Errorf("uid %d: %q, exit code %d; want %q, %d", uid, err, exitCode(t.Context(), err), want, exitFile)
		}
	}
}
