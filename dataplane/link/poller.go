package link

import (
	"time"

	"golang.org/x/sys/unix"
)

// A Poller waits for two descriptors. It holds what ppoll needs, so that waiting does not allocate.
type Poller struct{ fds [2]unix.PollFd }

// Wait sleeps until fd or wakefd is readable, timeout has elapsed or a signal arrives. It reports
// whether wakefd is readable. A negative timeout is infinite, and a negative descriptor is ignored.
func (p *Poller) Wait(timeout time.Duration, fd, wakefd int) (woken bool) {
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

// events returns what the last Wait has found out about fd, as poll(2) reports it.
func (p *Poller) events() int16 { return p.fds[0].Revents }
