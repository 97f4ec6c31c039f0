// Package seqpacket carries the messages of the control API over an AF_UNIX
// SOCK_SEQPACKET socket: one message a packet, descriptors by SCM_RIGHTS.
package seqpacket

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// MaxPacket is the longest packet, in bytes.
	MaxPacket = 65536
	// MaxFDs is the most descriptors that one packet carries.
	MaxFDs = 128
	// scmMaxFD is the most that the kernel lets one carry.
	scmMaxFD = 253
)

// Errors of Read and Write.
var (
	ErrTooLong    = errors.New("packet longer than 65536 bytes")
	ErrTooManyFDs = errors.New("more descriptors in a packet than the reader takes")
	ErrFilesLost  = errors.New("descriptors of a packet lost: the reader has too many open files")
)

// Conn is one end of a connection. Read may be used by one goroutine at a time
// and Write by another.
type Conn struct {
	c   *net.UnixConn
	buf []byte
	oob []byte
}

// Dial connects to the socket at path.
func Dial(ctx context.Context, path string) (*Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, err
	}
	return newConn(c.(*net.UnixConn)), nil
}

// FromFD makes a Conn of a connected SOCK_SEQPACKET descriptor. It takes fd
// over, also when it fails.
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
		return nil, fmt.Errorf("seqpacket: descriptor %d is no Unix socket", fd)
	}
	return newConn(u), nil
}

// FromUnix makes a Conn of an accepted connection.
func FromUnix(c *net.UnixConn) *Conn { return newConn(c) }

// Pair returns the two ends of a connection within the process.
func Pair() (a, b *Conn, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("seqpacket: %w", err)
	}
	if a, err = FromFD(fds[0]); err != nil {
		unix.Close(fds[1])
		return nil, nil, err
	}
	if b, err = FromFD(fds[1]); err != nil {
		a.Close()
		return nil, nil, err
	}
	return a, b, nil
}

func newConn(c *net.UnixConn) *Conn {
	return &Conn{c: c, buf: make([]byte, MaxPacket+1), oob: make([]byte, unix.CmsgSpace(scmMaxFD*4))}
}

// Read waits for a packet. The bytes are valid until the next Read; the
// descriptors, close-on-exec, are the caller's to close, with an error too. A
// packet with more than maxFDs descriptors, or longer than MaxPacket, is an error;
// with maxFDs 0 the kernel drops the descriptors. With ErrFilesLost the bytes are
// there all the same. io.EOF reports that the other end is gone.
func (c *Conn) Read(maxFDs int) (b []byte, fds []int, err error) {
	oob := c.oob
	if maxFDs == 0 {
		oob = nil
	}
	n, oobn, flags, _, err := c.c.ReadMsgUnix(c.buf, oob)
	if oobn > 0 {
		fds = parseFDs(oob[:oobn])
	}
	switch {
	case err != nil:
	case flags&unix.MSG_TRUNC != 0 || n > MaxPacket:
		err = ErrTooLong
	case len(fds) > maxFDs || maxFDs == 0 && flags&unix.MSG_CTRUNC != 0:
		err = ErrTooManyFDs
	case flags&unix.MSG_CTRUNC != 0: // there is room in oob: there was none in the process
		return c.buf[:n], fds, ErrFilesLost
	default:
		return c.buf[:n], fds, nil
	}
	return nil, fds, err
}

// Write sends one packet. The descriptors stay the caller's.
func (c *Conn) Write(b []byte, fds []int) error {
	if len(b) > MaxPacket {
		return ErrTooLong
	}
	if len(fds) > MaxFDs {
		return ErrTooManyFDs
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.c.WriteMsgUnix(b, oob, nil)
	return err
}

// WriteLast sends a packet beside whoever writes, and waits at most limit for room.
// What is written later fails.
func (c *Conn) WriteLast(b []byte, limit time.Duration) error {
	if err := c.c.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	err := c.Write(b, nil)
	_ = c.c.SetWriteDeadline(time.Unix(1, 0))
	return err
}

// Shutdown makes Read return what waits in the socket and then fail, and Write fail.
// Unlike Close it never waits: nothing is closed, the descriptors in the socket least
// of all.
func (c *Conn) Shutdown() {
	if raw, err := c.c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}

// Unread returns how much memory of the kernel holds what was written and the other
// end has not read; 0 if the connection is closed.
func (c *Conn) Unread() (n int) {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return n
}

// Close ends the connection. A blocked Read or Write returns.
func (c *Conn) Close() error { return c.c.Close() }

// Cred returns the credentials of the process at the other end, as the kernel
// noted them when the connection was made.
func (c *Conn) Cred() (*unix.Ucred, error) {
	raw, err := c.c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	var serr error
	if err := raw.Control(func(fd uintptr) {
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
