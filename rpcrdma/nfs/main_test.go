package nfs_test

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// noHandles marks the child process of TestWithoutCapability.
const noHandles = "IWARPD_TEST_NO_HANDLES"

// TestMain sets the umask that NewServer sets, so that files of tests have the same mode whether or not a server ran before.
func TestMain(m *testing.M) {
	if os.Getenv(noHandles) == "drop" {
		runtime.LockOSThread()
		err := unix.Prctl(unix.PR_CAPBSET_DROP, unix.CAP_DAC_READ_SEARCH, 0, 0, 0)
		if err == nil {
			err = os.Setenv(noHandles, "dropped")
		}
		if err == nil {
			err = syscall.Exec("/proc/self/exe", os.Args, os.Environ())
		}
		fmt.Fprintln(os.Stderr, "without CAP_DAC_READ_SEARCH:", err)
		os.Exit(1)
	}
	unix.Umask(0)
	os.Exit(testenv.RunApart(m))
}

// TestWithoutCapability runs the tests of this package in a process that may not open files by handle.
func TestWithoutCapability(t *testing.T) {
	testenv.RequireRoot(t)
	if os.Getenv(noHandles) != "" {
		return // it is the child
	}
	// TestForgedHandle opens a file by its handle, and TestNamesMemory opens none.
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run=^Test", "-test.skip=^(TestWithoutCapability|TestForgedHandle|TestNamesMemory)$", "-test.timeout=9m")
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "IWARPD_TEST_NAMESPACE=") { // it makes its own
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, noHandles+"=drop")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestUnit runs the tests of this package with the capabilities and the system calls that the unit of systemd allows.
func TestUnit(t *testing.T) {
	testenv.RequireRoot(t)
	if os.Getenv(noHandles) != "" {
		return // the child of TestWithoutCapability
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append(testenv.Unit(t, "../../deploy/units/iwarpctl-nfs@.service", "mount", "umount2"), // some tests mount what they export
		exe, "-test.run=^Test", "-test.skip=^(TestUnit|TestWithoutCapability)$", "-test.timeout=9m")
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
