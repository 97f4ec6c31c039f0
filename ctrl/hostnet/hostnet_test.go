package hostnet

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// wire makes two network namespaces joined by a veth pair, and returns handles
// of both. The calling test's goroutine is in the first, for the test's life.
func wire(t *testing.T) (here, there *netlink.Handle) {
	t.Helper()
	testenv.RequireRoot(t)
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	orig, err := netns.Get()
	if err != nil {
		t.Fatal(err)
	}
	peer, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	own, err := netns.New() // the thread is in it now
	if err != nil {
		t.Fatal(err)
	}
	orig.Close()
	here, err = netlink.NewHandleAt(own, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	there, err = netlink.NewHandleAt(peer, unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		here.Close()
		there.Close()
		own.Close()
		peer.Close()
	})
	must(t, here.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a0", MTU: 1500}, PeerName: "b0", PeerNamespace: netlink.NsFd(peer)}))
	up(t, here, "a0", "10.77.0.1/24")
	up(t, there, "b0", "10.77.0.2/24")
	// Until then the kernel drops what is sent, and asks for no neighbour.
	for began, h := time.Now(), here; ; {
		l, err := h.LinkByName(map[*netlink.Handle]string{here: "a0", there: "b0"}[h])
		must(t, err)
		switch {
		case l.Attrs().OperState != netlink.OperUp && time.Since(began) > time.Minute:
			t.Fatalf("%s does not come up", l.Attrs().Name)
		case l.Attrs().OperState != netlink.OperUp:
		case h == there:
			return here, there
		default:
			h = there
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newResolver makes a resolver that is closed when the test ends.
func newResolver(t *testing.T, names ...string) *Resolver {
	t.Helper()
	r, err := New(names...)
	must(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

func up(t *testing.T, h *netlink.Handle, name string, addrs ...string) netlink.Link {
	t.Helper()
	l, err := h.LinkByName(name)
	must(t, err)
	for _, s := range addrs {
		a, err := netlink.ParseAddr(s)
		must(t, err)
		a.Flags = unix.IFA_F_NODAD
		must(t, h.AddrAdd(l, a))
	}
	must(t, h.LinkSetUp(l))
	l, err = h.LinkByName(name)
	must(t, err)
	return l
}

func mac(l netlink.Link) [6]byte { return [6]byte(l.Attrs().HardwareAddr) }

func TestResolve(t *testing.T) {
	here, there := wire(t)
	a0, err := here.LinkByName("a0")
	must(t, err)
	b0, err := there.LinkByName("b0")
	must(t, err)
	vlans := true
	for _, h := range []struct {
		h      *netlink.Handle
		l      netlink.Link
		v4, v6 string
		name   string
	}{{here, a0, "10.78.0.1/24", "fd77::1/64", "a0.7"}, {there, b0, "10.78.0.2/24", "fd77::2/64", "b0.7"}} {
		up(t, h.h, h.l.Attrs().Name, h.v6)
		err := h.h.LinkAdd(&netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: h.name, ParentIndex: h.l.Attrs().Index}, VlanId: 7})
		if errors.Is(err, unix.EOPNOTSUPP) {
			vlans = false
			continue
		}
		must(t, err)
		up(t, h.h, h.name, h.v4)
	}
	if !vlans {
		t.Log("this kernel has no VLANs: their cases are left out")
	}
	up(t, here, "lo")
	up(t, here, "a0", "fe80::1/64", "169.254.7.1/24")
	up(t, there, "b0", "fe80::2/64", "169.254.7.2/24")
	_, dst, err := net.ParseCIDR("10.80.0.0/16")
	must(t, err)
	must(t, here.RouteAdd(&netlink.Route{LinkIndex: a0.Attrs().Index, Dst: dst, Gw: netip.MustParseAddr("10.77.0.2").AsSlice(), MTU: 1400}))

	for cidr, kind := range map[string]int{"10.81.0.0/16": unix.RTN_BLACKHOLE, "10.82.0.0/16": unix.RTN_PROHIBIT} {
		_, dst, err := net.ParseCIDR(cidr)
		must(t, err)
		must(t, here.RouteAdd(&netlink.Route{Dst: dst, Type: kind}))
	}

	r := newResolver(t, "a0")
	for dst, want := range map[string]string{"10.81.1.1": "no route: a blackhole route", "10.82.1.1": "no route: a prohibit route"} {
		if _, err := r.Resolve(netip.MustParseAddr(dst), netip.Addr{}, ""); !errors.Is(err, ErrNoRoute) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", dst, err, want)
		}
	}

	for _, tt := range []struct {
		dst, src string
		want     string // source
		vlan     uint16
		mtu      int
		local    bool
		err      error
	}{
		{dst: "10.77.0.2", want: "10.77.0.1", mtu: 1500},
		{dst: "10.77.0.2", src: "10.77.0.1", want: "10.77.0.1", mtu: 1500},
		{dst: "10.80.1.2", want: "10.77.0.1", mtu: 1400},
		{dst: "10.78.0.2", want: "10.78.0.1", vlan: 7, mtu: 1500},
		{dst: "fd77::2", want: "fd77::1", mtu: 1500},
		{dst: "192.0.2.1", err: ErrNoRoute},
		{dst: "10.77.0.1", want: "10.77.0.1", local: true},
		{dst: "10.77.0.1", src: "127.0.0.1", want: "127.0.0.1", local: true},
		{dst: "10.77.0.2", src: "127.0.0.1", err: dataplane.ErrSource},
		{dst: "fd77::2", src: "::1", err: dataplane.ErrSource},
		{dst: "127.0.0.1", want: "127.0.0.1", local: true},
		{dst: "127.0.0.1", src: "10.77.0.1", want: "10.77.0.1", local: true},
		{dst: "::1", want: "::1", local: true},
		{dst: "fd77::1", want: "fd77::1", local: true},
		{dst: "fe80::1", want: "fe80::1", local: true},
		{dst: "10.77.0.2", src: "10.99.9.9", err: dataplane.ErrSource},
		{dst: "10.77.0.255", err: dataplane.ErrBroadcast},
		{dst: "10.77.0.0", err: dataplane.ErrNetwork},
		{dst: "169.254.7.2", want: "169.254.7.1", mtu: 1500},
		{dst: "fe80::2", want: "fe80::1", mtu: 1500},
		{dst: "fe80::2%a0", want: "fe80::1", mtu: 1500},
		{dst: "fe80::2%a0", src: "fe80::1", want: "fe80::1", mtu: 1500},
		{dst: "fe80::2%lo", err: ErrInterface},
		{dst: "fe80::2", src: "fe80::9", err: dataplane.ErrSource},
	} {
		if tt.vlan != 0 && !vlans {
			continue
		}
		var src netip.Addr
		if tt.src != "" {
			src = netip.MustParseAddr(tt.src)
		}
		hop, err := r.Resolve(netip.MustParseAddr(tt.dst), src, "")
		if tt.err != nil {
			if !errors.Is(err, tt.err) {
				t.Errorf("%s from %q: %v, want %v", tt.dst, tt.src, err, tt.err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s from %q: %v", tt.dst, tt.src, err)
			continue
		}
		if tt.local {
			if !hop.Local || hop.Src != netip.MustParseAddr(tt.want) {
				t.Errorf("%s from %q: %+v, want one of this host", tt.dst, tt.src, hop)
			}
			continue
		}
		if hop.Local || hop.SrcMAC != mac(a0) || hop.DstMAC != mac(b0) || hop.Src != netip.MustParseAddr(tt.want) || hop.MTU != tt.mtu {
			t.Errorf("%s from %q: %+v", tt.dst, tt.src, hop)
		}
		if tt.vlan == 0 && len(hop.VLANs) != 0 || tt.vlan != 0 && (len(hop.VLANs) != 1 || hop.VLANs[0] != tt.vlan) {
			t.Errorf("%s: VLANs %v, want %d", tt.dst, hop.VLANs, tt.vlan)
		}
	}
	_, err = r.Resolve(netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("10.99.9.9"), "")
	if err == nil || !strings.Contains(err.Error(), "10.99.9.9 is not an address of the interface a0: choose one of") {
		t.Errorf("%v: docs/troubleshooting.md has another message", err)
	}
	if _, err := r.Resolve(netip.MustParseAddr("10.77.0.99"), netip.Addr{}, ""); !errors.Is(err, ErrNoNeighbour) {
		t.Errorf("a neighbour that is not there: %v", err)
	}
	want := 3
	if vlans {
		want = 4
	}
	if got := r.devices[0].Addrs(); len(got) != want {
		t.Errorf("addresses %v, want %d", got, want)
	}
	if got := r.devices[0].LinkLocal(); !slices.Contains(got, netip.MustParseAddr("fe80::1%a0")) {
		t.Errorf("link-local addresses %v", got)
	}
}

// TestNoARP checks that on an interface without ARP the administrator's entries count, and that without one frames
// go to the interface's own address, as those of the kernel do.
func TestNoARP(t *testing.T) {
	here, _ := wire(t)
	a0, err := here.LinkByName("a0")
	must(t, err)
	must(t, here.LinkSetARPOff(a0))
	far := [6]byte{2, 0, 0, 0, 0, 9}
	up(t, here, "a0", "fd77::1/64")
	for _, dst := range []string{"10.77.0.9", "fd77::9"} {
		must(t, here.NeighAdd(&netlink.Neigh{
			LinkIndex: a0.Attrs().Index, State: netlink.NUD_PERMANENT, IP: net.ParseIP(dst), HardwareAddr: far[:],
		}))
	}
	r := newResolver(t, "a0")
	for dst, want := range map[string][6]byte{"10.77.0.9": far, "fd77::9": far, "10.77.0.8": mac(a0), "fd77::8": mac(a0)} {
		if hop, err := r.Resolve(netip.MustParseAddr(dst), netip.Addr{}, ""); err != nil || hop.DstMAC != want {
			t.Errorf("%s: to %x, %v; want %x", dst, hop.DstMAC, err, want)
		}
	}
}

// TestSourceElsewhere checks that the error says what to do if a route names a source address that is on an interface
// that is not served.
func TestSourceElsewhere(t *testing.T) {
	here, _ := wire(t)
	must(t, here.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a1"}, PeerName: "b1"}))
	up(t, here, "a1", "10.90.0.1/32")
	a0, err := here.LinkByName("a0")
	must(t, err)
	addRoute(t, here, &netlink.Route{LinkIndex: a0.Attrs().Index, Src: net.IPv4(10, 90, 0, 1), Gw: net.IPv4(10, 77, 0, 2)}, "10.80.0.0/16")
	r := newResolver(t, "a0")
	_, err = r.Resolve(netip.MustParseAddr("10.80.0.1"), netip.Addr{}, "")
	if !errors.Is(err, ErrNoRoute) || !strings.Contains(err.Error(), "10.90.0.1 is not on a0: give") {
		t.Error(err)
	}
}

// addRoute adds a route to cidr.
func addRoute(t *testing.T, h *netlink.Handle, r *netlink.Route, cidr string) {
	t.Helper()
	_, dst, err := net.ParseCIDR(cidr)
	must(t, err)
	r.Dst = dst
	if err := h.RouteAdd(r); errors.Is(err, unix.EOPNOTSUPP) {
		testenv.Skip(t, "this kernel has no such route: %v", r)
	} else {
		must(t, err)
	}
}

// second makes another interface, which is not served, with an address and a neighbour 10.78.0.2, and gives a0 the
// neighbour 10.77.0.2.
func second(t *testing.T, h *netlink.Handle, name string) netlink.Link {
	t.Helper()
	must(t, h.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "b" + name}))
	up(t, h, "b"+name)
	l := up(t, h, name, "10.78.0.1/24")
	must(t, h.NeighSet(&netlink.Neigh{
		LinkIndex: l.Attrs().Index, IP: net.IPv4(10, 78, 0, 2), State: netlink.NUD_PERMANENT, HardwareAddr: l.Attrs().HardwareAddr,
	}))
	return l
}

// A resolution is what Resolve is to return for a destination, a source and a device, of which the last two may be
// empty.
type resolution struct {
	dst, src, by string
	device       string
	want         string // source
	err          error
}

func (tt resolution) check(t *testing.T, r *Resolver) {
	t.Helper()
	var src netip.Addr
	if tt.src != "" {
		src = netip.MustParseAddr(tt.src)
	}
	hop, err := r.Resolve(netip.MustParseAddr(tt.dst), src, tt.by)
	if !errors.Is(err, tt.err) || err == nil && (hop.Device != tt.device || hop.Src.String() != tt.want) {
		t.Errorf("%+v: %s, %v, %v", tt, hop.Device, hop.Src, err)
	}
}

// TestLoopback checks that addresses of loopback, as with BGP to the host, are those of the first interface, and that
// routes may name them as the source.
func TestLoopback(t *testing.T) {
	here, _ := wire(t)
	lo := up(t, here, "lo", "10.90.0.1/32", "fd90::1/128", "127.0.0.5/8")
	for _, s := range []string{"10.90.0.2/32", "10.90.0.3/32"} {
		a, err := netlink.ParseAddr(s)
		must(t, err)
		if s == "10.90.0.2/32" {
			a.Scope = unix.RT_SCOPE_HOST
		}
		must(t, here.AddrAdd(lo, a))
	}
	a0, a1 := up(t, here, "a0", "fd77::1/64", "10.90.0.3/32"), second(t, here, "a1")
	addRoute(t, here, &netlink.Route{LinkIndex: a0.Attrs().Index, Src: net.IPv4(10, 90, 0, 1), Gw: net.IPv4(10, 77, 0, 2)}, "10.80.0.0/16")
	addRoute(t, here, &netlink.Route{LinkIndex: a1.Attrs().Index, Src: net.IPv4(10, 90, 0, 1), Gw: net.IPv4(10, 78, 0, 2)}, "10.81.0.0/16")
	r, err := NewWithLoopback("a0", "a1")
	must(t, err)
	defer r.Close()
	if other := newResolver(t, "a0"); slices.Contains(other.Device("a0").Addrs(), netip.MustParseAddr("10.90.0.1")) {
		t.Error("New has addresses of loopback")
	}
	if n := OnLoopback(); n != 3 { // with one that is on a0 too
		t.Errorf("%d addresses on loopback, want 3", n)
	}
	addrs := func(all []netip.Addr, want ...string) bool {
		var have []string
		for _, a := range all {
			have = append(have, a.String())
		}
		slices.Sort(have)
		return slices.Equal(have, want)
	}
	for _, list := range []struct {
		what string
		all  []netip.Addr
		want []string
	}{
		{"loopback", r.Loopback(), []string{"10.90.0.1", "fd90::1"}},
		{"a0", r.Device("a0").Addrs(), []string{"10.77.0.1", "10.90.0.1", "10.90.0.3", "fd77::1", "fd90::1"}},
		{"a1", r.Device("a1").Addrs(), []string{"10.78.0.1"}},
	} {
		if !addrs(list.all, list.want...) {
			t.Errorf("%s: %v; want %v", list.what, list.all, list.want)
		}
	}
	for _, tt := range []resolution{
		{"10.80.0.1", "", "", "a0", "10.90.0.1", nil},
		{"10.81.0.1", "", "", "a1", "10.90.0.1", nil},
		{"10.81.0.1", "", "a1", "a1", "10.90.0.1", nil},
		{"10.77.0.2", "10.90.0.1", "", "a0", "10.90.0.1", nil},
		{"10.78.0.2", "10.90.0.1", "a1", "a1", "10.90.0.1", nil},
		{"10.77.0.2", "10.90.0.2", "", "", "", dataplane.ErrSource},
	} {
		tt.check(t, r)
	}
	if hop, err := r.Resolve(netip.MustParseAddr("10.90.0.1"), netip.Addr{}, ""); err != nil || !hop.Local {
		t.Errorf("an address of loopback: %+v, %v", hop, err)
	}
	if !slices.Contains(r.Hostless(), netip.MustParseAddr("10.90.0.1")) {
		t.Error("another host may have an address of loopback")
	}
	changed := changes(r)
	must(t, here.LinkDel(a0))
	until(t, changed, "that a1 has the addresses", func() bool {
		return addrs(r.Device("a1").Addrs(), "10.78.0.1", "10.90.0.1", "10.90.0.3", "fd90::1")
	})
	must(t, here.LinkSetDown(lo))
	until(t, changed, "that loopback is down", func() bool { return addrs(r.Device("a1").Addrs(), "10.78.0.1") })
}

// TestLeadsNowhere checks which interfaces have addresses that others serve.
func TestLeadsNowhere(t *testing.T) {
	attrs := func(flags uint32) netlink.LinkAttrs { return netlink.LinkAttrs{RawFlags: flags} }
	for _, tt := range []struct {
		what string
		l    netlink.Link
		want bool
	}{
		{"loopback", &netlink.Device{LinkAttrs: attrs(unix.IFF_UP | unix.IFF_LOOPBACK)}, true},
		{"dummy", &netlink.Dummy{LinkAttrs: attrs(unix.IFF_UP)}, true},
		{"dummy that is down", &netlink.Dummy{}, false},
		{"card", &netlink.Device{LinkAttrs: attrs(unix.IFF_UP)}, false},
		{"gone", nil, false},
	} {
		if got := leadsNowhere(tt.l); got != tt.want {
			t.Errorf("%s: %v", tt.what, got)
		}
	}
}

// TestPaths checks that of the paths of a route one over a served interface is taken, whichever the kernel chooses.
func TestPaths(t *testing.T) {
	here, _ := wire(t)
	a0, err := here.LinkByName("a0")
	must(t, err)
	a1 := second(t, here, "a1")
	addRoute(t, here, &netlink.Route{MultiPath: []*netlink.NexthopInfo{
		{LinkIndex: a0.Attrs().Index, Gw: net.IPv4(10, 77, 0, 2)}, {LinkIndex: a1.Attrs().Index, Gw: net.IPv4(10, 78, 0, 2)},
	}}, "10.80.0.0/16")
	addRoute(t, here, &netlink.Route{LinkIndex: a1.Attrs().Index, Gw: net.IPv4(10, 78, 0, 2)}, "10.81.0.0/16")
	r, err := New("a0")
	must(t, err)
	defer r.Close()
	for i := range byte(32) {
		for _, src := range []netip.Addr{{}, netip.MustParseAddr("10.77.0.1")} {
			hop, err := r.Resolve(netip.AddrFrom4([4]byte{10, 80, 0, i}), src, "")
			if err != nil || hop.Device != "a0" || hop.Src.String() != "10.77.0.1" {
				t.Fatalf("path %d from %v: %s, %v, %v", i, src, hop.Device, hop.Src, err)
			}
		}
	}
	if _, err := r.Resolve(netip.MustParseAddr("10.81.0.1"), netip.Addr{}, ""); !errors.Is(err, ErrInterface) {
		t.Errorf("a route without a path over a0: %v", err)
	}
}

// TestInterface checks that the next hop is on the interface that was asked for, where the routes lead to the peer over
// another one too: the kernel prefers that of the better metric in IPv6.
func TestInterface(t *testing.T) {
	here, _ := wire(t)
	a0 := up(t, here, "a0", "2001:db8:77::1/64")
	a1 := second(t, here, "a1")
	up(t, here, "a1", "2001:db8:78::1/64")
	for i, l := range []netlink.Link{a0, a1} {
		gw := netip.MustParseAddr([]string{"2001:db8:77::2", "2001:db8:78::2"}[i])
		addRoute(t, here, &netlink.Route{LinkIndex: l.Attrs().Index, Gw: gw.AsSlice(), Priority: i + 1}, "2001:db8:80::/64")
		must(t, here.NeighSet(&netlink.Neigh{
			LinkIndex: l.Attrs().Index, IP: gw.AsSlice(), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, byte(i)},
		}))
	}
	r := newResolver(t, "a0", "a1")
	for _, src := range []string{"2001:db8:77::1", "2001:db8:78::1"} {
		for i, device := range []string{"a0", "a1"} {
			hop, err := r.Resolve(netip.MustParseAddr("2001:db8:80::1"), netip.MustParseAddr(src), device)
			if err != nil || hop.Device != device || hop.DstMAC != [6]byte{2, 0, 0, 0, 0, byte(i)} {
				t.Errorf("from %s over %s: %s, %v, %v", src, device, hop.Device, hop.DstMAC, err)
			}
		}
	}
}

// TestEncap checks that a route with encapsulation, which only the kernel's packets can take, is refused.
func TestEncap(t *testing.T) {
	here, _ := wire(t)
	a0 := up(t, here, "a0", "fd77::1/64")
	addRoute(t, here, &netlink.Route{LinkIndex: a0.Attrs().Index, Encap: &netlink.SEG6Encap{
		Mode: nl.SEG6_IPTUN_MODE_ENCAP, Segments: []net.IP{net.ParseIP("fd77::2")},
	}}, "fd88::/64")
	r, err := New("a0")
	must(t, err)
	defer r.Close()
	if _, err := r.Resolve(netip.MustParseAddr("fd88::1"), netip.Addr{}, ""); !errors.Is(err, ErrNoRoute) || !strings.Contains(err.Error(), "encapsulation") {
		t.Error(err)
	}
}

func TestWatch(t *testing.T) {
	here, there := wire(t)
	r := newResolver(t, "a0")
	peer := netip.MustParseAddr("10.77.0.2")
	if _, err := r.Resolve(peer, netip.Addr{}, ""); err != nil {
		t.Fatal(err)
	}
	changed := changes(r)
	b0, err := there.LinkByName("b0")
	must(t, err)
	other := [6]byte{2, 0, 0, 7, 7, 7}
	must(t, there.LinkSetHardwareAddr(b0, other[:]))
	a0, err := here.LinkByName("a0")
	must(t, err)
	must(t, here.NeighSet(&netlink.Neigh{LinkIndex: a0.Attrs().Index, IP: peer.AsSlice(), State: netlink.NUD_REACHABLE, HardwareAddr: other[:]}))
	until(t, changed, "a neighbour's new address", func() bool {
		hop, err := r.Resolve(peer, netip.Addr{}, "")
		return err == nil && hop.DstMAC == other
	})
	must(t, here.LinkSetMTU(a0, 1300))
	until(t, changed, "a new MTU", func() bool { return r.devices[0].MTU() == 1300 })
	ad, err := netlink.ParseAddr("10.79.0.1/24")
	must(t, err)
	must(t, here.AddrAdd(a0, ad))
	until(t, changed, "a new address", func() bool { return len(r.devices[0].Addrs()) == 2 })
}

// TestNeighbourReplaced checks that connections get the new address when a neighbour that
// they use is lost and found again as another machine. Nothing else reports that to them.
func TestNeighbourReplaced(t *testing.T) {
	r := &Resolver{macs: make(map[neighbour][6]byte), waiting: make(map[neighbour][]chan struct{}), changed: make(chan struct{}, 1)}
	used, other := netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("10.77.0.3")
	first, second := [6]byte{2, 0, 0, 8, 8, 1}, [6]byte{2, 0, 0, 8, 8, 2}
	r.learn(neighbour{1, used}, first)
	tell := func(a netip.Addr, typ uint16, state int, mac [6]byte) {
		n := netlink.Neigh{LinkIndex: 1, IP: a.AsSlice(), Family: unix.AF_INET, State: state}
		if state&usable != 0 {
			n.HardwareAddr = mac[:]
		}
		r.neighbour(&netlink.NeighUpdate{Type: typ, Neigh: n})
	}
	for _, step := range []struct {
		name   string
		addr   netip.Addr
		typ    uint16
		state  int
		mac    [6]byte
		change bool
	}{
		{"confirmed", used, unix.RTM_NEWNEIGH, netlink.NUD_REACHABLE, first, false},
		{"silent", used, unix.RTM_NEWNEIGH, netlink.NUD_FAILED, first, false},
		{"another machine", used, unix.RTM_NEWNEIGH, netlink.NUD_REACHABLE, second, true},
		{"forgotten", used, unix.RTM_DELNEIGH, netlink.NUD_STALE, second, false},
		{"the same machine", used, unix.RTM_NEWNEIGH, netlink.NUD_STALE, second, false},
		{"forgotten again", used, unix.RTM_DELNEIGH, netlink.NUD_STALE, second, false},
		{"the first machine", used, unix.RTM_NEWNEIGH, netlink.NUD_REACHABLE, first, true},
		{"one that nobody uses", other, unix.RTM_NEWNEIGH, netlink.NUD_REACHABLE, first, false},
		{"it moves", other, unix.RTM_NEWNEIGH, netlink.NUD_REACHABLE, second, false},
	} {
		tell(step.addr, step.typ, step.state, step.mac)
		select {
		case <-r.changed:
			if !step.change {
				t.Errorf("%s: a change", step.name)
			}
		default:
			if step.change {
				t.Errorf("%s: no change", step.name)
			}
		}
	}
	// A lookup may learn the address before the event of the kernel is read.
	r.learn(neighbour{1, used}, second)
	if len(r.changed) != 1 {
		t.Error("another address was found, and no one is notified")
	}
	<-r.changed
	r.learn(neighbour{1, used}, second)
	if len(r.changed) != 0 {
		t.Error("the same address found again is a change")
	}
	// What is remembered is bounded; what is forgotten is asked for again.
	for i := range maxKnown + 1 {
		r.learn(neighbour{2, netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})}, first)
	}
	if len(r.macs) > maxKnown || len(r.changed) != 1 {
		t.Errorf("%d neighbours known, %d changes", len(r.macs), len(r.changed))
	}
}

// TestLearnedMTU checks that the MTU of a path that the kernel has learned from an ICMP error does not count: it takes one that quotes an
// echo reply from anybody. The engine takes only errors about data in flight (RFC 5927 section 4.1).
func TestLearnedMTU(t *testing.T) {
	here, there := wire(t)
	up(t, here, "a0", "fd77::1/64")
	up(t, there, "b0", "fd77::2/64")
	up(t, here, "lo") // over which the errors come
	r := newResolver(t, "a0")
	for _, tt := range []struct {
		dst    string
		family int
		proto  int
		to     unix.Sockaddr
		error  []byte // header of the ICMP error, and the packet that it quotes
	}{
		{"10.77.0.2", unix.AF_INET, unix.IPPROTO_ICMP, &unix.SockaddrInet4{Addr: [4]byte{10, 77, 0, 1}},
			testenv.Unhex(t, "03041c0d 00000514 45000404 00014000 40010000 0a4d0001 0a4d0002 00000000 00010001")},
		{"fd77::2", unix.AF_INET6, unix.IPPROTO_ICMPV6, &unix.SockaddrInet6{Addr: netip.MustParseAddr("fd77::1").As16()},
			testenv.Unhex(t, "02000000 00000514 60000000 04003a40 fd770000000000000000000000000001 fd770000000000000000000000000002 81000000 00010001")},
	} {
		fd, err := unix.Socket(tt.family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, tt.proto)
		must(t, err)
		defer unix.Close(fd)
		if tt.family == unix.AF_INET { // in IPv6 the kernel does it
			binary.BigEndian.PutUint16(tt.error[2:], 0)
			binary.BigEndian.PutUint16(tt.error[2:], pkt.Checksum(pkt.Sum(tt.error, 0)))
		}
		dst := netip.MustParseAddr(tt.dst)
		testenv.Until(t, "the kernel has learned it", func() bool {
			must(t, unix.Sendto(fd, tt.error, 0, tt.to))
			routes, err := here.RouteGet(dst.AsSlice())
			return err == nil && len(routes) == 1 && routes[0].MTU == 1300
		})
		if hop, err := r.Resolve(dst, netip.Addr{}, ""); err != nil || hop.MTU != 1500 {
			t.Errorf("%v: MTU %d, %v; want 1500", dst, hop.MTU, err)
		}
	}
}

// TestLookupCost checks that a neighbour is looked up without a look at all others: peers decide how many there are, and each connection
// that a peer opens takes a lookup, behind which those of others wait.
func TestLookupCost(t *testing.T) {
	here, _ := wire(t)
	r := newResolver(t, "a0")
	n := neighbour{r.devices[0].Index(), netip.MustParseAddr("10.77.1.1")}
	want := [6]byte{2, 0, 0, 0, 1, 1}
	for i := range 3000 {
		hi, lo := byte(1+i>>8), byte(i)
		must(t, here.NeighSet(&netlink.Neigh{LinkIndex: n.iface, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
			IP: net.IPv4(10, 77, hi, lo), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, hi, lo}}))
	}
	began := time.Now()
	for range 1000 {
		if mac, state, err := r.lookup(n); err != nil || mac != want || state != fixed {
			t.Fatalf("%v, %v, %v; want %v", mac, state, err, want)
		}
	}
	if d := time.Since(began); d > 5*time.Second {
		t.Errorf("1000 lookups among 3000 neighbours took %v", d)
	}
	n.addr = netip.MustParseAddr("10.77.250.1")
	if _, state, err := r.lookup(n); err != nil || state != unknown {
		t.Errorf("nobody: %v, %v", state, err)
	}
}

