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

// bindOver binds a guard socket to addr, whose port the kernel's TCP has, perhaps only in TIME-WAIT. The kernel allows
// that if the sockets had SO_REUSEADDR, as those of servers have. It returns -1 if that is not so. checkOver must
// follow.
func bindOver(addr netip.AddrPort, zone int) (fd int, port uint16) {
	fd, port, err := bindGuard(addr, zone, true)
	if err != nil {
		return -1, 0
	}
	// Now no other socket of the port can listen, so that none is accepted later.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0) != nil {
		unix.Close(fd)
		return -1, 0
	}
	return fd, port
}

// checkOver checks the guards of c in over, which bindOver has bound. Unless the kernel's TCP has the port only in
// TIME-WAIT on their addresses, it closes them and returns an error: the frames of another socket would be steered away.
func (cs *claims) checkOver(c *claim, over map[netip.Addr]int) error {
	if len(over) == 0 {
		return nil
	}
	var busy netip.Addr
	if !cs.mayLook(c.uid) {
		busy = c.addr.Addr()
	} else if busy = notInTimeWait(c.addr.Port(), over); !busy.IsValid() {
		return nil
	}
	for a, fd := range over {
		unix.Close(fd)
		delete(c.guards, a)
	}
	return bindError(netip.AddrPortFrom(busy, c.addr.Port()), unix.EADDRINUSE)
}

// mayLook reports whether the clients of uid may make the daemon look for sockets of the kernel once more.
func (cs *claims) mayLook(uid uint32) bool {
	if now := clock.Now(); cs.looks == nil || now.Sub(cs.looksSince) >= time.Second {
		cs.looks, cs.looksSince = make(map[uint32]int), now
	}
	if n := cs.looks[uid]; n == userLooks || n == 0 && len(cs.looks) == lookUsers {
		return false
	}
	cs.looks[uid]++
	return true
}

// notInTimeWait returns an address of over on which the kernel's TCP has port not only in TIME-WAIT, apart from the
// sockets of over, or the zero Addr if there is none. Linux shows sockets that are only bound from 6.8 on; before, one
// of these has the port if there is no TIME-WAIT.
func notInTimeWait(port uint16, over map[netip.Addr]int) netip.Addr {
	const (
		requestSize = 56                                      // struct inet_diag_req_v2 of linux/inet_diag.h
		messageSize = 72                                      // struct inet_diag_msg
		states      = (1<<14 - 2) &^ (1 << netlink.TCP_CLOSE) // TCP_ESTABLISHED to TCP_BOUND_INACTIVE
	)
	own, rests := make(map[uint32]bool), make(map[netip.Addr]bool)
	for a, fd := range over {
		var st unix.Stat_t
		if unix.Fstat(fd, &st) != nil {
			return a
		}
		own[uint32(st.Ino)], rests[a] = true, false
	}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		b := make([]byte, requestSize)
		b[0], b[1] = family, unix.IPPROTO_TCP
		binary.NativeEndian.PutUint32(b[4:], states)
		binary.BigEndian.PutUint16(b[8:], port)
		req.AddRawData(b)
		socks, err := req.Execute(unix.NETLINK_SOCK_DIAG, nl.SOCK_DIAG_BY_FAMILY)
		if err != nil {
			return netip.IPv6Unspecified()
		}
		for _, s := range socks {
			if len(s) < messageSize || own[binary.NativeEndian.Uint32(s[68:])] ||
				binary.BigEndian.Uint16(s[4:]) != port {
				continue
			}
			local, _ := netip.AddrFromSlice(s[8:24])
			if s[0] == unix.AF_INET {
				local, _ = netip.AddrFromSlice(s[8:12])
			}
			local = local.Unmap()
			_, ours := rests[local]
			switch {
			case !ours && !local.IsUnspecified():
			case s[1] != netlink.TCP_TIME_WAIT:
				return local
			default:
				rests[local] = true
			}
		}
	}
	for a, ok := range rests {
		if !ok {
			return a
		}
	}
	return netip.Addr{}
}
