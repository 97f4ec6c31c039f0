package seqpacket

import (
	"errors"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Contained reports whether the peer process is outside of this process's PID namespace, like
// the processes of containers, or has ended. The peer is the process that the kernel recorded
// when the connection was made.
func (c *Conn) Contained() bool {
	fd, err := c.peerPidfd()
	if err != nil {
		return true
	}
	defer unix.Close(fd)
	b, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	return err != nil || !inNamespace(string(b))
}

// inNamespace reports whether a process is in the PID namespace of this process's procfs. info
// is the fdinfo of a pidfd of the process. Its line NSpid has the number of the process in the
// namespace, or 0 if it has none or has ended, and then the numbers in nested namespaces.
func inNamespace(info string) bool {
	for line := range strings.Lines(info) {
		if list, ok := strings.CutPrefix(line, "NSpid:"); ok {
			pids := strings.Fields(list)
			return len(pids) == 1 && pids[0] != "0" && pids[0] != "-1"
		}
	}
	return false
}

// peerPidfd returns a pidfd of the peer process. Before Linux 6.5 it refers to the process that
// has the peer's number now.
func (c *Conn) peerPidfd() (fd int, err error) {
	var serr error
	if err := c.raw.Control(func(sock uintptr) { fd, serr = unix.GetsockoptInt(int(sock), unix.SOL_SOCKET, unix.SO_PEERPIDFD) }); err != nil {
		return -1, err
	}
	if !errors.Is(serr, unix.ENOPROTOOPT) {
		return fd, serr
	}
	cred, err := c.Cred()
	if err != nil {
		return -1, err
	}
	return unix.PidfdOpen(int(cred.Pid), 0)
}
