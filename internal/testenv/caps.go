package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// WithoutPrivileges runs f on a thread without capabilities, in the network namespace ns unless it
// is nil. The thread exits when f returns.
func WithoutPrivileges(t testing.TB, ns *Namespace, f func()) {
	t.Helper()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		run := func() error {
			// The thread is never unlocked, so the runtime terminates it and does not
			// reuse it without capabilities.
			runtime.LockOSThread()
			hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var keep, none [2]unix.CapUserData
			if err := unix.Capget(&hdr, &keep[0]); err != nil {
				return err
			}
			none[0].Permitted, none[1].Permitted = keep[0].Permitted, keep[1].Permitted
			if err := unix.Capset(&hdr, &none[0]); err != nil {
				return err
			}
			f()
			return unix.Capset(&hdr, &keep[0]) // to leave the namespace again
		}
		if ns == nil {
			err = run()
		} else {
			err = ns.Do(run)
		}
	}()
	<-done
	if err != nil {
		t.Fatalf("testenv: drop privileges: %v", err)
	}
}
