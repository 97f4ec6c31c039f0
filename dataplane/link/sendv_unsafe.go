package link

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxVec is the maximum number of buffers in a Vec.
const maxVec = 64

// Vec holds the buffers of a sendmsg(2), so that calls do not allocate.
type Vec struct {
	iov [maxVec]unix.Iovec
	hdr unix.Msghdr
	n   int
}

// Reset empties v.
func (v *Vec) Reset() { v.n = 0 }

// Add appends b, which must not be empty. It returns false if v is full.
func (v *Vec) Add(b []byte) bool {
	if v.n == maxVec {
		return false
	}
	v.iov[v.n].Base = unsafe.SliceData(b)
	v.iov[v.n].SetLen(len(b))
	v.n++
	return true
}

// Send sends the buffers over a stream socket without blocking. It returns the number of bytes
// that the kernel accepted.
func (v *Vec) Send(fd int) (int, unix.Errno) {
	v.hdr = unix.Msghdr{Iov: &v.iov[0]}
	v.hdr.SetIovlen(v.n)
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&v.hdr)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// Recv receives into b from a stream socket without blocking.
func Recv(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), 0
}

// Ready stores the events of an epoll descriptor that are pending, and returns their number. It
// does not wait, so the scheduler of Go need not know of the call.
func Ready(epoll int, events []unix.EpollEvent) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epoll), uintptr(unsafe.Pointer(unsafe.SliceData(events))), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0 // EINTR
	}
	return int(n)
}
