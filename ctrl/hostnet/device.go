package hostnet

import (
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// iface is an interface, or a VLAN on top of it.
type iface struct {
	dev   *Device
	mac   [6]byte
	mtu   int
	vlans []uint16 // outermost first
	noARP bool     // without neighbour resolution
}

// Device is an interface that a Resolver follows. Its methods return the current state.
type Device struct {
	r        *Resolver
	name     string
	index    int // 0 while the interface is gone
	removals int // times that the interface was removed
	missed   int // index of the interface that was missing before its removal was notified, or 0

	addrs  []netip.Addr
	scoped []netip.Addr // IPv6 link-local addresses of the interface itself, with its name
	vlans  [][]uint16
}

// Device returns the interface with that name, which must be one of those passed to New.
func (r *Resolver) Device(name string) *Device {
	for _, d := range r.devices {
		if d.name == name {
			return d
		}
	}
	return nil
}

// Index returns the index of the interface, 0 while there is no interface of that name.
func (d *Device) Index() int {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.index
}

// A Presence is the time from when an interface appears until it is removed. An interface that was
// moved to another namespace and back is another presence, although it may have the same index, since
// the sockets that were bound to it no longer are.
type Presence struct {
	Index    int // of the interface; 0 while it is gone
	removals int
}

// Presence returns the current Presence of the interface.
func (d *Device) Presence() Presence {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return Presence{d.index, d.removals}
}

// Addrs returns the addresses of the interface and its VLANs, and for the first interface that exists also
// those of loopback: see Loopback. Link-local IPv6 addresses, which mean nothing without an interface, are left out.
func (d *Device) Addrs() []netip.Addr {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.addrs
}

// LinkLocal returns the link-local IPv6 addresses of the interface itself, with its
// name for a zone.
func (d *Device) LinkLocal() []netip.Addr {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.scoped
}

// VLANs returns the VLANs on the interface. Each is a list of identifiers, outermost first; the
// list of the interface itself is empty.
func (d *Device) VLANs() [][]uint16 {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.vlans
}

// MTU returns the MTU of the interface, in bytes of an IP packet. It is 0 while the interface
// is gone.
func (d *Device) MTU() int {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.r.ifaces[d.index].mtu
}

// MTU returns the MTU of the interface with that name, or 0 if there is none.
func (r *Resolver) MTU(name string) int {
	if d := r.Device(name); d != nil {
		return d.MTU()
	}
	return 0
}

// Loopback returns the addresses of the host that are on loopback or on a dummy interface, which leads nowhere
// either, without those that have no meaning outside of the host. Frames for them arrive on whichever interfaces
// the routes of other hosts name, as with BGP to the host. A Resolver that was made by New has none.
func (r *Resolver) Loopback() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.loopback
}

// Hostless returns the addresses at which no other host can be: those of the interfaces, their VLANs and
// loopback, and the broadcast addresses of their subnets.
func (r *Resolver) Hostless() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hostless
}

// found is the result of refresh for one interface.
type found struct {
	index         int
	addrs, scoped []netip.Addr
	vlans         [][]uint16
}

// linkList is replaced in tests.
var linkList = (*netlink.Handle).LinkList

// refresh reads the interfaces and addresses again.
func (r *Resolver) refresh() error {
	links, err := whole(func() ([]netlink.Link, error) { return linkList(r.handle) })
	if err != nil {
		return err
	}
	byIndex := make(map[int]netlink.Link, len(links))
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
	}
	all := make(map[*Device]*found)
	held := make(map[int]*Device)
	for _, d := range r.devices {
		held[d.Index()] = d
	}
	for _, d := range r.devices {
		all[d] = &found{index: d.find(links, held)}
	}
	ifaces := make(map[int]iface)
	for i, l := range byIndex {
		f, ok := r.iface(l, byIndex, all)
		if !ok {
			continue
		}
		ifaces[i] = f
		if d := all[f.dev]; f.vlans != nil {
			d.vlans = append(d.vlans, f.vlans)
		}
	}
	now, err := r.readAddrs(byIndex, ifaces, all)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ifaces, r.addresses = ifaces, now
	for d, f := range all {
		d.update(f)
	}
	return nil
}

// readAddrs reads the addresses of the host. It adds those of ifaces, which are served, and of loopback to all.
func (r *Resolver) readAddrs(
	links map[int]netlink.Link, ifaces map[int]iface, all map[*Device]*found,
) (now addresses, err error) {
	list, err := whole(func() ([]netlink.Addr, error) { return r.handle.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return now, err
	}
	seen := make(map[netip.Addr]bool)
	for _, a := range list {
		ad, ok := netip.AddrFromSlice(a.IP)
		ad = ad.Unmap()
		usable := ok && a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) == 0
		f, served := ifaces[a.LinkIndex]
		if !served {
			if r.withLoopback && usable && isService(&a, links[a.LinkIndex]) {
				now.loopback = append(now.loopback, ad)
			}
			continue
		}
		now.add(ad, &a)
		switch d := all[f.dev]; {
		case !usable:
		case !isScoped(ad):
			d.addrs = append(d.addrs, ad)
			seen[ad] = true
		case a.LinkIndex == d.index:
			d.scoped = append(d.scoped, ad.WithZone(f.dev.name))
		}
	}
	now.loopback = slices.DeleteFunc(now.loopback, func(a netip.Addr) bool {
		twice := seen[a]
		seen[a] = true
		return twice
	})
	now.hostless = append(now.hostless, now.loopback...)
	for _, d := range r.devices {
		if f := all[d]; f.index != 0 {
			f.addrs = append(f.addrs, now.loopback...)
			break
		}
	}
	return now, nil
}

