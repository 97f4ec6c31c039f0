package ctrl

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// userLooks is the number of times a second that the clients of a user can make the daemon look for sockets of the
// kernel, which takes milliseconds on a host with many connections. lookUsers is the number of users that can.
const userLooks, lookUsers = 4, 8

// bindOver binds a guard socket of c to addr, whose port the kernel's TCP has only in TIME-WAIT. The kernel allows that
// if the sockets had SO_REUSEADDR, as those of servers have. The port must have no other socket: its frames would be
// steered away.
func (cs *claims) bindOver(c *claim, addr netip.AddrPort, zone int) (fd int, ok bool) {
	if now := clock.Now(); cs.looks == nil || now.Sub(cs.looksSince) >= time.Second {
		cs.looks, cs.looksSince = make(map[uint32]int), now
	}
	if n := cs.looks[c.uid]; n == userLooks || n == 0 && len(cs.looks) == lookUsers {
		return -1, false
	}
	cs.looks[c.uid]++
	fd, _, err := bindGuard(addr, zone, true)
	if err != nil {
		return -1, false
	}
	// Now no other socket of the port can listen, so that none is accepted later.
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0)
	if rests, e := onlyTimeWait(addr, fd); err != nil || e != nil || !rests {
		unix.Close(fd)
		return -1, false
	}
	return fd, true
}

// onlyTimeWait reports whether the kernel's TCP has addr in TIME-WAIT, and no socket on it but fd. Linux shows sockets
// that are only bound from 6.8 on; before, one of these has the port if there is no TIME-WAIT.
func onlyTimeWait(addr netip.AddrPort, fd int) (bool, error) {
	const (
		requestSize = 56                                      // struct inet_diag_req_v2 of linux/inet_diag.h
		messageSize = 72                                      // struct inet_diag_msg
		states      = (1<<14 - 2) &^ (1 << netlink.TCP_CLOSE) // TCP_ESTABLISHED to TCP_BOUND_INACTIVE
	)
	var own unix.Stat_t
	if err := unix.Fstat(fd, &own); err != nil {
		return false, err
	}
	rests := false
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		b := make([]byte, requestSize)
		b[0], b[1] = family, unix.IPPROTO_TCP
		binary.NativeEndian.PutUint32(b[4:], states)
		binary.BigEndian.PutUint16(b[8:], addr.Port())
		req.AddRawData(b)
		socks, err := req.Execute(unix.NETLINK_SOCK_DIAG, nl.SOCK_DIAG_BY_FAMILY)
		if err != nil {
			return false, err
		}
		for _, s := range socks {
			if len(s) < messageSize || binary.NativeEndian.Uint32(s[68:]) == uint32(own.Ino) ||
				binary.BigEndian.Uint16(s[4:]) != addr.Port() {
				continue
			}
			local, _ := netip.AddrFromSlice(s[8:24])
			if s[0] == unix.AF_INET {
				local, _ = netip.AddrFromSlice(s[8:12])
			}
			if local = local.Unmap(); !local.IsUnspecified() && local != addr.Addr().Unmap().WithZone("") {
				continue
			}
			if s[1] != netlink.TCP_TIME_WAIT {
				return false, nil
			}
			rests = true
		}
	}
	return rests, nil
}
