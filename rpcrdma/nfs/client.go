package nfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"

	"github.com/iwarpd/iwarpd/rpcrdma"
	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

// Client accesses a server's tree over RPC-over-RDMA.
type Client struct {
	rpc  *rpcrdma.Client
	cred rpc.Auth
	root []byte
	io   int // maximum bytes per READ or WRITE
}

// Error is an NFS status, as a client gets it and a server returns it. errors.Is matches it with fs.ErrNotExist and similar errors.
type Error struct {
	Op     string
	Status nfsv3.Nfsstat3
}

func (e *Error) Error() string {
	s, ok := statusTexts[e.Status]
	if !ok {
		s, ok = nfsv3.Nfsstat3_name[e.Status]
	}
	if !ok {
		s = fmt.Sprintf("status %d", e.Status)
	}
	return "nfs: " + e.Op + ": " + s
}

// statusTexts has words for the statuses that a user can do something about.
var statusTexts = map[nfsv3.Nfsstat3]string{
	nfsv3.NFS3ERR_PERM:        "not permitted",
	nfsv3.NFS3ERR_NOENT:       "no such file or folder",
	nfsv3.NFS3ERR_IO:          "input/output error of the server's disk",
	nfsv3.NFS3ERR_ACCES:       "permission denied",
	nfsv3.NFS3ERR_EXIST:       "exists already",
	nfsv3.NFS3ERR_NOTDIR:      "not a folder",
	nfsv3.NFS3ERR_ISDIR:       "is a folder",
	nfsv3.NFS3ERR_FBIG:        "file too large",
	nfsv3.NFS3ERR_NOSPC:       "no space left on the server",
	nfsv3.NFS3ERR_ROFS:        "the export is read-only",
	nfsv3.NFS3ERR_NAMETOOLONG: "name too long",
	nfsv3.NFS3ERR_NOTEMPTY:    "folder not empty",
	nfsv3.NFS3ERR_DQUOT:       "disk quota exceeded on the server",
	nfsv3.NFS3ERR_JUKEBOX:     "the server is too busy",
	nfsv3.NFS3ERR_STALE:       "the file was removed, or the server exports another folder now",
}

// Is reports whether e corresponds to an error of package fs.
func (e *Error) Is(target error) bool {
	switch target {
	case fs.ErrNotExist:
		return e.Status == nfsv3.NFS3ERR_NOENT || e.Status == nfsv3.NFS3ERR_STALE
	case fs.ErrExist:
		return e.Status == nfsv3.NFS3ERR_EXIST || e.Status == nfsv3.NFS3ERR_NOTEMPTY
	case fs.ErrPermission:
		return e.Status == nfsv3.NFS3ERR_ACCES || e.Status == nfsv3.NFS3ERR_PERM || e.Status == nfsv3.NFS3ERR_ROFS
	}
	return false
}

// Mount returns a client for an export, whose root it gets by MOUNT over the same connection.
func Mount(ctx context.Context, c *rpcrdma.Client, dir string) (*Client, error) {
	host, _ := os.Hostname()
	sys := rpc.Sys{Machine: host[:min(len(host), 255)], UID: uint32(os.Geteuid()), GID: uint32(os.Getegid())}
	groups, err := os.Getgroups()
	if err != nil {
		return nil, fmt.Errorf("nfs: groups: %w", err)
	}
	for _, g := range groups[:min(len(groups), rpc.MaxGroups)] {
		sys.GIDs = append(sys.GIDs, uint32(g))
	}
	n := &Client{rpc: c, cred: sys.Auth(), io: MaxIO}
	r, resp, err := c.Do(ctx, rpc.Call{Prog: ProgramMount, Vers: 3, Proc: 1, Cred: n.cred}, func(w *rpc.Writer) { w.String(dir) }, rpcrdma.Call{Again: true})
	if err != nil {
		return nil, err
	}
	defer resp.Release()
	if st := r.U32(); st != 0 {
		return nil, &Error{"mount " + dir, nfsv3.Nfsstat3(st)}
	}
	n.root = append([]byte(nil), r.Opaque(nfsv3.NFS3_FHSIZE)...)
	if r.Err() != nil {
		return nil, r.Err()
	}
	rr, err := n.call(ctx, "fsinfo", 19, func(w *rpc.Writer) { w.Opaque(n.root) }, rpcrdma.Call{Again: true})
	if err != nil {
		return nil, err
	}
	defer rr.release()
	skipAttr(rr.Reader)
	rt := rr.U32()
	rr.U32()
	rr.U32()
	wt := rr.U32()
	n.io = int(min(rt, wt, MaxIO))
	if rr.Err() != nil || n.io == 0 {
		return nil, rpc.ErrXDR
	}
	return n, nil
}

