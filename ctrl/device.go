package ctrl

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
)

// Device is a network interface with queues of the engine. A function that is nil provides no
// information.
type Device struct {
	// Name is the name of the interface, as shown to clients and as used in the engine's Queues
	// and the resolver's Hops.
	Name string
	// MTU is the MTU for which the links were opened. Clients see PresentMTU if that is less.
	MTU        int
	PresentMTU func() int
	Addrs      func() []netip.Addr // without link-local IPv6 addresses
	// LinkLocal returns the link-local IPv6 addresses of the interface, with its name as their
	// zone. Index returns its index, whatever its name is now.
	LinkLocal func() []netip.Addr
	Index     func() int
	VLANs     func() [][]uint16 // VLANs of the host
	// Transport describes how frames move, for people. It is called after Bind.
	Transport func() string
	// Sockets says that connections are sockets of the kernel's TCP, which has all addresses of
	// the host. Only the last Device may have it. A listen or connect without a device uses it
	// only if there is no other.
	Sockets bool
	// Link returns whether the link is "up" or "down", and its speed in bits per second. "" and
	// 0 mean that they are unknown, as both are if Link is nil.
	Link     func() (state string, speed uint64)
	Steering Steering // nil if nothing is steered
	Program  Program  // program to watch, or nil
}

// device is a Device of a Server. Server.mu guards down and detached.
type device struct {
	Device
	down     error // why the interface receives no frames, or nil
	detached bool  // down is set because the program was detached
}

// removed reports whether the interface has been removed. Called with Server.mu held.
func (d *device) removed() bool { return d.down != nil && !d.detached }

// name returns the name of d, or "" for nil, which means any device.
func (d *device) name() string {
	if d == nil {
		return ""
	}
	return d.Name
}

// sockets reports whether connections over d are kernel sockets.
func (d *device) sockets() bool { return d != nil && d.Sockets }

// linkLocal returns the link-local addresses of d, without zones.
func (d *device) linkLocal() (all []netip.Addr) {
	if d.LinkLocal != nil {
		for _, a := range d.LinkLocal() {
			all = append(all, a.WithZone(""))
		}
	}
	return all
}

func (d *device) addrs() []netip.Addr {
	if d.Addrs == nil {
		return nil
	}
	return d.Addrs()
}

// all returns every address that an endpoint may have on d, without zones.
func (d *device) all() []netip.Addr { return slices.Concat(d.addrs(), d.linkLocal()) }

// has reports whether a is an address of d. It is true for a nil d, which stands for all devices, and
// for a device that does not provide its addresses.
func (d *device) has(a netip.Addr) bool {
	return d == nil || d.Addrs == nil || slices.Contains(d.all(), a)
}

// mtu returns the current MTU of the interface, up to that of its links.
func (d *device) mtu() int {
	if d.PresentMTU != nil {
		if now := d.PresentMTU(); now > 0 {
			return min(now, d.MTU)
		}
	}
	return d.MTU
}

// devices are the devices of a server, at least one.
type devices []*device

// interfaces returns the devices that a request without a device means: all but kernel sockets,
// unless there is nothing else.
func (ds devices) interfaces() devices {
	if last := len(ds) - 1; last > 0 && ds[last].Sockets {
		return ds[:last]
	}
	return ds
}

// named returns the device with that name, the first one for "", or nil if there is none.
func (ds devices) named(name string) *device {
	for _, d := range ds {
		if d.Name == name || name == "" {
			return d
		}
	}
	return nil
}

// pick returns the device for a listen or connect of a client, which names a device or "", and a
// transport. It returns nil if any interface will do.
func (ds devices) pick(name string, t ctrlpb.Transport) (*device, error) {
	d := ds.named(name)
	if d == nil {
		return nil, errorf(invalid, "ctrl: %q is not an interface of this daemon: choose one of %s", clip(name, 64), ds.names())
	}
	if t == ctrlpb.Transport_TRANSPORT_SOCKET {
		return ds.kernel(name)
	}
	switch {
	case d.Sockets && (t == ctrlpb.Transport_TRANSPORT_SCTP || t == ctrlpb.Transport_TRANSPORT_SCTP_DRAFT):
		return nil, errorf(invalid, "ctrl: SCTP needs AF_XDP: the transport is kernel sockets")
	case name == "" && !d.Sockets:
		return nil, nil
	}
	return d, nil
}

// kernel returns the device of the kernel sockets for a request that names a device or "".
func (ds devices) kernel(name string) (*device, error) {
	last := ds[len(ds)-1]
	if !last.Sockets {
		return nil, errorf(invalid, "ctrl: this daemon has no kernel sockets: ask for TCP, or configure transport: both")
	}
	if name != "" && name != last.Name {
		return nil, errorf(invalid, "ctrl: kernel sockets belong to no interface: leave out %s", name)
	}
	return last, nil
}

func (ds devices) names() string {
	var all []string
	for _, d := range ds {
		all = append(all, d.Name)
	}
	return strings.Join(all, ", ")
}

// unzoned returns a without its zone, and the device for it. A link-local address needs a
// device: d if that is not nil, else that of the zone, or the only one.
func (ds devices) unzoned(a netip.Addr, d *device) (netip.Addr, *device, error) {
	z, ds := a.Zone(), ds.interfaces()
	switch {
	case z == "" && !a.IsLinkLocalUnicast(), a.Is4():
		return a, d, nil
	case d.sockets(): // hostnet.Sockets has no link-local addresses either
		return a, nil, errorf(badAddress, "ctrl: %v: kernel sockets serve no link-local addresses: choose another address", a)
	case z == "" && d == nil && len(ds) == 1:
		d = ds[0]
	case z == "" && d == nil:
		return a, nil, errorf(invalid, "ctrl: %v: name the interface of a link-local address, as in %v%%%s", a, a, ds[0].Name)
	case z == "":
	case a.IsLinkLocalUnicast() && ds.named(z) != nil && (d == nil || d.Name == z):
		d = ds.named(z)
	case d != nil:
		return a, nil, errorf(invalid, "ctrl: %v is not a link-local address of the interface %s", a, d.Name)
	default:
		return a, nil, errorf(invalid, "ctrl: %v: this daemon has link-local addresses only on %s", a, ds.names())
	}
	return a.WithZone(""), d, nil
}

