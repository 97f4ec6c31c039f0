package iwarp

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestWakeups checks what a wait returns: bytes, the expiry of a deadline, the end of the daemon, and the closing of the file meanwhile.
func TestWakeups(t *testing.T) {
	open := func() (w *wakeups, daemon int) {
		p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		w = newWakeups(p[0], "test", 16)
		t.Cleanup(func() { w.Close() })
		return w, p[1]
	}
	send := func(fd int, b []byte) {
		if _, err := unix.Write(fd, b); err != nil {
			t.Error(err)
		}
	}

	w, daemon := open()
	got := make(chan string)
	go func() {
		b, err := w.wait()
		if err != nil {
			t.Error(err)
		}
		got <- string(b)
	}()
	send(daemon, []byte("first"))
	if s := <-got; s != "first" {
		t.Errorf("wait returned %q", s)
	}
	one := []byte("x")
	if n := testing.AllocsPerRun(20, func() {
		send(daemon, one)
		if _, err := w.wait(); err != nil {
			t.Error(err)
		}
	}); n > 0 {
		t.Errorf("a wait allocates %v times", n)
	}
	send(daemon, []byte("0123456789abcdefXY"))
	for _, want := range []string{"0123456789abcdef", "XY"} {
		if b, err := w.wait(); err != nil || string(b) != want {
			t.Errorf("wait returned %q, %v; want %q", b, err, want)
		}
	}
	_ = w.SetReadDeadline(past)
	if b, err := w.wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("after the deadline wait returned %q, %v", b, err)
	}
	_ = w.SetReadDeadline(time.Time{})
	unix.Close(daemon)
	if b, err := w.wait(); err != io.EOF {
		t.Errorf("without a daemon wait returned %q, %v", b, err)
	}

	w, daemon = open()
	defer unix.Close(daemon)
	failed := make(chan error)
	go func() {
		_, err := w.wait()
		failed <- err
	}()
	w.Close()
	if err := <-failed; err == nil {
		t.Error("wait succeeded on a closed file")
	}
}
