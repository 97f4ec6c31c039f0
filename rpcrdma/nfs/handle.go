package nfs

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

// A file handle is the kernel's (name_to_handle_at), which stays valid over
// restarts and renames, with a MAC, so that clients cannot forge one:
//
//	1 byte version, 1 byte type, the kernel's bytes, 16 bytes MAC
//
// The MAC is HMAC-SHA-256-128 (RFC 4868) of what precedes it.
const (
	handleVersion = 2
	headSize      = 2
	macSize       = 16
	maxKernel     = nfsv3.NFS3_FHSIZE - headSize - macSize
)

// tree is a directory and everything below it on the same file system.
type tree struct {
	path string
	root int   // O_RDONLY
	held []int // further descriptors to keep open
	dev  uint64
	ino  uint64
	macs sync.Pool // of HMACs with the key of the handles
	fh   []byte    // of the root
	// names is not nil if files cannot be opened by handle.
	names *names
	// regular has a part of the MAC of each handle that was last seen to be that of a regular file. A file does not
	// change its type as long as it has its handle.
	regular [1 << 12]atomic.Uint64
}

// typed returns the place of the handle fh in regular, and what is there if its file is known to be regular.
func (t *tree) typed(fh []byte) (at *atomic.Uint64, part uint64) {
	part = binary.NativeEndian.Uint64(fh[len(fh)-macSize:])
	return &t.regular[part%uint64(len(t.regular))], part
}

// isRoot reports whether st is of the root.
func (t *tree) isRoot(st *unix.Stat_t) bool { return st.Dev == t.dev && st.Ino == t.ino }

// openTree opens the tree at path. The key of its handles is derived from that in keyFile, or
// random if keyFile is "".
func openTree(path, keyFile string) (_ *tree, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("nfs: %w", &fs.PathError{Op: "export", Path: path, Err: err})
		}
	}()
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	path = abs // clients mount it by that
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	t := &tree{path: path, root: fd}
	t.alone()
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		t.dev, t.ino = st.Dev, st.Ino
		if err := t.loadKey(keyFile); err != nil {
			t.close()
			return nil, err
		}
		t.fh, err = t.handle(t.root, "")
	}
	if err == nil {
		var f int
		if f, err = t.open(t.fh); err == nil {
			unix.Close(f)
		} else if err == unix.EPERM {
			t.names, err = newNames(t.fh, maxNames), nil
		}
	}
	if err != nil {
		t.close()
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = fmt.Errorf("its file system has no file handles; an overlay may, by its mount option nfs_export=on: %w", err)
		}
		return nil, err
	}
	return t, nil
}

// alone replaces the root by a copy of the tree's mount without the mounts below it, so that
// clients see the directories that these mounts cover instead of directories that they cannot
// enter. If that is not permitted, the tree is used as it is. The original root stays open to keep
// the file system in use.
func (t *tree) alone() {
	c, err := unix.OpenTree(t.root, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return
	}
	r, err := unix.Openat(c, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		unix.Close(c)
		return
	}
	t.held = append(t.held, t.root, c)
	t.root = r
}

func (t *tree) close() error {
	err := unix.Close(t.root)
	for _, fd := range t.held {
		err = errors.Join(err, unix.Close(fd))
	}
	return err
}

// loadKey sets the key of the handles. It refuses a key file inside the tree, which a client with
// its owner's rights could read.
func (t *tree) loadKey(file string) (err error) {
	var key [keySize]byte
	if file == "" {
		_, _ = rand.Read(key[:]) // never fails
	} else if key, err = loadKey(file); err != nil {
		return err
	} else if in, err := t.contains(file); err != nil {
		return err
	} else if in {
		return fmt.Errorf("key file %s is in the folder, where clients can read it; name another with --key-file", file)
	}
	fsid, err := t.fsid()
	if err != nil {
		return err
	}
	own := treeKey(key, fsid, t.ino)
	t.macs.New = func() any { return hmac.New(sha256.New, own) }
	return nil
}

// fsid returns the identifier of the tree's file system.
func (t *tree) fsid() (uint64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(t.root, &st); err != nil {
		return 0, err
	}
	id := uint64(uint32(st.Fsid.Val[0]))<<32 | uint64(uint32(st.Fsid.Val[1]))
	if id == 0 { // it has none, and a device number may change at a reboot
		id = t.dev
	}
	return id, nil
}

// contains reports whether the file with the given name is in the tree.
func (t *tree) contains(name string) (bool, error) {
	name, err := filepath.Abs(name)
	if err != nil {
		return false, err
	}
	dir, err := filepath.EvalSymlinks(filepath.Dir(name))
	if err != nil {
		return false, err
	}
	var first, st unix.Stat_t
	if err := unix.Stat(dir, &first); err != nil {
		return false, err
	}
	for ; first.Dev == t.dev; dir = filepath.Dir(dir) {
		if err := unix.Stat(dir, &st); err != nil {
			return false, err
		}
		if t.isRoot(&st) {
			return true, nil
		}
		if dir == "/" {
			break
		}
	}
	return false, nil
}

func (t *tree) mac(b []byte) []byte {
	h := t.macs.Get().(hash.Hash)
	defer t.macs.Put(h)
	h.Reset()
	h.Write(b)
	return h.Sum(nil)[:macSize]
}

// handle returns the handle of the entry name of the directory dir, or of dir itself if name is "".
// It does not follow symbolic links.
func (t *tree) handle(dir int, name string) ([]byte, error) {
	flags := 0
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	k, _, err := unix.NameToHandleAt(dir, name, flags)
	if err != nil {
		return nil, err
	}
	if k.Size() > maxKernel || k.Type() < 0 || k.Type() > 0xff {
		return nil, unix.EOVERFLOW
	}
	b := make([]byte, 0, nfsv3.NFS3_FHSIZE)
	b = append(b, handleVersion, byte(k.Type()))
	b = append(b, k.Bytes()...)
	return append(b, t.mac(b)...), nil
}

