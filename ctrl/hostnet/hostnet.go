// Package hostnet resolves destinations as the host's kernel does: routes, neighbours, addresses,
// VLANs and MTU, by netlink. Static does the same for links without a kernel.
package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane"
)

const (
	// neighbourWait bounds how long Resolve waits for the kernel to resolve a neighbour: it
	// sends three requests, a second apart.
	neighbourWait = 3500 * time.Millisecond
	// maxKnown bounds the number of neighbours whose last address is remembered, since hosts on
	// the link determine how many there are.
	maxKnown = 1 << 16
	// maxVLANs is the maximum number of tags of a frame.
	maxVLANs = 2
)

// Errors of Resolve.
var (
	ErrNoRoute     = errors.New("no route")
	ErrInterface   = errors.New("the route leads through another interface")
	ErrNoNeighbour = errors.New("no answer to ARP or neighbour discovery")
	ErrSource      = errors.New("no address of the interface")
	ErrBroadcast   = errors.New("a broadcast or multicast address")
	ErrGone        = errors.New("the interface is gone")
	ErrZone        = errors.New("a link-local address, and there are several interfaces that it may be behind")
)

// Resolver tracks the kernel's state of some interfaces and of the VLANs on top of them. It is safe for
// concurrent use.
type Resolver struct {
	devices []*Device
	handle  *netlink.Handle
	ns      netns.NsHandle
	done    chan struct{}
	wg      sync.WaitGroup

	patience time.Duration // neighbourWait, except in tests

	mu       sync.Mutex
	macs     map[neighbour][6]byte // last resolved address of each
	waiting  map[neighbour][]chan struct{}
	hostless []netip.Addr  // see Hostless
	ifaces   map[int]iface // the interfaces themselves and the VLANs on them
	watchers []func()
	changed  chan struct{}
	closed   bool
}

// neighbour identifies a neighbour.
type neighbour struct {
	iface int
	addr  netip.Addr
}

// iface is an interface, or a VLAN on top of it.
type iface struct {
	dev   *Device
	mac   [6]byte
	mtu   int
	vlans []uint16 // outermost first
	noARP bool     // no neighbour resolution
}

// New returns a Resolver for the named interfaces in the network namespace of the calling thread. They
// must exist; one that is removed later is tracked again when there is an interface of its name.
func New(names ...string) (*Resolver, error) {
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("hostnet: network namespace: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("hostnet: netlink: %w", err)
	}
	r := &Resolver{
		handle: h, ns: ns, patience: neighbourWait, done: make(chan struct{}), changed: make(chan struct{}, 1),
		macs: make(map[neighbour][6]byte), waiting: make(map[neighbour][]chan struct{}),
	}
	for _, name := range names {
		link, err := h.LinkByName(name)
		if err != nil {
			h.Close()
			ns.Close()
			return nil, fmt.Errorf("hostnet: interface %s: %w", name, err)
		}
		r.devices = append(r.devices, &Device{r: r, name: name, index: link.Attrs().Index})
	}
	if err := r.subscribe(); err != nil {
		r.Close()
		return nil, fmt.Errorf("hostnet: netlink: %w", err)
	}
	if err := r.refresh(); err != nil {
		r.Close()
		return nil, fmt.Errorf("hostnet: %w", err)
	}
	r.wg.Add(1)
	go r.notify()
	return r, nil
}

// Close ends the subscriptions and interrupts pending calls of Resolve.
func (r *Resolver) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	r.mu.Unlock()
	close(r.done)
	r.wg.Wait()
	r.handle.Close()
	return r.ns.Close()
}

// subscription is one set of netlink subscriptions.
type subscription struct {
	done   chan struct{}
	links  chan netlink.LinkUpdate
	addrs  chan netlink.AddrUpdate
	routes chan netlink.RouteUpdate
	neighs chan netlink.NeighUpdate
}

