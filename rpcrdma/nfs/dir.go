package nfs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
	"github.com/iwarpd/iwarpd/rpcrdma/rpc"
)

const (
	maxName = 255
	maxDir  = 1 << 16 // maximum bytes of a reply with entries
)

// entryName checks the name of a directory entry to be created or removed.
func entryName(b []byte) (string, error) {
	switch {
	case len(b) == 0 || bytes.ContainsAny(b, "/\x00"):
		return "", unix.EACCES
	case len(b) > maxName:
		return "", unix.ENAMETOOLONG
	case string(b) == "." || string(b) == "..":
		return "", unix.EINVAL
	}
	return string(b), nil
}

// directory opens the directory of a request, if the caller may search it.
func (s *Server) directory(c *cred, fh nfsv3.NfsFh3) (object, error) {
	o, err := s.object(fh, unix.O_PATH)
	if err != nil {
		return o, err
	}
	if !o.dir() {
		return o, unix.ENOTDIR
	}
	if !s.may(c, &o, mayExec) {
		return o, unix.EACCES
	}
	return o, nil
}

// NfsV3Nfsproc3Lookup implements LOOKUP.
func (s *Server) NfsV3Nfsproc3Lookup(ctx context.Context, a *nfsv3.Lookup3args) (nfsv3.Lookup3res, error) {
	c := &exchangeOf(ctx).cred
	d, err := s.directory(c, a.What.Dir)
	defer d.close()
	var fh []byte
	fd := -1
	if err == nil {
		switch name := string(a.What.Name); name {
		case ".":
			fd, fh, err = s.tree.find(d.fd, a.What.Dir.Data, ".")
		case "..":
			if s.tree.isRoot(&d.st) {
				fd, fh, err = s.tree.find(d.fd, a.What.Dir.Data, ".")
			} else if fd, err = s.parent(d.fd); err == nil {
				fh, err = s.tree.handle(fd, "")
			}
		default:
			if name, err = entryName(a.What.Name); err == nil {
				fd, fh, err = s.tree.find(d.fd, a.What.Dir.Data, name)
			}
		}
	}
	if fd >= 0 {
		defer unix.Close(fd)
	}
	if err != nil {
		return &nfsv3.Lookup3res_default{Status: status(err), Resfail: nfsv3.Lookup3resfail{DirAttributes: s.post(d.fd)}}, nil
	}
	return &nfsv3.Lookup3res_NFS3_OK{Resok: nfsv3.Lookup3resok{Object: nfsv3.NfsFh3{Data: fh}, ObjAttributes: s.post(fd), DirAttributes: s.post(d.fd)}}, nil
}

// maxDepth bounds the depth of a directory whose parent can be looked up, and of what can be opened
// by name.
const maxDepth = 1024

// parent opens the parent of a directory. It returns ESTALE if the directory was moved out of the
// export, whose parents must not be exposed.
func (s *Server) parent(dir int) (fd int, err error) {
	if fd, err = unix.Openat(dir, "..", unix.O_PATH|unix.O_CLOEXEC, 0); err == unix.ENOENT { // outside of the root of its mount
		return -1, unix.ESTALE
	} else if err != nil {
		return -1, err
	}
	up, err := unix.Dup(fd)
	for range maxDepth {
		var st, above unix.Stat_t
		if err != nil || unix.Fstat(up, &st) != nil {
			break
		}
		if s.tree.isRoot(&st) {
			unix.Close(up)
			return fd, nil
		}
		next, nerr := unix.Openat(up, "..", unix.O_PATH|unix.O_CLOEXEC, 0)
		unix.Close(up)
		up, err = next, nerr
		if err != nil || unix.Fstat(up, &above) != nil || above.Ino == st.Ino && above.Dev == st.Dev { // the root directory
			break
		}
	}
	if up >= 0 {
		unix.Close(up)
	}
	unix.Close(fd)
	return -1, unix.ESTALE
}

// changing opens a directory for changes of its entries, and so that these can be committed.
func (s *Server) changing(fh nfsv3.NfsFh3) (object, error) {
	d, err := s.object(fh, unix.O_RDONLY|unix.O_DIRECTORY)
	if err == unix.EACCES { // as a plain user, who may still change it
		return s.object(fh, unix.O_PATH)
	}
	return d, err
}

