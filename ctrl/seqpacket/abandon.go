package seqpacket

import (
	"math"
	"runtime"

	"golang.org/x/sys/unix"
)

// Peek waits for a packet and returns its bytes. They and the packet's descriptors stay in the
// socket. The bytes are valid until the next Read or Peek.
func (c *Conn) Peek() (b []byte, err error) {
	n, _, _, err := c.recv(nil, unix.MSG_PEEK)
	return c.buf[:n], err
}

// Abandon closes a connection on which the peer may have sent descriptors that were not read.
// Close could block: the kernel closes these descriptors with the last reference to the
// connection, and closing a socket with SO_LINGER waits for the time that its owner has set.
// The kernel does not linger when a thread exits, so Abandon makes a thread take the last
// reference and exit.
func (c *Conn) Abandon() {
	c.Shutdown() // nothing more can be sent
	fd := -1
	_ = c.raw.Control(func(s uintptr) { fd, _ = Dup(int(s)) })
	c.Close()
	if fd >= 0 {
		closeByExit(fd)
	}
}

// closeByExit closes fd in a thread that exits. For a moment the thread has the process's other
// descriptors too.
func closeByExit(fd int) {
	taken, closed := make(chan error), make(chan struct{})
	go takeAndExit(taken, closed)
	<-taken // also after a failure, since there is no other way
	unix.Close(fd)
	close(closed)
}

// takeAndExit gives its thread a descriptor table of its own, and ends the thread when closed
// is closed. Until then the thread closes nothing: another one may abandon a connection at the
// same time, so that any descriptor may be the last of one.
func takeAndExit(taken chan<- error, closed <-chan struct{}) {
	runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
	if unix.Gettid() == unix.Getpid() {
		go takeAndExit(taken, closed) // the first thread cannot exit
		<-closed
		runtime.UnlockOSThread()
		return
	}
	// The range has no descriptor. Containers often do not allow unshare.
	taken <- unix.CloseRange(math.MaxInt32, math.MaxInt32, unix.CLOSE_RANGE_UNSHARE)
	<-closed
}