// subscribe subscribes to changes of links, addresses, routes and neighbours.
func (r *Resolver) subscribe() error {
	s := &subscription{
		done: make(chan struct{}), links: make(chan netlink.LinkUpdate, 64), addrs: make(chan netlink.AddrUpdate, 64),
		routes: make(chan netlink.RouteUpdate, 64), neighs: make(chan netlink.NeighUpdate, 64),
	}
	runtime.LockOSThread() // netlink sockets use the thread's namespace
	defer runtime.UnlockOSThread()
	ns := r.elsewhere()
	err := netlink.LinkSubscribeWithOptions(s.links, s.done, netlink.LinkSubscribeOptions{Namespace: ns})
	if err == nil {
		err = netlink.AddrSubscribeWithOptions(s.addrs, s.done, netlink.AddrSubscribeOptions{Namespace: ns})
	}
	if err == nil {
		err = netlink.RouteSubscribeWithOptions(s.routes, s.done, netlink.RouteSubscribeOptions{Namespace: ns})
	}
	if err == nil {
		err = netlink.NeighSubscribeWithOptions(s.neighs, s.done, netlink.NeighSubscribeOptions{Namespace: ns})
	}
	if err != nil {
		close(s.done)
		return err
	}
	r.wg.Add(1)
	go r.follow(s)
	return nil
}

// elsewhere returns the namespace in which to open sockets, or nil if it is the current one:
// entering a namespace takes CAP_SYS_ADMIN, which the daemon may not have.
func (r *Resolver) elsewhere() *netns.NsHandle {
	if here, err := netns.Get(); err == nil {
		defer here.Close()
		if here.Equal(r.ns) {
			return nil
		}
	}
	return &r.ns
}

// end closes the sockets and drains the channels, so that their readers exit too.
func (s *subscription) end() {
	close(s.done)
	go drain(s.links)
	go drain(s.addrs)
	go drain(s.routes)
	go drain(s.neighs)
}

func drain[T any](ch <-chan T) {
	for range ch {
	}
}

// follow processes the kernel's notifications. If a channel closes because its socket overflowed,
// it subscribes again.
func (r *Resolver) follow(s *subscription) {
	defer r.wg.Done()
	defer s.end()
	for {
		var ok bool
		select {
		case <-r.done:
			return
		case _, ok = <-s.links:
			_ = r.refresh() // on failure keep the previous state
			r.change()
		case _, ok = <-s.addrs:
			_ = r.refresh()
			r.change()
		case _, ok = <-s.routes:
			r.change()
		case n, more := <-s.neighs:
			if ok = more; ok {
				r.neighbour(&n)
			}
		}
		for !ok {
			select {
			case <-r.done:
				return
			case <-time.After(100 * time.Millisecond):
			}
			if r.subscribe() == nil {
				_ = r.refresh()
				r.change()
				return
			}
		}
	}
}

// neighbour processes a change of a neighbour. Watchers are notified only if the address of a
// resolved neighbour has changed, because traffic changes the state of a neighbour all the time.
// The last address of a failed neighbour is kept, since it may return with another one.
func (r *Resolver) neighbour(n *netlink.NeighUpdate) {
	addr, ok := netip.AddrFromSlice(n.IP)
	if !ok || n.Family != unix.AF_INET && n.Family != unix.AF_INET6 {
		return
	}
	key := neighbour{n.LinkIndex, addr.Unmap()}
	mac, valid := macOf(&n.Neigh)
	moved := false
	r.mu.Lock()
	if valid && n.Type != unix.RTM_DELNEIGH {
		if old, known := r.macs[key]; known && old != mac {
			moved = true
			r.macs[key] = mac
		}
	}
	if valid || n.State&netlink.NUD_FAILED != 0 {
		for _, ch := range r.waiting[key] {
			close(ch)
		}
		delete(r.waiting, key)
	}
	r.mu.Unlock()
	if moved {
		r.change()
	}
}

// usable are the states in which the address of a neighbour may be used.
const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP

func macOf(n *netlink.Neigh) (mac [6]byte, ok bool) {
	if n.State&usable == 0 || len(n.HardwareAddr) != 6 {
		return mac, false
	}
	return [6]byte(n.HardwareAddr), true
}