// TestCloseEndsResolve checks that Close does not wait for a missing neighbour, and that
// a concurrent Resolve uses nothing that is closed.
func TestCloseEndsResolve(t *testing.T) {
	wire(t)
	r, err := New("a0")
	if err != nil {
		t.Fatal(err)
	}
	const askers = 8
	began, ended := make(chan struct{}), make(chan error, askers)
	for i := range askers {
		go func() {
			dst := netip.AddrFrom4([4]byte{10, 77, 0, byte(100 + i)}) // nobody
			began <- struct{}{}
			for {
				if _, err := r.Resolve(dst, netip.Addr{}, ""); !errors.Is(err, ErrNoNeighbour) {
					ended <- err
					return
				}
			}
		}()
	}
	for range askers {
		<-began
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	for range askers {
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	}
}

func TestVLANs(t *testing.T) {
	dev := func(index int) netlink.LinkAttrs { return netlink.LinkAttrs{Index: index, MTU: 1500} }
	vlan := func(index, parent, id int) netlink.Link {
		a := dev(index)
		a.ParentIndex, a.MTU = parent, 1500-4*(index-1)
		return &netlink.Vlan{LinkAttrs: a, VlanId: id}
	}
	all := map[int]netlink.Link{
		1: &netlink.Device{LinkAttrs: dev(1)}, 2: vlan(2, 1, 5), 3: vlan(3, 2, 6), 4: vlan(4, 3, 7), 5: vlan(5, 9, 8),
		6: &netlink.Device{LinkAttrs: dev(6)},
	}
	r := &Resolver{}
	first := &Device{r: r, name: "first"}
	for _, tt := range []struct {
		index int
		ok    bool
		tags  []uint16
	}{
		{1, true, nil}, {2, true, []uint16{5}}, {3, true, []uint16{5, 6}},
		{4, false, nil}, // three tags
		{5, false, nil}, // of another interface
		{6, false, nil},
	} {
		f, ok := r.iface(all[tt.index], all, map[*Device]*found{first: {index: 1}})
		if ok != tt.ok || ok && (!slices.Equal(f.vlans, tt.tags) || f.mtu != all[tt.index].Attrs().MTU) {
			t.Errorf("interface %d: %+v, %v", tt.index, f, ok)
		}
	}
}

func TestStatic(t *testing.T) {
	s := &Static{MTU: 1500, Addrs: []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}}
	for _, tt := range []struct{ dst, src, want string }{
		{"10.0.0.2", "", "10.0.0.1"}, {"fd00::2", "", "fd00::1"}, {"10.0.0.2", "10.0.0.1", "10.0.0.1"}, {"10.0.0.2", "10.0.0.9", ""},
	} {
		var src netip.Addr
		if tt.src != "" {
			src = netip.MustParseAddr(tt.src)
		}
		hop, err := s.Resolve(netip.MustParseAddr(tt.dst), src, "")
		if tt.want == "" {
			if err == nil {
				t.Errorf("%+v: no error", tt)
			}
			continue
		}
		if err != nil || hop.Src.String() != tt.want {
			t.Errorf("%+v: %v, %v", tt, hop.Src, err)
		}
	}
}

