package xsk

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// Offloads describes properties of an interface and its offloads.
type Offloads struct {
	// Local: the interface is virtual. A kernel on this host may be at its other end, and
	// send partial checksums and segments longer than the MTU.
	Local bool
	// SKB: frames are already in buffers of the kernel when they reach the interface, so
	// XDP must copy them.
	SKB bool
	// Segmentation: the interface has TCP segmentation offload.
	Segmentation bool
}

// FindOffloads queries an interface of the calling thread's network namespace.
func FindOffloads(ifname string) (o Offloads, err error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return o, fmt.Errorf("xsk: ethtool: %w", err)
	}
	defer e.Close()
	// Drivers without a name or features are not virtual links.
	if driver, err := e.DriverName(ifname); err == nil {
		switch driver {
		case "veth", "tun":
			o.Local, o.SKB = true, true
		case "virtio_net":
			o.Local = true
		}
	}
	if have, err := e.Features(ifname); err == nil {
		o.Segmentation = have["tx-tcp-segmentation"] && have["tx-tcp6-segmentation"]
	}
	return o, nil
}
