package testenv

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Sockets reports whether tests use kernel sockets (TRANSPORT=socket) instead of an in-process wire.
func Sockets() bool { return os.Getenv("TRANSPORT") == "socket" }

// Both reports whether nodes have kernel sockets besides the in-process wire (TRANSPORT=both).
func Both() bool { return os.Getenv("TRANSPORT") == "both" }

// ownNamespace marks the child process of RunApart.
const ownNamespace = "IWARPD_TEST_NAMESPACE"

// RunApart runs the tests of m and returns their exit status. With kernel sockets, and as root, they run
// in a child process with a network namespace of its own, in which only lo is up. With both
// transports lo has addrs. Namespace.Do would not be enough: the goroutines of an engine open sockets too.
func RunApart(m *testing.M, addrs ...netip.Addr) int {
	if !Sockets() && !Both() || os.Geteuid() != 0 {
		return m.Run()
	}
	if os.Getenv(ownNamespace) != "" {
		if err := loopback(addrs); err != nil {
			fmt.Fprintln(os.Stderr, "testenv: lo:", err)
			return 1
		}
		return m.Run()
	}
	runtime.LockOSThread() // the child ends with the thread that started it
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), ownNamespace+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv: a network namespace:", err)
		return 1
	}
	return 0
}

// loopback sets up lo, with addrs for TRANSPORT=both.
func loopback(addrs []netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil || !Both() {
		return err
	}
	for _, a := range addrs {
		n := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
		if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: n}); err != nil {
			return fmt.Errorf("%v: %w", a, err)
		}
	}
	return nil
}
