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
	// Segmentation: the interface has TCP segmentation offload.
	Segmentation bool
}

// FindOffloads queries an interface of the calling thread's network namespace.
func FindOffloads(dev netlink.Link) (o Offloads, err error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return o, fmt.Errorf("xsk: offloads of %s: ethtool: %w", dev.Attrs().Name, err)
	}
	defer e.Close()
	driver, _ := e.DriverName(dev.Attrs().Name)
	o.Local = bpf.Virtual(dev) || driver == "virtio_net"
	if have, err := e.Features(dev.Attrs().Name); err == nil {
		o.Segmentation = have["tx-tcp-segmentation"] && have["tx-tcp6-segmentation"]
	}
	return o, nil
}

// StopMerging turns off the offloads of an interface and of those below it that leave merged frames with a wrong
// checksum, if they are on: LRO, as the kernel does for XDP, and rx-gro-list, which is for frames that are forwarded.
func StopMerging(dev netlink.Link) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return
	}
	defer e.Close()
	for _, l := range append(below(dev), dev) {
		for _, feature := range []string{"rx-lro", "rx-gro-list"} {
			_ = e.Change(l.Attrs().Name, map[string]bool{feature: false}) // it may not have it
		}
	}
}

// below returns the interfaces from which dev gets its frames: the ports of a bond, team or bridge, or the interface of
// a VLAN.
func below(dev netlink.Link) (list []netlink.Link) {
	if !bpf.Virtual(dev) {
		return nil
	}
	all, _ := netlink.LinkList()
	a := dev.Attrs()
	for _, l := range all {
		b := l.Attrs()
		if b.MasterIndex == a.Index || dev.Type() == "vlan" && a.NetNsID < 0 && b.Index == a.ParentIndex {
			list = append(list, l)
		}
	}
	return list
}

// BusyQueues returns how many of the n queues of an interface get frames: frames of a bond or team, which have 16, come
// with the number of the port's queue, and those of a VLAN with that of the interface below.
func BusyQueues(dev netlink.Link, n int) int {
	most := 0
	for _, l := range below(dev) {
		q, _ := Queues(l.Attrs().Name) // it may just have gone
		most = max(most, q)
	}
	if most == 0 {
		return n
	}
	return min(n, most)
}
