package ctrl

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/shm"
)

// awayWait is how long the kernel may take for what a client has a hand in.
const awayWait = time.Second

// away runs f, a system call that a client can make wait as long as it likes, in a
// goroutine of its own. It returns when f does, or after awayWait; over is closed when
// f has returned.
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

// away runs f like the function away. Where the client makes it wait the client is cut
// off, what it holds stays in its quotas until f is over, and false is returned: what f
// was to free is not to be given back. Only the session's own goroutine calls it, and
// never with Server.mu held.
func (c *session) away(what string, f func()) bool {
	over, ok := away(f)
	if !ok {
		c.stuck = append(c.stuck, over)
		c.cutOff(errorf(invalid, "ctrl: the client makes the daemon wait for %s", what))
	}
	return ok
}

// free gives the memory of rings back. It must be called without Server.mu. The kernel
// takes the lock of the memfd for that, and a client that writes to its copy of the
// descriptor from a page which does not arrive holds it.
func (c *session) free(rings ...interface{ Free() error }) bool {
	return c.away("its rings", func() {
		for _, r := range rings {
			_ = r.Free()
		}
	})
}

// closeFiles closes descriptors that came from the client. To close one of FUSE, or the
// last of a socket that lingers, waits for whoever is at its other end; to close a memfd
// does not.
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
		c.away("a descriptor that it sent to close", func() { seqpacket.CloseAll(odd) })
	}
}

// hangUp ends the connection to the client, after which its session ends. Any goroutine
// may call it: the descriptors that wait in the socket are closed by the session.
func (c *session) hangUp() {
	c.hungUp.Store(true)
	c.conn.Shutdown()
}
