package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// OneCPU pins the calling goroutine to one CPU until the test ends. Frames received from a veth
// pair are queued per CPU, so frames sent from two CPUs may be reordered.
func OneCPU(t testing.TB) {
	t.Helper()
	runtime.LockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	for cpu := 0; one.Count() == 0; cpu++ {
		if all.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.SchedSetaffinity(0, &all); err != nil {
			t.Error(err) // the thread is still locked and exits with the goroutine
			return
		}
		runtime.UnlockOSThread()
	})
}
