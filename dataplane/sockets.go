package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/tcp"
)

// Sockets is the link of a worker whose connections are kernel sockets. It has TX slots, in
// which FPDUs are composed, but no frames. It needs no privileges.
type Sockets struct {
	link.NoFrames
	link.Pool
	ep        int // epoll
	spare     int // descriptor to close when there are no others left, or -1
	events    [64]unix.EpollEvent
	poll      link.Poller
	conns     map[int]*socket // by descriptor
	listeners map[int]*listener
	paused    []int     // descriptors of listeners that epoll does not report until there is a spare descriptor again
	ready     []*socket // may have data to read; served round-robin
	buf       []byte    // read buffer
	vec       link.Vec
	stats     link.Stats
}

// SocketMTU is the MTU reported for an engine over kernel sockets: the longest FPDU with its
// headers.
const SocketMTU = socketSlot

const (
	// socketSlot is the size of a TX slot, and so of the longest FPDU with its headroom.
	socketSlot = 16 << 10
	// socketRead is the size of a read, which should fit in the processor's cache.
	socketRead = 64 << 10
	// socketReads is the number of reads per connection and turn.
	socketReads = 4
	// socketTurn is the limit of the bytes read in a turn. Each connection that is read counts
	// as at least socketLeast.
	socketTurn, socketLeast = 512 << 10, 4 << 10
	// socketQueue bounds the composed bytes that the kernel has not accepted.
	socketQueue = 256 << 10
	// pausePeriod is the interval of attempts to get a spare descriptor.
	pausePeriod = 100 * time.Millisecond
	// acceptBudget is the number of connections accepted per listener and turn.
	acceptBudget = 16
	// leastSocketMemory has room for the reserved slots and as many others.
	leastSocketMemory = 2 * slotReserve * socketSlot
)

var (
	errSocketSCTP = errors.New("dataplane: SCTP needs AF_XDP: the transport is kernel sockets")
	errSelf       = errors.New("dataplane: cannot connect to its own address and port")
)

// NewSockets returns the link for a Queue over kernel sockets. memory is the size of its TX
// slots in bytes.
func NewSockets(memory int) (*Sockets, error) {
	ep, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("dataplane: epoll: %w", err)
	}
	return &Sockets{
		Pool: link.NewPool(make([]byte, max(memory, leastSocketMemory)), socketSlot), ep: ep, spare: spareFD(),
		conns: make(map[int]*socket), listeners: make(map[int]*listener), buf: make([]byte, socketRead),
	}, nil
}

func spareFD() int {
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	return fd
}

// MTU is link.Link.MTU: a record of an FPDU fills a slot.
func (s *Sockets) MTU() int { return SocketMTU }

// Stats is link.Link.Stats.
func (s *Sockets) Stats(st *link.Stats) { *st = s.stats }

// Wait is link.Link.Wait.
func (s *Sockets) Wait(timeout time.Duration, wakefd int) bool {
	if len(s.paused) > 0 && (timeout < 0 || timeout > pausePeriod) {
		timeout = pausePeriod
	}
	s.stats.Wakes++
	return s.poll.Wait(timeout, s.ep, wakefd)
}

// Close is link.Link.Close. It closes all sockets.
func (s *Sockets) Close() error {
	for fd := range s.conns {
		unix.Close(fd)
	}
	for fd := range s.listeners {
		unix.Close(fd)
	}
	clear(s.conns)
	clear(s.listeners)
	if s.spare >= 0 {
		unix.Close(s.spare)
	}
	return unix.Close(s.ep)
}

// serve handles epoll events, accepts connections and reads data.
func (s *Sockets) serve(w *worker) int {
	if len(s.paused) > 0 {
		s.resume()
	}
	n := link.Ready(s.ep, s.events[:])
	for i := range n {
		ev := &s.events[i]
		if l := s.listeners[int(ev.Fd)]; l != nil {
			s.accept(w, int(ev.Fd), l)
		} else if c := s.conns[int(ev.Fd)]; c != nil {
			c.report(ev.Events)
		}
	}
	at := 0
	for left, end := socketTurn, len(s.ready); at < end && left > 0 && !w.enough(); at++ {
		c := s.ready[at]
		c.queued = false
		left -= max(c.read(), socketLeast)
	}
	s.ready = slices.Delete(s.ready, 0, at)
	return n + at
}

// recheck polls every socket again: a fault in a client's memory may have ended a turn in which
// epoll had reported others, and epoll reports each change only once.
func (s *Sockets) recheck() {
	clear(s.ready)
	s.ready = s.ready[:0]
	for _, c := range s.conns {
		c.queued, c.readable, c.writable = false, true, c.state != tcp.SynSent
		c.enqueue()
	}
}

// openSocket returns a TCP socket bound to addr. With dual it is for IPv4 too; with shared
// every worker can have one.
func openSocket(addr netip.AddrPort, dual, shared bool) (fd int, err error) {
	domain := unix.AF_INET6
	if addr.Addr().Is4() {
		domain = unix.AF_INET
	}
	fd, err = unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return -1, fmt.Errorf("dataplane: socket: %w", err)
	}
	// The control plane has bound the port to another socket, which never listens.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if shared {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
	}
	if domain == unix.AF_INET6 {
		only := 1
		if dual {
			only = 0
		}
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only)
	}
	if err := unix.Bind(fd, sockaddr(addr)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("dataplane: bind to %v: %w", addr, err)
	}
	return fd, nil
}

