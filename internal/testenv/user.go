package testenv

import (
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// AsUser calls f on a thread with the effective user and groups of another user. It skips the test
// if the process may not change them. Only system calls of that thread, such as creating a socket,
// are affected.
func AsUser(t testing.TB, uid, gid uint32, groups []int, f func()) {
	t.Helper()
	own, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // unlocked only after the IDs are restored
		if err = effective(groups, uintptr(gid), uintptr(uid)); err != nil {
			return
		}
		f()
		// Restore the user first: other users may not change groups.
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

// setEffective sets the effective ID of the thread and leaves the real and saved IDs unchanged.
func setEffective(call, id uintptr) error {
	const same = ^uintptr(0)
	if _, _, e := unix.RawSyscall(call, same, id, same); e != 0 {
		return e
	}
	return nil
}
