package seqpacket

import (
	"math"
	"runtime"

	"golang.org/x/sys/unix"
)

// Peek waits for a packet and returns its bytes, which stay in the socket, as do its descriptors. The bytes are valid until the next Read
// or Peek.
func (c *Conn) Peek() (b []byte, err error) {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var n int
	var rerr error
	err = raw.Read(func(fd uintptr) bool {
		n, _, _, _, rerr = unix.Recvmsg(int(fd), c.buf, nil, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		return rerr != unix.EAGAIN
	})
	if err == nil {
		err = rerr
	}
	return c.buf[:max(n, 0)], err
}

// Abandon is Close for a connection whose other end may have sent descriptors that were not read. Close would wait for them: the kernel
// closes them with the last reference to the connection, and closing a socket with SO_LINGER waits for as long as its owner likes. But it
// does not linger for a thread that exits, so a thread takes the last reference, and exits.
func (c *Conn) Abandon() {
	c.Shutdown() // nothing more is sent
	fd := -1
	if raw, err := c.c.SyscallConn(); err == nil {
		_ = raw.Control(func(s uintptr) { fd, _ = Dup(int(s)) })
	}
	c.Close()
	if fd >= 0 {
		closeByExit(fd)
	}
}

// closeByExit closes fd. For a moment the thread has the other descriptors too.
func closeByExit(fd int) {
	taken, closed := make(chan error), make(chan struct{})
	go takeAndExit(fd, taken, closed)
	<-taken // also if it failed: there is no other way
	unix.Close(fd)
	close(closed)
}

// takeAndExit gives its thread descriptors of its own, and ends it when closed is closed.
func takeAndExit(fd int, taken chan<- error, closed <-chan struct{}) {
	runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
	if unix.Gettid() == unix.Getpid() {
		go takeAndExit(fd, taken, closed) // the first thread cannot exit
		<-closed
		runtime.UnlockOSThread()
		return
	}
	taken <- unix.CloseRange(uint(fd)+1, math.MaxUint32, unix.CLOSE_RANGE_UNSHARE) // it gets those up to fd
	<-closed
}