// TestHostless checks that our own addresses and the broadcast addresses of our subnets
// are not taken for those of other hosts, and that an address that we lose may be another
// host's.
func TestHostless(t *testing.T) {
	here, _ := wire(t)
	a0 := up(t, here, "a0", "10.90.0.1/31", "10.91.0.5/30", "10.92.0.1/16", "fd77::1/64", "fe80::1/64")
	odd, err := netlink.ParseAddr("10.93.0.1/24")
	must(t, err)
	odd.Broadcast = net.IPv4(10, 93, 0, 77).To4()
	must(t, here.AddrAdd(a0, odd))
	r := newResolver(t, "a0")
	has := func(a string) bool { return slices.Contains(r.Hostless(), netip.MustParseAddr(a)) }
	for a, want := range map[string]bool{
		"10.90.0.1": true, "10.90.0.0": false, "10.91.0.5": true, "10.91.0.7": true, "10.91.0.6": false,
		"10.92.255.255": true, "10.92.0.255": false, "10.93.0.77": true, "10.93.0.255": true, "fd77::1": true, "fe80::1": true, "fd77::2": false,
	} {
		if has(a) != want {
			t.Errorf("%s is hostless: %v; want %v", a, !want, want)
		}
	}
	changed := changes(r)
	must(t, here.AddrDel(a0, odd))
	until(t, changed, "that the address is gone", func() bool { return !has("10.93.0.1") && !has("10.93.0.255") })
}

