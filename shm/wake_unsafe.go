package shm

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// ReadWakes reads pending wake-ups of fd, which must be non-blocking, into b, which must not be
// empty. Go's scheduler does not notice the system call: for the first one that it notices after
// the process was idle it wakes its monitor thread, which then wakes up every 20 µs for a while.
func ReadWakes(fd int, b []byte) (int, error) {
	for {
		n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
		switch e {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, e
		}
	}
}

// The thread that Wake or notify wakes may run on this CPU before the system call returns. If Go's scheduler noticed the call, it would
// meanwhile give the caller's place to another goroutine. Neither call blocks.

var one = [8]byte{1}

// Wake writes to the eventfd fd.
func Wake(fd int) {
	for {
		if _, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&one)), unsafe.Sizeof(one)); e != unix.EINTR {
			return
		}
	}
}

// notify sends b to the reader of w. If the channel is full the reader has wake-ups pending, so b may be dropped.
func notify(w int, b []byte) {
	for {
		_, _, e := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(w), uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
		if e != unix.EINTR {
			return
		}
	}
}
