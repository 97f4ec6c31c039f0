package hostcheck

import (
	"fmt"
	"slices"

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

// merging are the kinds of interfaces that take over the traffic of their parts.
var merging = []string{"bridge", "bond", "team", "openvswitch"}

// unfit is Unfit for l. find returns an interface of the same network namespace.
func unfit(l netlink.Link, find func(index int) (netlink.Link, error)) string {
	master, kind := masterOf(l, find)
	switch {
	case slices.Contains(merging, kind):
		return fmt.Sprintf("a port of the %s %s, which has its traffic and addresses: serve %s", kind, master, master)
	case kind == "vrf":
		return fmt.Sprintf("in the VRF %[1]s, whose routes and ports iwarpd does not use: take it out, "+
			"or run \"ip vrf exec %[1]s iwarpd --transport socket\"", master)
	}
	under := l
	for range 2 { // number of tags that a frame may have
		if p, err := find(under.Attrs().ParentIndex); err == nil && under.Type() == "vlan" && under.Attrs().NetNsID < 0 {
			under = p
		}
	}
	// Frames of a VLAN do not go through the bridge or bond that the interface below is a port of.
	_, kind = masterOf(under, find)
	if v, ok := l.(*netlink.Vlan); ok && under != l && kind != "vrf" && !slices.Contains(merging, kind) {
		return fmt.Sprintf("the VLAN %d on %[2]s: serve %[2]s, which includes its VLANs", v.VlanId, under.Attrs().Name)
	}
	return ""
}

// masterOf returns the name and kind of the interface that l is a part of, or "" if there is none.
func masterOf(l netlink.Link, find func(index int) (netlink.Link, error)) (name, kind string) {
	if m, err := find(l.Attrs().MasterIndex); l.Attrs().MasterIndex != 0 && err == nil {
		return m.Attrs().Name, m.Type()
	}
	return "", ""
}