// change calls f to change the entry name of a directory, and commits the change to disk. f gets the
// open directory, which is locked. If also is not nil, it is changed too.
func (s *Server) change(dir nfsv3.NfsFh3, name []byte, also *object, f func(d *object, name string) error) (w nfsv3.WccData, err error) {
	if s.cfg.ReadOnly {
		return noWcc(), unix.EROFS
	}
	n, nerr := entryName(name)
	d, err := s.changing(dir)
	if err != nil {
		return noWcc(), err
	}
	if nerr == nil && s.tree.deep(dir.Data) {
		nerr = unix.ENAMETOOLONG
	}
	defer d.close()
	l := []*object{&d}
	if also != nil {
		l = append(l, also)
	}
	unlock := s.lock(l...)
	for _, o := range l {
		err = errors.Join(err, s.refresh(o))
	}
	if err == nil {
		err = nerr
	}
	if err == nil {
		err = f(&d, n)
	}
	w = s.wcc(&d)
	unlock()
	if err == nil {
		err = s.sync(d.fd)
	}
	return w, err
}

// made is the result of CREATE and similar procedures.
type made struct {
	obj  nfsv3.PostOpFh3
	attr nfsv3.PostOpAttr
}

// create calls f on behalf of c to make the entry of a directory, sets the attributes that f returns,
// if any, and commits the object to disk. f reports whether the object is new. A new object whose
// attributes cannot be set is removed.
func (s *Server) create(c *cred, where *nfsv3.Diropargs3, f func(dir int, name string) (a *nfsv3.Sattr3, isNew bool, err error)) (m made, w nfsv3.WccData, err error) {
	o := object{fd: -1}
	defer o.close()
	var fh []byte
	w, err = s.change(where.Dir, where.Name, nil, func(d *object, name string) error {
		var a *nfsv3.Sattr3
		isNew := false
		err := s.as(c, func() (err error) { a, isNew, err = f(d.fd, name); return err })
		if err == nil {
			o.fd, fh, err = s.tree.find(d.fd, where.Dir.Data, name)
		}
		if err == nil {
			err = s.refresh(&o)
		}
		if err == nil && a != nil {
			err = s.setattr(c, &o, a)
		}
		if err != nil && isNew {
			_ = s.as(c, func() error { // another may have put its own object in the place of the new one
				err := s.tree.unlink(d.fd, where.Dir.Data, name, 0)
				if err == unix.EISDIR {
					err = s.tree.unlink(d.fd, where.Dir.Data, name, unix.AT_REMOVEDIR)
				}
				return err
			})
		}
		return err
	})
	if err == nil {
		err = s.syncObject(&o)
	}
	return made{&nfsv3.PostOpFh3_TRUE{Handle: nfsv3.NfsFh3{Data: fh}}, s.post(o.fd)}, w, err
}

// exclusive stores the verifier of an exclusive CREATE in the times of the file, which the client
// sets afterwards.
func exclusive(verf [8]byte) [2]unix.Timespec {
	return [2]unix.Timespec{{Sec: int64(binary.BigEndian.Uint32(verf[:]) &^ (1 << 31))}, {Sec: int64(binary.BigEndian.Uint32(verf[4:]) &^ (1 << 31))}}
}

