// Package seqpacket carries the messages of the control API over an AF_UNIX SOCK_SEQPACKET socket:
// one message per packet, with descriptors as SCM_RIGHTS.
package seqpacket

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/printable"
)

const (
	// MaxPacket is the longest packet, in bytes.
	MaxPacket = 65536
	// MaxFDs is the maximum number of descriptors in a packet.
	MaxFDs = 128
	// scmMaxFD is the kernel's limit.
	scmMaxFD = 253
)

// Errors of Read and Write.
var (
	ErrTooLong    = errors.New("packet longer than 65536 bytes")
	ErrTooManyFDs = errors.New("more descriptors in a packet than the reader takes")
	ErrFilesLost  = errors.New("descriptors of a packet lost: the reader has too many open files")
)

// Conn is one end of a connection. One goroutine may call Read while another calls Write.
type Conn struct {
	c     io.Closer
	raw   syscall.RawConn
	waits bool // system calls wait, and Go's poller does not have the socket
	poll  polling
	buf   []byte
	oob   []byte
}

// maxPath is the length of the longest path of a socket, in bytes (unix(7)).
const maxPath = 107

// Dial connects to the socket at path. Its error wraps ENAMETOOLONG, ENOTSOCK if another kind of file
// is there, and EPROTOTYPE if the socket belongs to another program.
func Dial(ctx context.Context, path string) (*Conn, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("%s: %w", path, unix.ENAMETOOLONG)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if errors.Is(err, unix.ECONNREFUSED) {
		if info, serr := os.Stat(path); serr == nil && info.Mode()&fs.ModeSocket == 0 {
			err = unix.ENOTSOCK
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, printable.Reason(err))
	}
	return newConn(c.(*net.UnixConn)), nil
}

// FromFD returns a Conn for a connected SOCK_SEQPACKET descriptor. It takes ownership of fd, even
// if it fails.
func FromFD(fd int) (*Conn, error) {
	f := os.NewFile(uintptr(fd), "seqpacket")
	if f == nil {
		return nil, fmt.Errorf("seqpacket: %w", unix.EBADF)
	}
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("seqpacket: descriptor %d is not a Unix socket", fd)
	}
	return newConn(u), nil
}

// FromUnix returns a Conn for an accepted connection.
func FromUnix(c *net.UnixConn) *Conn { return newConn(c) }

func newConn(c *net.UnixConn) *Conn {
	raw, _ := c.SyscallConn() // fails for a nil UnixConn only
	return &Conn{c: c, raw: raw, buf: make([]byte, MaxPacket), oob: make([]byte, unix.CmsgSpace(scmMaxFD*4))}
}

// Block makes Read and Write wait in system calls, on threads of their own. That takes half the
// time of waiting for Go's poller, which the peer also wakes each time it reads a packet. No
// other method may be called meanwhile. If Block fails, the connection stays as it was.
func (c *Conn) Block() error {
	fd := -1
	var derr error
	if err := c.raw.Control(func(s uintptr) { fd, derr = Dup(int(s)) }); err != nil {
		return err
	}
	if derr != nil {
		return derr
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		unix.Close(fd)
		return err
	}
	c.c.Close()
	f := os.NewFile(uintptr(fd), "seqpacket")
	c.c, c.waits = f, true
	c.raw, _ = f.SyscallConn() // fails for a nil File only
	return nil
}

// Blocks reports whether Read takes a thread, by Block.
func (c *Conn) Blocks() bool { return c.waits }

// recv waits for a packet and receives it into buf and oob.
func (c *Conn) recv(oob []byte, flags int) (n, oobn, rflags int, err error) {
	cerr := c.raw.Read(func(fd uintptr) bool {
		receive := func(flags int) bool {
			for {
				n, oobn, rflags, _, err = unix.Recvmsg(int(fd), c.buf, oob, flags|unix.MSG_CMSG_CLOEXEC)
				if err != unix.EINTR {
					return err != unix.EAGAIN
				}
			}
		}
		done := c.waits && c.poll.until(func() bool { return receive(flags | unix.MSG_DONTWAIT) }) || receive(flags)
		if err == unix.ECONNRESET || err == nil && n == 0 && oobn == 0 {
			// The other end is gone, but packets that it sent before may be queued: the kernel looks
			// for a packet before it looks for the end, and for an error before both. With descriptors
			// it was an empty packet, which counts as the end.
			return receive(flags | unix.MSG_DONTWAIT)
		}
		return done
	})
	switch {
	case cerr != nil:
		return 0, 0, 0, net.ErrClosed
	case err == nil && n == 0:
		err = io.EOF
	}
	return max(n, 0), oobn, rflags, err
}

// polling is what Read does before it waits: a client often sends its next request sooner than sleeping
// and waking take.
type polling struct {
	rest time.Time // no polling until then
}

const (
	pollFor   = 100 * time.Microsecond
	longYield = time.Millisecond
	restFor   = 100 * time.Millisecond
)

