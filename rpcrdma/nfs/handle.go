package nfs

import (
	"bytes"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/rpcrdma/nfs/nfsv3"
)

// A file handle is the kernel's (name_to_handle_at), which stays valid over
// restarts and renames, with a MAC, so that none can be made up:
//
//	1 octet version, 1 octet length, 4 octets type, the kernel's octets, 8 octets MAC
const (
	handleVersion = 1
	macSize       = 8
	maxKernel     = nfsv3.NFS3_FHSIZE - 6 - macSize
)

// tree is a directory and what lies beneath it, on its file system.
type tree struct {
	path string
	root int   // O_RDONLY
	held []int // more descriptors that are open as long as the tree is
	dev  uint64
	ino  uint64
	key  [32]byte
	kept bool   // the key is the same after a restart
	fh   []byte // of the root
}

func openTree(path string) (*tree, error) {
	path, err := filepath.Abs(path) // clients name it by that
	if err != nil {
		return nil, fmt.Errorf("nfs: export %s: %w", path, err)
	}
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nfs: export %s: %w", path, err)
	}
	t := &tree{path: path, root: fd}
	t.alone()
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil {
		t.dev, t.ino = st.Dev, st.Ino
		t.key, t.kept = treeKey(&st, machineID)
		t.fh, err = t.handle(t.root, "")
	}
	if err == nil {
		var f int
		if f, err = t.open(t.fh, unix.O_PATH); err == nil {
			unix.Close(f)
		}
	}
	if err != nil {
		t.close()
		if errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("nfs: export %s: file handles need CAP_DAC_READ_SEARCH: %w", path, err)
		}
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil, fmt.Errorf("nfs: export %s: its file system has no file handles; an overlay may, by its mount option nfs_export=on: %w", path, err)
		}
		return nil, fmt.Errorf("nfs: export %s: %w", path, err)
	}
	return t, nil
}

// alone takes a copy of the tree's mount for its root that has none of those beneath
// it: where another file system is mounted, clients see the directory that it covers,
// and not one that nobody can enter. Where that is not permitted the tree stays as it
// is. The first root is kept open: the file system is in use.
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

const machineID = "/etc/machine-id"

// treeKey makes the key of the MACs: kept, it is the same after a restart. Where
// the host has no id (machine-id(5)) everyone could compute that, and it is random.
func treeKey(st *unix.Stat_t, idFile string) (key [32]byte, kept bool) {
	id, _ := os.ReadFile(idFile)
	if n, err := hex.Decode(make([]byte, len(id)), bytes.TrimSpace(id)); err != nil || n != 16 {
		_, _ = rand.Read(key[:]) // it does not fail
		return key, false
	}
	b := binary.BigEndian.AppendUint64([]byte("iwarpd nfs handle\x00"), st.Dev)
	b = binary.BigEndian.AppendUint64(b, st.Ino)
	return sha256.Sum256(append(b, id...)), true
}

func (t *tree) mac(b []byte) []byte {
	h := hmac.New(sha256.New, t.key[:])
	h.Write(b)
	return h.Sum(nil)[:macSize]
}

// handle names the entry name of the directory dir, "": dir itself. A symbolic
// link is not followed.
func (t *tree) handle(dir int, name string) ([]byte, error) {
	flags := 0
	if name == "" {
		flags = unix.AT_EMPTY_PATH
	}
	k, _, err := unix.NameToHandleAt(dir, name, flags)
	if err != nil {
		return nil, err
	}
	if k.Size() > maxKernel {
		return nil, unix.EOVERFLOW
	}
	b := make([]byte, 0, nfsv3.NFS3_FHSIZE)
	b = append(b, handleVersion, byte(k.Size()))
	b = binary.BigEndian.AppendUint32(b, uint32(k.Type()))
	b = append(b, k.Bytes()...)
	return append(b, t.mac(b)...), nil
}

var errHandle = errors.New("nfs: bad file handle")

// open opens what a handle names. ESTALE: it is gone, or the handle is of another
// export, such as the one that was here before. The caller has checked the rights.
func (t *tree) open(fh []byte, flags int) (fd int, err error) {
	if len(fh) < 6+macSize || fh[0] != handleVersion || len(fh) != 6+int(fh[1])+macSize {
		return -1, errHandle
	}
	body := fh[:len(fh)-macSize]
	if !hmac.Equal(t.mac(body), fh[len(body):]) {
		return -1, unix.ESTALE
	}
	k := unix.NewFileHandle(int32(binary.BigEndian.Uint32(fh[2:])), body[6:])
	return unix.OpenByHandleAt(t.root, k, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK)
}

// at opens the entry name of dir for its attributes, within dir.
func at(dir int, name string) (int, error) {
	return unix.Openat2(dir, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
}

// status gives an error as NFS has it.
func status(err error) nfsv3.Nfsstat3 {
	if err == nil {
		return nfsv3.NFS3_OK
	}
	if errors.Is(err, errHandle) {
		return nfsv3.NFS3ERR_BADHANDLE
	}
	if errors.Is(err, errCookie) {
		return nfsv3.NFS3ERR_BAD_COOKIE
	}
	var e unix.Errno
	if !errors.As(err, &e) {
		return nfsv3.NFS3ERR_SERVERFAULT
	}
	switch e {
	case unix.EPERM:
		return nfsv3.NFS3ERR_PERM
	case unix.ENOENT:
		return nfsv3.NFS3ERR_NOENT
	case unix.EIO:
		return nfsv3.NFS3ERR_IO
	case unix.ENXIO:
		return nfsv3.NFS3ERR_NXIO
	case unix.EACCES, unix.EBUSY: // EBUSY: another file system is mounted there
		return nfsv3.NFS3ERR_ACCES
	case unix.EXDEV:
		return nfsv3.NFS3ERR_XDEV
	case unix.EEXIST:
		return nfsv3.NFS3ERR_EXIST
	case unix.ENODEV:
		return nfsv3.NFS3ERR_NODEV
	case unix.ENOTDIR:
		return nfsv3.NFS3ERR_NOTDIR
	case unix.EISDIR:
		return nfsv3.NFS3ERR_ISDIR
	case unix.EINVAL, unix.ELOOP:
		return nfsv3.NFS3ERR_INVAL
	case unix.EFBIG:
		return nfsv3.NFS3ERR_FBIG
	case unix.ENOSPC:
		return nfsv3.NFS3ERR_NOSPC
	case unix.EROFS:
		return nfsv3.NFS3ERR_ROFS
	case unix.EMLINK:
		return nfsv3.NFS3ERR_MLINK
	case unix.ENAMETOOLONG:
		return nfsv3.NFS3ERR_NAMETOOLONG
	case unix.ENOTEMPTY:
		return nfsv3.NFS3ERR_NOTEMPTY
	case unix.EDQUOT:
		return nfsv3.NFS3ERR_DQUOT
	case unix.ESTALE:
		return nfsv3.NFS3ERR_STALE
	case unix.EOPNOTSUPP:
		return nfsv3.NFS3ERR_NOTSUPP
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EAGAIN:
		return nfsv3.NFS3ERR_JUKEBOX
	}
	return nfsv3.NFS3ERR_IO
}
