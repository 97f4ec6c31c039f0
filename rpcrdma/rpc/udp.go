package rpc

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ListenUDP binds a socket for ServeUDP to addr.
func ListenUDP(ctx context.Context, addr string) (*net.UDPConn, error) {
	// Set the options before bind, or datagrams that arrive earlier would lack their
	// destination address.
	l := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		return raw.Control(func(fd uintptr) { // one of the two does not apply to the socket's family and fails
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
		})
	}}
	c, err := l.ListenPacket(ctx, "udp", addr)
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// ServeUDP serves calls in datagrams from c, one at a time, until ctx is done or c is closed. It is
// for programs with short calls and replies, such as a portmapper. The source address of a reply is
// the destination address of its call.
func (s *Server) ServeUDP(ctx context.Context, c *net.UDPConn) error {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	b, to := make([]byte, 1<<16), make([]byte, 128)
	for {
		n, k, _, from, err := c.ReadMsgUDPAddrPort(b, to)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			select {
			case <-time.After(100 * time.Millisecond):
			case <-ctx.Done():
			}
			continue
		}
		m, ok := s.Serve(ctx, from.Addr().Unmap().String(), Msg{Body: b[:n]}, nil)
		if ok {
			_, _, _ = c.WriteMsgUDPAddrPort(m.AppendFlat(nil), to[:k], from)
		}
	}
}
