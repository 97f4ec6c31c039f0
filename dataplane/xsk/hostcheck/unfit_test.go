package hostcheck

import (
	"errors"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
)

func TestUnfit(t *testing.T) {
	at := func(index int, name string) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: index, Name: name, NetNsID: -1}
	}
	port := func(master int) netlink.Link {
		a := at(9, "eth9")
		a.MasterIndex = master
		return &netlink.Device{LinkAttrs: a}
	}
	vlan := func(parent, ns int) netlink.Link {
		a := at(9, "vlan9")
		a.ParentIndex, a.NetNsID = parent, ns
		return &netlink.Vlan{LinkAttrs: a, VlanId: 5}
	}
	all := map[int]netlink.Link{
		1: &netlink.Device{LinkAttrs: at(1, "eth0")}, 2: &netlink.Bridge{LinkAttrs: at(2, "br0")},
		3: &netlink.Bond{LinkAttrs: at(3, "bond0")}, 4: &netlink.Vrf{LinkAttrs: at(4, "vrf0")},
		5: vlan(1, -1), 6: port(2), 7: vlan(6, -1), 8: port(4),
	}
	find := func(i int) (netlink.Link, error) {
		if l := all[i]; l != nil {
			return l, nil
		}
		return nil, errors.New("none")
	}
	for _, tt := range []struct {
		l    netlink.Link
		want string // "": fit
	}{
		{all[1], ""}, {all[2], ""}, {all[3], ""}, {port(2), "serve br0"}, {port(3), "serve bond0"},
		{port(4), "ip vrf exec vrf0 iwarpd"},
		{vlan(1, -1), "serve eth0"}, {vlan(1, 7), ""}, {vlan(99, -1), ""}, // the interface below is in another namespace
		{vlan(5, -1), "VLAN 5 on eth0: serve eth0"},
		{vlan(6, -1), ""}, {vlan(7, -1), ""}, // the interface below is a port
		{vlan(8, -1), ""}, // or in a VRF
	} {
		if got := unfit(tt.l, find); (got == "") != (tt.want == "") || !strings.Contains(got, tt.want) {
			t.Errorf("%s %s: %q; want %q in it", tt.l.Type(), tt.l.Attrs().Name, got, tt.want)
		}
	}
}
