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
		return o, fmt.Errorf("xsk: ethtool: %w", err)
	}
	defer e.Close()
	driver, _ := e.DriverName(dev.Attrs().Name)
	o.Local = bpf.Virtual(dev) || driver == "virtio_net"
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

// BusyQueues returns how many of the n queues of an interface get frames: frames of a bond or team, which have 16, come with
// the number of the port's queue, and those of a VLAN with that of the interface below.
func BusyQueues(dev netlink.Link, n int) int {
	all, err := netlink.LinkList()
	if err != nil || !bpf.Virtual(dev) {
		return n
	}
	a, most := dev.Attrs(), 0
	for _, l := range all {
		b := l.Attrs()
		if b.MasterIndex == a.Index || dev.Type() == "vlan" && a.NetNsID < 0 && b.Index == a.ParentIndex {
			q, _ := Queues(b.Name) // it may just have gone
			most = max(most, q)
		}
	}
	if most == 0 {
		return n
	}
	return min(n, most)
}
