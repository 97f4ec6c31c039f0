package dataplane

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// socket is a connection of the kernel's TCP. Only its worker's goroutine uses it.
type socket struct {
	byteEnd
	fd int // -1: closed

	writable bool
	wrErr    error // write error; data that arrived before it is read first

	readable bool
	hup      bool // the peer has closed, so a short read does not mean that there is no more data
	queued   bool // in Sockets.ready

	mss   int
	mssAt clock.Time // when mss was read
}

// mssPeriod is how long the value of the kernel's MSS is cached.
const mssPeriod = time.Second

// newConn returns a connection for the socket fd, which it takes over.
func (s *Sockets) newConn(w *worker, id ConnID, flow pkt.Flow, fd int) (*tcpConn, error) {
	c := newTCPConn(id, flow, nil)
	sock := &socket{byteEnd: byteEnd{w: w, c: c, state: tcp.SynSent}, fd: fd}
	c.tcp, c.sock = sock, sock
	if err := s.watch(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|unix.EPOLLET); err != nil {
		return nil, err
	}
	s.conns[fd] = sock
	sock.configure()
	return c, nil
}

// configure sets the options that the kernel's TCP supports. If one is refused, the host's
// default remains.
func (s *socket) configure() {
	cfg := &s.w.tcp
	set := func(level, opt, v int) { _ = unix.SetsockoptInt(s.fd, level, opt, v) }
	set(unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	set(unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, socketQueue)
	if cfg.KeepAliveIdle > 0 {
		set(unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
		set(unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, max(int(cfg.KeepAliveIdle/time.Second), 1))
		set(unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, max(int(cfg.KeepAliveInterval/time.Second), 1))
		set(unix.IPPROTO_TCP, unix.TCP_KEEPCNT, max(cfg.KeepAliveCount, 1))
	}
	if limit := cmp.Or(cfg.UserTimeout, cfg.DataTimeout); limit > 0 {
		set(unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(limit/time.Millisecond))
	}
}

// report handles epoll events.
func (s *socket) report(events uint32) {
	if s.state == tcp.SynSent {
		if events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) == 0 {
			return
		}
		errno, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err == nil && errno != 0:
			s.end(socketError(unix.Errno(errno)))
			return
		case events&(unix.EPOLLOUT|unix.EPOLLHUP) == unix.EPOLLOUT:
			s.establish()
		default: // a socket that is not connecting yet reports HUP
			return
		}
	}
	if events&unix.EPOLLOUT != 0 {
		s.writable = true
		s.w.mark(&s.c.lane)
	}
	if events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.hup = true
	}
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.readable = true
		s.enqueue()
	}
}

// enqueue schedules s for reading.
func (s *socket) enqueue() {
	if s.readable && !s.queued && s.fd >= 0 {
		s.queued = true
		s.w.socks.ready = append(s.w.socks.ready, s)
	}
}

func (s *socket) establish() {
	s.state, s.writable = tcp.Established, true
	s.events = append(s.events, tcp.EventEstablished)
	s.askMSS()
	s.w.mark(&s.c.lane)
}

// askMSS reads the kernel's MSS, which determines the size of FPDUs.
func (s *socket) askMSS() {
	s.mssAt, s.mss = s.w.now, socketSlot-headroom
	if n, err := unix.GetsockoptInt(s.fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG); err == nil && n >= leastSocketMSS {
		s.mss = min(s.mss, n)
	}
}

// leastSocketMSS is large enough for an FPDU.
const leastSocketMSS = 256

// read reads available data up to the limit of a turn, and delivers it. It returns the number
// of bytes.
func (s *socket) read() (total int) {
	w := s.w
	if s.state == tcp.CloseWait {
		s.readable = false
		if err := s.failure(); err != nil {
			s.end(err)
		}
		return 0
	}
	for range socketReads {
		if s.fd < 0 || w.enough() {
			return total
		}
		b := w.socks.buf
		if room := s.c.room(w, len(b)); room < len(b) {
			if room <= 0 {
				return total // SetBacklog resumes
			}
			b = b[:room]
		}
		n, errno := link.Recv(s.fd, b)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			s.readable = false
			if s.wrErr != nil {
				s.end(s.wrErr)
			}
			return total
		case errno != 0:
			s.end(socketError(errno))
			return total
		case n == 0:
			s.readable = false
			s.peerClosed()
			return total
		}
		total += n
		s.received += uint64(n)
		w.stats.RxBytes += uint64(n)
		s.readable = n == len(b) || s.hup || s.wrErr != nil
		w.mark(&s.c.lane)
		if s.readable {
			s.enqueue() // first, since the code below may fault
		}
		s.c.deliverBytes(w, b[:n])
		if !s.readable {
			return total
		}
	}
	return total
}

// failure returns the error of a failed write, or of a RST after the peer's FIN, which a read does not
// report; or nil.
func (s *socket) failure() error {
	if s.wrErr != nil {
		return s.wrErr
	}
	if errno, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && errno != 0 {
		return socketError(unix.Errno(errno))
	}
	return nil
}

