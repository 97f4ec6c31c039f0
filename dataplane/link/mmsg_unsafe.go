package link

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// batch is the maximum number of frames per system call.
const batch = 64

// mmsghdr is struct mmsghdr.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

// mmsgs are the arguments of sendmmsg, kept so that no call allocates.
type mmsgs struct {
	msg [batch]mmsghdr
	iov [batch]unix.Iovec
}

// set makes message i the buffer b.
func (m *mmsgs) set(i int, b []byte) {
	m.iov[i].Base = unsafe.SliceData(b)
	m.iov[i].SetLen(len(b))
	h := &m.msg[i].hdr
	*h = unix.Msghdr{Iov: &m.iov[i]}
	h.SetIovlen(1)
	m.msg[i].n = 0
}

// send sends up to n messages without blocking. For a single one sendto has less to do.
func (m *mmsgs) send(fd, n int) (int, unix.Errno) {
	if n == 1 {
		v := &m.iov[0]
		_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(v.Base)), uintptr(v.Len), unix.MSG_DONTWAIT, 0, 0)
		if errno != 0 {
			return 0, errno
		}
		return 1, 0
	}
	r, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.msg[0])), uintptr(n), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(r), 0
}
