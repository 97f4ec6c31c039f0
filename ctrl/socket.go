package ctrl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/nss"
	"github.com/iwarpd/iwarpd/internal/printable"
)

// A socket is a listening socket for clients.
type socket struct {
	*net.UnixListener
	unpublish func() // removes another name of its file, in the folder of a slot, once; nil: there is none
}

// Close closes the socket and removes its file. A second Close does nothing: the file may then be that of the next
// daemon.
func (s socket) Close() {
	if s.unpublish != nil {
		s.unpublish()
	}
	s.UnixListener.Close()
}

func closeAll(all []socket) {
	for _, s := range all {
		s.Close()
	}
}

// ErrNotMember means that the daemon cannot give its socket to the group. That takes CAP_CHOWN,
// or membership in the group.
var ErrNotMember = errors.New("the daemon's user is not a member")

// listenSocket opens the socket at path with its mode and group.
func listenSocket(path string, mode fs.FileMode, group string) (*net.UnixListener, error) {
	gid := -1
	if group != "" {
		n, err := nss.GID(group)
		if err != nil {
			return nil, fmt.Errorf("ctrl: socket group: %w", err)
		}
		gid = int(n)
	}
	if err := removeStale(path); err != nil {
		return nil, err
	}
	l, err := listenOwn(path)
	if err != nil {
		return nil, socketError(path, err)
	}
	if gid >= 0 {
		if err = os.Chown(path, -1, gid); errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w of %s: usermod -aG %s USER, and start it again", ErrNotMember, group, group)
		}
	}
	if err == nil {
		err = os.Chmod(path, mode.Perm())
	}
	if err != nil {
		l.Close()
		return nil, socketError(path, err)
	}
	return l, nil
}

// listenOwn opens a socket at path to which only root and the daemon's user may connect, until chmod. Otherwise whoever
// the umask does not exclude could connect before the socket has its group and mode, and would stay connected.
func listenOwn(path string) (*net.UnixListener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		// bind(2) gives the file the mode of the socket's inode, less the umask.
		if cerr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); cerr != nil {
			return cerr
		}
		return err
	}}
	l, err := lc.Listen(context.Background(), "unixpacket", path)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

// socketError returns the error of a system call on the socket at path.
func socketError(path string, err error) error {
	return fmt.Errorf("ctrl: socket %s: %w", path, printable.Reason(err))
}

// removeStale removes the socket file of a daemon that no longer runs.
func removeStale(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return socketError(path, err)
	}
	if fi.Mode().Type() != fs.ModeSocket {
		return socketError(path, errors.New("exists and is not a socket"))
	}
	c, err := net.DialTimeout("unixpacket", path, time.Second)
	if err == nil {
		c.Close()
		return fmt.Errorf("ctrl: another iwarpd answers on %s: stop it, or set another path: %w", path, unix.EADDRINUSE)
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return socketError(path, err)
	}
	if err := os.Remove(path); err != nil {
		return socketError(path, err)
	}
	return nil
}
