package nfs_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

func TestRights(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	ok, denied := nfsv3.NFS3_OK, nfsv3.NFS3ERR_ACCES
	for _, c := range []struct {
		mode         os.FileMode
		who          who
		access       uint32
		read, writes nfsv3.Nfsstat3
	}{
		{0o600, alice, 0x0d, ok, ok}, {0o600, bob, 0, denied, denied}, {0o600, root, 0x0d, ok, ok},
		{0o400, alice, 0x01, ok, ok}, // an owner may still use a file that it has open (RFC 1813 section 4.4)
		{0o711, bob, 0x20, ok, denied}, {0o640, who{2000, 100, nil}, 0x01, ok, denied}, {0o660, who{2000, 200, []uint32{7, 100}}, 0x0d, ok, ok},
		{0o604, who{2000, 100, nil}, 0, denied, denied}, // the bits of the group apply, not those of others
	} {
		fh := l.file("f", c.mode, alice, "data")
		if got := l.access(c.who, fh); got != c.access {
			t.Errorf("%o for %d: access %#x, not %#x", c.mode, c.who.uid, got, c.access)
		}
		l.want(c.read, c.who, pRead, read(fh, 0, 4))
		l.want(c.writes, c.who, pWrite, write(fh, 0, []byte("x")))
	}
	l.want(nfsv3.NFS3ERR_PERM, bob, pSetattr, func(w *rpc.Writer) { w.Opaque(l.file("f", 0o666, alice, "")); sattr(w, 0o777, -1); w.U32(0) })
	// Files that users other than root make belong to them and have the requested mode. A sticky directory protects files
	// from other users, and set-group-ID is inherited.
	l.want(ok, root, pMkdir, func(w *rpc.Writer) { name(l.root, "tmp")(w); sattr(w, 0o1777, -1) })
	tmp := l.lookup("tmp")
	l.want(ok, alice, pCreate, create(tmp, "a", 0o666))
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "tmp/a"), &st); err != nil || st.Uid != 1000 || st.Gid != 100 || st.Mode&0o7777 != 0o666 {
		t.Errorf("%+v, %v", st, err)
	}
	if r, got := l.do(bob, pRemove, name(tmp, "a")); got != nfsv3.NFS3ERR_PERM && got != denied {
		t.Errorf("another removes from a sticky directory: %v, %v", got, r.Err())
	}
	l.want(ok, alice, pRemove, name(tmp, "a"))
	if err := unix.Chown(filepath.Join(l.dir, "tmp"), 0, 555); err != nil {
		t.Fatal(err)
	}
	if err := unix.Chmod(filepath.Join(l.dir, "tmp"), 0o2777); err != nil {
		t.Fatal(err)
	}
	l.want(ok, alice, pCreate, create(tmp, "g", 0o600))
	if err := unix.Stat(filepath.Join(l.dir, "tmp/g"), &st); err != nil || st.Gid != 555 {
		t.Errorf("%+v, %v", st, err)
	}
	// A change by a user other than root removes set-user-ID.
	fh := l.file("suid", 0o4777, alice, "x")
	l.want(ok, bob, pWrite, write(fh, 0, []byte("y")))
	if err := unix.Stat(filepath.Join(l.dir, "suid"), &st); err != nil || st.Mode&unix.S_ISUID != 0 {
		t.Errorf("%o, %v", st.Mode, err)
	}
	fh = l.file("suid", 0o4777, alice, "x")
	l.want(ok, bob, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, 0); w.U32(0) })
	if err := unix.Stat(filepath.Join(l.dir, "suid"), &st); err != nil || st.Mode&unix.S_ISUID != 0 {
		t.Errorf("%o, %v", st.Mode, err)
	}
	// Set-group-ID without the right to execute is no privilege: it stays, as with any write on the host.
	fh = l.file("sgid", 0o2767, alice, "x")
	l.want(ok, alice, pWrite, write(fh, 0, []byte("y")))
	l.want(ok, alice, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, 0); w.U32(0) })
	if err := unix.Stat(filepath.Join(l.dir, "sgid"), &st); err != nil || st.Mode&0o7777 != 0o2767 {
		t.Errorf("%o, %v", st.Mode, err)
	}
}

