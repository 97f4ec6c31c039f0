package link

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// superMsg holds the argument of sendmsg, so that calls do not allocate.
type superMsg struct {
	hdr [vnetHdrLen]byte
	iov [MaxSuper + 2]unix.Iovec
	msg unix.Msghdr
}

// send sends hdr and the parts after it, without blocking.
func (m *superMsg) send(fd int, to *unix.RawSockaddrLinklayer, parts [][]byte) unix.Errno {
	if len(parts) > MaxSuper+1 {
		return unix.EMSGSIZE
	}
	m.iov[0].Base = &m.hdr[0]
	m.iov[0].SetLen(len(m.hdr))
	for i, p := range parts {
		m.iov[i+1].Base = unsafe.SliceData(p)
		m.iov[i+1].SetLen(len(p))
	}
	m.msg = unix.Msghdr{Name: (*byte)(unsafe.Pointer(to)), Namelen: unix.SizeofSockaddrLinklayer, Iov: &m.iov[0]}
	m.msg.SetIovlen(len(parts) + 1)
	for {
		_, _, errno := unix.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.msg)), unix.MSG_DONTWAIT)
		if errno != unix.EINTR {
			return errno
		}
	}
}
