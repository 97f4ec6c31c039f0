package seqpacket

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Contained reports whether the process at the other end, as recorded by the kernel when the
// connection was made, is outside of this process's PID namespace, as the processes of containers
// are, or has ended.
func (c *Conn) Contained() bool {
	fd, err := c.peerPidfd()
	if err != nil {
		return true
	}
	defer unix.Close(fd)
	b, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	return err != nil || !inNamespace(string(b))
}

// inNamespace reports whether the process of a pidfd is in the PID namespace of the procfs that info,
// the pidfd's fdinfo, comes from. NSpid has its number there, 0 if it has none or the process is
// gone, and those in the namespaces below.
func inNamespace(info string) bool {
	for line := range strings.Lines(info) {
		if list, ok := strings.CutPrefix(line, "NSpid:"); ok {
			pids := strings.Fields(list)
			return len(pids) == 1 && pids[0] != "0" && pids[0] != "-1"
		}
	}
	return false
}

// peerPidfd returns a pidfd of the process at the other end. Before Linux 6.5 it is that of the
// process that has the number now.
func (c *Conn) peerPidfd() (fd int, err error) {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return -1, err
	}
	var serr error
	if err := raw.Control(func(sock uintptr) { fd, serr = unix.GetsockoptInt(int(sock), unix.SOL_SOCKET, unix.SO_PEERPIDFD) }); err != nil {
		return -1, err
	}
	if serr == nil {
		return fd, nil
	}
	cred, err := c.Cred()
	if err != nil {
		return -1, err
	}
	return unix.PidfdOpen(int(cred.Pid), 0)
}
