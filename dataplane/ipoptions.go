package dataplane

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/pkt"
)

// IPOptions are fields of the IP and VLAN headers of all packets of a connection.
type IPOptions struct {
	DSCP     uint8 // 0 to 63 (RFC 2474)
	TTL      uint8 // or hop limit; 0: the default, 64
	Priority uint8 // in VLAN tags, 0 to 7 (IEEE 802.1Q)
}

// vlanID masks the identifier in a TCI.
const vlanID = 0xfff

// apply sets the fields in t and its VLAN tags.
func (o IPOptions) apply(t *pkt.Tuple) {
	t.DSCP, t.TTL = o.DSCP, o.TTL
	for i := range t.VLANs[:t.NVLAN] {
		t.VLANs[i] = t.VLANs[i]&vlanID | uint16(o.Priority)<<13
	}
}

// applySocket sets the options of a kernel socket. The kernel maps the priority to that of VLAN
// tags with the interface's egress-qos-map. A socket for both families gets the options of
// both.
func (o IPOptions) applySocket(fd int) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("dataplane: socket: %w", err)
	}
	v6 := domain == unix.AF_INET6
	for _, opt := range []struct {
		name              string
		v6                bool
		level, opt, value int
	}{
		{"IP_TOS", false, unix.IPPROTO_IP, unix.IP_TOS, int(o.DSCP) << 2},
		{"IP_TTL", false, unix.IPPROTO_IP, unix.IP_TTL, int(o.TTL)},
		{"IPV6_TCLASS", true, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int(o.DSCP) << 2},
		{"IPV6_UNICAST_HOPS", true, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, int(o.TTL)},
		{"SO_PRIORITY", v6, unix.SOL_SOCKET, unix.SO_PRIORITY, int(o.Priority)}, // last: IP_TOS changes it
	} {
		if opt.value == 0 || opt.v6 && !v6 {
			continue // the host's default
		}
		if err := unix.SetsockoptInt(fd, opt.level, opt.opt, opt.value); err != nil {
			return fmt.Errorf("dataplane: socket option %s=%d: %w", opt.name, opt.value, err)
		}
	}
	return nil
}
