package iwarp

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// late is a context whose end is seen late: first by a look, and only then by those that wait for it.
type late struct{ context.Context }

func (late) Err() error { return context.DeadlineExceeded }

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
	for _, ended := range []func(context.Context) context.Context{
		func(ctx context.Context) context.Context { return ctx },
		func(ctx context.Context) context.Context { return late{ctx} }, // during the first attempt
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := OpenWait(ended(ctx), at.Name); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("it did not wait: %v", err)
		}
	}
}
