package filecopy

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/printable"
)

// tempPrefix begins the names of incomplete files.
const tempPrefix = ".iwcp-"

// A Store is a folder that files are read from and written to. No name can reach outside of it,
// neither by ".." nor through a symbolic link.
type Store struct {
	root *os.Root
}

// OpenStore opens the folder dir.
func OpenStore(dir string) (*Store, error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() { // the open of a FIFO would block
		return nil, fileError(dir, unix.ENOTDIR)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fileError(dir, err)
	}
	return &Store{root}, nil
}

// Close closes the store. Open files stay open.
func (s *Store) Close() error { return s.root.Close() }

// An Error is a failure with the code to report to the other side.
type Error struct {
	Code Code
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// CheckName accepts relative slash-separated names without ".", ".." and empty elements, without
// control characters, and not those of temporary files.
func CheckName(name string) error {
	switch {
	case len(name) > maxName:
		return &Error{CodeName, fmt.Errorf("name of %d bytes; at most %d are allowed", len(name), maxName)}
	case !utf8.ValidString(name):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: it is not UTF-8: rename it", name)}
	case name == "." || !fs.ValidPath(name):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: it must be relative, without \"..\" and empty parts", name)}
	case strings.ContainsFunc(name, unicode.IsControl):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: it contains a control character: rename it", name)}
	case strings.HasPrefix(path.Base(name), tempPrefix):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: %s is for temporary files", name, tempPrefix)}
	}
	return nil
}

// Attrs are attributes of a file.
type Attrs struct {
	Mode  uint32 // permissions, 0 to 0777
	Mtime int64  // nanoseconds since 1970
}

const permissions = 0o777

// AttrsOf returns the attributes of a file.
func AttrsOf(info fs.FileInfo) Attrs {
	return Attrs{uint32(info.Mode().Perm()), nanoseconds(info.ModTime())}
}

// nanoseconds returns t in nanoseconds since 1970, or the nearest time that these can be: of the years 1677 to 2262.
func nanoseconds(t time.Time) int64 {
	switch {
	case t.Before(time.Unix(0, math.MinInt64)):
		return math.MinInt64
	case t.After(time.Unix(0, math.MaxInt64)):
		return math.MaxInt64
	}
	return t.UnixNano()
}

// Open opens the regular file name for reading.
func (s *Store) Open(name string) (*os.File, fs.FileInfo, error) {
	if err := CheckName(name); err != nil {
		return nil, nil, err
	}
	// With O_NONBLOCK, opening a FIFO does not block.
	f, err := s.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fileError(name, err)
	}
	info, err := f.Stat()
	if err == nil {
		err = checkRegular(info)
	}
	if err != nil {
		f.Close()
		return nil, nil, fileError(name, err)
	}
	_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_SEQUENTIAL) // only speeds it up
	return f, info, nil
}

func checkRegular(info fs.FileInfo) error {
	switch {
	case info.IsDir():
		return errors.New("is a folder: copy it with cp -r")
	case !info.Mode().IsRegular():
		return errors.New("not a regular file")
	}
	return nil
}

// incoming is a file being received. It has a temporary name until Commit.
type incoming struct {
	store         *Store
	file          *os.File
	name, temp    string
	keep          bool // keep the temporary file on Abort
	preserve      bool
	attrs         Attrs
	old           fs.FileInfo // of the file that it replaces, or nil
	acl           []byte      // of the file that it replaces
	flushed, size int64       // bytes whose write-back has started, and bytes written
}

// Options control how a file is created.
type Options struct {
	Attrs
	Preserve bool // apply all Attrs; otherwise only the permissions of a new file, masked by the umask
	Resume   bool // resume an earlier copy of the same file, and keep an incomplete one
}

// flushEvery is the number of bytes written between starts of write-back. Without it the disk would
// be idle until Commit.
const flushEvery = 8 << 20

