package ctrl

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Slots are sockets for containers. A container gets the folder of one slot, which contains the
// socket, for programs of any uid: root in a container is not an administrator. The clients of a
// slot share one quota and see only each other.
type Slots struct {
	Folder string // contains a folder for each slot, named by its number, with iwarpd.sock
	Count  int    // 0 to MaxSlots; 0: none
	Rule   Rule   // applies to each slot, except for UIDs, GIDs, Deny and Admin
}

// MaxSlots bounds Slots.Count.
const MaxSlots = 4096

// slotUID represents the clients of slot 0 in quotas, rules and lists; slot n has slotUID+n. No
// user has such a uid: systemd leaves uids from 2^31 unused, since some software treats them as
// negative numbers.
const slotUID = 1 << 31

// otherRoot represents root of other PID namespaces than the daemon's, as of containers. It has the rights of a user,
// so it is another user than root: it neither sees root's connections nor shares its quotas.
const otherRoot = slotUID + MaxSlots

// user returns the name of a uid for errors and logs.
func user(uid uint32) string {
	switch {
	case uid == otherRoot:
		return "root of another PID namespace"
	case uid >= slotUID:
		return "slot " + strconv.FormatUint(uint64(uid-slotUID), 10)
	}
	return "uid " + strconv.FormatUint(uint64(uid), 10)
}

// ErrSlots means that the sockets of the slots cannot be made.
var ErrSlots = errors.New("slots")

// listen opens the sockets of all slots. The folders are not removed when the daemon exits:
// containers that have mounted them would not see new ones.
func (s *Slots) listen() (all []*UnixListener, err error) {
	defer func() {
		if err != nil {
			closeAll(all)
			all = nil
		}
	}()
	for n := range s.Count {
		l, err := s.listenSlot(n, nil)
		if err != nil {
			return all, err
		}
		all = append(all, l)
	}
	return all, nil
}

// listenSlot opens the socket of slot n or, if l is that and only its name in the slot is lost, restores the name. Root
// of a container may have write access to the folder of its slot, so the socket is created in the parent folder, to
// which only the daemon's user can write, and is then linked into the slot.
func (s *Slots) listenSlot(n int, l *UnixListener) (_ *UnixListener, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("ctrl: %w: %w", ErrSlots, err)
		}
	}()
	// The folder is closed to other users of the host: containers get single slots mounted.
	if err := os.Mkdir(s.Folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	slot := strconv.Itoa(n)
	dir := filepath.Join(s.Folder, slot)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	info, err := os.Stat(dir) // it may belong to another user, under whom a daemon ran before
	if err == nil && info.Mode().Perm() != 0o755 {
		err = os.Chmod(dir, 0o755) // regardless of the umask
	}
	if err != nil {
		return nil, err
	}
	private, public := filepath.Join(s.Folder, "."+slot), filepath.Join(dir, "iwarpd.sock")
	if l != nil && l.has(private) {
		return l, publish(private, public)
	}
	if l, err = listenSocket(private, 0o666, ""); err != nil {
		return nil, err
	}
	l.names = append(l.names, public)
	if err := publish(private, public); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

// publish links the file private as public and replaces any file there, which a container may
// have created.
func publish(private, public string) error {
	dir, err := os.MkdirTemp(filepath.Dir(private), ".old")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	name := filepath.Join(dir, "socket")
	if err := os.Link(private, name); err != nil {
		return err
	}
	if err := os.Rename(name, public); !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return unix.Renameat2(unix.AT_FDCWD, name, unix.AT_FDCWD, public, unix.RENAME_EXCHANGE)
}