// changes returns what is readable after r has seen a change.
func changes(r *Resolver) <-chan struct{} {
	ch := make(chan struct{}, 1)
	r.Watch(func() {
		select {
		case ch <- struct{}{}:
		default:
		}
	})
	return ch
}

// until waits until ok, which it asks after each change.
func until(t *testing.T, changed <-chan struct{}, what string, ok func() bool) {
	t.Helper()
	for limit := time.After(time.Minute); !ok(); {
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("%s: not seen", what)
		}
	}
}

// TestGone removes the interface and checks that a later one with its name is used.
func TestGone(t *testing.T) {
	here, _ := wire(t)
	r, err := New("a0")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	changed, d := changes(r), r.Device("a0")
	first := d.Index()
	l, err := here.LinkByName("a0")
	must(t, err)
	if first != l.Attrs().Index {
		t.Fatalf("index %d; want %d", first, l.Attrs().Index)
	}
	must(t, here.LinkSetDown(l))
	must(t, here.LinkSetName(l, "other"))
	must(t, here.LinkSetUp(l))
	until(t, changed, "an interface with another name", func() bool { return len(d.Addrs()) == 1 && d.Index() == first })
	must(t, here.LinkDel(l))
	until(t, changed, "an interface that is removed", func() bool { return d.Index() == 0 })
	if _, err := r.Resolve(netip.MustParseAddr("10.77.0.2"), netip.Addr{}, ""); !errors.Is(err, ErrGone) {
		t.Errorf("Resolve: %v; want %v", err, ErrGone)
	}
	if a := d.Addrs(); len(a) != 0 || d.MTU() != 0 {
		t.Errorf("addresses %v, MTU %d of an interface that is gone", a, d.MTU())
	}
	must(t, here.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a0", MTU: 1400}, PeerName: "c0"}))
	back := up(t, here, "a0", "10.77.0.9/24")
	up(t, here, "c0")
	until(t, changed, "an interface that is back", func() bool { return len(d.Addrs()) == 1 && d.MTU() == 1400 })
	if i := d.Index(); i != back.Attrs().Index || i == first {
		t.Errorf("index %d; want %d", i, back.Attrs().Index)
	}
}

// TestMovedAndBack checks that Presence changes when an interface was in another namespace for a moment, though it
// has the same index.
func TestMovedAndBack(t *testing.T) {
	here, _ := wire(t)
	own, err := netns.Get()
	must(t, err)
	defer own.Close()
	away, err := netns.New()
	must(t, err)
	defer away.Close()
	must(t, netns.Set(own))
	there, err := netlink.NewHandleAt(away, unix.NETLINK_ROUTE)
	must(t, err)
	defer there.Close()
	r := newResolver(t, "a0")
	changed, d := changes(r), r.Device("a0")
	before := d.Presence()
	l, err := here.LinkByName("a0")
	must(t, err)
	must(t, here.LinkSetMTU(l, 1400))
	until(t, changed, "another MTU", func() bool { return d.MTU() == 1400 })
	if d.Presence() != before {
		t.Error("the interface counts as another one because its MTU has changed")
	}
	must(t, here.LinkSetNsFd(l, int(away)))
	l, err = there.LinkByName("a0")
	must(t, err)
	must(t, there.LinkSetNsFd(l, int(own)))
	back, err := here.LinkByName("a0")
	must(t, err)
	if back.Attrs().Index != before.Index {
		t.Fatalf("index %d, was %d", back.Attrs().Index, before.Index)
	}
	until(t, changed, "that it was away", func() bool {
		now := d.Presence()
		return now.Index == before.Index && now != before
	})
}

// TestNameOfAnother checks that an interface that gets the name of one that was removed stays what it was.
func TestNameOfAnother(t *testing.T) {
	here, _ := wire(t)
	must(t, here.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a1", MTU: 1400}, PeerName: "b1"}))
	up(t, here, "b1")
	a1 := up(t, here, "a1", "10.78.0.1/24")
	r := newResolver(t, "a0", "a1")
	changed, d0, d1 := changes(r), r.Device("a0"), r.Device("a1")
	a0, err := here.LinkByName("a0")
	must(t, err)
	must(t, here.LinkDel(a0))
	until(t, changed, "an interface is removed", func() bool { return d0.Index() == 0 })
	must(t, here.LinkSetDown(a1))
	must(t, here.LinkSetName(a1, "a0"))
	must(t, here.LinkSetMTU(a1, 1450))
	until(t, changed, "the other one was renamed", func() bool { return d1.MTU() == 1450 })
	if d0.Index() != 0 || len(d0.Addrs()) != 0 || len(d1.Addrs()) != 1 {
		t.Errorf("index %d, addresses %v; those of the other one: %v", d0.Index(), d0.Addrs(), d1.Addrs())
	}
	must(t, here.LinkDel(a1))
	until(t, changed, "both are removed", func() bool { return d1.Index() == 0 })
	must(t, here.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a0", MTU: 1400}, PeerName: "c0"}))
	until(t, changed, "one is back", func() bool { return d0.Index() != 0 })
}

// TestMovedOnce checks that a move of an interface makes one new Presence, whether its absence or the notification of
// its removal is noticed first.
func TestMovedOnce(t *testing.T) {
	wire(t)
	var away atomic.Bool
	list := linkList
	linkList = func(h *netlink.Handle) ([]netlink.Link, error) {
		if away.Load() {
			return nil, nil
		}
		return list(h)
	}
	defer func() { linkList = list }()
	r, err := New("a0")
	must(t, err)
	r.Close() // from here on the test calls what follow calls
	d := r.Device("a0")
	index := d.Index()
	r.handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
	must(t, err)
	defer r.handle.Close()
	look := func(gone bool) {
		away.Store(gone)
		must(t, r.refresh())
	}
	removed := func() { r.removed(index) }
	absent, present := func() { look(true) }, func() { look(false) }
	for _, order := range [][]func(){
		{removed, present}, {removed, absent, present}, {absent, removed, present}, {absent, present, removed},
		{absent, present, removed, present},
	} {
		before := d.Presence()
		var after []Presence
		for _, f := range order {
			f()
			if p := d.Presence(); p.Index != 0 && p != before && !slices.Contains(after, p) {
				after = append(after, p)
			}
		}
		if len(after) != 1 {
			t.Errorf("from %v to %v", before, after)
		}
	}
}

// TestSeveral checks that the routes choose among the interfaces, also by rules about the
// source, and that a requested device is used in spite of them.
func TestSeveral(t *testing.T) {
	here, there := wire(t)
	for _, name := range []string{"a1", "a2"} {
		must(t, here.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name, MTU: 1400}, PeerName: "b" + name}))
		up(t, here, "b"+name)
	}
	a0 := up(t, here, "a0", "fe80::a0/64")
	a1 := up(t, here, "a1", "10.78.0.1/24", "fe80::a1/64")
	up(t, here, "a2", "10.79.0.1/24")
	for _, l := range []netlink.Link{a0, a1} { // not those of the kernel
		list, err := here.AddrList(l, netlink.FAMILY_V6)
		must(t, err)
		for _, a := range list {
			if a.IP.String() != "fe80::"+l.Attrs().Name {
				must(t, here.AddrDel(l, &a))
			}
		}
	}
	b0, err := there.LinkByName("b0")
	must(t, err)
	peer := [6]byte(b0.Attrs().HardwareAddr)
	for _, n := range []struct {
		l netlink.Link
		a string
	}{{a0, "10.77.0.200"}, {a1, "10.78.0.2"}, {a1, "10.78.0.200"}, {a1, "10.77.0.2"}, {a0, "fe80::2"}, {a1, "fe80::2"}} {
		must(t, here.NeighSet(&netlink.Neigh{LinkIndex: n.l.Attrs().Index, IP: net.ParseIP(n.a), State: netlink.NUD_PERMANENT, HardwareAddr: peer[:]}))
	}
	_, far, err := net.ParseCIDR("10.200.0.0/16")
	must(t, err)
	must(t, here.RouteAdd(&netlink.Route{Dst: far, Gw: net.ParseIP("10.77.0.200"), Src: net.ParseIP("10.78.0.1")}))
	must(t, here.RouteAdd(&netlink.Route{Dst: far, Gw: net.ParseIP("10.78.0.200"), Table: 100}))
	rule := netlink.NewRule()
	rule.Src, rule.Table = &net.IPNet{IP: net.ParseIP("10.78.0.1").To4(), Mask: net.CIDRMask(32, 32)}, 100
	must(t, here.RuleAdd(rule))

	r := newResolver(t, "a0", "a1")
	for _, tt := range []resolution{
		{"10.77.0.2", "", "", "a0", "10.77.0.1", nil},
		{"10.78.0.2", "", "", "a1", "10.78.0.1", nil},
		{"10.78.0.2", "10.77.0.1", "", "a1", "10.77.0.1", nil}, // as Linux does
		{"10.77.0.2", "", "a1", "a1", "10.78.0.1", nil},
		{"10.77.0.2", "10.77.0.1", "a1", "a1", "10.77.0.1", nil},
		{"10.78.0.2", "10.79.0.1", "", "", "", dataplane.ErrSource},
		{"10.79.0.2", "", "", "", "", ErrInterface},
		{"10.200.0.1", "10.77.0.1", "", "a0", "10.77.0.1", nil},
		{"10.200.0.1", "", "", "a1", "10.78.0.1", nil}, // the rule about the source that the first route has
		{"fe80::2", "", "", "", "", ErrZone},
		{"fe80::2%a1", "", "", "a1", "fe80::a1", nil},
		{"fe80::2", "", "a1", "a1", "fe80::a1", nil},
		{"fe80::2", "fe80::a0", "a1", "", "", dataplane.ErrSource},
		{"fe80::2%a0", "", "a1", "", "", ErrInterface},
		{"fe80::2%a2", "", "", "", "", ErrInterface},
	} {
		tt.check(t, r)
	}
	if r.MTU("a0") != 1500 || r.MTU("a1") != 1400 || r.MTU("a2") != 0 {
		t.Errorf("MTUs %d, %d, %d", r.MTU("a0"), r.MTU("a1"), r.MTU("a2"))
	}
	if a := r.Device("a1").Addrs(); len(a) != 1 || a[0].String() != "10.78.0.1" {
		t.Errorf("addresses of a1: %v", a)
	}

	changed := changes(r)
	must(t, here.LinkDel(a1))
	until(t, changed, "that a1 is gone", func() bool { return r.Device("a1").Index() == 0 })
	if _, err := r.Resolve(netip.MustParseAddr("10.77.0.2"), netip.Addr{}, "a1"); !errors.Is(err, ErrGone) {
		t.Errorf("by a device that is gone: %v", err)
	}
	if hop, err := r.Resolve(netip.MustParseAddr("10.77.0.2"), netip.Addr{}, ""); err != nil || hop.Device != "a0" {
		t.Errorf("by the other: %s, %v", hop.Device, err)
	}
}