// change schedules a call of the watchers. Several changes may share one call.
func (r *Resolver) change() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *Resolver) notify() {
	defer r.wg.Done()
	for {
		select {
		case <-r.done:
			return
		case <-r.changed:
		}
		r.mu.Lock()
		watchers := r.watchers
		r.mu.Unlock()
		for _, f := range watchers {
			f()
		}
		// A flapping route must not keep the watchers busy.
		select {
		case <-r.done:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Watch implements dataplane.Resolver.
func (r *Resolver) Watch(changed func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watchers = append(r.watchers, changed)
}

// Device is one interface that a Resolver follows. Its methods return what is so now.
type Device struct {
	r     *Resolver
	name  string
	index int // 0: it is gone

	addrs  []netip.Addr
	scoped []netip.Addr // IPv6 link-local ones of the interface itself, with its name
	vlans  [][]uint16
}

// Device returns the interface of that name, which New was given.
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

// Addrs returns the addresses of the interface and its VLANs. Link-local IPv6
// addresses, which mean nothing without an interface, are left out.
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

// VLANs returns the VLANs on the interface, each by its identifiers, outermost first;
// the interface itself has none.
func (d *Device) VLANs() [][]uint16 {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.vlans
}

// MTU returns the interface's, in bytes of an IP packet, 0 while it is gone.
func (d *Device) MTU() int {
	d.r.mu.Lock()
	defer d.r.mu.Unlock()
	return d.r.ifaces[d.index].mtu
}

// MTU returns that of the interface of that name, 0 if there is none.
func (r *Resolver) MTU(name string) int {
	if d := r.Device(name); d != nil {
		return d.MTU()
	}
	return 0
}

// Hostless returns the addresses that no other host has: those of the interfaces and their
// VLANs, and the broadcast addresses of their subnets.
func (r *Resolver) Hostless() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hostless
}

// found is what refresh finds of one interface.
type found struct {
	index         int
	addrs, scoped []netip.Addr
	vlans         [][]uint16
}

// refresh reads the interfaces and addresses again.
func (r *Resolver) refresh() error {
	links, err := whole(r.handle.LinkList)
	if err != nil {
		return err
	}
	byIndex := make(map[int]netlink.Link, len(links))
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
	}
	all := make(map[*Device]*found)
	for _, d := range r.devices {
		all[d] = &found{index: d.find(links)}
	}
	ifaces := make(map[int]iface)
	var hostless []netip.Addr
	for i, l := range byIndex {
		f, ok := r.iface(l, byIndex, all)
		if !ok {
			continue
		}
		ifaces[i] = f
		d := all[f.dev]
		if f.vlans != nil {
			d.vlans = append(d.vlans, f.vlans)
		}
		list, err := whole(func() ([]netlink.Addr, error) { return r.handle.AddrList(l, netlink.FAMILY_ALL) })
		if err != nil {
			return err
		}
		for _, a := range list {
			ad, ok := netip.AddrFromSlice(a.IP)
			ad = ad.Unmap()
			if ok {
				hostless = append(hostless, ad)
			}
			if b, ok := broadcast(a.IPNet); ok {
				hostless = append(hostless, b)
			}
			if b, ok := netip.AddrFromSlice(a.Broadcast); ok && !b.IsUnspecified() { // the administrator may set any address
				hostless = append(hostless, b.Unmap())
			}
			switch {
			case !ok || a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0:
			case !isScoped(ad):
				d.addrs = append(d.addrs, ad)
			case i == d.index:
				d.scoped = append(d.scoped, ad.WithZone(f.dev.name))
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ifaces, r.hostless = ifaces, hostless
	for d, f := range all {
		d.index, d.addrs, d.scoped, d.vlans = f.index, f.addrs, f.scoped, f.vlans
	}
	return nil
}

// find returns the index of the interface: the one that it had, also under another name,
// or that of the interface that has its name now, or 0.
func (d *Device) find(links []netlink.Link) (index int) {
	had := d.Index()
	for _, l := range links {
		switch a := l.Attrs(); {
		case a.Index == had:
			return had
		case a.Name == d.name:
			index = a.Index
		}
	}
	return index
}

// broadcast returns the directed broadcast address of an IPv4 subnet; one of 31 bits or
// more has none (RFC 3021).
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

// whole repeats a netlink dump that was interrupted by a change, as happens on hosts where
// containers come and go.
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

// Resolve implements dataplane.Resolver. Any address of the host is a destination, and its loopback
// addresses are sources for these. Resolve waits up to neighbourWait for the kernel to resolve the
// neighbour. If the routes name another interface than
// device, it looks for a way by device.
func (r *Resolver) Resolve(dst, src netip.Addr, device string) (dataplane.Hop, error) {
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
	if hop.Local {
		return hop, nil
	}
	if hop.DstMAC, err = r.neighbourMAC(via); err != nil {
		return hop, fmt.Errorf("hostnet: %v: %w (asked for %v on %s)", dst, err, via.addr, hop.Device)
	}
	return hop, nil
}

// way finds the way to dst: all of the hop but the neighbour's address.
func (r *Resolver) way(dst, src netip.Addr, device string) (hop dataplane.Hop, via neighbour, err error) {
	if isScoped(dst) {
		d, err := r.scope(dst, device)
		if err != nil {
			return hop, via, err
		}
		return r.sourced(dst.WithZone(""), src, d)
	}
	hop, via, err = r.sourced(dst, src, nil)
	if device != "" && (errors.Is(err, ErrInterface) || err == nil && !hop.Local && hop.Device != device) {
		if d := r.Device(device); d != nil {
			return r.sourced(dst, src, d)
		}
	}
	return hop, via, err
}

// scope returns the interface that a link-local address is behind.
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

// sourced is route with the source address that the kernel chooses, if src is none: it
// is asked twice, as for a connect(2), since a rule may be about the source address.
func (r *Resolver) sourced(dst, src netip.Addr, by *Device) (hop dataplane.Hop, via neighbour, err error) {
	if !src.IsValid() || src.IsUnspecified() {
		if hop, via, err = r.route(dst, netip.Addr{}, by); err != nil || hop.Local {
			return hop, via, err
		}
		src = hop.Src
	}
	return r.route(dst, src, by)
}

// enter makes Close wait for the caller, which must call wg.Done. It returns false if the Resolver
// is closed.
func (r *Resolver) enter() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.wg.Add(1)
	}
	return !r.closed
}

// route looks up the route to dst, by an interface if by is not nil. It fills in the hop except for the
// neighbour's MAC address.
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
			return hop, via, fmt.Errorf("%v is %w %s", src, ErrSource, r.names())
		}
		opts.SrcAddr = src.AsSlice()
	}
	routes, err := r.handle.RouteGetWithOptions(dst.AsSlice(), opts)
	switch {
	case err != nil:
		return hop, via, fmt.Errorf("%w: %w", r.orGone(ErrNoRoute), err)
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
		return hop, via, ErrBroadcast
	}
	r.mu.Lock()
	f, ok := r.ifaces[rt.LinkIndex]
	r.mu.Unlock()
	if !ok {
		return hop, via, fmt.Errorf("%w than %s: %s", r.orGone(ErrInterface), r.names(), r.linkName(rt.LinkIndex))
	}
	hop = dataplane.Hop{SrcMAC: f.mac, VLANs: f.vlans, MTU: f.mtu, Src: src, Device: f.dev.name}
	if rt.MTU > 0 {
		hop.MTU = min(hop.MTU, rt.MTU)
	}
	if opts.SrcAddr == nil {
		a, ok := netip.AddrFromSlice(rt.Src)
		if !ok {
			return hop, via, fmt.Errorf("%w with a source address: give the interface one", ErrNoRoute)
		}
		hop.Src = a.Unmap()
	}
	via = neighbour{rt.LinkIndex, dst}
	if gw, ok := netip.AddrFromSlice(rt.Gw); ok && !gw.IsUnspecified() {
		via.addr = gw.Unmap()
	} else if v, ok := rt.Via.(*netlink.Via); ok {
		if gw, ok := netip.AddrFromSlice(v.Addr); ok {
			via.addr = gw.Unmap()
		}
	}
	return hop, via, nil
}

