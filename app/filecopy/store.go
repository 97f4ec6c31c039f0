package filecopy

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"
)

// tempPrefix begins the names of files that are not whole yet.
const tempPrefix = ".iwcp-"

// A Store is a folder that files come from and go to. Nothing outside of it
// can be reached by any name: not by "..", nor through a symbolic link.
type Store struct {
	root *os.Root
}

// OpenStore opens the folder dir.
func OpenStore(dir string) (*Store, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	return &Store{root}, nil
}

// Close closes the store; files that are open stay open.
func (s *Store) Close() error { return s.root.Close() }

// An Error is a failure with the code that tells the other side its kind.
type Error struct {
	Code Code
	Err  error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

// CheckName accepts relative slash-separated names without ".", ".." and empty
// elements, control characters and our temporary files.
func CheckName(name string) error {
	switch {
	case len(name) > MaxName:
		return &Error{CodeName, fmt.Errorf("name of %d octets; at most %d are allowed", len(name), MaxName)}
	case name == "." || !fs.ValidPath(name):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: it must be relative, without \"..\" and empty parts", name)}
	case strings.ContainsFunc(name, unicode.IsControl):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: it holds a control character", name)}
	case strings.HasPrefix(path.Base(name), tempPrefix):
		return &Error{CodeName, fmt.Errorf("name %q is not allowed: %s is for temporary files", name, tempPrefix)}
	}
	return nil
}

// Open opens the regular file name for reading.
func (s *Store) Open(name string) (*os.File, int64, error) {
	if err := CheckName(name); err != nil {
		return nil, 0, err
	}
	// O_NONBLOCK: opening a FIFO must not wait for its other end.
	f, err := s.root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, fileError(name, err)
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err != nil {
		f.Close()
		return nil, 0, fileError(name, err)
	}
	return f, info.Size(), nil
}

// Incoming is a file on its way in. It has a temporary name until Commit.
type Incoming struct {
	store      *Store
	file       *os.File
	name, temp string
}

// Create begins a file of size octets under a temporary name in the folder
// where name will be. The space is reserved at once, so that a full disk shows
// before the data comes.
func (s *Store) Create(name string, size int64) (*Incoming, error) {
	if err := CheckName(name); err != nil {
		return nil, err
	}
	if size < 0 {
		return nil, &Error{CodeNoSpace, fmt.Errorf("%s: too large", name)}
	}
	if info, err := s.root.Stat(name); err == nil && !info.Mode().IsRegular() {
		return nil, fileError(name, errors.New("exists and is not a regular file"))
	}
	in := &Incoming{store: s, name: name, temp: path.Join(path.Dir(name), tempPrefix+rand.Text())}
	var err error
	in.file, err = s.root.OpenFile(in.temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, fileError(name, err)
	}
	if size > 0 {
		if err := reserve(in.file, size); err != nil {
			in.Abort()
			return nil, fileError(name, err)
		}
	}
	return in, nil
}

// reserve allocates size octets for f where the file system can.
func reserve(f *os.File, size int64) error {
	const tries = 10 // a signal interrupts the call, and may each time
	for range tries {
		err := unix.Fallocate(int(f.Fd()), 0, 0, size)
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
func (in *Incoming) Write(b []byte) (int, error) {
	n, err := in.file.Write(b)
	if err != nil {
		err = fileError(in.name, err)
	}
	return n, err
}

// Commit puts the file on disk and gives it its name. After an error, too, the
// Incoming is used up and nothing is left of it.
func (in *Incoming) Commit() error {
	err := in.file.Sync()
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

// Abort removes the file.
func (in *Incoming) Abort() {
	in.file.Close()
	_ = in.store.root.Remove(in.temp)
}

// fileError names the file as the user did, says what to do where that is
// clear, and finds the code.
func fileError(name string, err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return err
	}
	cause := err
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		cause = e.Err
	} else if e := (*os.LinkError)(nil); errors.As(err, &e) {
		cause = e.Err
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return &Error{CodeNotFound, fmt.Errorf("%s: %w", name, cause)}
	case errors.Is(err, fs.ErrPermission):
		return &Error{CodePermission, fmt.Errorf("%s: %w", name, cause)}
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return &Error{CodeNoSpace, fmt.Errorf("%s: disk full: make room and copy again: %w", name, cause)}
	case errors.Is(err, unix.EFBIG):
		return &Error{CodeNoSpace, fmt.Errorf("%s: too large for the file system: %w", name, cause)}
	}
	return &Error{CodeIO, fmt.Errorf("%s: %w", name, cause)}
}