// update applies f. An interface with another index has replaced the one before. Called with Resolver.mu held.
func (d *Device) update(f *found) {
	if d.index != f.index && d.index != 0 {
		d.removals++
		d.missed = d.index
	}
	d.index, d.addrs, d.scoped, d.vlans = f.index, f.addrs, f.scoped, f.vlans
}

// add adds an address of one of the interfaces, and what its network says about others.
func (all *addresses) add(ad netip.Addr, a *netlink.Addr) {
	if ad.IsValid() {
		all.hostless = append(all.hostless, ad)
	}
	ones, _ := a.Mask.Size()
	if n, err := ad.Prefix(ones); err == nil && ad.BitLen()-ones > 1 { // both addresses of a network of two are hosts
		all.networks = append(all.networks, n.Addr())
	}
	if b, ok := broadcast(a.IPNet); ok {
		all.hostless = append(all.hostless, b)
	}
	if b, ok := netip.AddrFromSlice(a.Broadcast); ok && !b.IsUnspecified() { // the administrator may set any address
		all.hostless = append(all.hostless, b.Unmap())
	}
}

// OnLoopback returns the number of addresses of loopback that NewWithLoopback would serve, in the calling thread's network
// namespace.
func OnLoopback() (n int) {
	links, _ := netlink.LinkList()
	for _, l := range links {
		addrs, _ := netlink.AddrList(l, netlink.FAMILY_ALL)
		for _, a := range addrs {
			if isService(&a, l) {
				n++
			}
		}
	}
	return n
}

// isService reports whether a, an address of l, is one of loopback that has a meaning outside of the host.
func isService(a *netlink.Addr, l netlink.Link) bool {
	return a.IP.IsGlobalUnicast() && a.Scope == unix.RT_SCOPE_UNIVERSE && leadsNowhere(l)
}

// leadsNowhere reports whether l, which may be nil, is loopback or a dummy, and is up: those that programs keep down
// have addresses for other purposes, such as those of the services of IPVS, and those in a VRF are the VRF's alone.
func leadsNowhere(l netlink.Link) bool {
	if l == nil || l.Attrs().RawFlags&unix.IFF_UP == 0 || l.Attrs().MasterIndex != 0 {
		return false
	}
	return l.Attrs().RawFlags&unix.IFF_LOOPBACK != 0 || l.Type() == "dummy"
}

// removed records that the interface with that index was removed, even if it is back already.
func (r *Resolver) removed(index int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.devices {
		switch index {
		case d.missed: // refresh has counted it
			d.missed = 0
		case d.index:
			d.removals++
			d.index = 0
		}
	}
}

// find returns the index of the interface, or 0. It is the interface that d holds, even under another name, or else the
// one that now has the name, unless another Device holds that.
func (d *Device) find(links []netlink.Link, held map[int]*Device) (index int) {
	for _, l := range links {
		switch a := l.Attrs(); {
		case held[a.Index] == d:
			return a.Index
		case a.Name == d.name && held[a.Index] == nil:
			index = a.Index
		}
	}
	return index
}

// broadcast returns the directed broadcast address of an IPv4 subnet. A subnet with a prefix of
// 31 or 32 bits has none (RFC 3021).
func broadcast(n *net.IPNet) (netip.Addr, bool) {
	ip := n.IP.To4()
	ones, bits := n.Mask.Size()
	if ip == nil || bits != 32 || ones > 30 {
		return netip.Addr{}, false
	}
	b := [4]byte(ip)
	for i := range b {
		b[i] |= ^n.Mask[i]
	}
	return netip.AddrFrom4(b), true
}

// whole repeats a netlink dump that a change interrupted, as happens on hosts where containers
// start and stop.
func whole[T any](read func() ([]T, error)) (list []T, err error) {
	for range 100 {
		if list, err = read(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return list, err
}

// isScoped reports whether a is valid only on one link.
func isScoped(a netip.Addr) bool { return a.Is6() && a.IsLinkLocalUnicast() }

// iface returns a description of l if it is one of the interfaces or a VLAN on top of one.
func (r *Resolver) iface(l netlink.Link, links map[int]netlink.Link, all map[*Device]*found) (f iface, ok bool) {
	a := l.Attrs()
	f = iface{mtu: a.MTU, noARP: a.RawFlags&unix.IFF_NOARP != 0}
	copy(f.mac[:], a.HardwareAddr)
	for {
		for d, is := range all {
			if l.Attrs().Index == is.index {
				f.dev = d
				return f, true
			}
		}
		v, isVLAN := l.(*netlink.Vlan)
		if !isVLAN || len(f.vlans) == maxVLANs {
			return f, false
		}
		f.vlans = append([]uint16{uint16(v.VlanId)}, f.vlans...)
		if l = links[v.ParentIndex]; l == nil {
			return f, false
		}
	}
}
