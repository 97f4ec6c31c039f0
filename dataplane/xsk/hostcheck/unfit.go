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
	if m := portOf(l, find); m != nil {
		return fmt.Sprintf("a port of the %s %s, which has its traffic and addresses: serve %s", m.Type(), m.Attrs().Name, m.Attrs().Name)
	}
	under := l
	for range 2 { // number of tags that a frame may have
		if p, err := find(under.Attrs().ParentIndex); err == nil && under.Type() == "vlan" && under.Attrs().NetNsID < 0 {
			under = p
		}
	}
	// Frames of a VLAN do not go through a bridge or bond that the interface below is a port of.
	if v, ok := l.(*netlink.Vlan); ok && under != l && portOf(under, find) == nil {
		return fmt.Sprintf("the VLAN %d on %s: serve %s, which includes its VLANs", v.VlanId, under.Attrs().Name, under.Attrs().Name)
	}
	return ""
}

// portOf returns the bridge or bond that l is a port of, or nil.
func portOf(l netlink.Link, find func(index int) (netlink.Link, error)) netlink.Link {
	if m, err := find(l.Attrs().MasterIndex); l.Attrs().MasterIndex != 0 && err == nil {
		switch m.Type() {
		case "bridge", "bond", "team", "openvswitch":
			return m
		}
	}
	return nil
}
