package ctrl

import (
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// awayWait is the time that a system call which a client can delay may take.
const awayWait = time.Second

// away runs f, a system call that a client can delay indefinitely, in a goroutine of its own. It returns when f does, or after awayWait;
// over is closed when f has returned.
func away(f func()) (over <-chan struct{}, ok bool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	t := time.NewTimer(awayWait)
	defer t.Stop()
	select {
	case <-done:
		return done, true
	case <-t.C:
		return done, false
	}
}

// away runs f like the function away. If the client delays f, away cuts the client off and
// returns false; the client's resources stay charged until f returns, and the caller must not
// release what f was to free. Only the session's own goroutine calls it, never with Server.mu
// held.
func (c *session) away(what string, f func()) bool {
	over, ok := away(f)
	if !ok {
		c.holdUntil(over)
		c.cutOff(errorf(invalid, "ctrl: the client delays the daemon in %s", what))
	}
	return ok
}

// holdUntil keeps the session charged until over is closed, even after the session has ended.
// Only the session's own goroutine calls it.
func (c *session) holdUntil(over <-chan struct{}) {
	c.stuck = append(slices.DeleteFunc(c.stuck, func(over <-chan struct{}) bool {
		select {
		case <-over:
			return true
		default:
			return false
		}
	}), over)
}

// free returns the memory of rings to the kernel. It must be called without Server.mu: the kernel takes the lock of the memfd, which a
// client can hold by writing to its copy of the descriptor from a page that never arrives.
func (c *session) free(rings ...interface{ Free() error }) bool {
	return c.away("its rings", func() {
		for _, r := range rings {
			_ = r.Free()
		}
	})
}

// closeFiles closes descriptors that came from the client. Closing a FUSE file may wait for the client; closing a memfd does not, nor a socket
// that no longer has SO_LINGER.
func (c *session) closeFiles(fds []int) {
	var odd []int
	for _, fd := range fds {
		if shm.IsMemfd(fd) {
			unix.Close(fd)
		} else {
			odd = append(odd, fd)
		}
	}
	if len(odd) > 0 {
		c.away("a descriptor that it sent to close", func() {
			for _, fd := range odd {
				_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{})
			}
			seqpacket.CloseAll(odd)
		})
	}
}

// shutdown shuts down the connection to the client, which ends the session. Any goroutine may call
// it: the session closes the descriptors that are queued in the socket.
func (c *session) shutdown() {
	c.hungUp.Store(true)
	c.conn.Shutdown()
}