// NfsV3Nfsproc3Create implements CREATE.
func (s *Server) NfsV3Nfsproc3Create(ctx context.Context, a *nfsv3.Create3args) (nfsv3.Create3res, error) {
	c := &exchangeOf(ctx).cred
	m, w, err := s.create(c, &a.Where, func(dir int, name string) (attrs *nfsv3.Sattr3, isNew bool, err error) {
		m := uint32(0o600) // a client that gives none sets it later
		switch how := a.How.(type) {
		case *nfsv3.Createhow3_UNCHECKED:
			attrs = &how.ObjAttributes
		case *nfsv3.Createhow3_GUARDED:
			attrs = &how.ObjAttributes
		}
		if attrs != nil {
			attrs, m = left(c, *attrs), mode(attrs, m)
		}
		fd, err := unix.Openat(dir, name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, m)
		if err == nil {
			defer unix.Close(fd)
			if how, ok := a.How.(*nfsv3.Createhow3_EXCLUSIVE); ok {
				ts := exclusive(how.Verf)
				err = unix.UtimesNanoAt(unix.AT_FDCWD, proc(fd), ts[:], 0)
			}
			return attrs, true, err
		}
		if err != unix.EEXIST {
			return nil, false, err
		}
		var st unix.Stat_t
		if err := unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return nil, false, err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFREG {
			return nil, false, unix.EEXIST
		}
		switch how := a.How.(type) {
		case *nfsv3.Createhow3_UNCHECKED:
			// The file exists: only a requested size is set.
			return &nfsv3.Sattr3{
				Mode: &nfsv3.SetMode3_default{}, Uid: &nfsv3.SetUid3_default{}, Gid: &nfsv3.SetGid3_default{},
				Size: how.ObjAttributes.Size, Atime: &nfsv3.SetAtime_default{}, Mtime: &nfsv3.SetMtime_default{},
			}, false, nil
		case *nfsv3.Createhow3_EXCLUSIVE:
			if ts := exclusive(how.Verf); st.Atim.Sec == ts[0].Sec && st.Mtim.Sec == ts[1].Sec {
				return nil, false, nil
			}
		}
		return nil, false, unix.EEXIST
	})
	if err != nil {
		return &nfsv3.Create3res_default{Status: status(err), Resfail: nfsv3.Create3resfail{DirWcc: w}}, nil
	}
	return &nfsv3.Create3res_NFS3_OK{Resok: nfsv3.Create3resok{Obj: m.obj, ObjAttributes: m.attr, DirWcc: w}}, nil
}

// NfsV3Nfsproc3Mkdir implements MKDIR.
func (s *Server) NfsV3Nfsproc3Mkdir(ctx context.Context, a *nfsv3.Mkdir3args) (nfsv3.Mkdir3res, error) {
	c := &exchangeOf(ctx).cred
	m, w, err := s.create(c, &a.Where, func(dir int, name string) (*nfsv3.Sattr3, bool, error) {
		err := unix.Mkdirat(dir, name, mode(&a.Attributes, 0o755))
		return left(c, a.Attributes), err == nil, err
	})
	if err != nil {
		return &nfsv3.Mkdir3res_default{Status: status(err), Resfail: nfsv3.Mkdir3resfail{DirWcc: w}}, nil
	}
	return &nfsv3.Mkdir3res_NFS3_OK{Resok: nfsv3.Mkdir3resok{Obj: m.obj, ObjAttributes: m.attr, DirWcc: w}}, nil
}

// NfsV3Nfsproc3Symlink implements SYMLINK.
func (s *Server) NfsV3Nfsproc3Symlink(ctx context.Context, a *nfsv3.Symlink3args) (nfsv3.Symlink3res, error) {
	c := &exchangeOf(ctx).cred
	m, w, err := s.create(c, &a.Where, func(dir int, name string) (*nfsv3.Sattr3, bool, error) {
		if len(a.Symlink.SymlinkData) == 0 || bytes.IndexByte(a.Symlink.SymlinkData, 0) >= 0 {
			return nil, false, unix.EINVAL
		}
		err := unix.Symlinkat(string(a.Symlink.SymlinkData), dir, name)
		return left(c, a.Symlink.SymlinkAttributes), err == nil, err
	})
	if err != nil {
		return &nfsv3.Symlink3res_default{Status: status(err), Resfail: nfsv3.Symlink3resfail{DirWcc: w}}, nil
	}
	return &nfsv3.Symlink3res_NFS3_OK{Resok: nfsv3.Symlink3resok{Obj: m.obj, ObjAttributes: m.attr, DirWcc: w}}, nil
}

