package link

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// waker wakes a goroutine that sleeps in poll. It costs the waking goroutine only an atomic
// load while no goroutine sleeps.
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

// wake wakes the sleeper, if there is one. Publish the data for it first.
func (w *waker) wake() {
	if w.asleep.Load() && w.asleep.CompareAndSwap(true, false) {
		one := [8]byte{1}
		_, _ = unix.Write(w.fd, one[:]) // EAGAIN: it is already readable
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

// wait sleeps until fd or wakefd is readable or timeout has elapsed. It reports whether wakefd
// is readable.
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
