package ctrl

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/shm"
)

const (
	maxCaptures     = 16      // concurrent captures of non-administrators: the workers check every frame for each capture
	captureRing     = 4 << 20 // bytes of frames buffered in each worker
	captureSocket   = 8 << 20 // bytes buffered in the socket
	captureInterval = 5       // milliseconds between polls
)

// capture starts to copy frames to a socket, and returns its other end.
func (c *session) capture(r *ctrlpb.Capture, reply *ctrlpb.Reply) ([]int, error) {
	s := c.srv
	e := s.engine
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.devices.interfaces()[0].Sockets {
		return nil, errNoFrames
	}
	match, err := c.viewer().captureFilter(r)
	if err != nil {
		return nil, err
	}
	admin, counts := c.policy().admin, 1
	if admin {
		counts = 0
	}
	if s.captures+counts > maxCaptures {
		return nil, errorf(busy, "ctrl: %d captures of users are running, the limit: end one", s.captures)
	}
	snap := s.devices.snaplen(r.Snaplen)
	frames := min(max(captureRing/snap, 256), 16384)
	size := uint64(s.engine.Workers()) * uint64(frames) * uint64(snap+40)
	if err := c.takeSized(resCaptures, resRings, size); err != nil {
		return nil, err
	}
	fd, reader, err := newCaptureSocket()
	if err != nil {
		c.giveSized(resCaptures, resRings, size)
		return nil, errorf(internal, "ctrl: capture: the daemon: %w", shm.Limit(err))
	}
	s.captures += counts
	may := func() bool { // what an administrator captures may be that of other users
		select {
		case <-c.out.quit:
			return false
		default:
			return !admin || c.policy().admin
		}
	}
	tap := e.NewTap(frames, snap, match)
	e.AddTap(tap)
	s.wg.Add(1)
	over := make(chan struct{})
	c.holdUntil(over)
	c.log.Info("capture begins", zap.Uint32("qp", r.Qp), zap.String("address", clip(r.Address, 64)), zap.Uint32("port", r.Port))
	go func() {
		defer s.wg.Done()
		defer close(over)
		copyFrames(tap, fd, may)
		e.RemoveTap(tap)
		closeCapture(fd, s.done)
		c.log.Info("capture ends", zap.Uint64("dropped", tap.Dropped()))
		s.mu.Lock()
		defer s.mu.Unlock()
		s.captures -= counts
		c.giveSized(resCaptures, resRings, size)
	}()
	reply.Body = &ctrlpb.Reply_Capture{Capture: &ctrlpb.CaptureReply{Snaplen: uint32(snap)}}
	return []int{reader}, nil
}

// snaplen returns how many bytes of a frame a capture copies if want are requested, or 0 for whole frames.
func (ds devices) snaplen(want uint32) int {
	const frameOverhead = 64 // link headers in addition to the IP packet
	snap := 0
	for _, d := range ds {
		snap = max(snap, d.MTU+frameOverhead)
	}
	if snap == frameOverhead {
		snap = 16 << 10
	}
	if want != 0 {
		snap = int(min(max(want, 14), uint32(snap)))
	}
	return snap
}

// newCaptureSocket returns the ends of a socket for a capture: ours and that of the reader.
func newCaptureSocket() (ours, reader int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, err
	}
	if unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, captureSocket) != nil {
		_ = unix.SetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_SNDBUF, captureSocket) // as much as the limits allow
	}
	_ = unix.Shutdown(fds[0], unix.SHUT_RD) // the reader must not send anything, especially not descriptors
	return fds[0], fds[1], nil
}

// errNoFrames refuses a capture of what the kernel's TCP carries.
var errNoFrames = errorf(badState, "ctrl: no frames to capture: the transport is kernel sockets: use tcpdump")

