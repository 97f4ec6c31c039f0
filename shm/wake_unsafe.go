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
