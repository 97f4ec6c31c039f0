package testenv

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser calls f on a thread that has the effective user and groups of somebody else, and
// skips the test where the process may not take them. Only the thread's own system calls
// have them, such as those that make a socket.
func AsUser(t testing.TB, uid, gid uint32, groups []int, f func()) {
	t.Helper()
	own, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // unlocked only when it is as it was
		if err = effective(groups, uintptr(gid), uintptr(uid)); err != nil {
			return
		}
		f()
		// The user first: another may not change groups.
		if err = setEffective(unix.SYS_SETRESUID, 0); err == nil {
			err = effective(own, 0, 0)
		}
		if err == nil {
			runtime.UnlockOSThread()
		}
	}()
	<-done
	if err != nil {
		Skip(t, "cannot take the credentials of another user: %v", err)
	}
}

func effective(groups []int, gid, uid uintptr) error {
	if err := unix.Setgroups(groups); err != nil {
		return err
	}
	if err := setEffective(unix.SYS_SETRESGID, gid); err != nil {
		return err
	}
	return setEffective(unix.SYS_SETRESUID, uid)
}

// setEffective sets the effective number of the thread, and leaves the real and the saved one.
func setEffective(call, id uintptr) error {
	const same = ^uintptr(0)
	if _, _, e := unix.RawSyscall(call, same, id, same); e != 0 {
		return e
	}
	return nil
}
