package link

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// waker lets another goroutine wake one that sleeps in poll, and costs it only
// an atomic load while nobody sleeps.
type waker struct {
	asleep atomic.Bool
	fd     int
}

func newWaker() (*waker, error) {
	fd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &waker{fd: fd}, nil
}

// wake wakes the sleeper, if there is one. What it is to see must have been
// published before.
func (w *waker) wake() {
	if w.asleep.Load() && w.asleep.CompareAndSwap(true, false) {
		one := [8]byte{1}
		_, _ = unix.Write(w.fd, one[:]) // EAGAIN: it is readable already
	}
}

// clear makes the descriptor unreadable.
func (w *waker) clear() {
	var b [8]byte
	_, _ = unix.Read(w.fd, b[:])
}

// poller waits for descriptors. It holds what poll needs, so that waiting does
// not allocate.
type poller struct{ fds [2]unix.PollFd }

// wait sleeps until fd or wakefd is readable or timeout is up. It reports whether
// wakefd is readable.
func (p *poller) wait(timeout time.Duration, fd, wakefd int) (woken bool) {
	// A negative descriptor is ignored by poll(2).
	p.fds[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	p.fds[1] = unix.PollFd{Fd: int32(wakefd), Events: unix.POLLIN}
	var ts *unix.Timespec
	if timeout >= 0 {
		t := unix.NsecToTimespec(int64(timeout))
		ts = &t
	}
	n, err := unix.Ppoll(p.fds[:], ts, nil)
	return err == nil && n > 0 && p.fds[1].Revents&unix.POLLIN != 0
}
