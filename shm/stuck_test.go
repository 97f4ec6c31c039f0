package shm

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// stuckPage returns a page whose first access, also by the kernel, blocks until the test ends: a page of a
// userfaultfd that nobody serves. It needs root.
func stuckPage(t testing.TB) []byte {
	t.Helper()
	testenv.RequireRoot(t)
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0, 0)
	if errno != 0 {
		testenv.Skip(t, "no userfaultfd: %v", errno)
	}
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	const (
		apiVersion  = 0xaa
		ioctlAPI    = 0xc018aa3f // UFFDIO_API
		ioctlReg    = 0xc020aa00 // UFFDIO_REGISTER
		modeMissing = 1          // UFFDIO_REGISTER_MODE_MISSING
	)
	api := [3]uint64{apiVersion}
	_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, ioctlAPI, uintptr(unsafe.Pointer(&api)))
	if errno == 0 {
		reg := [4]uint64{uint64(uintptr(unsafe.Pointer(&page[0]))), uint64(len(page)), modeMissing}
		_, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, ioctlReg, uintptr(unsafe.Pointer(&reg)))
	}
	if errno != 0 {
		t.Fatal(errno)
	}
	// Closing the userfaultfd lets blocked threads continue. The page stays mapped, since they
	// may still copy to it and would change what is mapped there next.
	t.Cleanup(func() { unix.Close(int(fd)) })
	return page
}

// stickIn makes a thread block in the system call trap, a read or write on fd that copies from or to page, a page of
// stuckPage. The kernel then holds the locks that it takes before it copies.
func stickIn(t testing.TB, trap uintptr, fd int, page []byte) {
	t.Helper()
	tid := make(chan int, 1)
	go func() {
		runtime.LockOSThread()
		tid <- unix.Gettid()
		_, _, _ = unix.Syscall(trap, uintptr(fd), uintptr(unsafe.Pointer(&page[0])), 8)
	}()
	name := fmt.Sprintf("/proc/self/task/%d/", <-tid)
	testenv.Until(t, fmt.Sprintf("a thread stops in system call %d", trap), func() bool {
		call, _ := os.ReadFile(name + "syscall")
		where, _ := os.ReadFile(name + "stack")
		return strings.HasPrefix(string(call), fmt.Sprintf("%d %#x ", trap, fd)) && strings.Contains(string(where), "userfault")
	})
}