// TestTruncateByWriter checks that users who may write a file that belongs to another one may truncate it as Linux does for
// O_TRUNC: it sets the modification time to the server's too, even that alone for a file that is empty already.
func TestTruncateByWriter(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	for _, c := range []struct {
		name       string
		mode       os.FileMode
		args       []uint32 // the size, or none, and both times
		want       nfsv3.Nfsstat3
		data       string
		atime, now bool // the access time stays, the modification time is now
	}{
		{"size", 0o666, []uint32{1, 0, 0, 0, 0}, nfsv3.NFS3_OK, "", true, true},
		{"size and time", 0o666, []uint32{1, 0, 0, 0, 1}, nfsv3.NFS3_OK, "", false, true},
		{"time", 0o666, []uint32{0, 0, 1}, nfsv3.NFS3_OK, "data", false, true},
		{"both times", 0o666, []uint32{0, 1, 1}, nfsv3.NFS3_OK, "data", false, true},
		{"time of a read-only file", 0o644, []uint32{0, 0, 1}, nfsv3.NFS3ERR_ACCES, "data", true, false},
		{"size and time of a read-only file", 0o644, []uint32{1, 0, 0, 0, 1}, nfsv3.NFS3ERR_ACCES, "data", true, false},
		{"access time", 0o666, []uint32{0, 1, 0}, nfsv3.NFS3ERR_PERM, "data", true, false},
		{"another time", 0o666, []uint32{0, 0, 2, 7, 7}, nfsv3.NFS3ERR_PERM, "data", true, false},
	} {
		fh := l.file("f", c.mode, alice, "data")
		p := filepath.Join(l.dir, "f")
		old := unix.Timespec{Sec: 1000}
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{old, old}, 0); err != nil {
			t.Fatal(err)
		}
		l.want(c.want, bob, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); w.U32(0, 0, 0); w.U32(c.args...); w.U32(0) })
		var st unix.Stat_t
		if err := unix.Stat(p, &st); err != nil || c.atime != (st.Atim == old) || c.now == (st.Mtim == old) {
			t.Errorf("%s: access time %v, modification time %v, %v", c.name, st.Atim, st.Mtim, err)
		}
		if b, err := os.ReadFile(p); err != nil || string(b) != c.data {
			t.Errorf("%s: %q, %v", c.name, b, err)
		}
	}
}

// TestNoOwner checks that SETATTR refuses a user or group that no file can have.
func TestNoOwner(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o644, alice, "data")
	for _, owner := range [][]uint32{{1, math.MaxUint32, 0}, {0, 1, math.MaxUint32}, {1, math.MaxUint32, 1, 100}} {
		l.want(nfsv3.NFS3ERR_INVAL, root, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); w.U32(1, 0o600); w.U32(owner...); w.U32(0, 0, 0, 0) })
	}
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "f"), &st); err != nil || st.Mode&0o777 != 0o644 || st.Uid != 1000 || st.Gid != 100 {
		t.Errorf("%+v, %v", st, err)
	}
}

// TestSearch checks that READDIRPLUS gives handles and attributes of the entries of a directory only to callers that may
// look them up.
func TestSearch(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	l.want(nfsv3.NFS3_OK, alice, pMkdir, func(w *rpc.Writer) { name(l.root, "d")(w); sattr(w, 0o744, -1) })
	d := l.lookup("d")
	l.want(nfsv3.NFS3_OK, alice, pCreate, create(d, "f", 0o644))
	l.want(nfsv3.NFS3ERR_ACCES, bob, pLookup, name(d, "f"))
	for _, c := range []struct {
		who  who
		more uint32 // attributes and handles follow
	}{{bob, 0}, {alice, 1}} {
		r := l.want(nfsv3.NFS3_OK, c.who, pReaddirplus, func(w *rpc.Writer) { w.Opaque(d); w.U64(0); w.U64(0); w.U32(4096, 4096) })
		r.Fixed(4 + 84 + 8) // attributes and verifier
		names := 0
		for r.U32() == 1 {
			r.U64()
			n := string(r.Opaque(255))
			r.U64()
			attr := r.U32()
			if attr == 1 {
				r.Fixed(84)
			}
			handle := r.U32()
			if handle == 1 {
				r.Opaque(64)
			}
			if names++; n != ".." && (attr != c.more || handle != c.more) {
				t.Errorf("uid %d: %q: attributes %d, handle %d; want %d", c.who.uid, n, attr, handle, c.more)
			}
		}
		if names != 3 || r.Err() != nil {
			t.Errorf("uid %d: %d names, %v", c.who.uid, names, r.Err())
		}
	}
}