// owns reports whether a is an address of one of the interfaces, by's alone if it is
// link-local and by is not nil.
func (r *Resolver) owns(a netip.Addr, by *Device) bool {
	for _, d := range r.devices {
		if slices.Contains(d.Addrs(), a) || (by == nil || by == d) && slices.Contains(d.LinkLocal(), a.WithZone(d.name)) {
			return true
		}
	}
	return false
}

// orGone returns err, or ErrGone if none of the interfaces is there.
func (r *Resolver) orGone(err error) error {
	for _, d := range r.devices {
		if d.Index() != 0 {
			return err
		}
	}
	return ErrGone
}

// names lists the interfaces, for messages.
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

// neighbourMAC returns the MAC address of a neighbour. It makes the kernel resolve the neighbour,
// or probe it if the address is known, since the kernel does not see our traffic.
func (r *Resolver) neighbourMAC(n neighbour) (mac [6]byte, err error) {
	switch mac, state, err := r.lookup(n); {
	case err != nil, state == fixed:
		return mac, err
	case state == known:
		_ = r.kick(n)
		return mac, nil
	}
	heard := r.listen(n)
	defer func() { r.unwait(n, heard) }()
	if err := r.kick(n); err != nil {
		return mac, fmt.Errorf("asking the kernel for the neighbour: %w", err)
	}
	timeout := time.NewTimer(r.patience)
	defer timeout.Stop()
	mac, state, err := r.lookup(n) // it may have been resolved before listen
	for first := true; err == nil && (state == asked || first && state == unknown); first = false {
		select {
		case <-heard: // resolved or failed
			heard = r.listen(n)
			mac, state, err = r.lookup(n)
		case <-timeout.C:
			return mac, ErrNoNeighbour
		case <-r.done:
			return mac, net.ErrClosed
		}
	}
	if state != known && state != fixed && err == nil {
		err = ErrNoNeighbour
	}
	return mac, err
}