// closeCapture closes the socket of a capture when the reader has read all frames or has closed
// its end, or done is closed.
func closeCapture(fd int, done <-chan struct{}) {
	_ = unix.Shutdown(fd, unix.SHUT_RDWR)
	awaitUnread(func() int { n, _ := unix.IoctlGetInt(fd, unix.SIOCOUTQ); return n }, done)
	unix.Close(fd)
}

// captureFilter returns the filter that r describes, if the client may see the matching frames. Called with mu held.
func (v viewer) captureFilter(r *ctrlpb.Capture) (func(*pkt.Flow) bool, error) {
	if r.Port > 65535 {
		return nil, errorf(invalid, "ctrl: invalid port %d", r.Port)
	}
	var addr netip.Addr
	if r.Address != "" {
		a, err := netip.ParseAddr(r.Address)
		if err != nil {
			return nil, errorf(invalid, "ctrl: %q is not an address", clip(r.Address, 64))
		}
		addr = a.Unmap()
	}
	if r.Qp != 0 {
		q, err := v.qp(r.Qp)
		if err != nil {
			return nil, err
		}
		switch {
		case q.conn == nil || !q.conn.local.IsValid():
			return nil, errorf(badState, "ctrl: queue pair %d has no connection to capture", r.Qp)
		case q.conn.within:
			return nil, errorf(badState, "ctrl: no frames to capture: both ends of queue pair %d are on this host", r.Qp)
		case v.devices.of(q.conn, v.engine).sockets():
			return nil, errNoFrames
		}
		// A later connection between the same endpoints may belong to another user.
		flow, cl := flowOf(q.conn.local, q.conn.remote), q.conn.claim
		return func(f *pkt.Flow) bool { return *f == flow && (cl == nil || !cl.dropped.Load()) }, nil
	}
	if !v.as.policy().admin {
		return nil, errorf(permission, "ctrl: %s may capture the connections of its own queue pairs only: name one",
			user(v.as.cred.Uid))
	}
	if !addr.IsValid() && r.Port == 0 {
		return nil, nil
	}
	port, as16 := uint16(r.Port), [16]byte{}
	if addr.IsValid() {
		as16 = addr.As16()
	}
	return func(f *pkt.Flow) bool {
		return (!addr.IsValid() || f.Local == as16 || f.Remote == as16) && (port == 0 || f.LocalPort == port || f.RemotePort == port)
	}, nil
}

// copyFrames copies the frames of tap to fd until fd is closed, or may returns false. If the reader is slow the frames stay in the
// tap, which drops and counts them.
func copyFrames(tap *dataplane.Tap, fd int, may func() bool) {
	var b []byte
	poll := []unix.PollFd{{Fd: int32(fd)}}
	for may() {
		full, gone := false, false
		tap.Read(func(f *dataplane.TapFrame) bool {
			b = appendRecord(b[:0], f, tap.Dropped())
			err := unix.Send(fd, b, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			full = errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS)
			gone = err != nil && !full && !errors.Is(err, unix.EINTR)
			return err == nil
		})
		if gone {
			return
		}
		poll[0].Events = 0
		if full {
			poll[0].Events = unix.POLLOUT
		}
		if n, _ := unix.Poll(poll, captureInterval); n > 0 && poll[0].Revents&(unix.POLLHUP|unix.POLLERR|unix.POLLNVAL) != 0 {
			return
		}
	}
}

// appendRecord appends a captured frame in the format of docs/api.md.
func appendRecord(b []byte, f *dataplane.TapFrame, dropped uint64) []byte {
	at := time.Now().Add(f.At.Sub(clock.Now()))
	b = binary.LittleEndian.AppendUint64(b, uint64(at.UnixNano()))
	b = binary.LittleEndian.AppendUint64(b, dropped)
	b = binary.LittleEndian.AppendUint32(b, uint32(f.Size))
	b = binary.LittleEndian.AppendUint16(b, uint16(f.Worker))
	dir := byte(0)
	if f.Out {
		dir = 1
	}
	b = append(b, dir, 0)
	return append(b, f.Data...)
}
