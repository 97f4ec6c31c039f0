package nfs_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

type rig struct {
	dir string
	ctx context.Context
	c   *rpcrdma.Client
	n   *nfs.Client
}

// exports counts the exports. Each has its own port: over kernel sockets all have the same address.
var exports atomic.Uint32

func start(t testing.TB, version int, set ...func(*nfs.Config)) *rig {
	t.Helper()
	testenv.RequireRoot(t)
	dir := t.TempDir()
	testenv.Chmod(t, dir, 0o777)
	scfg := nfs.Config{Dir: dir, NoRootSquash: true}
	for _, f := range set {
		f(&scfg)
	}
	s, err := nfs.NewServer(scfg)
	if err != nil {
		t.Fatal(err)
	}
	a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets()})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	x := &nfs.Export{
		Server: s, Listen: netip.AddrPortFrom(b.Addr(), rpcrdma.Port+uint16(exports.Add(1))).String(), Config: rpcrdma.DefaultConfig(true),
		Open: func(ctx context.Context) (*iwarp.Device, error) { return b.NewDevice(ctx) },
	}
	up := make(chan struct{})
	ready := sync.OnceFunc(func() { close(up) })
	x.Tell = func(string, ...any) { ready() }
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx) }()
	select {
	case <-up:
	case err := <-done:
		t.Fatal(err)
	}
	cfg := rpcrdma.DefaultConfig(false)
	cfg.Session.Version = version
	e, err := rpcrdma.New(ctx, a.Device(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	g := &rig{dir: dir, ctx: ctx, c: e.Dial(x.Listen)}
	if g.n, err = nfs.Mount(ctx, g.c, "/"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		g.c.Close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		cancel()
		<-done
		a.Close()
		b.Close()
		s.Close()
	})
	return g
}

func TestFiles(t *testing.T) {
	for _, version := range []int{1, 2} {
		t.Run(fmt.Sprint("version ", version), func(t *testing.T) {
			g := start(t, version)
			n, ctx := g.n, g.ctx
			rnd := rand.NewChaCha8([32]byte{byte(version)})
			for _, size := range []int{0, 1, 7, 512, 4000, 4096, 100_001, 1 << 20, 5<<20 + 13} {
				name := fmt.Sprintf("f%d \xff\xc3\xa9", size) // names are any bytes
				data := make([]byte, size)
				_, _ = rnd.Read(data)
				fh, err := n.Create(ctx, n.Root(), name, 0o640)
				if err != nil {
					t.Fatal(err)
				}
				if k, err := n.Put(ctx, fh, bytes.NewReader(data)); err != nil || k != int64(size) {
					t.Fatalf("put of %d: %d, %v", size, k, err)
				}
				disk, err := os.ReadFile(filepath.Join(g.dir, name))
				if err != nil || !bytes.Equal(disk, data) {
					t.Fatalf("%d bytes: %d on disk, %v", size, len(disk), err)
				}
				i, err := n.Walk(ctx, "/"+name)
				if err != nil || i.Size != uint64(size) || i.Perm != 0o640 || !bytes.Equal(i.Handle, fh) {
					t.Fatalf("%+v, %v", i, err)
				}
				h := sha256.New()
				if k, err := n.Get(ctx, fh, h); err != nil || k != int64(size) || !bytes.Equal(h.Sum(nil), sum(data)) {
					t.Fatalf("get of %d: %d, %v", size, k, err)
				}
				if size > 10 {
					b := make([]byte, 20)
					if k, err := n.ReadAt(ctx, fh, b, uint64(size-10)); k != 10 || err != io.EOF || !bytes.Equal(b[:10], data[size-10:]) {
						t.Fatalf("read at the end: %d, %v", k, err)
					}
				}
			}
			conn, err := g.c.Conn(ctx)
			if err != nil || conn.Version() != version {
				t.Fatal(conn.Version(), err)
			}
			if c := conn.Counters(); c.InlineBytes > 400<<10 {
				t.Errorf("data went inline: %+v", c)
			}
			// READDIRPLUS has room for its longest reply.
			testenv.Mkdir(t, filepath.Join(g.dir, "many"), 0o755)
			for i := range 200 {
				testenv.WriteFile(t, filepath.Join(g.dir, "many", fmt.Sprint(i)), nil, 0o600)
			}
			many, err := n.Walk(ctx, "many")
			if err != nil {
				t.Fatal(err)
			}
			names := 0
			if err := n.List(ctx, many.Handle, func(nfs.Info) error { names++; return nil }); err != nil || names != 200 {
				t.Errorf("%d names, %v", names, err)
			}
			// Write chunks are as long as the longest result, so no result needs another way.
			fh, err := n.Create(ctx, n.Root(), "chunks", 0o640)
			if err != nil {
				t.Fatal(err)
			}
			data := make([]byte, 20_000) // fits in a continued reply
			_, _ = rnd.Read(data)
			if _, err := n.Put(ctx, fh, bytes.NewReader(data)); err != nil {
				t.Fatal(err)
			}
			before, got := conn.Counters().InlineBytes, make([]byte, len(data))
			if k, err := n.ReadAt(ctx, fh, got, 0); k != len(data) || !bytes.Equal(got, data) {
				t.Fatal(k, err)
			}
			if n := conn.Counters().InlineBytes - before; n > 1000 {
				t.Errorf("%d bytes of a READ went inline", n)
			}
		})
	}
}

