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
	driver, _ := e.DriverName(dev.Attrs().Name)
	o.SKB = bpf.Virtual(dev)
	o.Local = o.SKB || driver == "virtio_net"
	if have, err := e.Features(dev.Attrs().Name); err == nil {
		o.Segmentation = have["tx-tcp-segmentation"] && have["tx-tcp6-segmentation"]
	}
	return o, nil
}

// StopLRO turns off large receive offload of an interface and those below it, if it is on, as the kernel does for XDP: it
// leaves a wrong checksum.
func StopLRO(ifname string) {
	if e, err := ethtool.NewEthtool(); err == nil {
		_ = e.Change(ifname, map[string]bool{"rx-lro": false}) // it may not have it
		e.Close()
	}
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

// PortQueues returns the queues of the port of dev that has the most, or 0 if there is none.
func PortQueues(dev netlink.Link) (most int) {
	for _, port := range below(dev) {
		q, _ := Queues(port.Attrs().Name) // a port may just have gone
		most = max(most, q)
	}
	return most
}
