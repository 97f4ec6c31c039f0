package nfs

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/subnet"
)

// unstable has a descriptor for each file with data that no COMMIT has covered yet. It was opened before the data was
// written, so that it reports a failure to write the data to disk. A later one does not if a program of the host has
// called fsync(2) first, or if the kernel has dropped the file from memory.
type unstable struct {
	mu      sync.Mutex
	files   map[fileKey]unstableFile
	open    int        // descriptors, with those that are being committed
	writers writers    // the clients that have them
	aged    sync.Mutex // held while the timer of one file commits it, since each fsync(2) takes a thread
}

type unstableFile struct {
	fd    int
	by    *writer
	timer *time.Timer // commits the file
}

// writers are the clients with unstable data, which have the descriptors as their connections.
type (
	writers = subnet.Peers[struct{}]
	writer  = subnet.Peer[struct{}]
)

// maxUnstable bounds the number of files, and unstableAge the time before a file is committed without a COMMIT, since
// its descriptor keeps the space of a file that is removed.
const (
	maxUnstable = 256 // of the 1024 descriptors that a process may have at least
	unstableAge = 10 * time.Second
)

// writer returns the client with the given address. Called with mu held.
func (u *unstable) writer(peer string) *writer {
	a, _ := netip.ParseAddr(peer)
	return u.writers.Find(a, nil)
}

// keep keeps the descriptor of o, which belongs to the handle fh and which the client peer has written, unless it has one
// of the file already. The clients of a network may have four times as many as are free, so that they leave some for
// others. keep returns false if they have.
func (s *Server) keep(peer string, fh []byte, o *object) bool {
	u, k := &s.unstable, keyOf(fh)
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, ok := u.files[k]; ok {
		return true
	}
	if u.files == nil {
		u.files, u.writers = make(map[fileKey]unstableFile), make(writers)
	}
	by := u.writer(peer)
	if by.Net.Conns >= 4*(maxUnstable-u.open) {
		return false
	}
	u.files[k] = unstableFile{o.fd, by, time.AfterFunc(unstableAge, func() { s.commitAged(k) })}
	u.open++
	u.writers.Add(by)
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
		u.writers.Remove(f.by)
	}()
	return true, s.sync(f.fd)
}

func (s *Server) commitAged(k fileKey) {
	s.unstable.aged.Lock()
	defer s.unstable.aged.Unlock()
	_, _ = s.commitKept(k)
}

// commitOne commits a file of a descriptor that keep has kept for the network of the client peer, to make room for another
// of theirs.
func (s *Server) commitOne(peer string) {
	u := &s.unstable
	u.mu.Lock()
	net := u.writer(peer).Net
	var own fileKey
	for k, f := range u.files {
		if f.by.Net == net {
			own = k
			break
		}
	}
	u.mu.Unlock()
	_, _ = s.commitKept(own)
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