// Create creates a file of size bytes under a temporary name in the folder of name. It reserves the
// space at once, so that a full disk is detected before the transfer.
func (s *Store) Create(name string, size int64, o Options) (*incoming, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	if size < 0 {
		return nil, &Error{CodeNoSpace, fmt.Errorf("%s: too large", name)}
	}
	in := &incoming{store: s, name: name, keep: o.Resume, preserve: o.Preserve, attrs: o.Attrs}
	in.attrs.Mode &= permissions
	perm := fs.FileMode(in.attrs.Mode | 0o600)
	switch info, err := s.root.Stat(name); {
	case err == nil:
		if err := checkRegular(info); err != nil {
			return nil, fileError(name, fmt.Errorf("exists and %w", err))
		}
		in.old, perm = info, 0o600 // not accessible to others before it has its owner and its group
		if !o.Preserve {
			in.attrs.Mode, in.acl = uint32(info.Mode().Perm()), s.acl(name)
		}
	case errors.Is(err, unix.ENOTDIR):
		return nil, &Error{CodeIO, fmt.Errorf("%s: a part of the path before the last is a file, not a folder: choose another path", name)}
	case errors.Is(err, unix.ENAMETOOLONG): // the temporary name may be shorter
		return nil, &Error{CodeIO, fmt.Errorf("%s: the file system takes no name as long as this: choose a shorter one", name)}
	}
	flags, part := os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, rand.Text()
	if o.Resume {
		id := sha256.Sum256(fmt.Appendf(nil, "%s\x00%d\x00%d", name, size, o.Mtime))
		part = "part-" + hex.EncodeToString(id[:16])
	} else {
		flags |= os.O_EXCL
	}
	in.temp = path.Join(path.Dir(name), tempPrefix+part)
	var err error
	in.file, err = s.root.OpenFile(in.temp, flags, perm)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, s.noFolder(name)
	case err != nil:
		return nil, fileError(name, err)
	}
	if o.Resume {
		if err := in.lock(perm); err != nil {
			in.file.Close()
			return nil, fileError(name, err)
		}
	}
	if err := in.begin(size); err != nil {
		in.Abort()
		return nil, fileError(name, err)
	}
	return in, nil
}

// noFolder returns the error if name cannot be made because the folder that it is to be in does not exist, or takes nothing new.
func (s *Store) noFolder(name string) error {
	if _, err := s.root.Stat(path.Dir(name)); err == nil {
		return &Error{CodePermission, fmt.Errorf("%s: its folder was removed, or the file system there takes no new files, as /proc: choose another folder", name)}
	}
	return &Error{CodeNotFound, fmt.Errorf("%s: no folder %s: make it first", name, path.Dir(name))}
}

// lock takes over the file of an earlier copy, if there is one, as if it had been made with the permissions perm.
func (in *incoming) lock(perm fs.FileMode) error {
	switch err := unix.Flock(int(in.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return errors.New("another copy of this file is in progress: wait for its end")
	case err != nil:
		return fmt.Errorf("lock the incomplete file: %w", err)
	}
	info, err := in.file.Stat()
	if err == nil {
		err = checkRegular(info)
	}
	if err != nil {
		return err
	}
	if named, err := in.store.root.Lstat(in.temp); err != nil || !os.SameFile(info, named) {
		return errors.New("another copy of this file has just ended: copy again")
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && int(st.Uid) != os.Geteuid() { // that user could change it after Commit
		return fmt.Errorf("%s belongs to another user: remove it", path.Base(in.temp))
	}
	in.size = info.Size()
	// The permissions differ by the umask, or since only one of the copies replaces a file.
	if info.Mode().Perm() != perm {
		if perm, err = in.store.made(path.Dir(in.temp), perm); err == nil && info.Mode().Perm() != perm {
			err = in.file.Chmod(perm)
		}
	}
	return err
}

// made returns the permissions of a file that is made in the folder dir with the permissions perm.
func (s *Store) made(dir string, perm fs.FileMode) (fs.FileMode, error) {
	name := path.Join(dir, tempPrefix+rand.Text())
	f, err := s.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, perm)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err := errors.Join(err, s.root.Remove(name)); err != nil {
		return 0, err
	}
	return info.Mode().Perm(), nil
}

// begin reserves the space for the rest of the file.
func (in *incoming) begin(size int64) error {
	if in.size > size {
		if err := in.file.Truncate(size); err != nil {
			return err
		}
		in.size = size
	}
	in.flushed = in.size
	if _, err := in.file.Seek(in.size, io.SeekStart); err != nil || size == in.size {
		return err
	}
	return reserve(in.file, size-in.size, in.size)
}

// prefix returns a reader for the existing part.
func (in *incoming) prefix() io.Reader { return io.NewSectionReader(in.file, 0, in.size) }

// reserve checks that f can grow by size bytes at offset. It allocates them, without changing the
// file's size, where that is cheap; on tmpfs it would take as long as writing.
func reserve(f *os.File, size, offset int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return err
	}
	if st.Type == unix.TMPFS_MAGIC {
		if st.Blocks != 0 && uint64(size) > st.Bavail*uint64(st.Bsize) { // 0: no limit
			return unix.ENOSPC
		}
		return nil
	}
	const tries = 10 // the call may be interrupted by a signal each time
	for range tries {
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, offset, size)
		if !errors.Is(err, unix.EINTR) {
			if errors.Is(err, unix.EOPNOTSUPP) {
				return nil
			}
			return err
		}
	}
	return nil
}