// NfsV3Nfsproc3Mknod implements MKNOD.
func (s *Server) NfsV3Nfsproc3Mknod(ctx context.Context, a *nfsv3.Mknod3args) (nfsv3.Mknod3res, error) {
	c := &exchangeOf(ctx).cred
	var attrs *nfsv3.Sattr3
	typ, dev := uint32(0), nfsv3.Specdata3{}
	switch n := a.What.(type) {
	case *nfsv3.Mknoddata3_NF3CHR:
		attrs, typ, dev = &n.Device.DevAttributes, unix.S_IFCHR, n.Device.Spec
	case *nfsv3.Mknoddata3_NF3BLK:
		attrs, typ, dev = &n.Device.DevAttributes, unix.S_IFBLK, n.Device.Spec
	case *nfsv3.Mknoddata3_NF3SOCK:
		attrs, typ = &n.PipeAttributes, unix.S_IFSOCK
	case *nfsv3.Mknoddata3_NF3FIFO:
		attrs, typ = &n.PipeAttributes, unix.S_IFIFO
	}
	if attrs == nil {
		return &nfsv3.Mknod3res_default{Status: nfsv3.NFS3ERR_BADTYPE, Resfail: nfsv3.Mknod3resfail{DirWcc: noWcc()}}, nil
	}
	m, w, err := s.create(c, &a.Where, func(dir int, name string) (*nfsv3.Sattr3, bool, error) {
		n := unix.Mkdev(dev.Specdata1, dev.Specdata2)
		if n > math.MaxUint32 { // mknod would make another device: it takes 12 bits of the major number, and 20 of the minor
			return nil, false, unix.EINVAL
		}
		err := unix.Mknodat(dir, name, typ|mode(attrs, 0o644), int(n))
		return left(c, *attrs), err == nil, err
	})
	if err != nil {
		return &nfsv3.Mknod3res_default{Status: status(err), Resfail: nfsv3.Mknod3resfail{DirWcc: w}}, nil
	}
	return &nfsv3.Mknod3res_NFS3_OK{Resok: nfsv3.Mknod3resok{Obj: m.obj, ObjAttributes: m.attr, DirWcc: w}}, nil
}

// remove removes a directory entry on behalf of c.
func (s *Server) remove(c *cred, what *nfsv3.Diropargs3, flags int) (nfsv3.WccData, error) {
	return s.change(what.Dir, what.Name, nil, func(d *object, name string) error {
		return s.as(c, func() error { return s.tree.unlink(d.fd, what.Dir.Data, name, flags) })
	})
}

// NfsV3Nfsproc3Remove implements REMOVE.
func (s *Server) NfsV3Nfsproc3Remove(ctx context.Context, a *nfsv3.Remove3args) (nfsv3.Remove3res, error) {
	w, err := s.remove(&exchangeOf(ctx).cred, &a.Object, 0)
	if err != nil {
		return &nfsv3.Remove3res_default{Status: status(err), Resfail: nfsv3.Remove3resfail{DirWcc: w}}, nil
	}
	return &nfsv3.Remove3res_NFS3_OK{Resok: nfsv3.Remove3resok{DirWcc: w}}, nil
}

// NfsV3Nfsproc3Rmdir implements RMDIR.
func (s *Server) NfsV3Nfsproc3Rmdir(ctx context.Context, a *nfsv3.Rmdir3args) (nfsv3.Rmdir3res, error) {
	w, err := s.remove(&exchangeOf(ctx).cred, &a.Object, unix.AT_REMOVEDIR)
	if err != nil {
		return &nfsv3.Rmdir3res_default{Status: status(err), Resfail: nfsv3.Rmdir3resfail{DirWcc: w}}, nil
	}
	return &nfsv3.Rmdir3res_NFS3_OK{Resok: nfsv3.Rmdir3resok{DirWcc: w}}, nil
}

// NfsV3Nfsproc3Rename implements RENAME.
func (s *Server) NfsV3Nfsproc3Rename(ctx context.Context, a *nfsv3.Rename3args) (nfsv3.Rename3res, error) {
	c := &exchangeOf(ctx).cred
	from := noWcc()
	to := noWcc()
	name, err := entryName(a.To.Name)
	if err == nil {
		to, err = s.rename(c, a, name, &from)
	}
	if err != nil {
		return &nfsv3.Rename3res_default{Status: status(err), Resfail: nfsv3.Rename3resfail{FromdirWcc: from, TodirWcc: to}}, nil
	}
	return &nfsv3.Rename3res_NFS3_OK{Resok: nfsv3.Rename3resok{FromdirWcc: from, TodirWcc: to}}, nil
}

