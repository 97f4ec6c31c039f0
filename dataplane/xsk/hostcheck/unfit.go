package hostcheck

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// Unfit returns why the interface with that name cannot be served while another one can, and
// names the other one. The text follows "is". It returns "" if the interface can be served.
func Unfit(name string) string {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return ""
	}
	if first := l.Attrs().Name; first != name { // sysfs and ethtool know no other
		return fmt.Sprintf("an alternative name of %s: serve %s", first, first)
	}
	return unfit(l, netlink.LinkByIndex)
}

// unfit is Unfit for l. find returns an interface of the same network namespace.
func unfit(l netlink.Link, find func(index int) (netlink.Link, error)) string {
	a := l.Attrs()
	if m, err := find(a.MasterIndex); a.MasterIndex != 0 && err == nil {
		switch kind := m.Type(); kind {
		case "bridge", "bond", "team", "openvswitch":
			return fmt.Sprintf("a port of the %s %s, which has its traffic and addresses: serve %s", kind, m.Attrs().Name, m.Attrs().Name)
		}
	}
	if v, ok := l.(*netlink.Vlan); ok && a.NetNsID < 0 {
		if p, err := find(a.ParentIndex); err == nil {
			return fmt.Sprintf("the VLAN %d on %s: serve %s, which includes its VLANs", v.VlanId, p.Attrs().Name, p.Attrs().Name)
		}
	}
	return ""
}