// TestOldFailure checks that a late report of an earlier failure to find a neighbour does
// not end a current wait.
func TestOldFailure(t *testing.T) {
	here, _ := wire(t)
	r := newResolver(t, "a0")
	r.patience = 2 * time.Minute
	// The kernel asks until the test is over.
	must(t, os.WriteFile("/proc/sys/net/ipv4/neigh/a0/mcast_solicit", []byte("1000"), 0))
	peer := netip.MustParseAddr("10.77.0.99") // nobody
	key := neighbour{r.devices[0].index, peer}
	ended := make(chan error, 1)
	var hop dataplane.Hop
	go func() {
		var err error
		hop, err = r.Resolve(peer, netip.Addr{}, "")
		ended <- err
	}()
	// waits returns what Resolve waits for, once that is not last and the kernel asks.
	waits := func(last chan struct{}) (now chan struct{}) {
		t.Helper()
		testenv.Until(t, "a caller waits", func() bool {
			select {
			case err := <-ended:
				t.Fatalf("ended: %v", err)
			default:
			}
			now = nil
			r.mu.Lock()
			if l := r.waiting[key]; len(l) == 1 {
				now = l[0]
			}
			r.mu.Unlock()
			_, state, err := r.lookup(key)
			return now != nil && now != last && state == asked && err == nil
		})
		return now
	}
	var last chan struct{}
	for range 3 {
		last = waits(last)
		r.neighbour(&netlink.NeighUpdate{Type: unix.RTM_NEWNEIGH, Neigh: netlink.Neigh{LinkIndex: r.devices[0].index, IP: peer.AsSlice(), Family: unix.AF_INET, State: netlink.NUD_FAILED}})
	}
	waits(last)
	found := [6]byte{2, 0, 0, 9, 9, 9}
	must(t, here.NeighSet(&netlink.Neigh{LinkIndex: r.devices[0].index, IP: peer.AsSlice(), State: netlink.NUD_REACHABLE, HardwareAddr: found[:]}))
	if err := <-ended; err != nil || hop.DstMAC != found {
		t.Errorf("%v, %v", hop.DstMAC, err)
	}
}

