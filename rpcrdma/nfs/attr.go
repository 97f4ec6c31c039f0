package nfs

import (
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

func nfstime(t unix.Timespec) nfsv3.Nfstime3 {
	return nfsv3.Nfstime3{Seconds: uint32(t.Sec), Nseconds: uint32(t.Nsec)}
}

func fattr(st *unix.Stat_t) nfsv3.Fattr3 {
	a := nfsv3.Fattr3{
		Mode: st.Mode & 0o7777, Nlink: uint32(st.Nlink), Uid: st.Uid, Gid: st.Gid, Size: uint64(st.Size), Used: uint64(st.Blocks) * 512,
		Rdev: nfsv3.Specdata3{Specdata1: unix.Major(st.Rdev), Specdata2: unix.Minor(st.Rdev)},
		Fsid: st.Dev, Fileid: st.Ino, Atime: nfstime(st.Atim), Mtime: nfstime(st.Mtim), Ctime: nfstime(st.Ctim),
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		a.Type = nfsv3.NF3DIR
	case unix.S_IFLNK:
		a.Type = nfsv3.NF3LNK
	case unix.S_IFBLK:
		a.Type = nfsv3.NF3BLK
	case unix.S_IFCHR:
		a.Type = nfsv3.NF3CHR
	case unix.S_IFSOCK:
		a.Type = nfsv3.NF3SOCK
	case unix.S_IFIFO:
		a.Type = nfsv3.NF3FIFO
	default:
		a.Type = nfsv3.NF3REG
	}
	return a
}

var (
	noAttr   = &nfsv3.PostOpAttr_FALSE{}
	noBefore = &nfsv3.PreOpAttr_FALSE{}
)

// post returns the attributes of fd after a request, or none if fd < 0.
func (s *Server) post(fd int) nfsv3.PostOpAttr {
	var st unix.Stat_t
	if fd < 0 || s.tree.stat(fd, &st) != nil {
		return noAttr
	}
	return &nfsv3.PostOpAttr_TRUE{Attributes: fattr(&st)}
}

// pre returns the attributes for wcc_data before a request.
func pre(st *unix.Stat_t) nfsv3.PreOpAttr {
	return &nfsv3.PreOpAttr_TRUE{Attributes: nfsv3.WccAttr{Size: uint64(st.Size), Mtime: nfstime(st.Mtim), Ctime: nfstime(st.Ctim)}}
}

func noWcc() nfsv3.WccData { return nfsv3.WccData{Before: noBefore, After: noAttr} }

// object is an open file of a request, with its attributes before the request.
type object struct {
	fd int
	st unix.Stat_t
}

// object opens a handle, for its attributes only or with further flags.
func (s *Server) object(fh nfsv3.NfsFh3, flags int) (o object, err error) {
	fd, done, err := s.tree.openAs(fh.Data, flags)
	if err != nil {
		return object{fd: -1}, err
	}
	o.fd = fd
	if err = s.tree.stat(fd, &o.st); err == nil && !done {
		if err = s.reopen(&o, flags); err == nil && o.st.Mode&unix.S_IFMT == unix.S_IFREG {
			at, part := s.tree.typed(fh.Data)
			at.Store(part)
		}
	}
	if err != nil {
		o.close()
	}
	return o, err
}

// reopen opens o with further flags. It must be a file or a directory: opening a device can have side effects.
func (s *Server) reopen(o *object, flags int) error {
	if t := o.st.Mode & unix.S_IFMT; t != unix.S_IFREG && t != unix.S_IFDIR {
		if flags&unix.O_DIRECTORY != 0 {
			return unix.ENOTDIR
		}
		return unix.EINVAL
	}
	fd, err := s.tree.reopen(o.fd, flags)
	if err == nil {
		o.close()
		o.fd = fd
	}
	return err
}

func (o *object) close() {
	if o.fd >= 0 {
		unix.Close(o.fd)
		o.fd = -1
	}
}

// refresh reads the attributes again after the object has been locked.
func (s *Server) refresh(o *object) error { return s.tree.stat(o.fd, &o.st) }

func (o *object) dir() bool { return o.st.Mode&unix.S_IFMT == unix.S_IFDIR }

func (s *Server) wcc(o *object) nfsv3.WccData {
	if o.fd < 0 {
		return noWcc()
	}
	return nfsv3.WccData{Before: pre(&o.st), After: s.post(o.fd)}
}

// syncObject commits a file or directory to disk.
func (s *Server) syncObject(o *object) error {
	if t := o.st.Mode & unix.S_IFMT; s.cfg.Async || t != unix.S_IFREG && t != unix.S_IFDIR {
		return nil
	}
	fd, err := s.tree.reopen(o.fd, unix.O_RDONLY)
	if err == unix.EACCES && !o.dir() { // as a plain user, who may still have written it
		fd, err = s.tree.reopen(o.fd, unix.O_WRONLY)
	}
	switch err {
	case nil:
		defer unix.Close(fd)
		return s.sync(fd)
	case unix.EACCES:
		return s.sync(o.fd)
	}
	return err
}

// proc returns a path to fd for system calls that take no descriptor.
func proc(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// setattr applies a to the object o for c. The size comes first: changing it may clear
// set-user-ID, which the mode then sets.
func (s *Server) setattr(c *cred, o *object, a *nfsv3.Sattr3) error {
	uid, gid := -1, -1
	if u, ok := a.Uid.(*nfsv3.SetUid3_TRUE); ok {
		uid = int(int32(u.Uid))
		if uid == -1 { // chown(2) would change nothing
			return unix.EINVAL
		}
	}
	if g, ok := a.Gid.(*nfsv3.SetGid3_TRUE); ok {
		gid = int(int32(g.Gid))
		if gid == -1 {
			return unix.EINVAL
		}
	}
	fd := -1 // for the size
	z, ok := a.Size.(*nfsv3.SetSize3_TRUE)
	if ok {
		if o.dir() {
			return unix.EISDIR
		}
		if c.uid != 0 && c.uid != o.st.Uid && !s.may(c, o, mayWrite) { // the kernel answers root below
			return unix.EACCES
		}
		if o.st.Mode&unix.S_IFMT != unix.S_IFREG {
			return unix.EINVAL
		}
		if z.Size > 1<<63-1 {
			return unix.EFBIG
		}
		var err error
		if fd, err = s.tree.reopen(o.fd, unix.O_WRONLY); err != nil {
			return err
		}
		defer unix.Close(fd)
	}
	return s.as(c, func() error {
		if fd >= 0 {
			if err := unix.Ftruncate(fd, int64(z.Size)); err != nil {
				return err
			}
		}
		if uid != -1 || gid != -1 {
			if err := unix.Fchownat(o.fd, "", uid, gid, unix.AT_EMPTY_PATH); err != nil {
				return err
			}
		}
		if m, ok := a.Mode.(*nfsv3.SetMode3_TRUE); ok && o.st.Mode&unix.S_IFMT != unix.S_IFLNK { // a symbolic link has no mode
			unlock := s.tree.still()
			err := unix.Fchmodat(unix.AT_FDCWD, proc(o.fd), m.Mode&0o7777, 0)
			unlock()
			if err != nil {
				return err
			}
		}
		return setTimes(o.fd, a)
	})
}

// setTimes sets those times of a file that a has.
func setTimes(fd int, a *nfsv3.Sattr3) error {
	ts := [2]unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Nsec: unix.UTIME_OMIT}}
	switch t := a.Atime.(type) {
	case *nfsv3.SetAtime_SET_TO_CLIENT_TIME:
		ts[0] = timespec(t.Atime)
	default:
		if t != nil && t.GetSetIt() == nfsv3.SET_TO_SERVER_TIME {
			ts[0].Nsec = unix.UTIME_NOW
		}
	}
	switch t := a.Mtime.(type) {
	case *nfsv3.SetMtime_SET_TO_CLIENT_TIME:
		ts[1] = timespec(t.Mtime)
	default:
		if t != nil && t.GetSetIt() == nfsv3.SET_TO_SERVER_TIME {
			ts[1].Nsec = unix.UTIME_NOW
		}
	}
	if ts[0].Nsec == unix.UTIME_OMIT && ts[1].Nsec == unix.UTIME_OMIT {
		return nil
	}
	err := unix.UtimesNanoAt(unix.AT_FDCWD, proc(fd), ts[:], 0)
	if err == unix.EPERM && ts[0].Nsec == unix.UTIME_OMIT && ts[1].Nsec == unix.UTIME_NOW {
		// A client sets this time when a program truncates a file, to which every user who may write the file is
		// entitled. But the kernel lets users other than the owner set only both times at once.
		ts[0].Nsec = unix.UTIME_NOW
		err = unix.UtimesNanoAt(unix.AT_FDCWD, proc(fd), ts[:], 0)
	}
	return err
}