// rename performs a RENAME to the entry name.
func (s *Server) rename(c *cred, a *nfsv3.Rename3args, as string, from *nfsv3.WccData) (to nfsv3.WccData, err error) {
	to = noWcc()
	t, err := s.changing(a.To.Dir)
	if err != nil {
		return to, err
	}
	defer t.close()
	if s.tree.deep(a.To.Dir.Data) {
		return to, unix.ENAMETOOLONG
	}
	*from, err = s.change(a.From.Dir, a.From.Name, &t, func(d *object, name string) error {
		err := s.as(c, func() error { return s.tree.rename(d.fd, a.From.Dir.Data, name, t.fd, a.To.Dir.Data, as) })
		to = s.wcc(&t)
		return err
	})
	if err == nil && !bytes.Equal(a.To.Dir.Data, a.From.Dir.Data) { // change has committed the one
		err = s.sync(t.fd)
	}
	return to, err
}

// NfsV3Nfsproc3Link implements LINK.
func (s *Server) NfsV3Nfsproc3Link(ctx context.Context, a *nfsv3.Link3args) (nfsv3.Link3res, error) {
	c := &exchangeOf(ctx).cred
	w := noWcc()
	o, err := s.object(a.File, unix.O_PATH)
	defer o.close()
	if err == nil {
		w, err = s.change(a.Link.Dir, a.Link.Name, nil, func(d *object, name string) error {
			if o.dir() {
				return unix.EINVAL
			}
			// Use its path in /proc: AT_EMPTY_PATH requires CAP_DAC_READ_SEARCH, which
			// only root has.
			defer s.tree.still()()
			err := s.as(c, func() error { return unix.Linkat(unix.AT_FDCWD, proc(o.fd), d.fd, name, unix.AT_SYMLINK_FOLLOW) })
			if err == nil {
				s.tree.learn(a.File.Data, a.Link.Dir.Data, name)
			}
			return err
		})
	}
	if err != nil {
		return &nfsv3.Link3res_default{Status: status(err), Resfail: nfsv3.Link3resfail{FileAttributes: s.post(o.fd), LinkdirWcc: w}}, nil
	}
	return &nfsv3.Link3res_NFS3_OK{Resok: nfsv3.Link3resok{FileAttributes: s.post(o.fd), LinkdirWcc: w}}, nil
}

// entry is a directory entry. cookie is the position of the next one.
type entry struct {
	ino, cookie uint64
	name        string
}

// errCookie means that a cookie is not valid for its directory, errTooSmall that no entry fits in the reply.
var (
	errCookie   = &Error{"list", nfsv3.NFS3ERR_BAD_COOKIE}
	errTooSmall = &Error{"list", nfsv3.NFS3ERR_TOOSMALL}
)

// entries calls f for each entry of d from cookie on, until f returns false because the entry does not fit. It reports
// whether the end was reached. The root is its own parent: the directory above is not exported.
func (s *Server) entries(d *object, cookie uint64, f func(e *entry) bool) (end bool, err error) {
	root := s.tree.isRoot(&d.st)
	if _, err := unix.Seek(d.fd, int64(cookie), unix.SEEK_SET); err == unix.EINVAL {
		return false, errCookie
	} else if err != nil {
		return false, err
	}
	buf := make([]byte, 1<<15)
	full := error(errTooSmall) // until an entry has fit
	for {
		n, err := unix.Getdents(d.fd, buf)
		if err == unix.ENOENT { // it was removed, and a program has it open
			err = unix.ESTALE
		}
		if err != nil {
			return false, err
		}
		if n <= 0 {
			return true, nil
		}
		for b := buf[:n]; len(b) >= 19; {
			size := int(binary.NativeEndian.Uint16(b[16:]))
			if size < 19 || size > len(b) {
				return false, unix.EIO
			}
			name, _, _ := bytes.Cut(b[19:size], []byte{0})
			e := entry{binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint64(b[8:]), string(name)}
			if root && e.name == ".." {
				e.ino = d.st.Ino
			}
			if !f(&e) {
				return false, full
			}
			full, b = nil, b[size:]
		}
	}
}

