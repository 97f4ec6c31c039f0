package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane"
)

// AnyInterface is the name of the device of kernel sockets.
const AnyInterface = "any"

// Sockets is the resolver for an engine that uses kernel sockets. The kernel routes each packet;
// Resolve only returns the source address.
type Sockets struct{}

// Resolve returns a Hop with the source address that the kernel chooses for dst, or src if
// it is valid, and the MTU of the path. It does not block.
func (Sockets) Resolve(dst, src netip.Addr, _ string) (hop dataplane.Hop, err error) {
	domain, level, mtu := unix.AF_INET, unix.IPPROTO_IP, unix.IP_MTU
	if dst.Is6() {
		domain, level, mtu = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return hop, fmt.Errorf("hostnet: socket: %w", err)
	}
	defer unix.Close(fd)
	if src.IsValid() {
		if err := unix.Bind(fd, sockaddr(src, 0)); err != nil {
			return hop, fmt.Errorf("hostnet: %v is %w: %w", src, dataplane.ErrSource, err)
		}
	}
	const discard = 9 // no packet is sent
	if err := unix.Connect(fd, sockaddr(dst, discard)); err != nil {
		why := ErrNoRoute
		if errors.Is(err, unix.EACCES) {
			why = dataplane.ErrBroadcast
		}
		return hop, fmt.Errorf("hostnet: %v: %w: %w", dst, why, err)
	}
	own, err := unix.Getsockname(fd)
	if err != nil {
		return hop, fmt.Errorf("hostnet: %v: %w", dst, err)
	}
	switch own := own.(type) {
	case *unix.SockaddrInet4:
		hop.Src = netip.AddrFrom4(own.Addr)
	case *unix.SockaddrInet6:
		hop.Src = netip.AddrFrom16(own.Addr).Unmap()
	}
	hop.MTU, _ = unix.GetsockoptInt(fd, level, mtu)
	hop.Local = dst.IsLoopback() || slices.Contains(Sockets{}.Addrs(), dst)
	return hop, nil
}

func sockaddr(a netip.Addr, port int) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Port: port, Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: port, Addr: a.As16()}
}

// Watch does nothing: the kernel's connections follow its routes.
func (Sockets) Watch(func()) {}

// Addrs returns the addresses of the host, those of loopback last, without the link-local
// ones of IPv6.
func (Sockets) Addrs() (addrs []netip.Addr) {
	all, _ := net.InterfaceAddrs()
	var loop []netip.Addr
	for _, a := range all {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		switch addr, _ := netip.AddrFromSlice(n.IP); {
		case addr.Is6() && !addr.Is4In6() && addr.IsLinkLocalUnicast():
		case addr.IsLoopback():
			loop = append(loop, addr.Unmap())
		case addr.IsValid():
			addrs = append(addrs, addr.Unmap())
		}
	}
	return append(addrs, loop...)
}