// TestACL checks rights that the mode of a file does not show. In the mode of a file with an ACL the group's bits are
// the mask.
func TestACL(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	fh := l.file("f", 0o600, alice, "data")
	acl := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{0x01, 6, math.MaxUint32}, {0x02, 6, 2000}, {0x04, 0, math.MaxUint32}, {0x10, 6, math.MaxUint32}, {0x20, 0, math.MaxUint32}} {
		acl = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(acl, e.tag), e.perm), e.id)
	}
	if err := unix.Setxattr(filepath.Join(l.dir, "f"), "system.posix_acl_access", acl, 0); err != nil {
		testenv.Skip(t, "no ACLs on this file system: %v", err)
	}
	l.want(nfsv3.NFS3_OK, bob, pRead, read(fh, 0, 4))
	l.want(nfsv3.NFS3_OK, bob, pWrite, write(fh, 0, []byte("x")))
	group := who{uid: 3000, gid: 100}
	l.want(nfsv3.NFS3ERR_ACCES, group, pRead, read(fh, 0, 4))
	l.want(nfsv3.NFS3ERR_ACCES, group, pWrite, write(fh, 0, []byte("x")))
	if a, b := l.access(bob, fh), l.access(group, fh); a != 0x0d || b != 0 {
		t.Errorf("access %#x, %#x", a, b)
	}
}

// TestRunning checks that a write to a program that runs on the server's host is refused, and not with the error of a
// disk.
func TestRunning(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	program := testenv.ReadFile(t, "/bin/sleep")
	fh := l.file("sleep", 0o755, alice, string(program)) // its name, if it is one of many in a file
	name := filepath.Join(l.dir, "sleep")
	c := exec.Command(name, "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	}()
	if f, err := os.OpenFile(name, os.O_WRONLY, 0); err == nil {
		f.Close()
		testenv.Skip(t, "this kernel lets programs change that run")
	}
	for _, who := range []who{root, alice} {
		l.want(nfsv3.NFS3ERR_ACCES, who, pWrite, write(fh, 0, []byte("x")))
		l.want(nfsv3.NFS3ERR_ACCES, who, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, 0); w.U32(0) })
	}
}

// TestRootSquash checks that by default the root and the group 0 of a client have no rights, and that a client can make
// no set-user-ID program of root, no set-group-ID program of its group, and no device node.
func TestRootSquash(t *testing.T) {
	l := serveLocal(t, nfs.Config{Async: true})
	var st unix.Stat_t
	for i, c := range []who{root, {0, 100, []uint32{100}}} {
		made := fmt.Sprint("made", i)
		l.want(nfsv3.NFS3_OK, c, pCreate, create(l.root, made, 0o600))
		if err := unix.Stat(filepath.Join(l.dir, made), &st); err != nil || st.Uid != 65534 || st.Gid != 65534 {
			t.Errorf("%+v makes a file of %d:%d, %v", c, st.Uid, st.Gid, err)
		}
	}
	fh := l.file("f", 0o660, root, "data")
	for _, c := range []who{root, {1000, 0, nil}, {1000, 100, []uint32{0}}, {0, 0, []uint32{0}}, {1000, 1<<32 - 1, nil}, {1<<32 - 1, 100, nil}, {1000, 100, []uint32{1<<32 - 1}}} {
		l.want(nfsv3.NFS3ERR_ACCES, c, pRead, read(fh, 0, 4))
	}
	owned := func(w *rpc.Writer) { w.U32(1, 0o6755, 1, 0, 1, 0, 0, 0, 0) } // by root and its group; no size, no times
	for _, c := range []who{root, {0, 100, []uint32{0}}, {1000, 0, nil}, {1000, 100, []uint32{0}}} {
		l.want(nfsv3.NFS3_OK, c, pCreate, func(w *rpc.Writer) { name(l.root, "su")(w); w.U32(0); owned(w) })
		su := l.lookup("su")
		l.want(nfsv3.NFS3_OK, c, pWrite, write(su, 0, []byte("program")))
		l.want(nfsv3.NFS3ERR_PERM, c, pSetattr, func(w *rpc.Writer) { w.Opaque(su); owned(w); w.U32(0) })
		l.want(nfsv3.NFS3_OK, c, pSetattr, func(w *rpc.Writer) { w.Opaque(su); sattr(w, 0o6755, -1); w.U32(0) })
		if err := unix.Stat(filepath.Join(l.dir, "su"), &st); err != nil || st.Uid == 0 || st.Gid == 0 || st.Mode&0o7777 != 0o6755 {
			t.Errorf("%+v makes a program of %d:%d, mode %#o, %v", c, st.Uid, st.Gid, st.Mode&0o7777, err)
		}
		l.want(nfsv3.NFS3ERR_PERM, c, pMknod, func(w *rpc.Writer) {
			name(l.root, "dev")(w)
			w.U32(uint32(nfsv3.NF3BLK))
			sattr(w, 0o666, -1)
			w.U32(8, 0)
		})
		l.want(nfsv3.NFS3_OK, c, pRemove, name(l.root, "su"))
	}
}

