package ctrl

import (
	"net/netip"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/dataplane"
)

// Device is a network interface that the engine has queues of. Functions that are nil are
// not known.
type Device struct {
	// Name is that of the interface, as clients are shown it, and as the engine's Queues and
	// the resolver's Hops have it.
	Name string
	// MTU is what the links were opened for; clients are shown PresentMTU if that is less.
	MTU        int
	PresentMTU func() int
	Addrs      func() []netip.Addr // without link-local IPv6 addresses
	// LinkLocal returns the link-local IPv6 addresses of the interface, with it for a zone.
	LinkLocal func() []netip.Addr
	VLANs     func() [][]uint16 // that the host is in
	// Transport describes how bytes move, for people; it is called once the engine is
	// bound.
	Transport func() string
	// Link returns whether the link is "up" or "down", and its speed in bits per second. "" and
	// 0 mean that they are unknown, as both are if Link is nil.
	Link     func() (state string, speed uint64)
	Steering Steering // nil if nothing is steered
	Program  Program  // program to watch, or nil
}

// device is a Device of a Server. Server.mu guards down and detached.
type device struct {
	Device
	down     error // why no frames come; nil: they do
	detached bool  // the reason is that the program was detached
}

// name returns that of d, "" for nil, which leaves the device open.
func (d *device) name() string {
	if d == nil {
		return ""
	}
	return d.Name
}

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

// mtu is the interface's now, as far as the links that were opened carry it.
func (d *device) mtu() int {
	if d.PresentMTU != nil {
		if now := d.PresentMTU(); now > 0 {
			return min(now, d.MTU)
		}
	}
	return d.MTU
}

// devices are those of a server, at least one.
type devices []*device

// named returns the device of that name, the first one for "", and nil for any other name.
func (ds devices) named(name string) *device {
	for _, d := range ds {
		if d.Name == name || name == "" {
			return d
		}
	}
	return nil
}

// find is named for a name that a client gave, which "" leaves open.
func (ds devices) find(name string) (*device, error) {
	if name == "" {
		return nil, nil
	}
	if d := ds.named(name); d != nil {
		return d, nil
	}
	return nil, errorf(invalid, "ctrl: %q is no interface of this daemon: choose one of %s", clip(name, 64), ds.names())
}

func (ds devices) names() string {
	var all []string
	for _, d := range ds {
		all = append(all, d.Name)
	}
	return strings.Join(all, ", ")
}

// unzoned returns a without its zone, and the device that it stands for, which for a
// link-local address has to be known: d, if that is not nil, the zone's or the only one.
func (ds devices) unzoned(a netip.Addr, d *device) (netip.Addr, *device, error) {
	z := a.Zone()
	switch {
	case z == "" && !a.IsLinkLocalUnicast(), a.Is4():
		return a, d, nil
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
		return a, nil, errorf(invalid, "ctrl: %v: this daemon has link-local addresses of %s alone", a, ds.names())
	}
	return a.WithZone(""), d, nil
}

// down returns why no frames come by d, or, if that is nil, by any.
func (ds devices) down(d *device) error {
	if d != nil {
		return d.down
	}
	return ds.up().down
}

// up returns the first device that frames come by, or if there is none the first.
func (ds devices) up() *device {
	for _, d := range ds {
		if d.down == nil {
			return d
		}
	}
	return ds[0]
}

// addrs returns every address that an endpoint may have, without zones; known is false
// where that cannot be told.
func (ds devices) addrs() (all []netip.Addr, known bool) {
	for _, d := range ds {
		if d.Addrs == nil {
			return nil, false
		}
		all = slices.Concat(all, d.addrs(), d.linkLocal())
	}
	return all, true
}

// owner returns the device that has the link-local address a, nil for other addresses.
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

// steered gives the steerings that an endpoint is claimed from: frames for an address may
// come by each interface, as neighbours answer ARP for all that the host has, but for
// link-local addresses.
func (ds devices) steered(ep bpf.Endpoint) (all []Steering) {
	only := ds.owner(ep.Addr)
	for _, d := range ds {
		if d.Steering != nil && (only == nil || only == d) {
			all = append(all, d.Steering)
		}
	}
	return all
}

// claim claims an endpoint everywhere, or nowhere.
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

// unclaim ends claim. A link-local address may have left its interface since: those that
// do not have it claimed say so, which is no matter.
func (ds devices) unclaim(ep bpf.Endpoint) {
	for _, d := range ds {
		if d.Steering != nil {
			_ = d.Steering.Unclaim(ep)
		}
	}
}

// refresh gives the steerings the addresses and VLANs that there are now.
func (ds devices) refresh() {
	all, _ := ds.addrs()
	for _, d := range ds {
		if st, ok := d.Steering.(interface{ SetAddresses([]netip.Addr) error }); ok {
			_ = st.SetAddresses(slices.DeleteFunc(slices.Clone(all), func(a netip.Addr) bool { // what it knew stays
				o := ds.owner(a)
				return o != nil && !slices.Contains(d.linkLocal(), a)
			}))
		}
		if st, ok := d.Steering.(interface{ SetVLANs([][]uint16) error }); ok && d.VLANs != nil {
			_ = st.SetVLANs(d.VLANs())
		}
	}
}

// Unplug tells the server that the interface of a device has been removed. Its connections
// end; listeners and the clients' other objects stay. When it returns the links are not used
// any more.
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

// Plug ends Unplug, with new links, which are for packets of that MTU.
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

// of returns the device that c uses, nil while it has none.
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
