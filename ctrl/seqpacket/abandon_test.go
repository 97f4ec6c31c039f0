package seqpacket

import (
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// lingerer returns a socket whose close waits for an hour, because its peer reads nothing, and
// the peer.
func lingerer(t *testing.T) (fd int, peer net.Conn) {
	t.Helper()
	l := testenv.Listen(t)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if peer, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { peer.Close() })
	f, err := c.(*net.TCPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if fd, err = Dup(int(f.Fd())); err != nil {
		t.Fatal(err)
	}
	junk := make([]byte, 1<<16)
	for unix.Send(fd, junk, unix.MSG_DONTWAIT) == nil {
	}
	if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}); err != nil {
		t.Fatal(err)
	}
	return fd, peer
}

// TestAbandon checks that closing a connection that holds lingering sockets returns at once,
// and that those sockets are closed too.
func TestAbandon(t *testing.T) {
	for range 20 {
		a, b := pair(t)
		fd, peer := lingerer(t)
		for range 3 {
			if err := a.Write([]byte("packet"), []int{fd}); err != nil {
				t.Fatal(err)
			}
		}
		unix.Close(fd)
		if p, err := b.Peek(); string(p) != "packet" || err != nil {
			t.Fatalf("%q: %v", p, err)
		}
		done := make(chan struct{})
		go func() {
			b.Abandon()
			close(done)
		}()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatal("it waits for the descriptors in it")
		}
		if _, _, err := a.Read(0); err == nil {
			t.Error("the other end reads something")
		}
		a.Close()
		// The socket is closed if its peer reads the data and then the end of the stream.
		_ = peer.SetReadDeadline(time.Now().Add(time.Minute))
		junk := make([]byte, 1<<20)
		var err error
		for err == nil {
			_, err = peer.Read(junk)
		}
		if os.IsTimeout(err) {
			t.Fatal("a socket that was in it is open")
		}
	}
}

// TestTakeAndExit checks that the thread keeps each descriptor until it exits: it would wait if it closed one that is
// the last of another connection.
func TestTakeAndExit(t *testing.T) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	taken, closed := make(chan error), make(chan struct{})
	go takeAndExit(taken, closed)
	if err := <-taken; err != nil {
		t.Fatal(err)
	}
	unix.Close(p[1])
	b := make([]byte, 1)
	if n, err := unix.Read(p[0], b); err != unix.EAGAIN {
		t.Errorf("after the thread took the descriptors: read %d, %v; want EAGAIN, since it has the other end", n, err)
	}
	close(closed)
	fds := []unix.PollFd{{Fd: int32(p[0]), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, 60e3)
		if err == unix.EINTR {
			continue
		}
		if n == 0 || err != nil {
			t.Errorf("the thread has not closed the other end a minute after it should have exited: %v", err)
		}
		return
	}
}
