package seqpacket

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Groups returns the group IDs of the process at the other end, the effective one first, as
// recorded by the kernel when the connection was made.
func (c *Conn) Groups() ([]uint32, error) {
	cred, err := c.Cred()
	if err != nil {
		return nil, err
	}
	var gids []uint32
	var serr error
	if err := c.raw.Control(func(fd uintptr) { gids, serr = peerGroups(fd) }); err != nil {
		return nil, err
	}
	return append([]uint32{cred.Gid}, gids...), serr
}

// peerGroups reads SO_PEERGROUPS (Linux 4.13). If the buffer is too short, the kernel reports the
// required length.
func peerGroups(fd uintptr) ([]uint32, error) {
	const size = unsafe.Sizeof(uint32(0))
	for room := uintptr(64); ; {
		gids := make([]uint32, room)
		n := uint32(room * size)
		_, _, e := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&gids[0])), uintptr(unsafe.Pointer(&n)), 0)
		switch need := uintptr(n) / size; {
		case e == 0:
			return gids[:need], nil
		case errors.Is(e, unix.ERANGE) && need > room:
			room = need
		default:
			return nil, e
		}
	}
}
