package nfs_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// TestNotMade checks that a procedure that makes an object, and cannot set its attributes, leaves nothing behind.
func TestNotMade(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	type attributes struct {
		name      string
		who       who
		want      nfsv3.Nfsstat3
		uid, gid  uint32
		set, size uint32 // 1: set user and group; set the size, to 2^63
	}
	owner := []attributes{
		{"no user", root, nfsv3.NFS3ERR_INVAL, math.MaxUint32, 0, 1, 0},
		{"no group", root, nfsv3.NFS3ERR_INVAL, 0, math.MaxUint32, 1, 0},
	}
	with := func(a attributes) func(w *rpc.Writer) {
		return func(w *rpc.Writer) {
			if w.U32(1, 0o600); a.set == 1 {
				w.U32(1, a.uid, 1, a.gid)
			} else {
				w.U32(0, 0)
			}
			if w.U32(a.size); a.size == 1 {
				w.U64(1 << 63)
			}
			w.U32(0, 0)
		}
	}
	for _, p := range []struct {
		name string
		proc uint32
		size nfsv3.Nfsstat3
		args func(w *rpc.Writer, attrs func(*rpc.Writer))
	}{
		{"CREATE, UNCHECKED", pCreate, nfsv3.NFS3ERR_FBIG, func(w *rpc.Writer, attrs func(*rpc.Writer)) { w.U32(0); attrs(w) }},
		{"CREATE, GUARDED", pCreate, nfsv3.NFS3ERR_FBIG, func(w *rpc.Writer, attrs func(*rpc.Writer)) { w.U32(1); attrs(w) }},
		{"MKDIR", pMkdir, nfsv3.NFS3ERR_ISDIR, func(w *rpc.Writer, attrs func(*rpc.Writer)) { attrs(w) }},
		{"SYMLINK", pSymlink, nfsv3.NFS3ERR_INVAL, func(w *rpc.Writer, attrs func(*rpc.Writer)) { attrs(w); w.String("to") }},
		{"MKNOD", pMknod, nfsv3.NFS3ERR_INVAL, func(w *rpc.Writer, attrs func(*rpc.Writer)) { w.U32(uint32(nfsv3.NF3FIFO)); attrs(w) }},
	} {
		for _, a := range append(owner, attributes{name: "a size", who: alice, want: p.size, size: 1}) {
			l.want(a.want, a.who, p.proc, func(w *rpc.Writer) { name(l.root, "new")(w); p.args(w, with(a)) })
			if e, err := os.ReadDir(l.dir); err != nil || len(e) > 0 {
				t.Fatalf("%s with %s: left %v, %v", p.name, a.name, e, err)
			}
		}
	}
	// A file that was there stays.
	l.file("old", 0o600, alice, "data")
	l.want(nfsv3.NFS3ERR_FBIG, alice, pCreate, func(w *rpc.Writer) { name(l.root, "old")(w); w.U32(0); with(attributes{size: 1})(w) })
	if b, err := os.ReadFile(filepath.Join(l.dir, "old")); err != nil || string(b) != "data" {
		t.Errorf("%q, %v", b, err)
	}
}

// TestOwnerOfMade checks the owner and the mode of a new object for which an owner, a group and set-user-ID were asked:
// root gets all of them, others make their own objects.
func TestOwnerOfMade(t *testing.T) {
	l := newLocal(t, nfs.Config{})
	l.want(nfsv3.NFS3_OK, who{0, 100, nil}, pCreate, create(l.root, "group", 0o600))
	var st unix.Stat_t
	if err := unix.Stat(filepath.Join(l.dir, "group"), &st); err != nil || st.Uid != 0 || st.Gid != 100 {
		t.Errorf("root with the group 100 makes a file of %d:%d, %v", st.Uid, st.Gid, err)
	}
	attrs := func(w *rpc.Writer) { w.U32(1, 0o6711, 1, 2000, 1, 200, 0, 0, 0) } // no size, no times
	for _, p := range []struct {
		name string
		proc uint32
		mode uint32
		args func(w *rpc.Writer)
	}{
		{"CREATE, UNCHECKED", pCreate, 0o6711, func(w *rpc.Writer) { w.U32(0); attrs(w) }},
		{"CREATE, GUARDED", pCreate, 0o6711, func(w *rpc.Writer) { w.U32(1); attrs(w) }},
		{"MKDIR", pMkdir, 0o6711, attrs},
		{"SYMLINK", pSymlink, 0o777, func(w *rpc.Writer) { attrs(w); w.String("to") }},
		{"MKNOD", pMknod, 0o6711, func(w *rpc.Writer) { w.U32(uint32(nfsv3.NF3FIFO)); attrs(w) }},
	} {
		for _, c := range []struct{ who, owner who }{{root, bob}, {alice, alice}, {who{1000, 100, []uint32{200}}, who{1000, 200, nil}}} {
			l.want(nfsv3.NFS3_OK, c.who, p.proc, func(w *rpc.Writer) { name(l.root, "new")(w); p.args(w) })
			file := filepath.Join(l.dir, "new")
			if err := unix.Lstat(file, &st); err != nil {
				t.Fatalf("%s by %d: %v", p.name, c.who.uid, err)
			}
			if st.Uid != c.owner.uid || st.Gid != c.owner.gid || st.Mode&0o7777 != p.mode {
				t.Errorf("%s by %d: %d:%d, mode %#o", p.name, c.who.uid, st.Uid, st.Gid, st.Mode&0o7777)
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
		}
	}
}
