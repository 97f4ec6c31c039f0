package seqpacket

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

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
