package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// WithoutPrivileges runs f on a thread that has no capabilities, in the network
// namespace of ns if that is not nil. The thread ends with f.
func WithoutPrivileges(t testing.TB, ns *Namespace, f func()) {
	t.Helper()
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		run := func() error {
			// Never unlocked: the runtime ends the thread, and with it what
			// was done to it.
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