func timespec(t nfsv3.Nfstime3) unix.Timespec {
	return unix.Timespec{Sec: int64(t.Seconds), Nsec: int64(min(t.Nseconds, 999_999_999))}
}

// mode returns the mode for a new object, def if none is given.
func mode(a *nfsv3.Sattr3, def uint32) uint32 {
	if m, ok := a.Mode.(*nfsv3.SetMode3_TRUE); ok {
		return m.Mode & 0o7777
	}
	return def
}

// keepNoSetID clears set-user-ID of a file to which a user other than root has written, where the kernel has not: with
// direct I/O, FUSE leaves that to its server. st is from before.
func keepNoSetID(c *cred, fd int, st *unix.Stat_t) {
	var now unix.Stat_t
	if c.uid == 0 || st.Mode&(unix.S_ISUID|unix.S_ISGID) == 0 || unix.Fstat(fd, &now) != nil {
		return
	}
	drop := now.Mode & unix.S_ISUID
	if now.Mode&unix.S_IXGRP != 0 { // otherwise set-group-ID is no privilege
		drop |= now.Mode & unix.S_ISGID
	}
	if drop != 0 {
		_ = unix.Fchmod(fd, now.Mode&0o7777&^drop)
	}
}

// left returns the attributes of a that remain to be set when c has made an object with the mode of a. It leaves out the
// owner that users other than root ask for, and a group that they are not in: some clients, such as that of macOS, ask
// for them with each object, and accept what the object gets.
func left(c *cred, a nfsv3.Sattr3) *nfsv3.Sattr3 {
	if c.uid != 0 {
		a.Uid = &nfsv3.SetUid3_default{}
		if g, ok := a.Gid.(*nfsv3.SetGid3_TRUE); !ok || g.Gid != c.gid && !slices.Contains(c.gids, g.Gid) {
			a.Gid = &nfsv3.SetGid3_default{}
		}
	}
	if mode(&a, 0)&(unix.S_ISUID|unix.S_ISGID) == 0 { // which mkdir does not set, and a new owner or group clears
		a.Mode = &nfsv3.SetMode3_default{}
	}
	return &a
}