// Write appends to the file.
func (in *incoming) Write(b []byte) (int, error) {
	n, err := in.file.Write(b)
	in.size += int64(n)
	if err != nil {
		return n, fileError(in.name, err)
	}
	if todo := in.size - in.flushed; todo >= flushEvery {
		_ = unix.SyncFileRange(int(in.file.Fd()), in.flushed, todo, unix.SYNC_FILE_RANGE_WRITE) // errors are reported to Commit
		in.flushed = in.size
	}
	return n, nil
}

// aclAttr is the extended attribute with the access control list of a file.
const aclAttr = "system.posix_acl_access"

// ACL returns the access control list of a file as the kernel encodes it, or nil if it has none.
func ACL(file string) []byte {
	b := make([]byte, 1<<16) // no attribute is longer
	n, err := unix.Getxattr(file, aclAttr, b)
	if err != nil {
		return nil
	}
	return b[:n]
}

// acl is ACL for the file name, which Stat has found.
func (s *Store) acl(name string) []byte {
	dir, err := s.root.OpenFile(path.Dir(name), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil
	}
	defer dir.Close()
	return ACL(fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), path.Base(name)))
}

// Succeed gives f, which is to replace the file old, the permissions of old with its access control list acl, and its
// owner and its group as far as that is allowed.
func Succeed(f *os.File, old fs.FileInfo, acl []byte) error {
	return succeed(f, old, acl, old.Mode().Perm())
}

// succeed is Succeed with other permissions.
func succeed(f *os.File, old fs.FileInfo, acl []byte, mode fs.FileMode) error {
	if sys, ok := old.Sys().(*syscall.Stat_t); ok {
		_ = f.Chown(-1, int(sys.Gid)) // apart: users may not give files away, but may choose among their groups
		_ = f.Chown(int(sys.Uid), -1)
	}
	_ = unix.Fremovexattr(int(f.Fd()), aclAttr) // that of the folder's default
	if len(acl) > 0 && unix.Fsetxattr(int(f.Fd()), aclAttr, acl, 0) != nil {
		mode &^= 0o070 // the mask of the list, not the rights of the group
	}
	info, err := f.Stat()
	if err == nil && info.Mode().Perm() != mode { // VFAT does not let users set it
		err = f.Chmod(mode)
	}
	return err
}

// setAttrs sets the permissions and, if they are preserved, the times. A file that replaces another gets its owner and
// its group.
func (in *incoming) setAttrs() error {
	if in.old != nil {
		if err := succeed(in.file, in.old, in.acl, fs.FileMode(in.attrs.Mode)); err != nil { // never those of old with -p: they may be wider
			return err
		}
	}
	info, err := in.file.Stat()
	if err != nil {
		return err
	}
	mode := fs.FileMode(in.attrs.Mode)
	if !in.preserve {
		mode &= info.Mode() // the umask is applied already
	}
	if mode != info.Mode().Perm() {
		if err := in.file.Chmod(mode); err != nil {
			return err
		}
	}
	if in.preserve {
		at := time.Unix(0, in.attrs.Mtime)
		return in.store.root.Chtimes(in.temp, at, at)
	}
	return nil
}

