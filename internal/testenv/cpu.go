package testenv

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// OneCPU keeps the calling goroutine, a test's, on one CPU until the test ends. Each CPU
// has a queue of its own of frames that came out of a veth pair: those that are sent from
// two may change their order.
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
			t.Error(err) // the thread, still locked, ends with the goroutine
			return
		}
		runtime.UnlockOSThread()
	})
}