func sum(b []byte) []byte { s := sha256.Sum256(b); return s[:] }

func TestTree(t *testing.T) {
	g := start(t, 2)
	n, ctx, root := g.n, g.ctx, g.n.Root()
	dir, err := n.Mkdir(ctx, root, "d", 0o755)
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for i := range 1500 {
		name := fmt.Sprintf("entry with a longer name %d", i)
		want = append(want, name)
		testenv.WriteFile(t, filepath.Join(g.dir, "d", name), nil, 0o644)
	}
	var got []string
	if err := n.List(ctx, dir, func(i nfs.Info) error {
		if i.Handle == nil || i.Type != nfsv3.NF3REG {
			t.Errorf("%+v", i)
		}
		got = append(got, i.Name)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("%d entries, not %d", len(got), len(want))
	}

	for _, target := range []string{"d/x", string(bytes.Repeat([]byte("long/"), 700))} {
		fh, err := n.Symlink(ctx, root, "link", target)
		if err != nil {
			t.Fatal(err)
		}
		if s, err := n.Readlink(ctx, fh); err != nil || s != target {
			t.Errorf("%q, %v", s, err)
		}
		if err := n.Remove(ctx, root, "link"); err != nil {
			t.Fatal(err)
		}
		if _, err := n.Getattr(ctx, fh); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("removed: %v", err)
		}
	}

	fh, err := n.Create(ctx, root, "sparse", 0o600)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Truncate(ctx, fh, 1<<33); err != nil {
		t.Fatal(err)
	}
	if i, err := n.Getattr(ctx, fh); err != nil || i.Size != 1<<33 || i.Used > 1<<20 {
		t.Errorf("%+v, %v", i, err)
	}
	if err := n.Rename(ctx, root, "sparse", dir, "moved"); err != nil {
		t.Fatal(err)
	}
	if i, err := n.Walk(ctx, "d/moved"); err != nil || !bytes.Equal(i.Handle, fh) {
		t.Errorf("%+v, %v", i, err)
	}
	for _, c := range []struct {
		name string
		err  error
		want nfsv3.Nfsstat3
	}{
		{"rmdir of a full directory", n.Rmdir(ctx, root, "d"), nfsv3.NFS3ERR_NOTEMPTY},
		{"remove of nothing", n.Remove(ctx, root, "none"), nfsv3.NFS3ERR_NOENT},
		{"remove of a slash", n.Remove(ctx, root, "d/moved"), nfsv3.NFS3ERR_ACCES},
		{"remove of dot dot", n.Remove(ctx, root, ".."), nfsv3.NFS3ERR_INVAL},
		{"rename of a long name", n.Rename(ctx, dir, "moved", root, string(make([]byte, 300))), nfsv3.NFS3ERR_ACCES},
		{"truncate of a directory", n.Truncate(ctx, dir, 0), nfsv3.NFS3ERR_ISDIR},
		{"bytes that are no handle", func() error { _, err := n.Getattr(ctx, append([]byte{3, 8}, make([]byte, 21)...)); return err }(), nfsv3.NFS3ERR_BADHANDLE},
		{"a handle that is too short", func() error { _, err := n.Getattr(ctx, root[:17]); return err }(), nfsv3.NFS3ERR_BADHANDLE},
		{"a handle of the version before", func() error { _, err := n.Getattr(ctx, append([]byte{1, 8}, make([]byte, 20)...)); return err }(), nfsv3.NFS3ERR_STALE},
		{"a made-up handle", func() error { _, err := n.Getattr(ctx, append([]byte{2, 8}, make([]byte, 20)...)); return err }(), nfsv3.NFS3ERR_STALE},
		{"a forged handle", func() error {
			b := slices.Clone(root)
			b[8] ^= 1
			_, err := n.Getattr(ctx, b)
			return err
		}(), nfsv3.NFS3ERR_STALE},
		{"reading a FIFO", func() error {
			if err := unix.Mkfifo(filepath.Join(g.dir, "fifo"), 0o666); err != nil {
				return err
			}
			i, err := n.Walk(ctx, "fifo")
			if err == nil {
				_, err = n.ReadAt(ctx, i.Handle, make([]byte, 10), 0)
			}
			return err
		}(), nfsv3.NFS3ERR_INVAL},
		{"truncating a FIFO", func() error {
			i, err := n.Walk(ctx, "fifo")
			if err == nil {
				err = n.Truncate(ctx, i.Handle, 0)
			}
			return err
		}(), nfsv3.NFS3ERR_INVAL},
		{"lookup through a link", func() error {
			if err := os.Symlink("/etc", filepath.Join(g.dir, "etc")); err != nil {
				return err
			}
			_, err := n.Walk(ctx, "etc/passwd")
			return err
		}(), nfsv3.NFS3ERR_NOTDIR},
	} {
		var e *nfs.Error
		if !errors.As(c.err, &e) || e.Status != c.want || e.Status == nfsv3.NFS3ERR_NOTDIR && !strings.HasSuffix(e.Error(), ": not a folder") {
			t.Errorf("%s: %v", c.name, c.err)
		}
	}
	// The root has no parent that clients can reach.
	up, err := n.Lookup(ctx, root, "..")
	if err != nil || !bytes.Equal(up.Handle, root) {
		t.Errorf("..: %v", err)
	}
	if i, err := n.Lookup(ctx, dir, ".."); err != nil || !bytes.Equal(i.Handle, root) {
		t.Errorf("d/..: %v", err)
	}
}