func TestReadOnly(t *testing.T) {
	l := newLocal(t, nfs.Config{ReadOnly: true})
	fh := l.file("f", 0o666, root, "data")
	for proc, args := range map[uint32]func(*rpc.Writer){
		pSetattr: func(w *rpc.Writer) { w.Opaque(fh); sattr(w, 0o600, -1); w.U32(0) },
		pWrite:   write(fh, 0, []byte("x")), pCreate: create(l.root, "n", 0o600),
		pMkdir:   func(w *rpc.Writer) { name(l.root, "n")(w); sattr(w, 0o700, -1) },
		pSymlink: func(w *rpc.Writer) { name(l.root, "n")(w); sattr(w, -1, -1); w.String("f") },
		pMknod:   func(w *rpc.Writer) { name(l.root, "n")(w); w.U32(7); sattr(w, 0o600, -1) },
		pRemove:  name(l.root, "f"), pRmdir: name(l.root, "f"),
		pRename: func(w *rpc.Writer) { name(l.root, "f")(w); name(l.root, "n")(w) },
		pLink:   func(w *rpc.Writer) { w.Opaque(fh); name(l.root, "n")(w) },
	} {
		l.want(nfsv3.NFS3ERR_ROFS, root, proc, args)
	}
	if a := l.access(root, fh); a != 0x01 {
		t.Errorf("access %#x", a)
	}
	if d := l.access(root, l.root); d != 0x03 {
		t.Errorf("access to the directory %#x", d)
	}
	r := l.want(nfsv3.NFS3_OK, root, pRead, read(fh, 0, 10))
	r.Fixed(4 + 84 + 4 + 4)
	if s := r.String(10); s != "data" {
		t.Errorf("%q", s)
	}
}

// TestReadOnlyMount checks that ACCESS does not grant root what a file system that is mounted read-only refuses: a client
// would take the data of a write, and lose it.
func TestReadOnlyMount(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	testenv.WriteFile(t, filepath.Join(dir, "f"), []byte("data"), 0o777)
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	l := newLocal(t, nfs.Config{Dir: dir})
	fh := l.lookup("f")
	for _, c := range []who{root, alice} {
		if a := l.access(c, fh); a != 0x21 {
			t.Errorf("access of user %d: %#x", c.uid, a)
		}
		if d := l.access(c, l.root); d != 0x03 {
			t.Errorf("access of user %d to the directory: %#x", c.uid, d)
		}
	}
	l.want(nfsv3.NFS3ERR_ROFS, root, pWrite, write(fh, 0, []byte("x")))
	l.want(nfsv3.NFS3ERR_ROFS, root, pSetattr, func(w *rpc.Writer) { w.Opaque(fh); sattr(w, -1, 0); w.U32(0) })
}

// TestFlavors checks that unsupported credentials are rejected with an error.
func TestFlavors(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	many := rpc.Sys{GIDs: make([]uint32, 17)}
	for _, c := range []struct {
		name string
		cred rpc.Auth
		err  error
	}{
		{"AUTH_NONE", rpc.Auth{}, nil}, {"AUTH_SYS", (&rpc.Sys{GIDs: make([]uint32, 16)}).Auth(), nil}, {"17 groups", many.Auth(), rpc.AuthError},
		{"AUTH_SHORT", rpc.Auth{Flavor: 2, Body: make([]byte, 8)}, rpc.AuthError},
		{"RPCSEC_GSS", rpc.Auth{Flavor: rpc.AuthGSS, Body: []byte{0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}}, rpc.AuthError},
	} {
		for _, prog := range []uint32{nfs.ProgramNFS, nfs.ProgramMount} {
			var w rpc.Writer
			(&rpc.Call{XID: l.xid.Add(1), Prog: prog, Vers: 3, Cred: c.cred}).Start(&w)
			reply, ok := l.srv.Serve(t.Context(), "10.0.0.9", w.Msg, nil)
			if _, err := rpc.ParseReply(reply); !ok || err != c.err {
				t.Errorf("%s, program %d: %v, not %v", c.name, prog, err, c.err)
			}
		}
	}
}
