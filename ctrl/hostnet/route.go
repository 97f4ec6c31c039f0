package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane"
)

// Resolve implements dataplane.Resolver. The destination may be an address of the host itself,
// and only then may the source be a loopback address. Resolve waits up to neighbourWait for the
// kernel to resolve the neighbour. If the routes name another interface than device, it looks
// for a route over device. AnyInterface stands for kernel sockets.
func (r *Resolver) Resolve(dst, src netip.Addr, device string) (dataplane.Hop, error) {
	if device == AnyInterface {
		return Sockets{}.Resolve(dst, src, device)
	}
	if !r.enter() {
		return dataplane.Hop{}, fmt.Errorf("hostnet: %v: %w", dst, net.ErrClosed)
	}
	defer r.wg.Done()
	hop, via, err := r.way(dst, src, device)
	if err != nil {
		return hop, fmt.Errorf("hostnet: %v: %w", dst, err)
	}
	if hop.Local {
		return hop, nil
	}
	hop.DstMAC, hop.Found, err = r.neighbourMAC(via)
	switch {
	case errors.Is(err, ErrNoNeighbour) && r.isNetwork(via.addr): // a host may have it, but few do
		return hop, fmt.Errorf("hostnet: %v: %w", dst, dataplane.ErrNetwork)
	case err != nil:
		return hop, fmt.Errorf("hostnet: %v: %w (asked for %v on %s)", dst, err, via.addr, hop.Device)
	}
	return hop, nil
}

// isNetwork reports whether a is the lowest address of a network of one of the interfaces.
func (r *Resolver) isNetwork(a netip.Addr) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Contains(r.networks, a)
}

// way finds the hop to dst, without the neighbour's MAC address.
func (r *Resolver) way(dst, src netip.Addr, device string) (hop dataplane.Hop, via neighbour, err error) {
	if isScoped(dst) {
		d, err := r.scope(dst, device)
		if err != nil {
			return hop, via, err
		}
		return r.sourced(dst.WithZone(""), src, d)
	}
	hop, via, err = r.sourced(dst, src, nil)
	if errors.Is(err, ErrInterface) && device == "" {
		for _, d := range r.paths(dst, src) {
			if hop, via, err := r.sourced(dst, src, d); err == nil {
				return hop, via, nil
			}
		}
	}
	if device != "" && (errors.Is(err, ErrInterface) || err == nil && !hop.Local && hop.Device != device) {
		if d := r.Device(device); d != nil {
			return r.sourced(dst, src, d)
		}
	}
	return hop, via, err
}

// paths returns the interfaces that are among those of the route to dst if it has several (ECMP).
func (r *Resolver) paths(dst, src netip.Addr) (all []*Device) {
	opts := &netlink.RouteGetOptions{FIBMatch: true}
	if src.IsValid() && !src.IsUnspecified() {
		opts.SrcAddr = src.AsSlice()
	}
	routes, err := r.handle.RouteGetWithOptions(dst.AsSlice(), opts)
	if err != nil || len(routes) == 0 {
		return nil
	}
	for _, d := range r.devices {
		index := d.Index()
		by := func(p *netlink.NexthopInfo) bool { return p.LinkIndex == index }
		if index != 0 && slices.ContainsFunc(routes[0].MultiPath, by) {
			all = append(all, d)
		}
	}
	return all
}

// scope returns the interface to which a link-local address belongs.
func (r *Resolver) scope(a netip.Addr, device string) (*Device, error) {
	z := a.Zone()
	switch {
	case z != "" && device != "" && z != device:
		return nil, fmt.Errorf("%w than %s: %s", ErrInterface, device, z)
	case z == "":
		z = device
	}
	if z == "" {
		if len(r.devices) > 1 {
			return nil, fmt.Errorf("%w: name it, as in %v%%%s", ErrZone, a, r.devices[0].name)
		}
		return r.devices[0], nil
	}
	if d := r.Device(z); d != nil {
		return d, nil
	}
	return nil, fmt.Errorf("%w than %s: %s", ErrInterface, r.names(), z)
}

// sourced is route with the source address that the kernel chooses if src is invalid. It looks
// up the route twice, like connect(2), since a rule may match the source address.
func (r *Resolver) sourced(dst, src netip.Addr, by *Device) (hop dataplane.Hop, via neighbour, err error) {
	if !src.IsValid() || src.IsUnspecified() {
		if hop, via, err = r.route(dst, netip.Addr{}, by); err != nil || hop.Local {
			return hop, via, err
		}
		if src = hop.Src; !r.owns(src, by) { // such as one of an interface that is not served
			return hop, via, fmt.Errorf("%w with a usable source address: %v is not on %s: give the interface that address, or if it is on loopback set loopback-addresses: on",
				ErrNoRoute, src, r.names())
		}
	}
	return r.route(dst, src, by)
}

// enter makes Close wait for the caller, which must call wg.Done. It returns false if the
// Resolver is closed.
func (r *Resolver) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.wg.Add(1)
	}
	return !r.closed
}

func (r *Resolver) wrongSource(src netip.Addr) error {
	return fmt.Errorf("%v is %w %s: choose one of those that iwarpctl status shows", src, dataplane.ErrSource, r.names())
}

// routeError names the routes that the kernel reports as an invalid argument and as a lack of permission.
func routeError(err error) error {
	switch {
	case errors.Is(err, unix.EINVAL):
		return errors.New("a blackhole route")
	case errors.Is(err, unix.EACCES):
		return errors.New("a prohibit route")
	}
	return err
}

