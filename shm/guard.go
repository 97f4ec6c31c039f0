package shm

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Constants of linux/userfaultfd.h.
const (
	uffdUserModeOnly   = 1
	uffdAPI            = 0xaa
	uffdMissingShmem   = 1 << 5
	uffdSIGBUS         = 1 << 7
	uffdModeMissing    = 1
	uffdioAPI          = 0xc018aa3f
	uffdioRegister     = 0xc020aa00
	mincoreChunk       = 1 << 12 // pages
	errNotAllocatedFix = "the owner of the memory allocates it before it is registered: write to each page, or madvise(MADV_POPULATE_WRITE)"
)

// guard is the userfaultfd of this process. It makes an access to a hole in client memory a fault (SIGBUS); otherwise the kernel would
// allocate a page, charged to this process. It needs no privilege.
var guard = sync.OnceValues(func() (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|uffdUserModeOnly, 0, 0)
	if errno != 0 {
		return -1, fmt.Errorf("shm: userfaultfd: %w: client memory is not protected against holes that the client makes later; allow the system call, and CONFIG_USERFAULTFD in the kernel", errno)
	}
	api := [3]uint64{uffdAPI, uffdMissingShmem | uffdSIGBUS}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uffdioAPI, uintptr(unsafe.Pointer(&api))); errno != 0 {
		unix.Close(int(fd))
		return -1, fmt.Errorf("shm: userfaultfd: features of Linux 4.14: %w", errno)
	}
	return int(fd), nil
})

// Guarded returns nil if no access to a Region can allocate memory, and otherwise the reason: then only holes that exist when MapRegion is
// called are detected.
func Guarded() error {
	_, err := guard()
	return err
}

// guardHoles ensures that this process never allocates any of mem, a mapping of client memory: an access to a hole faults.
func guardHoles(mem []byte) error {
	fd, err := guard()
	if err != nil {
		return nil // populate looks for holes instead
	}
	reg := [4]uint64{uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), roundPages(len(mem)), uffdModeMissing}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uffdioRegister, uintptr(unsafe.Pointer(&reg))); errno != 0 {
		return fmt.Errorf("shm: protecting %d bytes: %w", len(mem), errno)
	}
	return nil
}

// populate maps the pages of mem, which guardHoles protects, and checks that all are allocated.
// On a read the kernel maps the pages of a shared file for writing too, if the mapping is
// writable.
func populate(mem []byte) error {
	holes := Guarded() != nil && !incore(mem)
	var err error
	if !holes {
		err = unix.Madvise(mem, unix.MADV_POPULATE_READ)
	}
	switch {
	case holes, errors.Is(err, unix.EFAULT):
		return fmt.Errorf("%w: not all of its %d bytes are allocated: %s", ErrMemory, len(mem), errNotAllocatedFix)
	case err != nil:
		return fmt.Errorf("shm: mapping the pages of %d bytes: %w", len(mem), err)
	}
	return nil
}

// incore reports whether all pages of mem are allocated.
func incore(mem []byte) bool {
	page := os.Getpagesize()
	vec := make([]byte, min(mincoreChunk, (len(mem)+page-1)/page))
	for len(mem) > 0 {
		n := min(len(mem), len(vec)*page)
		at := unsafe.Pointer(unsafe.SliceData(mem))
		if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(at), uintptr(n), uintptr(unsafe.Pointer(unsafe.SliceData(vec)))); errno != 0 {
			return false
		}
		for _, v := range vec[:(n+page-1)/page] {
			if v&1 == 0 {
				return false
			}
		}
		mem = mem[n:]
	}
	return true
}

// Populate allocates the pages of memory that is to be registered, so that they are charged to this process; the daemon accepts only memory
// without holes. mem is a mapping of it.
func Populate(mem []byte) error {
	if len(mem) == 0 {
		return nil
	}
	page := uintptr(os.Getpagesize())
	at := uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
	head := at % page
	n := roundPages(len(mem) + int(head))
	for _, advice := range []uintptr{unix.MADV_POPULATE_WRITE, unix.MADV_POPULATE_READ} {
		_, _, errno := unix.Syscall(unix.SYS_MADVISE, at-head, uintptr(n), advice)
		switch errno {
		case 0:
			return nil
		case unix.EINVAL, unix.EFAULT: // mapped for reading only, or not all within its file
			continue
		}
		return fmt.Errorf("shm: allocating %d bytes: %w", len(mem), errno)
	}
	return fmt.Errorf("shm: allocating %d bytes: %w: is all of the memory within its file, and the kernel Linux 5.14 or later?", len(mem), unix.EFAULT)
}

func roundPages(n int) uint64 { return uint64(align(n, os.Getpagesize())) }
