package nfs

import (
	"bytes"
	"container/list"
	"os"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// names remembers where the files are whose handles clients have, for a process that may not open
// files by handle, which requires CAP_DAC_READ_SEARCH. A file that was moved by others than clients
// is stale until it is looked up again.
//
// An entry takes about 200 bytes.
type names struct {
	// moves is held for writing while a client renames or reopen changes a mode, and for reading
	// while names are learned or followed or a client changes a mode. It is not held twice by one
	// goroutine.
	moves sync.RWMutex

	mu    sync.Mutex
	root  fileKey
	limit int // of entries; those that were not used for the longest time go
	files map[fileKey]*list.Element
	used  list.List // of *file; the last used first, folders before what is in them
}

// maxNames is the limit of names.
const maxNames = 1 << 20

// fileKey identifies a file: the MAC of its handle.
type fileKey [macSize]byte

func keyOf(fh []byte) fileKey { return fileKey(fh[len(fh)-macSize:]) }

// place is the entry name of a directory.
type place struct {
	dir  fileKey
	name string
}

// file is an entry of names.
type file struct {
	key fileKey
	// at has the places where the file was seen last, the newest first. A file with several links
	// has two of them, so that a client may remove either.
	at [2]place
}

func newNames(root []byte, limit int) *names {
	return &names{root: keyOf(root), limit: limit, files: make(map[fileKey]*list.Element)}
}

// learn records that the file with the handle fh is the entry name of the directory with the handle
// dir.
func (n *names) learn(fh, dir []byte, name string) {
	if k := keyOf(fh); k != n.root && name != "." && name != ".." {
		n.add(k, place{keyOf(dir), name})
	}
}

// add records that a file was seen at p.
func (n *names) add(k fileKey, p place) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.files[k]
	if e == nil {
		e = n.used.PushFront(&file{key: k})
		n.files[k] = e
	}
	if f := e.Value.(*file); f.at[0] != p {
		f.at = [...]place{p, f.at[0]}
	}
	n.use(k)
	for len(n.files) > n.limit {
		delete(n.files, n.used.Remove(n.used.Back()).(*file).key)
	}
}

// use moves a file and then the directories above it to the front of the list.
func (n *names) use(k fileKey) {
	for range maxDepth {
		e := n.files[k]
		if e == nil {
			return
		}
		n.used.MoveToFront(e)
		k = e.Value.(*file).at[0].dir
	}
}

// path returns place i of a file and the names from the root to it. ok is false if it is not known.
func (n *names) path(k fileKey, i int) (at place, path []string, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.use(k)
	for range maxDepth {
		if k == n.root {
			slices.Reverse(path)
			return at, path, true
		}
		e := n.files[k]
		if e == nil {
			break
		}
		p := e.Value.(*file).at[i]
		if p.name == "" {
			break
		}
		if path == nil {
			at = p
		}
		path, k, i = append(path, p.name), p.dir, 0
	}
	return at, nil, false
}

// openByName opens the file with the handle fh, whose MAC was checked, where it was seen last. It
// returns ESTALE if it is no longer there.
func (t *tree) openByName(fh []byte, flags int) (fd int, err error) {
	fd, err = t.search(fh)
	if err != nil || flags == unix.O_PATH {
		return fd, err
	}
	defer unix.Close(fd)
	return t.reopen(fd, flags|unix.O_CLOEXEC|unix.O_NONBLOCK)
}

// reopen opens the file of fd. The process may not pass over its mode, but an owner may write a
// file that it made read-only (RFC 1813 section 4.4): the mode is changed for a moment.
func (t *tree) reopen(fd, flags int) (int, error) {
	f, err := unix.Open(proc(fd), flags, 0)
	if err != unix.EACCES {
		return f, err
	}
	t.names.moves.Lock()
	defer t.names.moves.Unlock()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || int(st.Uid) != os.Geteuid() || st.Mode&(unix.S_ISUID|unix.S_ISGID) != 0 { // chmod may clear these
		return -1, err
	}
	if unix.Fchmodat(unix.AT_FDCWD, proc(fd), st.Mode&0o7777|0o600, 0) != nil {
		return -1, err
	}
	f, err = unix.Open(proc(fd), flags, 0)
	if cerr := unix.Fchmodat(unix.AT_FDCWD, proc(fd), st.Mode&0o7777, 0); cerr != nil && err == nil {
		unix.Close(f)
		return -1, cerr
	}
	return f, err
}

// search opens a file for its attributes.
func (t *tree) search(fh []byte) (fd int, err error) {
	defer t.still()()
	failed := error(unix.ESTALE)
	for i := range len(file{}.at) {
		seen, path, ok := t.names.path(keyOf(fh), i)
		if !ok {
			continue
		}
		fd, err := t.walk(path)
		switch err {
		case nil:
			// Another file may be there now.
			if found, err := t.handle(fd, ""); err == nil && bytes.Equal(found, fh) {
				if i > 0 {
					t.names.add(keyOf(fh), seen)
				}
				return fd, nil
			}
			unix.Close(fd)
		case unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV: // others changed the path
		default:
			failed = err
		}
	}
	return -1, failed
}

// walk opens a path below the root for the attributes of its last file. It follows no links.
func (t *tree) walk(path []string) (fd int, err error) {
	dir := t.root
	for {
		n, size := 0, 0
		for n < len(path) && size+len(path[n])+2 < unix.PathMax { // "./", and a zero byte
			size += len(path[n]) + 1
			n++
		}
		fd, err = at(dir, "./"+strings.Join(path[:n], "/"))
		if dir != t.root {
			unix.Close(dir)
		}
		if path = path[n:]; err != nil || len(path) == 0 {
			return fd, err
		}
		dir = fd
	}
}

// still prevents renames by clients, and changes by reopen, until unlock is called.
func (t *tree) still() (unlock func()) {
	if t.names == nil {
		return func() {}
	}
	t.names.moves.RLock()
	return t.names.moves.RUnlock
}

// learn records the place of a file whose handle is given to a client, if that is needed.
func (t *tree) learn(fh, dir []byte, name string) {
	if t.names != nil {
		t.names.learn(fh, dir, name)
	}
}

// entry returns the handle of the entry name of the directory dir, which has the handle dh.
func (t *tree) entry(dir int, dh []byte, name string) ([]byte, error) {
	defer t.still()()
	fh, err := t.handle(dir, name)
	if err == nil {
		t.learn(fh, dh, name)
	}
	return fh, err
}

// learnPath records the places of the directories of the path p, which is relative to the root.
func (t *tree) learnPath(p string) error {
	if t.names == nil {
		return nil
	}
	defer t.still()()
	dir, path := t.fh, strings.Split(p, "/")
	for i, name := range path {
		fd, err := t.walk(path[:i+1])
		if err != nil {
			return err
		}
		fh, err := t.handle(fd, "")
		unix.Close(fd)
		if err != nil {
			return err
		}
		t.names.learn(fh, dir, name)
		dir = fh
	}
	return nil
}

// rename renames an entry of the directory from to the entry name of the directory to, which has
// the handle dir.
func (t *tree) rename(from int, old string, to int, dir []byte, name string) error {
	if t.names == nil {
		return unix.Renameat(from, old, to, name)
	}
	t.names.moves.Lock()
	defer t.names.moves.Unlock()
	err := unix.Renameat(from, old, to, name)
	if err == nil {
		if fh, err := t.handle(to, name); err == nil {
			t.names.learn(fh, dir, name)
		}
	}
	return err
}
