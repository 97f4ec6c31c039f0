// Package seqpacket carries the messages of the control API over an AF_UNIX SOCK_SEQPACKET socket:
// one message per packet, with descriptors as SCM_RIGHTS.
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
	return &Conn{c: c, buf: make([]byte, MaxPacket+1), oob: make([]byte, unix.CmsgSpace(scmMaxFD*4))}
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
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := c.c.WriteMsgUnix(b, oob, nil)
	return err
}

// TryWrite sends one packet if there is room for it now, and reports whether it did. The caller keeps ownership of the descriptors.
func (c *Conn) TryWrite(b []byte, fds []int) (ok bool) {
	if len(b) > MaxPacket || len(fds) > MaxFDs {
		return false
	}
	raw, err := c.c.SyscallConn()
	if err != nil {
		return false
	}
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_ = raw.Write(func(fd uintptr) bool {
		ok = unix.Sendmsg(int(fd), b, oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) == nil
		return true
	})
	return ok
}

// WriteLast sends a packet concurrently with other writers, and waits at most limit for room. Later
// writes fail.
func (c *Conn) WriteLast(b []byte, limit time.Duration) error {
	if err := c.c.SetWriteDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	err := c.Write(b, nil)
	_ = c.c.SetWriteDeadline(time.Unix(1, 0))
	return err
}

// Shutdown makes Read fail once it has returned the packets queued in the socket, and makes Write
// fail. Unlike Close it never blocks, since it closes nothing, in particular not the descriptors
// queued in the socket.
func (c *Conn) Shutdown() {
	if raw, err := c.c.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) })
	}
}

// Unread returns how much kernel memory is used by packets that the other end has not read, or 0 if
// the connection is closed.
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

// Cred returns the credentials of the process at the other end, as recorded by the kernel when the
// connection was made.
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