// route looks up the route to dst, over the interface by if that is not nil. It fills in the
// hop except for the neighbour's MAC address.
func (r *Resolver) route(dst, src netip.Addr, by *Device) (hop dataplane.Hop, via neighbour, err error) {
	opts := &netlink.RouteGetOptions{}
	if by != nil {
		if opts.OifIndex = by.Index(); opts.OifIndex == 0 {
			return hop, via, ErrGone
		}
	}
	if src.IsValid() {
		src = src.WithZone("")
		if !src.IsLoopback() && !r.owns(src, by) {
			return hop, via, r.wrongSource(src)
		}
		opts.SrcAddr = src.AsSlice()
	}
	routes, err := r.get(dst, by, opts)
	switch {
	case errors.Is(err, unix.EINVAL) && src.IsLoopback(): // to another host
		return hop, via, r.wrongSource(src)
	case err != nil:
		return hop, via, fmt.Errorf("%w: %w", r.orGone(ErrNoRoute), routeError(err))
	case len(routes) == 0:
		return hop, via, ErrNoRoute
	}
	rt := &routes[0]
	switch rt.Type {
	case unix.RTN_LOCAL:
		hop = dataplane.Hop{Src: src, Local: true}
		if opts.SrcAddr == nil {
			a, _ := netip.AddrFromSlice(rt.Src)
			hop.Src = a.Unmap()
		}
		return hop, via, nil
	case unix.RTN_BROADCAST, unix.RTN_MULTICAST:
		return hop, via, dataplane.ErrBroadcast
	}
	if src.IsLoopback() { // the kernel forbids that only over IPv4
		return hop, via, r.wrongSource(src)
	}
	r.mu.Lock()
	f, ok := r.ifaces[rt.LinkIndex]
	r.mu.Unlock()
	if !ok {
		return hop, via, fmt.Errorf("%w than %s: %s", r.orGone(ErrInterface), r.names(), r.linkName(rt.LinkIndex))
	}
	if rt.Encap != nil { // the kernel would put the packets into others
		return hop, via, fmt.Errorf("%w but one with encapsulation, which iwarpd does not do (\"encap\" in ip route get): "+
			"make another, or use kernel sockets", ErrNoRoute)
	}
	hop = dataplane.Hop{SrcMAC: f.mac, VLANs: f.vlans, MTU: f.mtu, Src: src, Device: f.dev.name}
	if rt.MTU > 0 {
		// This may be what an ICMP error has told the kernel, which takes some that anybody can forge. The engine checks those that it
		// gets itself (RFC 5927), so only an MTU that is set for the route counts.
		set := *opts
		set.FIBMatch = true
		if routes, err := r.get(dst, by, &set); err == nil && len(routes) > 0 && routes[0].MTU > 0 {
			hop.MTU = min(hop.MTU, routes[0].MTU)
		}
	}
	if opts.SrcAddr == nil {
		a, ok := netip.AddrFromSlice(rt.Src)
		if !ok {
			return hop, via, fmt.Errorf("%w with a source address: give the interface one", ErrNoRoute)
		}
		hop.Src = a.Unmap()
	}
	return hop, neighbour{rt.LinkIndex, nextHop(rt, dst)}, nil
}

// nextHop returns the gateway of a route to dst, or dst if it has none.
func nextHop(rt *netlink.Route, dst netip.Addr) netip.Addr {
	if gw, ok := netip.AddrFromSlice(rt.Gw); ok && !gw.IsUnspecified() {
		return gw.Unmap()
	}
	if v, ok := rt.Via.(*netlink.Via); ok {
		if gw, ok := netip.AddrFromSlice(v.Addr); ok {
			return gw.Unmap()
		}
	}
	return dst
}

// get asks the kernel for the routes to dst. In IPv6 it takes the interface only as a preference if a source is given,
// so that the route may lead over another one than by; then it is asked again without.
func (r *Resolver) get(dst netip.Addr, by *Device, opts *netlink.RouteGetOptions) ([]netlink.Route, error) {
	routes, err := r.handle.RouteGetWithOptions(dst.AsSlice(), opts)
	if err != nil || len(routes) == 0 || by == nil || opts.SrcAddr == nil || dst.Is4() {
		return routes, err
	}
	r.mu.Lock()
	over := r.ifaces[routes[0].LinkIndex].dev
	r.mu.Unlock()
	if routes[0].Type == unix.RTN_UNICAST && over != by {
		return r.handle.RouteGetWithOptions(dst.AsSlice(), &netlink.RouteGetOptions{OifIndex: opts.OifIndex})
	}
	return routes, nil
}

// owns reports whether a is an address of one of the interfaces. If a is link-local and by is
// not nil, only by counts.
func (r *Resolver) owns(a netip.Addr, by *Device) bool {
	for _, d := range r.devices {
		if slices.Contains(d.Addrs(), a) || (by == nil || by == d) && slices.Contains(d.LinkLocal(), a.WithZone(d.name)) {
			return true
		}
	}
	return false
}

// orGone returns ErrGone if none of the interfaces exists, and err otherwise.
func (r *Resolver) orGone(err error) error {
	for _, d := range r.devices {
		if d.Index() != 0 {
			return err
		}
	}
	return ErrGone
}

// names lists the interfaces for error messages.
func (r *Resolver) names() string {
	var all []string
	for _, d := range r.devices {
		all = append(all, d.name)
	}
	return strings.Join(all, ", ")
}

func (r *Resolver) linkName(index int) string {
	if l, err := r.handle.LinkByIndex(index); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("interface %d", index)
}
