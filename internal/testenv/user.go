package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser calls f on a thread that has the credentials of a user, and skips the test
// where the process may not take them. Only the thread's own system calls have them,
// such as those that make a socket.
func AsUser(t testing.TB, uid, gid uint32, groups []int, f func()) {
	t.Helper()
	var failed error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if failed = unix.Setgroups(groups); failed != nil {
			return
		}
		for _, call := range [][2]uintptr{{unix.SYS_SETRESGID, uintptr(gid)}, {unix.SYS_SETRESUID, uintptr(uid)}} {
			if _, _, e := unix.RawSyscall(call[0], call[1], call[1], call[1]); e != 0 {
				failed = e
				return
			}
		}
		f()
	}()
	<-done
	if failed != nil {
		Skip(t, "cannot take the credentials of another user: %v", failed)
	}
}