// until calls try until it returns true, or for pollFor. It returns what try returned last. Between calls
// it yields the CPU, as the client may need it. If another program takes the CPU then, polling is slower
// than sleeping, so there is none for restFor.
func (p *polling) until(try func() bool) bool {
	now := time.Now()
	for end := now.Add(pollFor); now.After(p.rest) && now.Before(end); {
		if try() {
			return true
		}
		_, _, _ = unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		before := now
		if now = time.Now(); now.Sub(before) > longYield {
			p.rest = now.Add(restFor)
		}
	}
	return false
}

// trySend sends a packet if there is room for it now, or fails with EAGAIN.
func trySend(fd uintptr, b []byte, fds []int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		err := unix.Sendmsg(int(fd), b, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if err != unix.EINTR {
			return err
		}
	}
}

// awaitRoom waits until the socket has room or is shut down, or for limit if that is positive.
// It may return early. sendmsg does not return when the socket is shut down, but poll does.
func awaitRoom(fd uintptr, limit time.Duration) {
	ms := -1
	if limit > 0 {
		ms = int(limit.Milliseconds()) + 1
	}
	_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, ms)
}

// Read waits for a packet. The bytes are valid until the next Read. The caller must close the
// descriptors, even if there is an error; they are close-on-exec. Read fails if a packet has more
// than maxFDs descriptors or is longer than MaxPacket; if maxFDs is 0 the kernel drops the
// descriptors. With ErrFilesLost the bytes are valid nevertheless. Read returns io.EOF when the
// other end is gone.
func (c *Conn) Read(maxFDs int) (b []byte, fds []int, err error) {
	oob := c.oob
	if maxFDs == 0 {
		oob = nil
	}
	n, oobn, flags, err := c.recv(oob, 0)
	if oobn > 0 {
		fds = parseFDs(oob[:oobn])
	}
	switch {
	case err != nil:
	case flags&unix.MSG_TRUNC != 0:
		err = ErrTooLong
	case len(fds) > maxFDs || maxFDs == 0 && flags&unix.MSG_CTRUNC != 0:
		err = ErrTooManyFDs
	case flags&unix.MSG_CTRUNC != 0: // oob has room, so the process was out of descriptors
		return c.buf[:n], fds, ErrFilesLost
	default:
		return c.buf[:n], fds, nil
	}
	return nil, fds, err
}

// Write sends one packet. The caller keeps ownership of the descriptors.
func (c *Conn) Write(b []byte, fds []int) error {
	if len(b) > MaxPacket {
		return ErrTooLong
	}
	if len(fds) > MaxFDs {
		return ErrTooManyFDs
	}
	var err error
	cerr := c.raw.Write(func(fd uintptr) bool {
		for err = trySend(fd, b, fds); c.waits && err == unix.EAGAIN; err = trySend(fd, b, fds) {
			awaitRoom(fd, 0)
		}
		return err != unix.EAGAIN
	})
	if cerr != nil {
		return net.ErrClosed
	}
	return err
}

// TryWrite sends one packet if there is room for it now, and reports whether it did. The caller keeps ownership of the descriptors.
func (c *Conn) TryWrite(b []byte, fds []int) (ok bool) {
	if len(b) > MaxPacket || len(fds) > MaxFDs {
		return false
	}
	_ = c.raw.Control(func(fd uintptr) { ok = trySend(fd, b, fds) == nil })
	return ok
}

// WriteLast sends a packet concurrently with other writers, and waits at most limit for room.
func (c *Conn) WriteLast(b []byte, limit time.Duration) {
	end := time.Now().Add(limit)
	_ = c.raw.Control(func(fd uintptr) {
		for left := limit; left > 0 && trySend(fd, b, nil) == unix.EAGAIN; left = time.Until(end) {
			awaitRoom(fd, left)
		}
	})
}

// Shutdown makes Read fail once it has returned the packets queued in the socket, and makes Write
// fail. Unlike Close it never blocks, since it closes nothing, in particular not the descriptors
// queued in the socket.
func (c *Conn) Shutdown() {
	_ = c.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
}

// CloseRead makes Read fail once it has returned the packets queued in the socket. Nothing more can be sent to it.
func (c *Conn) CloseRead() {
	_ = c.raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RD) })
}

// Unread returns how much kernel memory is used by packets that the other end has not read, or 0 if
// the connection is closed.
func (c *Conn) Unread() (n int) {
	_ = c.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return n
}

// Close ends the connection. A blocked Read or Write returns.
func (c *Conn) Close() error {
	if c.waits {
		c.Shutdown()
	}
	return c.c.Close()
}

// Cred returns the credentials of the process at the other end, as recorded by the kernel when the
// connection was made.
func (c *Conn) Cred() (*unix.Ucred, error) {
	var cred *unix.Ucred
	var serr error
	if err := c.raw.Control(func(fd uintptr) {
		cred, serr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, err
	}
	return cred, serr
}

func parseFDs(oob []byte) (fds []int) {
	msgs, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	for i := range msgs {
		if r, err := syscall.ParseUnixRights(&msgs[i]); err == nil {
			fds = append(fds, r...)
		}
	}
	return fds
}

// CloseAll closes descriptors.
func CloseAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// Dup duplicates a descriptor, close-on-exec.
func Dup(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }
