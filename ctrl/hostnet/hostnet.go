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
)

// Resolver tracks the kernel's state of one interface and of the VLANs on top of it. It is safe for
// concurrent use.
type Resolver struct {
	name   string
	index  int
	handle *netlink.Handle
	ns     netns.NsHandle
	done   chan struct{}
	wg     sync.WaitGroup

	patience time.Duration // neighbourWait, except in tests

	mu       sync.Mutex
	macs     map[neighbour][6]byte // last resolved address of each
	waiting  map[neighbour][]chan struct{}
	addrs    []netip.Addr
	hostless []netip.Addr  // see Hostless
	scoped   []netip.Addr  // IPv6 link-local addresses of the interface itself, with its name as the zone
	ifaces   map[int]iface // the interface itself and the VLANs on it
	watchers []func()
	changed  chan struct{}
	gone     chan struct{} // closed when the interface is removed
	closed   bool
}

// neighbour identifies a neighbour.
type neighbour struct {
	iface int
	addr  netip.Addr
}

// iface is the interface, or a VLAN on top of it.
type iface struct {
	mac   [6]byte
	mtu   int
	vlans []uint16 // outermost first
	noARP bool     // no neighbour resolution
}

// New returns a Resolver for the named interface in the network namespace of the calling thread.
func New(name string) (*Resolver, error) {
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
		name: name, handle: h, ns: ns, patience: neighbourWait, done: make(chan struct{}), changed: make(chan struct{}, 1), gone: make(chan struct{}),
		macs: make(map[neighbour][6]byte), waiting: make(map[neighbour][]chan struct{}),
	}
	link, err := h.LinkByName(name)
	if err != nil {
		h.Close()
		ns.Close()
		return nil, fmt.Errorf("hostnet: interface %s: %w", name, err)
	}
	r.index = link.Attrs().Index
	if err := r.subscribe(); err != nil {
		r.Close()
		return nil, fmt.Errorf("hostnet: netlink: %w", err)
	}
	if err := r.refresh(); err != nil {
		r.Close()
		return nil, fmt.Errorf("hostnet: interface %s: %w", name, err)
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

// Addrs returns the addresses of the interface and its VLANs, without IPv6 link-local addresses.
func (r *Resolver) Addrs() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.addrs
}

// Hostless returns the addresses that no other host can have: those of the interface and its VLANs,
// and the broadcast addresses of their subnets.
func (r *Resolver) Hostless() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.hostless
}

// VLANs returns the VLANs on the interface, each as its identifiers, outermost first. The list for
// the interface itself is empty.
func (r *Resolver) VLANs() [][]uint16 {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([][]uint16, 0, len(r.ifaces))
	for _, f := range r.ifaces {
		if f.vlans != nil {
			all = append(all, f.vlans)
		}
	}
	return all
}

// LinkLocal returns the IPv6 link-local addresses of the interface itself, with its name as the
// zone.
func (r *Resolver) LinkLocal() []netip.Addr {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.scoped
}

// Gone returns a channel that is closed when the interface is removed from the host or the
// namespace. It stays closed if a new interface gets the same name.
func (r *Resolver) Gone() <-chan struct{} { return r.gone }

// lost records that the interface and its addresses are gone.
func (r *Resolver) lost() {
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-r.gone:
		return
	default:
	}
	close(r.gone)
	r.ifaces, r.addrs, r.scoped, r.hostless = nil, nil, nil, nil
}

// MTU returns the MTU of the interface, in bytes of an IP packet.
func (r *Resolver) MTU() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.ifaces[r.index].mtu
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
	if byIndex[r.index] == nil {
		r.lost()
		return ErrGone
	}
	ifaces := make(map[int]iface)
	addrs := []netip.Addr{} // nil means unknown
	var scoped, hostless []netip.Addr
	for i, l := range byIndex {
		f, ok := r.iface(l, byIndex)
		if !ok {
			continue
		}
		ifaces[i] = f
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
				addrs = append(addrs, ad)
			case i == r.index:
				scoped = append(scoped, ad.WithZone(r.name))
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ifaces, r.addrs, r.scoped, r.hostless = ifaces, addrs, scoped, hostless
	return nil
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

// iface returns a description of l if it is the interface or a VLAN on top of it.
func (r *Resolver) iface(l netlink.Link, all map[int]netlink.Link) (f iface, ok bool) {
	a := l.Attrs()
	f = iface{mtu: a.MTU, noARP: a.RawFlags&unix.IFF_NOARP != 0}
	copy(f.mac[:], a.HardwareAddr)
	for l.Attrs().Index != r.index {
		v, isVLAN := l.(*netlink.Vlan)
		if !isVLAN || len(f.vlans) == maxVLANs {
			return f, false
		}
		f.vlans = append([]uint16{uint16(v.VlanId)}, f.vlans...)
		if l = all[v.ParentIndex]; l == nil {
			return f, false
		}
	}
	return f, true
}

// Resolve implements dataplane.Resolver. Any address of the host is a destination, and its loopback
// addresses are sources for these. Resolve waits up to neighbourWait for the kernel to resolve the
// neighbour.
func (r *Resolver) Resolve(dst, src netip.Addr) (dataplane.Hop, error) {
	if !r.enter() {
		return dataplane.Hop{}, fmt.Errorf("hostnet: %v: %w", dst, net.ErrClosed)
	}
	defer r.wg.Done()
	hop, via, err := r.route(dst, src)
	if err != nil {
		return hop, fmt.Errorf("hostnet: %v: %w", dst, err)
	}
	if hop.Local {
		return hop, nil
	}
	if hop.DstMAC, err = r.neighbourMAC(via); err != nil {
		return hop, fmt.Errorf("hostnet: %v: %w (asked for %v on %s)", dst, err, via.addr, r.name)
	}
	return hop, nil
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

// route looks up the route to dst. It fills in the hop except for the neighbour's MAC address.
func (r *Resolver) route(dst, src netip.Addr) (hop dataplane.Hop, via neighbour, err error) {
	opts := &netlink.RouteGetOptions{}
	if isScoped(dst) {
		if z := dst.Zone(); z != "" && z != r.name {
			return hop, via, fmt.Errorf("%w than %s: %s", ErrInterface, r.name, z)
		}
		dst = dst.WithZone("")
		opts.OifIndex = r.index
	}
	if src.IsValid() && !src.IsUnspecified() {
		src = src.WithZone("")
		if !src.IsLoopback() && !slices.Contains(r.Addrs(), src) && !slices.Contains(r.LinkLocal(), src.WithZone(r.name)) {
			return hop, via, fmt.Errorf("%v is %w %s", src, ErrSource, r.name)
		}
		opts.SrcAddr = src.AsSlice()
	}
	routes, err := r.handle.RouteGetWithOptions(dst.AsSlice(), opts)
	switch {
	case err != nil:
		return hop, via, fmt.Errorf("%w: %w", ErrNoRoute, err)
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
	gone := r.ifaces == nil
	r.mu.Unlock()
	if gone {
		return hop, via, ErrGone
	}
	if !ok {
		return hop, via, fmt.Errorf("%w than %s: %s", ErrInterface, r.name, r.linkName(rt.LinkIndex))
	}
	hop = dataplane.Hop{SrcMAC: f.mac, VLANs: f.vlans, MTU: f.mtu, Src: src}
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

func (r *Resolver) linkName(index int) string {
	if l, err := r.handle.LinkByIndex(index); err == nil {
		return l.Attrs().Name
	}
	return fmt.Sprintf("interface %d", index)
}

// neighbourMAC returns the MAC address of a neighbour. It makes the kernel resolve the neighbour,
// or probe it if the address is known, since the kernel does not see our traffic.
func (r *Resolver) neighbourMAC(n neighbour) (mac [6]byte, err error) {
	if mac, state, err := r.lookup(n); state == known || err != nil {
		if err == nil {
			_ = r.kick(n)
		}
		return mac, err
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
	if state != known && err == nil {
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
)

// lookup reads a neighbour from the kernel's table.
func (r *Resolver) lookup(n neighbour) (mac [6]byte, state knowledge, err error) {
	r.mu.Lock()
	noARP := r.ifaces[n.iface].noARP
	r.mu.Unlock()
	if noARP {
		return mac, known, nil
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
