package nfs

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// unstable has a descriptor for each file with data that no COMMIT has covered yet. It was opened before the data was
// written, so that it reports a failure to write the data to disk. A later one does not if a program of the host has
// called fsync(2) first, or if the kernel has dropped the file from memory.
type unstable struct {
	mu    sync.Mutex
	files map[fileKey]unstableFile
	open  int        // descriptors, with those that are being committed
	aged  sync.Mutex // held while the timer of one file commits it, since each fsync(2) takes a thread
}

type unstableFile struct {
	fd    int
	timer *time.Timer // commits the file
}

// maxUnstable bounds the number of files, and unstableAge the time before a file is committed without a COMMIT, since
// its descriptor keeps the space of a file that is removed.
const (
	maxUnstable = 256 // of the 1024 descriptors that a process may have at least
	unstableAge = 10 * time.Second
)

// keep keeps the descriptor of o, which belongs to the handle fh, unless it has one of the file already. It
// returns false if there are too many.
func (s *Server) keep(fh []byte, o *object) bool {
	u, k := &s.unstable, keyOf(fh)
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, ok := u.files[k]; ok {
		return true
	}
	if u.open == maxUnstable {
		return false
	}
	if u.files == nil {
		u.files = make(map[fileKey]unstableFile)
	}
	u.files[k] = unstableFile{o.fd, time.AfterFunc(unstableAge, func() { s.commitAged(k) })}
	u.open++
	o.fd = -1
	return true
}

// commitKept commits the file of a descriptor that keep has kept, and closes it. It returns false if there is none.
func (s *Server) commitKept(k fileKey) (kept bool, err error) {
	u := &s.unstable
	u.mu.Lock()
	f, ok := u.files[k]
	delete(u.files, k)
	u.mu.Unlock()
	if !ok {
		return false, nil
	}
	f.timer.Stop()
	defer func() {
		unix.Close(f.fd)
		u.mu.Lock()
		defer u.mu.Unlock()
		u.open--
	}()
	return true, s.sync(f.fd)
}

func (s *Server) commitAged(k fileKey) {
	s.unstable.aged.Lock()
	defer s.unstable.aged.Unlock()
	_, _ = s.commitKept(k)
}

// commitAny commits a file of a descriptor that keep has kept, to make room for another.
func (s *Server) commitAny() {
	u := &s.unstable
	u.mu.Lock()
	var k fileKey
	for k = range u.files {
		break
	}
	u.mu.Unlock()
	_, _ = s.commitKept(k)
}

func (u *unstable) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, f := range u.files {
		f.timer.Stop()
		unix.Close(f.fd)
	}
	clear(u.files)
}
