package ctrl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/nss"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// A UnixListener is a listening Unix socket with the names of its file.
type UnixListener struct {
	*net.UnixListener
	file   fs.FileInfo
	names  []string // that of a slot has a second one
	remove func()   // removes those names that are still of its file, once
}

func newUnixListener(own *net.UnixListener, path string) (*UnixListener, error) {
	file, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	own.SetUnlinkOnClose(false)
	l := &UnixListener{UnixListener: own, file: file, names: []string{path}}
	l.remove = sync.OnceFunc(func() {
		for _, name := range l.names {
			if l.has(name) {
				_ = os.Remove(name)
			}
		}
	})
	return l, nil
}

// Close closes the socket and removes its file, but nothing that another process has put in its place. A second Close
// removes nothing.
func (l *UnixListener) Close() error {
	l.remove() // first: until it is closed, no other file can have the number of its inode
	return l.UnixListener.Close()
}

// has reports whether name is a name of the socket's file.
func (l *UnixListener) has(name string) bool {
	now, err := os.Lstat(name)
	return err == nil && os.SameFile(now, l.file)
}

// Lost reports whether the file at the socket's path is gone or is another program's: no program can connect then.
func (l *UnixListener) Lost() bool { return !l.has(l.names[0]) }

// lost returns the names that the socket's file no longer has.
func (l *UnixListener) lost() (names []string) {
	for _, name := range l.names {
		if !l.has(name) {
			names = append(names, name)
		}
	}
	return names
}

func closeAll(all []*UnixListener) {
	for _, l := range all {
		l.Close()
	}
}

// ErrNotMember means that the daemon cannot give its socket to the group. That takes CAP_CHOWN,
// or membership in the group.
var ErrNotMember = errors.New("the daemon's user is not a member")

// listenSocket opens the socket at path with its mode and group.
func listenSocket(path string, mode fs.FileMode, group string) (*UnixListener, error) {
	gid := -1
	if group != "" {
		n, err := nss.GID(group)
		if err != nil {
			return nil, fmt.Errorf("ctrl: socket group: %w", err)
		}
		gid = int(n)
	}
	l, err := ListenUnix("unixpacket", path, mode, gid)
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, unix.EADDRINUSE):
		return nil, fmt.Errorf("ctrl: another iwarpd answers on %s: stop it, or set another path: %w", path, err)
	case errors.Is(err, errGroup):
		err = fmt.Errorf("%w of %s: usermod -aG %s USER, and start it again", ErrNotMember, group, group)
	}
	return nil, fmt.Errorf("ctrl: socket %s: %w", path, err)
}

// errGroup means that the daemon may not give a socket to the group.
var errGroup = errors.New("the socket cannot have that group")

// ListenUnix opens a socket of the network, unix or unixpacket, at path, with its permissions and, unless gid is negative,
// its group. A socket file that nothing serves is replaced; if a process serves it, the error is EADDRINUSE.
func ListenUnix(network, path string, mode fs.FileMode, gid int) (*UnixListener, error) {
	if err := removeStale(network, path); err != nil {
		return nil, printable.Reason(err)
	}
	own, err := listenOwn(network, path)
	if err != nil {
		return nil, printable.Reason(err)
	}
	l, err := newUnixListener(own, path)
	if err != nil {
		own.Close()
		return nil, printable.Reason(err)
	}
	if gid >= 0 {
		if err = os.Chown(path, -1, gid); errors.Is(err, fs.ErrPermission) {
			err = errGroup
		}
	}
	if err == nil {
		err = os.Chmod(path, mode.Perm())
	}
	if err != nil {
		l.Close()
		return nil, printable.Reason(err)
	}
	return l, nil
}

// listenOwn opens a socket at path to which only root and the daemon's user may connect, until chmod. Otherwise whoever
// the umask does not exclude could connect before the socket has its group and mode, and would stay connected.
// A later listen(2) would not prevent that: connect(2) checks the file's mode before it looks whether the socket
// listens.
func listenOwn(network, path string) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		// bind(2) gives the file the mode of the socket's inode, less the umask.
		if cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	l, err := lc.Listen(context.Background(), network, path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// removeStale removes the socket file of a daemon that no longer runs.
func removeStale(network, path string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.Mode().Type() != fs.ModeSocket:
		return errors.New("exists and is not a socket")
	}
	c, err := net.DialTimeout(network, path, time.Second)
	switch {
	case err == nil:
		c.Close()
		return unix.EADDRINUSE
	case errors.Is(err, unix.EPROTOTYPE): // served too, as a socket of another type
		return unix.EADDRINUSE
	case !errors.Is(err, unix.ECONNREFUSED):
		return err
	}
	return os.Remove(path)
}
