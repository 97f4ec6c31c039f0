package iwarp

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/shm"
)

// wakeups is a descriptor from which the program reads the wake-ups of completion queues.
type wakeups struct {
	*os.File
	raw  syscall.RawConn
	read func(fd uintptr) (done bool) // made once, so that waiting allocates nothing
	buf  []byte
	n    int // result of read
	err  error
}

// past is a deadline that has passed.
var past = time.Unix(1, 0)

// newWakeups takes over fd, which must be non-blocking. A wait reads at most size bytes.
func newWakeups(fd int, name string, size int) *wakeups {
	w := &wakeups{File: os.NewFile(uintptr(fd), name), buf: make([]byte, size)}
	w.read = func(fd uintptr) bool {
		w.n, w.err = shm.ReadWakes(int(fd), w.buf)
		return w.err != unix.EAGAIN
	}
	w.raw, _ = w.SyscallConn() // fails only without a File
	return w
}

// wait waits until there are wake-ups, and returns what it has read, which is valid until the next
// call. The error is io.EOF if the daemon has closed its end. Only one goroutine may wait.
func (w *wakeups) wait() ([]byte, error) {
	if err := w.raw.Read(w.read); err != nil {
		return nil, err
	}
	if w.err != nil {
		return nil, w.err
	}
	if w.n == 0 {
		return nil, io.EOF
	}
	return w.buf[:w.n], nil
}

// interrupt makes sleep return, also the next one, until the read deadline is cleared.
func (w *wakeups) interrupt() { _ = w.SetReadDeadline(past) }

// sleep is wait for an object of d, until ctx is done. It returns nothing after an interrupt. ending
// reports whether the object is being closed.
func (w *wakeups) sleep(ctx context.Context, d *Device, ending func() bool) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if ctx.Done() != nil {
		stop := context.AfterFunc(ctx, w.interrupt)
		defer stop()
	}
	d.rest()
	b, err := w.wait()
	switch {
	case err == nil:
		return b, nil
	case errors.Is(err, os.ErrDeadlineExceeded): // by this context or, late, an earlier one, or by interrupt
		return nil, ctx.Err()
	case ending():
		return nil, ErrClosed
	}
	return nil, cmp.Or(d.Err(), ErrDaemonGone)
}
