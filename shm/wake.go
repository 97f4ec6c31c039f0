package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// No wake-up may make the daemon wait for a client. A worker never reads or writes a descriptor that its clients write to: it watches their
// eventfds, edge-triggered, in an epoll instance of its own. A client is woken through a socket pair, of which it has one end: when it
// reads, the kernel holds only the lock of that end. An object whose lock is held while client memory is copied, such as a pipe, would
// block the daemon if the client copies from a page that never arrives.

// Alarm wakes a sleeping worker. Clients wake it with eventfds, and other goroutines with Ring.
type Alarm struct {
	epoll, own int
	events     [64]unix.EpollEvent
}

// NewAlarm returns an Alarm that watches nothing.
func NewAlarm() (a *Alarm, err error) {
	a = &Alarm{epoll: -1, own: -1}
	if a.epoll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err == nil {
		if a.own, err = newEventFD(); err == nil {
			err = a.Watch(a.own)
		}
	}
	if err != nil {
		a.Close()
		return nil, fmt.Errorf("shm: wake-ups of a worker: %w", Limit(err))
	}
	return a, nil
}

// newEventFD creates an eventfd that is readable from the start, so that every write to it is an edge.
func newEventFD() (int, error) { return unix.Eventfd(1, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC) }

// FD returns a descriptor that is readable from a wake-up until Clear.
func (a *Alarm) FD() int { return a.epoll }

// Watch makes each write to the eventfd fd a wake-up. Any goroutine may call it.
func (a *Alarm) Watch(fd int) error {
	err := unix.EpollCtl(a.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET, Fd: int32(fd)})
	if errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: raise the sysctl fs.epoll.max_user_watches", err)
	}
	return err
}

// Unwatch ends Watch. Any goroutine may call it.
func (a *Alarm) Unwatch(fd int) { _ = unix.EpollCtl(a.epoll, unix.EPOLL_CTL_DEL, fd, nil) }

// Ring wakes the worker. Any goroutine may call it.
func (a *Alarm) Ring() { Wake(a.own) }

// Clear makes FD unreadable, unless more clients have woken the worker than one call of epoll_wait returns.
func (a *Alarm) Clear() { _, _ = unix.EpollWait(a.epoll, a.events[:], 0) }

// Close closes the descriptors.
func (a *Alarm) Close() { closeFDs(a.epoll, a.own) }

func closeFDs(fds ...int) {
	for _, fd := range fds {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
}

// Bytes of unread wake-ups, as the kernel counts them, with its overhead. A channel of a single queue needs only one wake-up.
const (
	queueWakes   = 1 // the least that the kernel has
	channelWakes = 96 << 10
)

// NewChannel creates a wake-up channel for the completion queues of a client: the client reads r, the queues write to w.
func NewChannel() (r, w int, err error) { return newWaker(channelWakes) }

// newWaker creates a one-way socket pair with room for about room unread bytes. Nothing that the reader does with r can block Send on w,
// and nothing can be sent to w.
func newWaker(room int) (r, w int, err error) {
	p, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("shm: socketpair: %w", Limit(err))
	}
	if err = unix.SetsockoptInt(p[1], unix.SOL_SOCKET, unix.SO_SNDBUF, room); err == nil {
		err = unix.Shutdown(p[1], unix.SHUT_RD)
	}
	if err != nil {
		closeFDs(p[0], p[1])
		return -1, -1, fmt.Errorf("shm: wake-ups: %w", err)
	}
	return p[0], p[1], nil
}

// Drain reads the pending wake-ups of fd, which must be non-blocking. Clients use it.
func Drain(fd int) {
	var b [512]byte
	for {
		if n, _ := ReadWakes(fd, b[:]); n < len(b) {
			return
		}
	}
}