// TestProbe checks that a neighbour that the kernel takes for reachable is probed only when it does not answer us, that
// it then gets its new address, and that one that an administrator has set stays.
func TestProbe(t *testing.T) {
	here, there := wire(t)
	r := newResolver(t, "a0")
	b0, err := there.LinkByName("b0")
	must(t, err)
	moved := [6]byte{2, 0, 0, 9, 9, 9}
	peer, fixedPeer := netip.MustParseAddr("10.77.0.2"), netip.MustParseAddr("10.77.0.3")
	set := func(a netip.Addr, state int) {
		t.Helper()
		must(t, here.NeighSet(&netlink.Neigh{LinkIndex: r.devices[0].index, IP: a.AsSlice(), State: state, HardwareAddr: moved[:]}))
	}
	for name, ms := range map[string]string{"base_reachable_time_ms": "3600000", "retrans_time_ms": "100"} {
		must(t, os.WriteFile("/proc/sys/net/ipv4/neigh/a0/"+name, []byte(ms), 0))
	}
	set(peer, netlink.NUD_REACHABLE)
	set(fixedPeer, netlink.NUD_PERMANENT)
	stateOf := func(a netip.Addr) (state int) {
		t.Helper()
		list, err := here.NeighList(r.devices[0].index, netlink.FAMILY_V4)
		must(t, err)
		for _, n := range list {
			if b, _ := netip.AddrFromSlice(n.IP); b.Unmap() == a {
				state = n.State
			}
		}
		return state
	}
	if _, err := r.Resolve(peer, netip.Addr{}, ""); err != nil || stateOf(peer) != netlink.NUD_REACHABLE {
		t.Errorf("resolved, and in state %#x: %v", stateOf(peer), err)
	}
	r.Probe(fixedPeer, netip.Addr{}, "")
	// If the kernel forgets the neighbour while Resolve asks for it, it may know it again before the next Resolve.
	for try := 1; ; try++ {
		found := false
		r.Probe(peer, netip.Addr{}, "")
		testenv.Until(t, "the neighbour is found where it is", func() bool {
			hop, err := r.Resolve(peer, netip.Addr{}, "")
			here := err == nil && hop.DstMAC == mac(b0)
			if found = hop.Found; found && !here {
				t.Errorf("found at %v, or not: %v", hop.DstMAC, err)
			}
			return here
		})
		if found {
			break
		}
		if try == 10 {
			t.Fatal("no answer says that the neighbour has just been found")
		}
		set(peer, netlink.NUD_REACHABLE)
	}
	if hop, err := r.Resolve(peer, netip.Addr{}, ""); err != nil || hop.Found {
		t.Errorf("found again: %v, %v", hop.Found, err)
	}
	if state := stateOf(fixedPeer); state != netlink.NUD_PERMANENT {
		t.Errorf("the fixed neighbour is in state %#x", state)
	}
}