// Commit flushes the file to disk and renames it to its final name. The file cannot be used
// afterwards, even after an error, which leaves nothing behind.
func (in *incoming) Commit() error {
	err := in.file.Sync()
	if err == nil { // last, since a plain user cannot resume a copy of a read-only file that is killed after it
		err = in.setAttrs()
	}
	if e := in.file.Close(); err == nil {
		err = e
	}
	if err == nil {
		err = in.store.root.Rename(in.temp, in.name)
	}
	if err != nil {
		_ = in.store.root.Remove(in.temp)
		return fileError(in.name, err)
	}
	dir, err := in.store.root.Open(path.Dir(in.name))
	if err != nil {
		return fileError(in.name, err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fileError(in.name, err)
	}
	return nil
}

// Abort removes the file, or keeps what was received to be resumed, without the space reserved for the
// rest. It removes the file before it closes it, since closing unlocks it.
func (in *incoming) Abort() {
	defer in.file.Close()
	if !in.keep || in.size == 0 || in.file.Truncate(in.size) != nil {
		_ = in.store.root.Remove(in.temp)
	}
}

// Entry is an object of a Store.
type Entry struct {
	Attrs
	Name   string
	Size   int64
	Folder bool
	Other  bool // neither a folder nor a regular file, or not accessible
}

func entryOf(name string, info fs.FileInfo) Entry {
	return Entry{AttrsOf(info), name, info.Size(), info.IsDir(), !info.IsDir() && !info.Mode().IsRegular()}
}

// checkFolder is CheckName for a folder; "" is the whole store.
func checkFolder(name string) (rooted string, err error) {
	if name == "" {
		return ".", nil
	}
	return name, CheckName(name)
}

// Stat describes the object name; "" is the store itself.
func (s *Store) Stat(name string) (Entry, error) {
	rooted, err := checkFolder(name)
	if err != nil {
		return Entry{}, err
	}
	info, err := s.root.Stat(rooted)
	if err != nil {
		return Entry{}, fileError(name, err)
	}
	return entryOf(path.Base(rooted), info), nil
}

// List returns the names of the entries of the folder name, sorted, except those of incomplete files. A name that the
// protocol cannot represent has escapes in it.
func (s *Store) List(name string) ([]string, error) {
	rooted, err := checkFolder(name)
	if err != nil {
		return nil, err
	}
	dir, err := s.root.OpenFile(rooted, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fileError(name, err)
	}
	defer dir.Close()
	l, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fileError(name, err)
	}
	l = slices.DeleteFunc(l, func(n string) bool { return strings.HasPrefix(n, tempPrefix) })
	for i, n := range l {
		if CheckName(n) != nil {
			shown := printable.String(n)
			l[i] = strings.ToValidUTF8(shown[:min(len(shown), maxEntry)], "")
		}
	}
	slices.Sort(l)
	return slices.Compact(l), nil
}

// entry describes the entry n, which List has returned, of the folder name. Symbolic links to folders, which could lead
// in circles, and what the protocol cannot name are Other.
func (s *Store) entry(name, n string) Entry {
	full := path.Join(name, n)
	if CheckName(full) != nil {
		return Entry{Name: n, Other: true}
	}
	info, err := s.root.Lstat(full)
	if err == nil && info.Mode()&fs.ModeSymlink != 0 {
		if info, err = s.root.Stat(full); err == nil && info.IsDir() {
			return Entry{Name: n, Other: true}
		}
	}
	if err != nil {
		return Entry{Name: n, Other: true}
	}
	return entryOf(n, info)
}

// Mkdir creates the folder name if it does not exist, and sets the attributes that o preserves.
func (s *Store) Mkdir(name string, o Options) error {
	if err := CheckName(name); err != nil {
		return err
	}
	mode := fs.FileMode(o.Mode & permissions)
	if err := s.root.Mkdir(name, mode|0o700); err != nil { // so that files can be created in it, whatever the mode
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return s.noFolder(name)
		case !errors.Is(err, fs.ErrExist):
			return fileError(name, err)
		}
		if info, err := s.root.Stat(name); err != nil || !info.IsDir() {
			return fileError(name, errors.New("exists and is not a folder"))
		}
	}
	if !o.Preserve {
		return nil
	}
	at := time.Unix(0, o.Mtime)
	if err := errors.Join(s.root.Chmod(name, mode), s.root.Chtimes(name, at, at)); err != nil {
		return fileError(name, err)
	}
	return nil
}

// fileError returns an Error with the name as the user gave it, the code and, where known, a
// remedy.
func fileError(name string, err error) error {
	if _, ok := errors.AsType[*Error](err); ok {
		return err
	}
	if name == "" {
		name = "the folder itself"
	}
	cause := err
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		cause = e.Err
	} else if e, ok := errors.AsType[*os.LinkError](err); ok {
		cause = e.Err
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &Error{CodeNotFound, fmt.Errorf("%s: %w", name, cause)}
	case errors.Is(err, fs.ErrPermission):
		return &Error{CodePermission, fmt.Errorf("%s: %w", name, cause)}
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return &Error{CodeNoSpace, fmt.Errorf("%s: disk full: make room and copy again: %w", name, cause)}
	case errors.Is(err, unix.EROFS):
		return &Error{CodePermission, fmt.Errorf("%s: %w: choose a folder that can be written", name, cause)}
	case errors.Is(err, unix.EFBIG):
		return &Error{CodeNoSpace, fmt.Errorf("%s: too large for the file system: %w", name, cause)}
	case cause.Error() == "path escapes from parent": // of os.Root, which does not export it
		return &Error{CodeIO, fmt.Errorf("%s: a symbolic link that leads out of the folder, or is absolute, is not followed: make it relative, or copy the file by its own name", name)}
	}
	return &Error{CodeIO, fmt.Errorf("%s: %w", name, cause)}
}