// Root returns the handle of the export.
func (n *Client) Root() []byte { return n.root }

// reply is a Reader after a status of NFS3_OK.
type reply struct {
	*rpc.Reader
	resp *rpcrdma.Response
}

func (r *reply) release() { r.resp.Release() }

// A call that the server is too busy for is made again after busyWait, which doubles up to maxBusyWait.
// It fails after busyLimit.
const busyWait, maxBusyWait, busyLimit = 100 * time.Millisecond, 5 * time.Second, 2 * time.Minute

// call makes a call, and repeats it as a new one while the server is too busy for it (RFC 1813 section
// 2.6, NFS3ERR_JUKEBOX).
func (n *Client) call(ctx context.Context, op string, proc uint32, args func(*rpc.Writer), q rpcrdma.Call) (*reply, error) {
	began := time.Now()
	for wait := busyWait; ; wait = min(2*wait, maxBusyWait) {
		r, err := n.once(ctx, op, proc, args, q)
		if e, ok := errors.AsType[*Error](err); !ok || e.Status != nfsv3.NFS3ERR_JUKEBOX || time.Since(began) > busyLimit {
			return r, err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (n *Client) once(ctx context.Context, op string, proc uint32, args func(*rpc.Writer), q rpcrdma.Call) (*reply, error) {
	r, resp, err := n.rpc.Do(ctx, rpc.Call{Prog: ProgramNFS, Vers: 3, Proc: proc, Cred: n.cred}, args, q)
	if err != nil {
		return nil, fmt.Errorf("nfs: %s: %w", op, err)
	}
	st := r.U32()
	switch {
	case r.Err() != nil:
		err = fmt.Errorf("nfs: %s: %w", op, r.Err())
	case st != 0:
		err = &Error{op, nfsv3.Nfsstat3(st)}
	}
	if err != nil {
		resp.Release()
		return nil, err
	}
	return &reply{r, resp}, nil
}

// Info describes an object.
type Info struct {
	Name       string
	Handle     []byte
	Type       nfsv3.Ftype3
	Perm       uint32
	Nlink      uint32
	UID, GID   uint32
	Size, Used uint64
	Fileid     uint64
	Mtime      time.Time
}

func readAttr(r *rpc.Reader) (i Info) {
	i.Type, i.Perm, i.Nlink, i.UID, i.GID = nfsv3.Ftype3(r.U32()), r.U32(), r.U32(), r.U32(), r.U32()
	i.Size, i.Used = r.U64(), r.U64()
	r.U64()
	r.U64()
	i.Fileid = r.U64()
	r.U64()
	i.Mtime = time.Unix(int64(r.U32()), int64(r.U32()))
	r.U64()
	return i
}

// skipAttr reads a post_op_attr.
func skipAttr(r *rpc.Reader) (i Info, ok bool) {
	if r.U32() == 0 {
		return i, false
	}
	return readAttr(r), true
}

func skipWcc(r *rpc.Reader) {
	if r.U32() != 0 {
		r.U64()
		r.U64()
		r.U64()
	}
	skipAttr(r)
}

// Getattr performs GETATTR.
func (n *Client) Getattr(ctx context.Context, fh []byte) (Info, error) {
	r, err := n.call(ctx, "getattr", 1, func(w *rpc.Writer) { w.Opaque(fh) }, rpcrdma.Call{Again: true})
	if err != nil {
		return Info{}, err
	}
	defer r.release()
	i := readAttr(r.Reader)
	i.Handle = fh
	return i, r.Err()
}

// Lookup performs LOOKUP.
func (n *Client) Lookup(ctx context.Context, dir []byte, name string) (Info, error) {
	r, err := n.call(ctx, "lookup "+name, 3, func(w *rpc.Writer) { w.Opaque(dir); w.String(name) }, rpcrdma.Call{Again: true})
	if err != nil {
		return Info{}, err
	}
	defer r.release()
	fh := append([]byte(nil), r.Opaque(nfsv3.NFS3_FHSIZE)...)
	i, ok := skipAttr(r.Reader)
	if r.Err() != nil {
		return i, r.Err()
	}
	if !ok {
		return n.Getattr(ctx, fh)
	}
	i.Name, i.Handle = name, fh
	return i, nil
}

// Walk looks up a path, starting at the root. It does not follow symbolic links.
func (n *Client) Walk(ctx context.Context, p string) (Info, error) {
	i := Info{Handle: n.root, Type: nfsv3.NF3DIR, Name: "/"}
	for name := range strings.SplitSeq(strings.Trim(path.Clean("/"+p), "/"), "/") {
		if name == "" {
			i, err := n.Getattr(ctx, n.root)
			i.Name = "/"
			return i, err
		}
		var err error
		if i, err = n.Lookup(ctx, i.Handle, name); err != nil {
			return i, err
		}
	}
	return i, nil
}

// List calls f for each entry of a directory except "." and "..".
func (n *Client) List(ctx context.Context, dir []byte, f func(Info) error) error {
	var cookie, verf uint64
	seen := make(map[uint64]bool) // cookies at which a reply began
	for !seen[cookie] {
		seen[cookie] = true
		r, err := n.call(ctx, "readdirplus", 17, func(w *rpc.Writer) {
			w.Opaque(dir)
			w.U64(cookie)
			w.U64(verf)
			w.U32(maxDir/4, maxDir)
		}, rpcrdma.Call{Reply: maxDir + 512, Again: true})
		if err != nil {
			return err
		}
		skipAttr(r.Reader)
		verf = r.U64()
		for r.U32() == 1 {
			id, name := r.U64(), r.String(maxName)
			cookie = r.U64()
			i, _ := skipAttr(r.Reader)
			i.Fileid, i.Name = id, name
			if r.U32() == 1 {
				i.Handle = append([]byte(nil), r.Opaque(nfsv3.NFS3_FHSIZE)...)
			}
			if r.Err() != nil {
				break
			}
			if name == "." || name == ".." {
				continue
			}
			if err := f(i); err != nil {
				r.release()
				return err
			}
		}
		eof := r.U32()
		err = r.Err()
		r.release()
		if err != nil || eof == 1 {
			return err
		}
	}
	return errors.New("nfs: readdirplus: the server lists the same entries again")
}

// Readlink performs READLINK.
func (n *Client) Readlink(ctx context.Context, fh []byte) (string, error) {
	r, err := n.call(ctx, "readlink", 5, func(w *rpc.Writer) { w.Opaque(fh) }, rpcrdma.Call{Results: []int{4096}, Reply: 256, Again: true})
	if err != nil {
		return "", err
	}
	defer r.release()
	skipAttr(r.Reader)
	s := string(r.Result(4096))
	return s, r.Err()
}

// read performs a READ of at most n.io bytes. data is valid until release.
func (n *Client) read(ctx context.Context, fh []byte, off uint64, count int) (data []byte, eof bool, release func(), err error) {
	r, err := n.call(ctx, "read", 6, func(w *rpc.Writer) {
		w.Opaque(fh)
		w.U64(off)
		w.U32(uint32(count))
	}, rpcrdma.Call{Results: []int{count}, Reply: 256, Again: true})
	if err != nil {
		return nil, false, nil, err
	}
	skipAttr(r.Reader)
	c := r.U32()
	eof = r.U32() == 1
	data = r.Result(count)
	if r.Err() != nil || int(c) != len(data) {
		r.release()
		return nil, false, nil, rpc.ErrXDR
	}
	return data, eof, r.release, nil
}

// ReadAt reads at most len(b) bytes.
func (n *Client) ReadAt(ctx context.Context, fh []byte, b []byte, off uint64) (int, error) {
	done := 0
	for done < len(b) {
		d, eof, release, err := n.read(ctx, fh, off+uint64(done), min(len(b)-done, n.io))
		if err != nil {
			return done, err
		}
		done += copy(b[done:], d)
		release()
		if eof || len(d) == 0 {
			return done, io.EOF
		}
	}
	return done, nil
}

// write performs an unstable WRITE of at most n.io bytes. committed means that no COMMIT is needed.
func (n *Client) write(ctx context.Context, fh []byte, off uint64, b []byte) (count int, committed bool, verf uint64, err error) {
	r, err := n.call(ctx, "write", 7, func(w *rpc.Writer) {
		w.Opaque(fh)
		w.U64(off)
		w.U32(uint32(len(b)), uint32(nfsv3.UNSTABLE))
		w.Item(b)
	}, rpcrdma.Call{Reply: 512, Again: true})
	if err != nil {
		return 0, false, 0, err
	}
	defer r.release()
	skipWcc(r.Reader)
	count = int(r.U32())
	committed = nfsv3.StableHow(r.U32()) == nfsv3.FILE_SYNC
	verf = r.U64()
	if r.Err() != nil || count > len(b) {
		return 0, false, 0, rpc.ErrXDR
	}
	return count, committed, verf, nil
}

// Commit performs COMMIT for a whole file.
func (n *Client) Commit(ctx context.Context, fh []byte) (verf uint64, err error) {
	r, err := n.call(ctx, "commit", 21, func(w *rpc.Writer) {
		w.Opaque(fh)
		w.U64(0)
		w.U32(0)
	}, rpcrdma.Call{Again: true})
	if err != nil {
		return 0, err
	}
	defer r.release()
	skipWcc(r.Reader)
	return r.U64(), r.Err()
}

// Create performs an unchecked CREATE: an existing file is truncated.
func (n *Client) Create(ctx context.Context, dir []byte, name string, perm uint32) ([]byte, error) {
	return n.make(ctx, "create "+name, 8, dir, name, func(w *rpc.Writer) {
		w.U32(0, 1, perm, 0, 0, 1)
		w.U64(0)
		w.U32(0, 0)
	})
}

// Mkdir performs MKDIR.
func (n *Client) Mkdir(ctx context.Context, dir []byte, name string, perm uint32) ([]byte, error) {
	return n.make(ctx, "mkdir "+name, 9, dir, name, func(w *rpc.Writer) { w.U32(1, perm, 0, 0, 0, 0, 0) })
}

// Symlink performs SYMLINK.
func (n *Client) Symlink(ctx context.Context, dir []byte, name, target string) ([]byte, error) {
	return n.make(ctx, "symlink "+name, 10, dir, name, func(w *rpc.Writer) {
		w.U32(0, 0, 0, 0, 0, 0)
		w.Item([]byte(target))
	})
}

func (n *Client) make(ctx context.Context, op string, proc uint32, dir []byte, name string, rest func(*rpc.Writer)) ([]byte, error) {
	r, err := n.call(ctx, op, proc, func(w *rpc.Writer) { w.Opaque(dir); w.String(name); rest(w) }, rpcrdma.Call{})
	if err != nil {
		return nil, err
	}
	defer r.release()
	if r.U32() == 1 {
		fh := append([]byte(nil), r.Opaque(nfsv3.NFS3_FHSIZE)...)
		return fh, r.Err()
	}
	i, err := n.Lookup(ctx, dir, name)
	return i.Handle, err
}

// Remove performs REMOVE.
func (n *Client) Remove(ctx context.Context, dir []byte, name string) error {
	return n.change(ctx, "remove "+name, 12, func(w *rpc.Writer) { w.Opaque(dir); w.String(name) })
}

// Rmdir performs RMDIR.
func (n *Client) Rmdir(ctx context.Context, dir []byte, name string) error {
	return n.change(ctx, "rmdir "+name, 13, func(w *rpc.Writer) { w.Opaque(dir); w.String(name) })
}

// Rename performs RENAME.
func (n *Client) Rename(ctx context.Context, from []byte, name string, to []byte, as string) error {
	return n.change(ctx, "rename "+name, 14, func(w *rpc.Writer) { w.Opaque(from); w.String(name); w.Opaque(to); w.String(as) })
}

// Truncate sets the size by SETATTR.
func (n *Client) Truncate(ctx context.Context, fh []byte, size uint64) error {
	return n.change(ctx, "setattr", 2, func(w *rpc.Writer) {
		w.Opaque(fh)
		w.U32(0, 0, 0, 1)
		w.U64(size)
		w.U32(0, 0, 0)
	})
}

func (n *Client) change(ctx context.Context, op string, proc uint32, args func(*rpc.Writer)) error {
	r, err := n.call(ctx, op, proc, args, rpcrdma.Call{})
	if err == nil {
		r.release()
	}
	return err
}
