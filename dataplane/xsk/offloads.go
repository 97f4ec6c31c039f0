package xsk

import (
	"fmt"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"

	"github.com/iwarpd/iwarpd/bpf"
)

// Offloads describes properties of an interface and its offloads.
type Offloads struct {
	// Local: a kernel on this host may be at the other end, and send partial checksums and
	// segments longer than the MTU.
	Local bool
	// SKB: frames are already in buffers of the kernel when they reach the interface, so
	// XDP must copy them.
	SKB bool
	// Segmentation: the interface has TCP segmentation offload.
	Segmentation bool
}

// FindOffloads queries an interface of the calling thread's network namespace.
func FindOffloads(dev netlink.Link) (o Offloads, err error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return o, fmt.Errorf("xsk: ethtool: %w", err)
	}
	defer e.Close()
	o.Local, o.SKB = isLocal(e, dev), bpf.Virtual(dev)
	if have, err := e.Features(dev.Attrs().Name); err == nil {
		o.Segmentation = have["tx-tcp-segmentation"] && have["tx-tcp6-segmentation"]
	}
	return o, nil
}

// isLocal reports whether a kernel on this host may be at the other end of an interface.
func isLocal(e *ethtool.Ethtool, dev netlink.Link) bool {
	switch dev.Type() {
	case "bond", "team", "vlan": // all frames come by the interfaces below
		for _, l := range below(dev) {
			if isLocal(e, l) {
				return true
			}
		}
		return false
	}
	driver, err := e.DriverName(dev.Attrs().Name)
	return bpf.Virtual(dev) || err == nil && driver == "virtio_net"
}

// below returns the ports of a bond or team, and the interface on which a VLAN is, as far as
// they are in the calling thread's network namespace.
func below(dev netlink.Link) (links []netlink.Link) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil
	}
	a := dev.Attrs()
	for _, l := range all {
		b := l.Attrs()
		if b.MasterIndex == a.Index || dev.Type() == "vlan" && a.NetNsID < 0 && b.Index == a.ParentIndex {
			links = append(links, l)
		}
	}
	return links
}
