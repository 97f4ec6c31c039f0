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

// Slots are sockets for containers. A container gets the folder of one of them
// and with it the socket, under whatever uid its programs run: root of a
// container is nobody's administrator. The clients of a slot share one quota and
// see only each other.
type Slots struct {
	Folder string // holds a folder for each slot, named by its number, with iwarpd.sock
	Count  int    // 0 to MaxSlots; 0: none
	Rule   Rule   // its Listen, Addrs and Limits hold for each slot; the rest is unused
}

// MaxSlots bounds Slots.Count.
const MaxSlots = 4096

// slotUID is the uid that stands for the clients of slot 0 in quotas, rules and
// lists; slot n has slotUID+n. No user has such a uid: systemd leaves those from
// 2^31 unused since software takes them for negative numbers.
const slotUID = 1 << 31

// user names a uid in errors and logs.
func user(uid uint32) string {
	if uid >= slotUID {
		return "slot " + strconv.FormatUint(uint64(uid-slotUID), 10)
	}
	return "uid " + strconv.FormatUint(uint64(uid), 10)
}

// policy returns what the clients of a slot may do.
func (s *Slots) policy(c *Config) policy {
	p := policy{listen: s.Rule.Listen, addrs: s.Rule.Addrs, limits: c.Limits}
	if s.Rule.Limits != nil {
		p.limits = s.Rule.Limits.fill()
	}
	return p
}

// listen opens the sockets of all slots. Folders stay when the daemon ends: they
// are mounted into containers, and a folder made again would not be.
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
	// Containers are given one slot each; other users of the host none.
	if err := os.Mkdir(s.Folder, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("ctrl: slots: %w", err)
	}
	for n := range s.Count {
		dir := filepath.Join(s.Folder, strconv.Itoa(n))
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return all, fmt.Errorf("ctrl: slots: %w", err)
		}
		if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask
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
