package dataplane

import (
	"errors"
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

// errOver is the error of a change to a connection that has ended.
var errOver = errors.New("dataplane: the connection has ended")

// vlanID masks the identifier in a TCI.
const vlanID = 0xfff

// apply sets the fields in t and its VLAN tags.
func (o IPOptions) apply(t *pkt.Tuple) {
	t.DSCP, t.TTL = o.DSCP, o.TTL
	for i := range t.VLANs[:t.NVLAN] {
		t.VLANs[i] = t.VLANs[i]&vlanID | uint16(o.Priority)<<13
	}
}

// socketOption is an option of a kernel socket.
type socketOption struct {
	name              string
	v6                bool // of IPv6 sockets only
	level, opt, value int
}

// applySocket sets the options of a kernel socket; those that are 0 are the host's default. The
// kernel maps the priority to that of VLAN tags with the interface's egress-qos-map.
func (o IPOptions) applySocket(fd int) error {
	var opts []socketOption
	if o.DSCP != 0 {
		opts = o.dscpOptions()
	}
	if o.TTL != 0 {
		opts = append(opts, socketOption{"IP_TTL", false, unix.IPPROTO_IP, unix.IP_TTL, int(o.TTL)},
			socketOption{"IPV6_UNICAST_HOPS", true, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, int(o.TTL)})
	}
	return o.setSocket(fd, opts)
}

// applySocketDSCP sets the DSCP of a kernel socket, also if it is 0.
func (o IPOptions) applySocketDSCP(fd int) error { return o.setSocket(fd, o.dscpOptions()) }

func (o IPOptions) dscpOptions() []socketOption {
	return []socketOption{{"IP_TOS", false, unix.IPPROTO_IP, unix.IP_TOS, int(o.DSCP) << 2},
		{"IPV6_TCLASS", true, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, int(o.DSCP) << 2}}
}

// setSocket sets options, and then the priority, which IP_TOS changes. A socket for both families
// gets the options of both.
func (o IPOptions) setSocket(fd int, opts []socketOption) error {
	if o.Priority != 0 {
		opts = append(opts, socketOption{"SO_PRIORITY", false, unix.SOL_SOCKET, unix.SO_PRIORITY, int(o.Priority)})
	}
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("dataplane: socket: %w", err)
	}
	for _, opt := range opts {
		if opt.v6 && domain != unix.AF_INET6 {
			continue
		}
		if err := unix.SetsockoptInt(fd, opt.level, opt.opt, opt.value); err != nil {
			return fmt.Errorf("dataplane: socket option %s=%d: %w", opt.name, opt.value, err)
		}
	}
	return nil
}
