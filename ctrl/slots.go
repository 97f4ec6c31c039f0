package ctrl

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
)

// Slots are sockets for containers. A container gets the folder of one slot, which contains the
// socket, for programs of any uid: root in a container is not an administrator. The clients of a
// slot share one quota and see only each other.
type Slots struct {
	Folder string // contains a folder for each slot, named by its number, with iwarpd.sock
	Count  int    // 0 to MaxSlots; 0: none
	Rule   Rule   // applies to each slot, but for UIDs, GIDs, Deny and Admin
}

// MaxSlots bounds Slots.Count.
const MaxSlots = 4096

// slotUID represents the clients of slot 0 in quotas, rules and lists; slot n has slotUID+n. No
// user has such a uid: systemd leaves uids from 2^31 unused, since some software treats them as
// negative numbers.
const slotUID = 1 << 31

// user returns the name of a uid for errors and logs.
func user(uid uint32) string {
	if uid >= slotUID {
		return "slot " + strconv.FormatUint(uint64(uid-slotUID), 10)
	}
	return "uid " + strconv.FormatUint(uint64(uid), 10)
}

// policy returns the rights of the clients of a slot.
func (s *Slots) policy(c *Config) policy {
	p := policy{listen: s.Rule.Listen, addrs: s.Rule.Addrs, limits: c.Limits,
		acceptFrom: s.Rule.AcceptFrom, connectTo: s.Rule.ConnectTo, rule: c.ruleName("slots")}
	if s.Rule.Limits != nil {
		p.limits = s.Rule.Limits.fill()
	}
	return p
}

// listen opens the sockets of all slots. The folders are not removed when the daemon exits:
// containers that have mounted them would not see new ones.
func (s *Slots) listen() (all []*net.UnixListener, err error) {
	defer func() {
		if err != nil {
			closeAll(all)
			all = nil
		}
	}()
	if s.Count == 0 {
		return nil, nil
	}
	// The folder is closed to other users of the host: containers get single slots mounted.
	if err := os.Mkdir(s.Folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("ctrl: slots: %w", err)
	}
	for n := range s.Count {
		dir := filepath.Join(s.Folder, strconv.Itoa(n))
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return all, fmt.Errorf("ctrl: slots: %w", err)
		}
		if err := os.Chmod(dir, 0o755); err != nil { // regardless of the umask
			return all, fmt.Errorf("ctrl: slots: %w", err)
		}
		l, err := listenSocket(filepath.Join(dir, "iwarpd.sock"), 0o666, "")
		if err != nil {
			return all, err
		}
		all = append(all, l)
	}
	return all, nil
}

func closeAll(ls []*net.UnixListener) {
	for _, l := range ls {
		l.Close()
	}
}