// TestWhole checks that a list that changes while it is read is read again, and that any
// other error is returned.
func TestWhole(t *testing.T) {
	other := errors.New("another")
	for _, tt := range []struct {
		name string
		errs []error
		want error
		left int
	}{
		{"at once", []error{nil, other}, nil, 1},
		{"changed", []error{netlink.ErrDumpInterrupted, netlink.ErrDumpInterrupted, nil}, nil, 0},
		{"another error", []error{netlink.ErrDumpInterrupted, other, nil}, other, 1},
		{"for ever", slices.Repeat([]error{netlink.ErrDumpInterrupted}, 1000), netlink.ErrDumpInterrupted, 900},
	} {
		t.Run(tt.name, func(t *testing.T) {
			errs := tt.errs
			_, err := whole(func() (l []int, err error) {
				err, errs = errs[0], errs[1:]
				return l, err
			})
			if err != tt.want || len(errs) != tt.left {
				t.Errorf("%v, with %d answers not asked for; want %v, %d", err, len(errs), tt.want, tt.left)
			}
		})
	}
}

// TestSockets checks what the kernel's sockets know of a destination.
func TestSockets(t *testing.T) {
	here, _ := wire(t)
	up(t, here, "lo")
	up(t, here, "a0", "fd77::1/64")
	a := netip.MustParseAddr
	var s Sockets
	for _, tt := range []struct {
		dst, src netip.Addr
		want     dataplane.Hop
		err      error
	}{
		{a("10.77.0.2"), netip.Addr{}, dataplane.Hop{Src: a("10.77.0.1"), MTU: 1500}, nil},
		{a("10.77.0.2"), a("10.77.0.1"), dataplane.Hop{Src: a("10.77.0.1"), MTU: 1500}, nil},
		{a("fd77::2"), netip.Addr{}, dataplane.Hop{Src: a("fd77::1"), MTU: 1500}, nil},
		{a("10.77.0.1"), netip.Addr{}, dataplane.Hop{Src: a("10.77.0.1"), Local: true}, nil},
		{a("fd77::1"), netip.Addr{}, dataplane.Hop{Src: a("fd77::1"), Local: true}, nil},
		{a("127.0.0.9"), netip.Addr{}, dataplane.Hop{Src: a("127.0.0.1"), Local: true}, nil},
		{a("10.77.0.2"), a("10.77.0.9"), dataplane.Hop{}, dataplane.ErrSource},
		{a("10.88.0.1"), netip.Addr{}, dataplane.Hop{}, ErrNoRoute},
		{a("10.77.0.255"), netip.Addr{}, dataplane.Hop{}, dataplane.ErrBroadcast},
	} {
		hop, err := s.Resolve(tt.dst, tt.src, "")
		if tt.want.Local { // it depends on the kernel
			hop.MTU = 0
		}
		if !errors.Is(err, tt.err) || err == nil && !reflect.DeepEqual(hop, tt.want) {
			t.Errorf("to %v from %v: %+v, %v; want %+v, %v", tt.dst, tt.src, hop, err, tt.want, tt.err)
		}
	}
	if all := s.Addrs(); !slices.Equal(all, []netip.Addr{a("10.77.0.1"), a("fd77::1"), a("127.0.0.1"), a("::1")}) {
		t.Errorf("addresses %v", all)
	}
}

