package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's TCP, used as efficiently as a Go program can: system calls on blocking sockets
// for bulk and message rate, on spinning non-blocking ones for latency, TCP_NODELAY, and no
// garbage collection.

const tcpPort = 7190

// tcpOrder is the client's request to the server. Each test has a connection.
type tcpOrder struct {
	Kind   byte // 's' stream to the server, 'p' ping-pong
	_      [3]byte
	Size   uint32
	Warm   int64
	Window int64
}

func tcpServer(j job, ready func()) ([]result, error) {
	quiet()
	network, addr := endpoint(j.Local)
	ln, err := net.Listen(network, addr)
	if err != nil {
		return nil, err
	}
	go func() {
		untilStdinEnds()
		ln.Close()
	}()
	ready()
	for {
		c, err := ln.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if err := tcpServe(c); err != nil {
			return nil, err
		}
	}
}

// endpoint returns the network and address of the server at addr, which is an IP address or the
// path of a Unix socket.
func endpoint(addr string) (network, address string) {
	if filepath.IsAbs(addr) {
		return "unix", addr
	}
	return "tcp", net.JoinHostPort(addr, strconv.Itoa(tcpPort))
}

func tcpServe(c net.Conn) error {
	defer c.Close()
	var o tcpOrder
	if err := binary.Read(c, binary.LittleEndian, &o); err != nil {
		return err
	}
	fd, done, err := rawFD(c, o.Kind == 'p')
	if err != nil {
		return err
	}
	defer done()
	if o.Kind == 'p' {
		b := make([]byte, o.Size)
		for {
			if err := spinRead(fd, b); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if err := spinWrite(fd, b); err != nil {
				return err
			}
		}
	}
	// The receiver measures a stream.
	b := make([]byte, max(1<<20, int(o.Size)))
	var total uint64
	var start, from, to time.Time
	for {
		n, errno := rawRead(fd, b)
		if errno == unix.EINTR {
			continue
		}
		if errno != 0 {
			return errno
		}
		if n == 0 {
			return errors.New("the stream ended early")
		}
		now := time.Now()
		if start.IsZero() {
			start = now
		}
		if from.IsZero() {
			if now.Sub(start) >= time.Duration(o.Warm) {
				from = now
			}
			continue
		}
		total += uint64(n)
		if to = now; to.Sub(from) >= time.Duration(o.Window) {
			break
		}
	}
	var ans [16]byte
	binary.LittleEndian.PutUint64(ans[:], total)
	binary.LittleEndian.PutUint64(ans[8:], uint64(to.Sub(from)))
	if n, errno := rawWrite(fd, ans[:]); errno != 0 || n != len(ans) {
		return errors.New("the answer could not be sent")
	}
	_ = unix.Shutdown(fd, unix.SHUT_WR)
	for { // the client stops when it receives the answer
		if n, errno := rawRead(fd, b); errno != 0 || n == 0 {
			return nil
		}
	}
}

func tcpClient(j job, _ func()) ([]result, error) {
	quiet()
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		r, err := tcpTest(j, t)
		if err != nil {
			return nil, fmt.Errorf("%v: %w", t, err)
		}
		rs[i] = r
	}
	return rs, nil
}

func tcpTest(j job, t test) (r result, err error) {
	network, addr := endpoint(j.Remote)
	c, err := net.Dial(network, addr)
	if err != nil {
		return r, err
	}
	defer c.Close()
	o := tcpOrder{Kind: 's', Size: uint32(t.Size), Warm: int64(j.Warm), Window: int64(j.Window)}
	if t.Workload == "ping-pong" || t.Workload == "one-way" {
		o.Kind = 'p'
	}
	if err := binary.Write(c, binary.LittleEndian, &o); err != nil {
		return r, err
	}
	fd, done, err := rawFD(c, o.Kind == 'p')
	if err != nil {
		return r, err
	}
	defer done()
	b := make([]byte, t.Size)
	if o.Kind == 'p' {
		r, err := pingPong(j, func() error {
			if err := spinWrite(fd, b); err != nil {
				return err
			}
			return spinRead(fd, b)
		})
		if t.Workload == "one-way" {
			r = half(r)
		}
		return r, err
	}
	var ans [16]byte
	n, busy := 0, cpuBusy()
	for ; ; n++ {
		if err := spinWrite(fd, b); err != nil {
			return r, err
		}
		if len(b) >= 1<<16 || n%256 == 0 { // has the server received enough?
			k, _, _ := unix.Recvfrom(fd, ans[:], unix.MSG_DONTWAIT)
			if k == len(ans) {
				break
			} else if k == 0 {
				return r, io.ErrUnexpectedEOF
			}
		}
	}
	total, took := binary.LittleEndian.Uint64(ans[:]), binary.LittleEndian.Uint64(ans[8:])
	if t.Workload == "rate" {
		r.Value = float64(total) / float64(t.Size) / float64(took) * 1e3 // M/s
	} else {
		r.Value = float64(total) * 8 / float64(took) // Gb/s
		r.CPU = (cpuBusy() - busy) / (float64(n+1) * float64(t.Size) / (1 << 30))
	}
	return r, nil
}

// quiet keeps the garbage collector and the scheduler out of the measurement.
func quiet() {
	debug.SetGCPercent(-1)
	runtime.LockOSThread()
}

// rawFD returns a descriptor of c for plain system calls.
func rawFD(c net.Conn, nonblock bool) (int, func(), error) {
	f, err := c.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		return -1, nil, err
	}
	fd := int(f.Fd())
	err = unix.SetNonblock(fd, nonblock)
	if c.LocalAddr().Network() == "tcp" {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
	}
	return fd, func() { f.Close() }, err
}

// The raw calls keep the processor while they block, as in a C program: no other goroutine
// needs it.

func rawRead(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), errno
}

func rawWrite(fd int, b []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return int(n), errno
}

func spinRead(fd int, b []byte) error {
	for len(b) > 0 {
		n, errno := rawRead(fd, b)
		switch {
		case errno == unix.EAGAIN || errno == unix.EINTR:
		case errno != 0:
			return errno
		case n == 0:
			return io.EOF
		default:
			b = b[n:]
		}
	}
	return nil
}

func spinWrite(fd int, b []byte) error {
	for len(b) > 0 {
		n, errno := rawWrite(fd, b)
		switch {
		case errno == unix.EAGAIN || errno == unix.EINTR:
		case errno != 0:
			return errno
		default:
			b = b[n:]
		}
	}
	return nil
}