// listen returns a channel that is closed at the next notification about n. The caller must call
// unwait.
func (r *Resolver) listen(n neighbour) chan struct{} {
	heard := make(chan struct{})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting[n] = append(r.waiting[n], heard)
	return heard
}

func (r *Resolver) unwait(n neighbour, heard chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := slices.DeleteFunc(r.waiting[n], func(c chan struct{}) bool { return c == heard })
	if len(left) == 0 {
		delete(r.waiting, n)
	} else {
		r.waiting[n] = left
	}
}

// knowledge is the state of a neighbour in the kernel's table.
type knowledge uint8

const (
	unknown knowledge = iota // no entry, or a failed one
	asked                    // being resolved
	known
	fixed // by an administrator, or not to be found: kick would make the kernel forget it
)

// lookup reads a neighbour from the kernel's table.
func (r *Resolver) lookup(n neighbour) (mac [6]byte, state knowledge, err error) {
	r.mu.Lock()
	noARP := r.ifaces[n.iface].noARP
	r.mu.Unlock()
	if noARP {
		return mac, fixed, nil
	}
	family := netlink.FAMILY_V4
	if n.addr.Is6() {
		family = netlink.FAMILY_V6
	}
	list, err := r.handle.NeighList(n.iface, family)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return mac, unknown, fmt.Errorf("neighbours: %w", err)
	}
	for i := range list {
		if a, ok := netip.AddrFromSlice(list[i].IP); !ok || a.Unmap() != n.addr {
			continue
		}
		mac, ok := macOf(&list[i])
		switch {
		case ok:
			r.learn(n, mac)
			if list[i].State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 {
				return mac, fixed, nil
			}
			return mac, known, nil
		case list[i].State&netlink.NUD_INCOMPLETE != 0:
			return mac, asked, nil
		}
		return mac, unknown, nil
	}
	return mac, unknown, nil
}

// learn records the MAC address that n was resolved to. If it replaces another one, learn calls the
// watchers, since the kernel's notification would no longer show a change.
func (r *Resolver) learn(n neighbour, mac [6]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	old, known := r.macs[n]
	if !known && len(r.macs) == maxKnown {
		clear(r.macs)
		r.change() // users resolve their neighbours again
	}
	if known && old != mac {
		r.change()
	}
	r.macs[n] = mac
}

// kick notifies the kernel that the neighbour is in use (NTF_USE), so that it resolves or probes
// it.
func (r *Resolver) kick(n neighbour) error {
	family := unix.AF_INET
	if n.addr.Is6() {
		family = unix.AF_INET6
	}
	return r.handle.NeighSet(&netlink.Neigh{
		LinkIndex: n.iface, Family: family, Flags: netlink.NTF_USE, IP: n.addr.AsSlice(),
	})
}