// down returns why d receives no frames or, if d is nil, why no device does.
func (ds devices) down(d *device) error {
	if d != nil {
		return d.down
	}
	return ds.up().down
}

// up returns the first interface that receives frames, or the first one if none does.
func (ds devices) up() *device {
	for _, d := range ds.interfaces() {
		if d.down == nil {
			return d
		}
	}
	return ds[0]
}

// local returns the device for a connection to the address a of this host: the one that has it, as the
// listener may be on that device alone, and else any that is up.
func (ds devices) local(a netip.Addr) *device {
	for _, d := range ds.interfaces() {
		if d.down == nil && d.has(a) {
			return d
		}
	}
	return ds.up()
}

// only returns d alone, or all if d is nil.
func (ds devices) only(d *device) devices {
	if d == nil {
		return ds
	}
	return devices{d}
}

// addrs returns every address of the interfaces that an endpoint may have, without zones. known is
// false if one does not provide them.
func (ds devices) addrs() (all []netip.Addr, known bool) {
	for _, d := range ds.interfaces() {
		if d.Addrs == nil {
			return nil, false
		}
		all = append(all, d.all()...)
	}
	return all, true
}

// have reports whether a is an address of on, or of any interface if on is nil. It is true if the
// addresses are unknown.
func (ds devices) have(a netip.Addr, on *device) bool {
	all, known := ds.only(on).addrs()
	return !known || on.sockets() || slices.Contains(all, a)
}

// owner returns the device that has the link-local address a, or nil for other addresses.
func (ds devices) owner(a netip.Addr) *device {
	if a.Is6() && a.IsLinkLocalUnicast() {
		for _, d := range ds {
			if slices.Contains(d.linkLocal(), a) {
				return d
			}
		}
	}
	return nil
}

// steered returns the steerings in which an endpoint is claimed. Frames for an address may
// arrive on every interface, because the host answers ARP for all its addresses on each. Those
// for link-local addresses arrive on one.
func (ds devices) steered(ep bpf.Endpoint) (all []Steering) {
	only := ds.owner(ep.Addr)
	for _, d := range ds {
		if d.Steering != nil && (only == nil || only == d) {
			all = append(all, d.Steering)
		}
	}
	return all
}

// claim claims an endpoint in all its steerings, or in none.
func (ds devices) claim(ep bpf.Endpoint) error {
	all := ds.steered(ep)
	for i, s := range all {
		if err := s.Claim(ep); err != nil {
			for _, s := range all[:i] {
				_ = s.Unclaim(ep)
			}
			return err
		}
	}
	return nil
}

// unclaim undoes claim. Errors are ignored, since a link-local address may have moved to
// another interface.
func (ds devices) unclaim(ep bpf.Endpoint) {
	for _, d := range ds {
		if d.Steering != nil {
			_ = d.Steering.Unclaim(ep)
		}
	}
}

// refresh passes the current addresses, and also others, and the current VLANs to the steerings. It returns the first
// error, after which steerings may have the previous ones.
func (ds devices) refresh(also []netip.Addr) (failed error) {
	all, _ := ds.addrs()
	all = append(all, also...)
	for _, d := range ds {
		if d.Steering == nil {
			continue
		}
		failed = cmp.Or(failed, d.Steering.SetAddresses(slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool {
			o := ds.owner(a)
			return o != nil && !slices.Contains(d.linkLocal(), a)
		})))
		if d.VLANs != nil {
			failed = cmp.Or(failed, d.Steering.SetVLANs(d.VLANs()))
		}
	}
	return failed
}

// Unplug records that the interface of a device has been removed. Its connections end;
// listeners and the clients' other objects stay. When it returns, the links are no longer used.
func (s *Server) Unplug(name string) {
	why := errorf(unreachable, "ctrl: the interface %s was removed: it is served again when it is back", name)
	s.mu.Lock()
	d := s.devices.named(name)
	d.down, d.detached = why, false
	n := len(s.connsOf(d))
	s.mu.Unlock()
	s.engine.Unplug(name, why)
	s.log.Error("the interface was removed, and its connections were ended", zap.String("interface", name), zap.Int("connections", n))
}

// Plug undoes Unplug. The device has new links, for packets of the given MTU.
func (s *Server) Plug(name string, mtu int, queues []dataplane.Queue) error {
	if err := s.engine.Plug(name, queues); err != nil {
		return err
	}
	s.mu.Lock()
	d := s.devices.named(name)
	d.down, d.detached, d.MTU = nil, false, mtu
	s.mu.Unlock()
	s.log.Warn("the interface is back and is served again", zap.String("interface", name))
	return nil
}

// of returns the device that c uses, or nil while it has none.
func (ds devices) of(c *conn, e Engine) *device {
	if c.id == 0 {
		return nil
	}
	return ds.named(e.Device(c.id))
}

// connsOf returns the connections that use d. Called with mu held.
func (s *Server) connsOf(d *device) (all []*conn) {
	for _, c := range s.conns {
		if s.devices.of(c, s.engine) == d {
			all = append(all, c)
		}
	}
	return all
}
