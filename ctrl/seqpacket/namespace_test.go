package seqpacket

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestContained checks that a process in a PID namespace of its own is distinguished from one in ours.
func TestContained(t *testing.T) {
	if path := os.Getenv("CONNECT_TO"); path != "" { // the child
		c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Read(make([]byte, 1)) // until the other end closes
		return
	}
	for _, tt := range []struct {
		name  string
		flags uintptr
		want  bool
	}{
		{"same namespace", 0, false},
		{"own namespace", syscall.CLONE_NEWPID, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.flags != 0 {
				testenv.RequireRoot(t)
			}
			path := filepath.Join(t.TempDir(), "socket")
			l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			cmd := exec.Command(os.Args[0], "-test.run=^TestContained$")
			cmd.Env = append(os.Environ(), "CONNECT_TO="+path)
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: tt.flags}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			u, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			c := FromUnix(u)
			if got := c.Contained(); got != tt.want {
				t.Errorf("Contained() = %v; want %v", got, tt.want)
			}
			c.Close()
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPeerPidfd checks that the peer is not looked up by its number if the kernel knows the process itself, but has no
// pidfd for it: when the peer has ended, another process may have the number. Here there is no peer.
func TestPeerPidfd(t *testing.T) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, want := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if errors.Is(want, unix.ENOPROTOOPT) {
		testenv.Skip(t, "no SO_PEERPIDFD (before Linux 6.5)")
	}
	c, err := FromFD(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.peerPidfd(); want == nil || !errors.Is(err, want) {
		t.Errorf("%v; the kernel said %v", err, want)
	}
}

// TestInNamespace checks how the kernel's description of a pidfd is read.
func TestInNamespace(t *testing.T) {
	for info, want := range map[string]bool{
		"pos:\t0\nPid:\t42\nNSpid:\t42\n": true,
		"Pid:\t42\nNSpid:\t42\t1\n":       false,
		"Pid:\t42\nNSpid:\t42\t7\t1\n":    false,
		"Pid:\t0\nNSpid:\t0\n":            false,
		"Pid:\t-1\nNSpid:\t-1\n":          false,
		"pos:\t0\nflags:\t02000002\n":     false,
		"":                                false,
	} {
		if got := inNamespace(info); got != want {
			t.Errorf("%q: %v", info, got)
		}
	}
}
