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
type names struct {
	// moves is held for writing while a client renames or reopenOwn changes a mode, and for reading
	// while names are learned or followed or a client changes a mode. It is not held twice by one
	// goroutine.
	moves sync.RWMutex

	mu    sync.Mutex
	root  fileKey
	size  int // of all entries, by file.size
	limit int // of size; the files that were not used for the longest time go
	files map[fileKey]*list.Element
	used  list.List // of *file; the last used first, folders before what is in them
}

const (
	// maxNames is the limit of the memory for names, in bytes: that of a million files.
	maxNames = 256 << 20
	// maxPlaces is the number of links of a file that are remembered.
	maxPlaces = 16
	// fileSize and placeSize are the bytes that a file and one of its places take without the name.
	// An entry of files takes up to 120 of them: a map from which much was deleted may have split
	// its tables early.
	fileSize, placeSize = 224, 48
)

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
	// at has the places where the file was seen, the last one first. A file with several links has
	// several, so that a client may remove any.
	at []place
}

// size returns the bytes that f takes.
func (f *file) size() int {
	n := fileSize
	for _, p := range f.at {
		n += placeSize + len(p.name)
	}
	return n
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
		n.size += fileSize
	}
	if f := e.Value.(*file); len(f.at) == 0 || f.at[0] != p {
		n.size -= f.size()
		f.at = slices.DeleteFunc(f.at, func(q place) bool { return q == p })
		f.at = slices.Insert(f.at[:min(len(f.at), maxPlaces-1)], 0, p)
		n.size += f.size()
	}
	n.use(k)
	for n.size > n.limit {
		n.drop(n.used.Back())
	}
}

// remove records that a file is no longer at p.
func (n *names) remove(k fileKey, p place) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.files[k]
	if e == nil {
		return
	}
	f := e.Value.(*file)
	n.size -= f.size()
	f.at = slices.DeleteFunc(f.at, func(q place) bool { return q == p })
	n.size += f.size()
	if len(f.at) == 0 {
		n.drop(e)
	}
}

// drop forgets a file.
func (n *names) drop(e *list.Element) {
	f := n.used.Remove(e).(*file)
	delete(n.files, f.key)
	n.size -= f.size()
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

// known is a place of a file, with the names from the root to it.
type known struct {
	at   place
	path []string
}

// paths returns the places of a file to which the path is known.
func (n *names) paths(k fileKey) (all []known) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if k == n.root {
		return []known{{}}
	}
	n.use(k)
	if e := n.files[k]; e != nil {
		for _, p := range e.Value.(*file).at {
			if path := n.path(p); path != nil {
				all = append(all, known{p, path})
			}
		}
	}
	return all
}

// path returns the names from the root to p, or nil if they are not known.
func (n *names) path(p place) (path []string) {
	for range maxDepth {
		path = append(path, p.name)
		if p.dir == n.root {
			slices.Reverse(path)
			return path
		}
		e := n.files[p.dir]
		if e == nil {
			break
		}
		p = e.Value.(*file).at[0]
	}
	return nil
}

// reopenOwn is reopen for a file whose mode refuses it. The process may not pass over the mode, but an owner may
// write a file that it made read-only (RFC 1813 section 4.4): the mode is changed for a moment.
func (t *tree) reopenOwn(fd, flags int) (int, error) {
	t.names.moves.Lock()
	defer t.names.moves.Unlock()
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || int(st.Uid) != os.Geteuid() || st.Mode&unix.S_ISGID != 0 && !inGroup(st.Gid) { // chmod would clear it
		return -1, unix.EACCES
	}
	if unix.Fchmodat(unix.AT_FDCWD, proc(fd), st.Mode&0o7777|0o600, 0) != nil {
		return -1, unix.EACCES
	}
	f, err := unix.Open(proc(fd), flags, 0)
	if cerr := unix.Fchmodat(unix.AT_FDCWD, proc(fd), st.Mode&0o7777, 0); cerr != nil && err == nil {
		unix.Close(f)
		return -1, cerr
	}
	return f, err
}

// inGroup reports whether the process is in the group gid.
func inGroup(gid uint32) bool {
	groups, err := os.Getgroups()
	return int(gid) == os.Getegid() || err == nil && slices.Contains(groups, int(gid))
}

// search opens the file with the handle fh, whose MAC was checked, for its attributes, where it was seen
// last. It returns ESTALE if the file is no longer there.
func (t *tree) search(fh []byte) (fd int, err error) {
	defer t.still()()
	failed := error(unix.ESTALE)
	for i, seen := range t.names.paths(keyOf(fh)) {
		fd, err := t.walk(seen.path)
		switch err {
		case nil:
			// Another file may be there now.
			if found, err := t.handle(fd, ""); err == nil && bytes.Equal(found, fh) {
				if i > 0 {
					t.names.add(keyOf(fh), seen.at)
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

// deep reports whether entries of the directory with the handle dir are too deep to be opened by
// name.
func (t *tree) deep(dir []byte) bool {
	if t.names == nil {
		return false
	}
	all := t.names.paths(keyOf(dir))
	return len(all) > 0 && !slices.ContainsFunc(all, func(k known) bool { return len(k.path) < maxDepth })
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

// stat reads the attributes of fd, without the mode that reopenOwn sets for a moment.
func (t *tree) stat(fd int, st *unix.Stat_t) error {
	defer t.still()()
	return unix.Fstat(fd, st)
}

// still prevents renames by clients, and changes by reopenOwn, until unlock is called.
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

// entry returns the handle and the attributes of the entry name of the directory d, which has the
// handle dh. It returns EXDEV if another file system is mounted there.
func (t *tree) entry(d *object, dh []byte, name string) (fh []byte, st unix.Stat_t, err error) {
	fd, fh, err := t.find(d.fd, dh, name) // opened, since another file may get the name at any time
	if err != nil {
		return nil, st, err
	}
	defer unix.Close(fd)
	if err = t.stat(fd, &st); err == nil && st.Dev != d.st.Dev {
		err = unix.EXDEV
	}
	return fh, st, err
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

// rename renames the entry old of the directory from to the entry name of the directory to. They
// have the handles fromHandle and toHandle.
func (t *tree) rename(from int, fromHandle []byte, old string, to int, toHandle []byte, name string) error {
	if t.names == nil {
		return unix.Renameat(from, old, to, name)
	}
	t.names.moves.Lock()
	defer t.names.moves.Unlock()
	replaced, rerr := t.handle(to, name)
	err := unix.Renameat(from, old, to, name)
	if err != nil {
		return err
	}
	fh, err := t.handle(to, name)
	if err != nil {
		return nil
	}
	if rerr != nil || !bytes.Equal(fh, replaced) { // otherwise both were links of one file, and remain
		t.names.remove(keyOf(fh), place{keyOf(fromHandle), old})
	}
	if rerr == nil {
		t.names.remove(keyOf(replaced), place{keyOf(toHandle), name})
	}
	t.names.learn(fh, toHandle, name)
	return nil
}

// unlink removes the entry name of the directory dir, which has the handle dh.
func (t *tree) unlink(dir int, dh []byte, name string, flags int) error {
	if t.names == nil {
		return unix.Unlinkat(dir, name, flags)
	}
	defer t.still()()
	fh, herr := t.handle(dir, name)
	err := unix.Unlinkat(dir, name, flags)
	if err == nil && herr == nil {
		t.names.remove(keyOf(fh), place{keyOf(dh), name})
	}
	return err
}