// listen makes the worker listen for l. The kernel distributes connections among the workers'
// sockets.
func (s *Sockets) listen(w *worker, l *listener, addr netip.AddrPort, backlog int) error {
	shared := len(w.dev.workers) > 1
	dual := addr.Addr().IsUnspecified()
	if dual {
		addr = netip.AddrPortFrom(netip.IPv6Unspecified(), addr.Port())
	}
	fd, err := openSocket(addr, dual, shared)
	if dual && errors.Is(err, unix.EAFNOSUPPORT) { // a host without IPv6
		addr = netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port())
		fd, err = openSocket(addr, false, shared)
	}
	if err != nil {
		return err
	}
	if err = l.ip.applySocket(fd); err == nil { // before listen, for the SYN-ACKs
		err = unix.Listen(fd, max(backlog, 1))
	}
	if err != nil {
		unix.Close(fd)
		return fmt.Errorf("dataplane: listen on %v: %w", addr, err)
	}
	if err := s.watch(fd, unix.EPOLLIN); err != nil {
		unix.Close(fd)
		return err
	}
	s.listeners[fd] = l
	return nil
}

func (s *Sockets) watch(fd int, events uint32) error {
	if err := unix.EpollCtl(s.ep, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: events, Fd: int32(fd)}); err != nil {
		return fmt.Errorf("dataplane: epoll: %w", err)
	}
	return nil
}

// unlisten closes the socket of l.
func (s *Sockets) unlisten(l *listener) {
	for fd, have := range s.listeners {
		if have == l {
			delete(s.listeners, fd)
			unix.Close(fd)
		}
	}
}

// accept accepts connections for l.
func (s *Sockets) accept(w *worker, lfd int, l *listener) {
	for range acceptBudget {
		if l.unseen >= maxUnseen {
			return // the kernel's backlog is the queue
		}
		fd, peer, err := unix.Accept4(lfd, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
		switch {
		case errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE):
			w.stats.RxNoConn++
			s.refuse(lfd)
			return
		case errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return // EAGAIN, or an error of a connection that is gone
		}
		// The kernel has already answered the SYN, so for the peer the connection is reset.
		if !l.admits(addrPort(peer).Addr()) || s.accepted(w, fd, peer, l) != nil {
			w.stats.RxNoConn++
			reset(fd)
		}
	}
}

// refuse accepts and resets a connection for which there is no descriptor, so that the peer is
// notified and the listener does not stay readable. Another thread may take the descriptor that it
// frees for that; then the listener is paused, so that it does not keep the worker busy.
func (s *Sockets) refuse(lfd int) {
	if s.spare >= 0 {
		unix.Close(s.spare)
		if fd, _, err := unix.Accept4(lfd, unix.SOCK_CLOEXEC); err == nil {
			reset(fd)
		}
		s.spare = spareFD()
	}
	if s.spare < 0 && unix.EpollCtl(s.ep, unix.EPOLL_CTL_MOD, lfd, &unix.EpollEvent{Fd: int32(lfd)}) == nil {
		s.paused = append(s.paused, lfd)
	}
}

// resume makes epoll report paused listeners again if there is a spare descriptor.
func (s *Sockets) resume() {
	if s.spare = spareFD(); s.spare < 0 {
		return
	}
	for _, fd := range s.paused {
		if s.listeners[fd] != nil {
			_ = unix.EpollCtl(s.ep, unix.EPOLL_CTL_MOD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
		}
	}
	s.paused = s.paused[:0]
}

// accepted creates a connection of l for the socket fd.
func (s *Sockets) accepted(w *worker, fd int, peer unix.Sockaddr, l *listener) error {
	own, err := unix.Getsockname(fd)
	if err != nil {
		return err
	}
	flow := pkt.NewFlow(addrPort(own), addrPort(peer))
	if old := w.lookup(&flow); old != nil { // its socket is closed, since otherwise the kernel would not have reused the flow
		old.discard(w)
	}
	if !w.makePlace() {
		return errTooMany
	}
	if err := l.ip.applySocket(fd); err != nil {
		return err
	}
	c, err := s.newConn(w, w.newID(), flow, fd)
	if err != nil {
		return err
	}
	c.enterAccepted(w, l)
	c.sock.establish()
	return nil
}

// connect starts an active open.
func (s *Sockets) connect(w *worker, id ConnID, r *ConnectRequest) error {
	flow := pkt.NewFlow(r.Local, r.Remote)
	switch {
	case r.Local == r.Remote:
		return errSelf
	case w.lookup(&flow) != nil:
		return errFlowExists
	case !w.makePlace():
		return errTooMany
	}
	fd, err := openSocket(r.Local, false, len(w.dev.workers) > 1)
	if err != nil {
		return err
	}
	if err := r.IP.applySocket(fd); err != nil {
		unix.Close(fd)
		return err
	}
	c, err := s.newConn(w, id, flow, fd)
	if err != nil {
		unix.Close(fd)
		return err
	}
	c.enterDialed(w, r)
	if err := unix.Connect(fd, sockaddr(r.Remote)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		c.sock.end(socketError(err))
	}
	return nil
}

// reset closes a socket with a RST.
func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Close(fd)
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