var errHandle = &Error{"open", nfsv3.NFS3ERR_BADHANDLE}

// open opens the file of a handle for its attributes. It returns ESTALE if the file no longer exists or
// belongs to another export.
func (t *tree) open(fh []byte) (fd int, err error) {
	fd, _, err = t.openAs(fh, unix.O_PATH)
	return fd, err
}

// openAs is open with other flags, if what it opens is known to be a directory or a regular file: opening a device or
// a FIFO can have side effects. Otherwise it opens the file for its attributes, and done is false.
func (t *tree) openAs(fh []byte, flags int) (fd int, done bool, err error) {
	if len(fh) < headSize+macSize || fh[0] == 0 || fh[0] > handleVersion { // of an earlier version: stale
		return -1, false, errHandle
	}
	body := fh[:len(fh)-macSize]
	if !hmac.Equal(t.mac(body), fh[len(body):]) {
		return -1, false, unix.ESTALE
	}
	at, part := t.typed(fh)
	how := flags
	// With O_DIRECTORY the kernel opens nothing but a directory.
	if t.names != nil || flags&unix.O_DIRECTORY == 0 && at.Load() != part {
		how = unix.O_PATH
	}
	if t.names != nil {
		fd, err = t.search(fh)
	} else {
		k := unix.NewFileHandle(int32(fh[1]), body[headSize:])
		fd, err = unix.OpenByHandleAt(t.root, k, how|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK)
		if err == unix.ELOOP { // a symbolic link, with O_DIRECTORY
			err = unix.ENOTDIR
		}
	}
	return fd, how == flags, err
}

// reopen opens the regular file or directory fd, which was opened for its attributes, for its data. The caller must
// have checked permissions.
func (t *tree) reopen(fd, flags int) (int, error) {
	flags |= unix.O_CLOEXEC | unix.O_NONBLOCK
	f, err := unix.Open(proc(fd), flags, 0)
	if err == unix.EACCES && t.names != nil {
		return t.reopenOwn(fd, flags)
	}
	return f, err
}

// find opens the entry name of dir for its attributes, without leaving dir, and returns its handle.
// dh is the handle of dir.
func (t *tree) find(dir int, dh []byte, name string) (fd int, fh []byte, err error) {
	defer t.still()()
	if name != "." && t.deep(dh) {
		return -1, nil, unix.ENAMETOOLONG
	}
	if fd, err = at(dir, name); err != nil {
		return -1, nil, err
	}
	if fh, err = t.handle(fd, ""); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	t.learn(fh, dh, name)
	return fd, fh, nil
}

// at opens the entry name of dir for its attributes, without leaving dir.
func at(dir int, name string) (int, error) {
	return unix.Openat2(dir, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
}

// status converts an error to an NFS status.
func status(err error) nfsv3.Nfsstat3 {
	if err == nil {
		return nfsv3.NFS3_OK
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Status
	}
	e, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return nfsv3.NFS3ERR_SERVERFAULT
	}
	if st, ok := statuses[e]; ok {
		return st
	}
	return nfsv3.NFS3ERR_IO
}

// statuses has the NFS status of each errno that is not NFS3ERR_IO.
var statuses = map[unix.Errno]nfsv3.Nfsstat3{
	unix.EPERM:        nfsv3.NFS3ERR_PERM,
	unix.ENOENT:       nfsv3.NFS3ERR_NOENT,
	unix.ENXIO:        nfsv3.NFS3ERR_NXIO,
	unix.EACCES:       nfsv3.NFS3ERR_ACCES,
	unix.EBUSY:        nfsv3.NFS3ERR_ACCES, // another file system is mounted there
	unix.ETXTBSY:      nfsv3.NFS3ERR_ACCES, // it is a program that runs on this host
	unix.EXDEV:        nfsv3.NFS3ERR_XDEV,
	unix.EEXIST:       nfsv3.NFS3ERR_EXIST,
	unix.ENODEV:       nfsv3.NFS3ERR_NODEV,
	unix.ENOTDIR:      nfsv3.NFS3ERR_NOTDIR,
	unix.EISDIR:       nfsv3.NFS3ERR_ISDIR,
	unix.EINVAL:       nfsv3.NFS3ERR_INVAL,
	unix.ELOOP:        nfsv3.NFS3ERR_INVAL,
	unix.EFBIG:        nfsv3.NFS3ERR_FBIG,
	unix.ENOSPC:       nfsv3.NFS3ERR_NOSPC,
	unix.EROFS:        nfsv3.NFS3ERR_ROFS,
	unix.EMLINK:       nfsv3.NFS3ERR_MLINK,
	unix.ENAMETOOLONG: nfsv3.NFS3ERR_NAMETOOLONG,
	unix.ENOTEMPTY:    nfsv3.NFS3ERR_NOTEMPTY,
	unix.EDQUOT:       nfsv3.NFS3ERR_DQUOT,
	unix.ESTALE:       nfsv3.NFS3ERR_STALE,
	unix.EOPNOTSUPP:   nfsv3.NFS3ERR_NOTSUPP,
	unix.EMFILE:       nfsv3.NFS3ERR_JUKEBOX,
	unix.ENFILE:       nfsv3.NFS3ERR_JUKEBOX,
	unix.ENOMEM:       nfsv3.NFS3ERR_JUKEBOX,
	unix.EAGAIN:       nfsv3.NFS3ERR_JUKEBOX,
	unix.EINTR:        nfsv3.NFS3ERR_JUKEBOX, // a signal for the process has ended a call of FUSE
}
