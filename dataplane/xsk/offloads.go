package xsk

import (
	"fmt"

	"github.com/safchain/ethtool"
)

// Offloads says what of a kernel's TCP passes an interface.
type Offloads struct {
	// Local: the interface is virtual, and a kernel on this machine may be at its other
	// end, which leaves checksums partial and segments longer than the MTU.
	Local bool
	// SKB: each frame is a buffer of the kernel's already when it comes to the interface,
	// so that XDP has to copy it.
	SKB bool
	// Segmentation: the interface takes TCP segments that are to be cut up.
	Segmentation bool
}

// FindOffloads asks the kernel about an interface of the calling thread's network
// namespace.
func FindOffloads(ifname string) (o Offloads, err error) {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return o, fmt.Errorf("xsk: ethtool: %w", err)
	}
	defer e.Close()
	// Some drivers have no name, or no features; those are no virtual links.
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