// TestClientGroups checks that a client acts with the supplementary groups of its process, as many as a call has room for.
func TestClientGroups(t *testing.T) {
	g := start(t, 2)
	p := filepath.Join(g.dir, "f")
	if err := errors.Join(os.WriteFile(p, []byte("data"), 0o640), os.Chown(p, 0, 555)); err != nil {
		t.Fatal(err)
	}
	many := []int{555}
	for i := range 2 * rpc.MaxGroups {
		many = append(many, 1000+i)
	}
	for _, c := range []struct {
		groups []int
		want   error
	}{{[]int{7, 555}, nil}, {many, nil}, {[]int{7}, fs.ErrPermission}} {
		var n *nfs.Client
		var err error
		testenv.AsUser(t, 1000, 100, c.groups, func() { n, err = nfs.Mount(g.ctx, g.c, "/") })
		if err != nil {
			t.Fatal(err)
		}
		i, err := n.Walk(g.ctx, "f")
		if err == nil {
			_, err = n.Get(g.ctx, i.Handle, io.Discard)
		}
		if !errors.Is(err, c.want) {
			t.Errorf("groups %v: %v, want %v", c.groups, err, c.want)
		}
	}
}

// TestLongestCall checks that an export takes no data item that is longer than that of the longest WRITE.
func TestLongestCall(t *testing.T) {
	g := start(t, 2)
	fh, err := g.n.Create(g.ctx, g.n.Root(), "f", 0o600)
	if err != nil {
		t.Fatal(err)
	}
	for _, size := range []int{nfs.MaxIO, nfs.MaxIO + 4} {
		data := make([]byte, size)
		_, resp, err := g.c.Do(g.ctx, rpc.Call{Prog: nfs.ProgramNFS, Vers: 3, Proc: pWrite, Cred: (&rpc.Sys{}).Auth()}, func(w *rpc.Writer) {
			w.Opaque(fh)
			w.U64(0)
			w.U32(uint32(size), uint32(nfsv3.UNSTABLE))
			w.Item(data)
		}, rpcrdma.Call{})
		if err == nil {
			resp.Release()
		}
		f, failed := errors.AsType[*session.FailureError](err)
		if size <= nfs.MaxIO && err != nil || size > nfs.MaxIO && (!failed || f.Code != wire.ErrReadChunks) {
			t.Errorf("a WRITE of %d bytes: %v", size, err)
		}
	}
}