// TestMACOf checks which entries of the neighbour table have an address.
func TestMACOf(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for _, tt := range []struct {
		n    netlink.Neigh
		want bool
	}{
		{netlink.Neigh{State: netlink.NUD_REACHABLE, HardwareAddr: mac}, true},
		{netlink.Neigh{State: netlink.NUD_FAILED, HardwareAddr: mac}, false},
		{netlink.Neigh{State: netlink.NUD_REACHABLE, HardwareAddr: mac[:4]}, false}, // as over a tunnel
		{netlink.Neigh{State: netlink.NUD_INCOMPLETE}, false},
	} {
		if got, ok := macOf(&tt.n); ok != tt.want || ok && got != [6]byte(mac) {
			t.Errorf("%+v: %x, %v", tt.n, got, ok)
		}
	}
}

// TestUnwait checks that one that waits no more takes no notification from others.
func TestUnwait(t *testing.T) {
	r := &Resolver{waiting: make(map[neighbour][]chan struct{})}
	n := neighbour{1, netip.MustParseAddr("10.77.0.2")}
	first, second := r.listen(n), r.listen(n)
	r.unwait(n, first)
	if all := r.waiting[n]; len(all) != 1 || all[0] != second {
		t.Errorf("%d wait", len(all))
	}
	r.unwait(n, first)
	r.unwait(n, second)
	if len(r.waiting) != 0 {
		t.Error("nobody waits, and it is kept")
	}
}