func (s *socket) peerClosed() {
	s.w.mark(&s.c.lane)
	switch err := s.failure(); {
	case err != nil:
		s.end(err)
	case s.state == tcp.FinWait1:
		s.end(nil)
		s.state = tcp.TimeWait // in the kernel
	default:
		s.state = tcp.CloseWait
		s.events = append(s.events, tcp.EventPeerClosed)
	}
}

// flush writes composed data to the kernel.
func (s *socket) flush() int {
	w, work := s.w, 0
	for s.outAt < len(s.out) && s.writable && s.fd >= 0 {
		v := &w.socks.vec
		v.Reset()
		want := -s.written
		for i, skip := s.outAt, s.written; i < len(s.out); i++ {
			o := &s.out[i]
			if !v.Add(w.link.Bytes(link.Slot(o.buf))[headroom+skip : headroom+o.n]) {
				break
			}
			want += o.n
			skip = 0
		}
		n, errno := v.Send(s.fd)
		switch {
		case errno == unix.EINTR:
			continue
		case errno == unix.EAGAIN:
			s.writable = false
			return work
		case errno != 0:
			// The peer's Terminate may still be readable.
			s.writable, s.wrErr = false, socketError(errno)
			s.readable, s.hup = true, true
			s.enqueue()
			return work
		}
		w.stats.TxBytes += uint64(n)
		s.take(n)
		work++
		if n < want {
			s.writable = false // epoll reports when there is room again
		}
	}
	if s.closing && s.open() && s.unsent == 0 && s.wrErr == nil {
		_ = unix.Shutdown(s.fd, unix.SHUT_WR)
		if s.state == tcp.CloseWait {
			s.end(nil)
		} else {
			s.state = tcp.FinWait1
		}
	}
	if work > 0 && s.writable {
		s.goOn()
	}
	if s.fd >= 0 && w.now.Sub(s.mssAt) >= mssPeriod && s.state != tcp.SynSent {
		s.askMSS()
	}
	return work
}

// end closes s. err is nil if both sides have closed.
func (s *socket) end(err error) {
	if s.fd < 0 {
		return
	}
	delete(s.w.socks.conns, s.fd)
	unix.Close(s.fd)
	s.fd = -1
	s.byteEnd.end(err)
}

// MSS returns the segment size, at most that of a slot.
func (s *socket) MSS() int { return s.mss }

// Room returns how many bytes may be composed now.
func (s *socket) Room() int {
	if !s.open() || s.closing || s.wrErr != nil {
		return 0
	}
	return socketQueue - s.unsent
}

// SetBacklog continues reading, if there is room.
func (s *socket) SetBacklog(int) { s.enqueue() }

// Close sends a FIN after all composed data.
func (s *socket) Close(clock.Time) {
	if s.closing || s.fd < 0 {
		return
	}
	if s.state == tcp.SynSent {
		s.end(nil)
		return
	}
	s.close()
	s.enqueue()
}

// Abort sends a RST.
func (s *socket) Abort(clock.Time) {
	if s.fd >= 0 {
		_ = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		s.end(tcp.ErrAborted)
	}
}

// Stats returns the kernel's counters of the connection.
func (s *socket) Stats() tcp.Stats {
	st := s.byteEnd.Stats()
	if s.fd < 0 {
		return st
	}
	i, err := unix.GetsockoptTCPInfo(s.fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return st
	}
	us := func(n uint32) time.Duration { return time.Duration(n) * time.Microsecond }
	st.SRTT, st.RTTVar, st.MinRTT, st.RTO = us(i.Rtt), us(i.Rttvar), us(i.Min_rtt), us(i.Rto)
	st.Cwnd, st.Ssthresh, st.InFlight = int(i.Snd_cwnd*i.Snd_mss), int(min(i.Snd_ssthresh, 1<<20))*int(i.Snd_mss), int(i.Unacked*i.Snd_mss)
	st.PMTU, st.SndWnd, st.RcvWnd = int(i.Pmtu), int(i.Snd_wnd), int(i.Rcv_space)
	st.SegsOut, st.SegsIn, st.BytesOut, st.BytesIn = uint64(i.Segs_out), uint64(i.Segs_in), i.Bytes_acked, i.Bytes_received
	st.Retransmits, st.RetransBytes, st.DSACKIn = uint64(i.Total_retrans), i.Bytes_retrans, uint64(i.Dsack_dups)
	st.Timeouts = uint64(i.Total_rto)
	return st
}

// socketError returns the error of package tcp for an errno.
func socketError(err error) error {
	switch {
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return tcp.ErrReset
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ENOPROTOOPT):
		return tcp.ErrRefused
	case errors.Is(err, unix.ETIMEDOUT):
		return tcp.ErrTimeout
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTDOWN):
		return tcp.ErrUnreachable
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENETDOWN):
		return fmt.Errorf("%w: %w", tcp.ErrUnreachable, err) // a route or a filter forbids it
	}
	return fmt.Errorf("dataplane: socket: %w", err)
}
