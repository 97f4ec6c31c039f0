package iwarp

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestOpenWaitFull checks that OpenWait waits for a daemon to which more programs connect at once than its socket holds.
func TestOpenWaitFull(t *testing.T) {
	at := &unix.SockaddrUnix{Name: filepath.Join(t.TempDir(), "socket")}
	socket := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	daemon := socket()
	err := errors.Join(unix.Bind(daemon, at), unix.Listen(daemon, 0))
	for err == nil {
		err = unix.Connect(socket(), at)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := OpenWait(ctx, at.Name); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it did not wait: %v", err)
	}
}
