package link

import (
	"sync/atomic"

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