// list opens a directory for reading.
func (s *Server) list(ctx context.Context, fh nfsv3.NfsFh3) (object, error) {
	d, err := s.object(fh, unix.O_RDONLY|unix.O_DIRECTORY)
	if err == nil && !s.may(&exchangeOf(ctx).cred, &d, mayRead) {
		err = unix.EACCES
	}
	return d, err
}

// NfsV3Nfsproc3Readdir implements READDIR.
func (s *Server) NfsV3Nfsproc3Readdir(ctx context.Context, a *nfsv3.Readdir3args) (nfsv3.Readdir3res, error) {
	d, err := s.list(ctx, a.Dir)
	defer d.close()
	ok := nfsv3.Readdir3resok{}
	if err == nil {
		left := int(min(a.Count, maxDir)) - 104 // attributes, verifier, end
		next := &ok.Reply.Entries
		ok.Reply.Eof, err = s.entries(&d, a.Cookie, func(e *entry) bool {
			if left -= 24 + rpc.Pad(len(e.name)); left < 0 {
				return false
			}
			*next = &nfsv3.Entry3{Fileid: e.ino, Name: []byte(e.name), Cookie: e.cookie}
			next = &(*next).Nextentry
			return true
		})
	}
	if err != nil {
		return &nfsv3.Readdir3res_default{Status: status(err), Resfail: nfsv3.Readdir3resfail{DirAttributes: s.post(d.fd)}}, nil
	}
	ok.DirAttributes = s.post(d.fd)
	return &nfsv3.Readdir3res_NFS3_OK{Resok: ok}, nil
}

// NfsV3Nfsproc3Readdirplus implements READDIRPLUS.
func (s *Server) NfsV3Nfsproc3Readdirplus(ctx context.Context, a *nfsv3.Readdirplus3args) (nfsv3.Readdirplus3res, error) {
	d, err := s.list(ctx, a.Dir)
	defer d.close()
	ok := nfsv3.Readdirplus3resok{}
	if err == nil {
		left, names := int(min(a.Maxcount, maxDir))-104, int(min(a.Dircount, maxDir))
		search := s.may(&exchangeOf(ctx).cred, &d, mayExec) // as LOOKUP demands for a handle
		next := &ok.Reply.Entries
		ok.Reply.Eof, err = s.entries(&d, a.Cookie, func(e *entry) bool {
			n := &nfsv3.Entryplus3{Fileid: e.ino, Name: []byte(e.name), Cookie: e.cookie, NameAttributes: noAttr, NameHandle: &nfsv3.PostOpFh3_FALSE{}}
			names -= 24 + rpc.Pad(len(e.name))
			size := 24 + rpc.Pad(len(e.name)) + 8
			// Return nothing about the parent, which may be outside of the export.
			if e.name != ".." && search {
				if fh, st, err := s.tree.entry(&d, a.Dir.Data, e.name); err == nil {
					n.NameAttributes = &nfsv3.PostOpAttr_TRUE{Attributes: fattr(&st)}
					n.NameHandle = &nfsv3.PostOpFh3_TRUE{Handle: nfsv3.NfsFh3{Data: fh}}
					size += 84 + 4 + rpc.Pad(len(fh))
				}
			}
			if left -= size; left < 0 || names < 0 && ok.Reply.Entries != nil {
				return false
			}
			*next = n
			next = &n.Nextentry
			return true
		})
	}
	if err != nil {
		return &nfsv3.Readdirplus3res_default{Status: status(err), Resfail: nfsv3.Readdirplus3resfail{DirAttributes: s.post(d.fd)}}, nil
	}
	ok.DirAttributes = s.post(d.fd)
	return &nfsv3.Readdirplus3res_NFS3_OK{Resok: ok}, nil
}
