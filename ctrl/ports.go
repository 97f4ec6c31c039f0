package ctrl

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/shm"
)

// A claim reserves a local endpoint for iwarpd. The XDP program steers its packets, and a kernel
// socket is bound to it but never listens, so that no other program can use the port and the kernel
// does not respond on it. A listener and the connections it accepted share a claim.
type claim struct {
	addr      netip.AddrPort
	on        *device // of an unspecified address: stands for the addresses of this interface, or nil for those of all; of others: nil, or kernel sockets
	uid       uint32
	listening bool           // a listener uses it
	active    bool           // for an active open, and counted in the quota of ports
	remote    netip.AddrPort // peer of its last connection
	since     clock.Time     // start of TIME-WAIT, 0 if its last connection is not in it
	until     clock.Time     // end of TIME-WAIT
	refs      int
	guards    map[netip.Addr]int    // guard sockets by address
	extra     uint64                // those of guards that are counted, and not in an account
	wants     []bpf.Endpoint        // endpoints that steer was called with
	eps       map[bpf.Endpoint]bool // endpoints that are steered for wants
	dropped   atomic.Bool           // the endpoint may be another user's
}

// claims are the reserved endpoints. All methods require Server.mu.
type claims struct {
	devices  devices
	noGuard  bool // the kernel does not use the addresses (pipes)
	accounts *accounts
	failed   func(error) // called with the error of a refresh, which is to be repeated
	byAddr   map[claimKey]*claim
	byPort   map[uint16][]*claim // the same claims by port; a port has at most one per local address
	nextPort uint16              // for noGuard
	// inUse counts the connections of listeners on all addresses by local address. The host may lose the address and get it
	// back, and the kernel would reset them until that is noticed: so it is steered as long as they last, but for lostTime at
	// most, since another host may have it then, to which this one forwards.
	inUse map[netip.Addr]int
	lost  map[netip.Addr]clock.Time // those that the host lacks, and when they are left to the kernel, or 0: they are

	looks      map[uint32]int // calls of notInTimeWait since looksSince, by uid
	looksSince clock.Time
}

// claimKey identifies a claim.
type claimKey struct {
	addr netip.AddrPort
	on   *device
}

func (c *claim) key() claimKey { return claimKey{c.addr, c.on} }

// take reserves addr, or adds a user to its claim. An unspecified address stands for all addresses
// of on, or if that is nil of all interfaces; port 0 selects a free port. With kernel sockets as on,
// the engine's socket has the endpoint, and nothing is steered. An active open names its peer, to
// which alone the endpoint belongs; without one the claim is for a listener. That may share the claim of
// connections that an earlier listener of the same uid accepted.
func (cs *claims) take(addr netip.AddrPort, on *device, uid uint32, peer netip.AddrPort) (*claim, error) {
	listen := !peer.IsValid()
	if !addr.Addr().IsUnspecified() && !on.sockets() {
		on = nil // an address belongs to one interface
	}
	if addr.Port() != 0 {
		if c := cs.byAddr[claimKey{addr, on}]; c != nil {
			if !listen || c.listening || c.uid != uid {
				if c.since != 0 {
					return nil, errorf(portInUse, "ctrl: %v is in TIME-WAIT after the connection that was made from it (RFC 9293 3.6.1): choose another port, or wait (tcp-time-wait)", addr)
				}
				return nil, errorf(portInUse, "ctrl: %v is in use by another client of iwarpd, or by its last connections: "+
					"choose another port, or end that client (iwarpctl listen list) and wait up to %v", addr, lingerTime)
			}
			if err := cs.steerTCP(c, peer); err != nil {
				return nil, err
			}
			c.refs++
			c.listening = true
			return c, nil
		}
		if other := cs.overlap(addr, on); other != nil {
			return nil, errorf(portInUse, "ctrl: %v is in use by another client of iwarpd, on %v: choose another port (iwarpctl listen list)", addr, other.addr)
		}
	}
	c := &claim{
		addr: addr, on: on, uid: uid, listening: listen, refs: 1,
		guards: make(map[netip.Addr]int), eps: make(map[bpf.Endpoint]bool),
	}
	if err := cs.bind(c); err != nil {
		cs.undo(c)
		return nil, err
	}
	if err := cs.steerTCP(c, peer); err != nil {
		cs.undo(c)
		return nil, err
	}
	cs.byAddr[c.key()] = c
	cs.byPort[c.addr.Port()] = append(cs.byPort[c.addr.Port()], c)
	return c, nil
}

// steerTCP steers the TCP segments of c: those of peer, or of all if peer is invalid.
func (cs *claims) steerTCP(c *claim, peer netip.AddrPort) error {
	ep := bpf.Endpoint{Proto: pkt.ProtoTCP, Addr: c.addr.Addr(), Port: c.addr.Port(), Peer: peer}
	if err := cs.steer(c, ep); err != nil {
		return errorf(internal, "ctrl: steering %v: %w", c.addr, err)
	}
	return nil
}

// steer steers another endpoint to c, unless it is already steered. An unspecified address stands for all
// that c has now.
func (cs *claims) steer(c *claim, ep bpf.Endpoint) error {
	if c.on.sockets() {
		return nil
	}
	if !slices.Contains(c.wants, ep) {
		c.wants = append(c.wants, ep)
	}
	if !ep.Addr.IsUnspecified() {
		return cs.steerOne(c, ep)
	}
	if c.on == nil || c.on.Addrs == nil {
		ep.Addr = netip.Addr{} // all addresses of both families
		return cs.steerOne(c, ep)
	}
	for _, ep.Addr = range c.on.all() {
		if err := cs.steerOne(c, ep); err != nil {
			return err
		}
	}
	return nil
}

func (cs *claims) steerOne(c *claim, ep bpf.Endpoint) error {
	if c.eps[ep] || ep.Addr.IsLoopback() { // no frames are addressed to it
		return nil
	}
	if err := cs.devices.claim(ep); err != nil {
		return err
	}
	c.eps[ep] = true
	return nil
}

// overlap returns a claim of the same port that has an address of addr on on.
func (cs *claims) overlap(addr netip.AddrPort, on *device) *claim {
	for _, c := range cs.byPort[addr.Port()] {
		if c.covers(addr.Addr(), on) {
			return c
		}
	}
	return nil
}

// covers reports whether c and addr on on have an address in common, and are not equal.
func (c *claim) covers(addr netip.Addr, on *device) bool {
	switch all, other := c.addr.Addr().IsUnspecified(), addr.IsUnspecified(); {
	case c.on.sockets() != on.sockets(): // the kernel has the addresses of all interfaces
		return all || other || c.addr.Addr() == addr
	case all && other:
		return c.on == nil || on == nil || c.on == on
	case all:
		return c.on.has(addr)
	case other:
		return on.has(c.addr.Addr())
	}
	return false
}

// bind binds the guard sockets of c and, for port 0, determines its port.
func (cs *claims) bind(c *claim) error {
	if cs.noGuard {
		if c.addr.Port() == 0 {
			p, err := cs.freePort(c.addr.Addr(), c.on)
			if err != nil {
				return err
			}
			c.addr = netip.AddrPortFrom(c.addr.Addr(), p)
		}
		return nil
	}
	if !c.addr.Addr().IsUnspecified() || c.on.sockets() {
		return cs.bindTo(c, []netip.Addr{c.addr.Addr()})
	}
	addr := c.addr
	addrs, _ := cs.devices.only(c.on).addrs()
	err := cs.bindTo(c, addrs)
	if e, ok := errors.AsType[*Error](err); ok && e.Code == badAddress {
		c.unguard()
		c.addr = addr
		err = cs.bindTo(c, slices.DeleteFunc(slices.Clone(addrs), cs.deleted))
	}
	return err
}

// deleted reports whether the kernel no longer has a, which may not have been noticed yet.
func (cs *claims) deleted(a netip.Addr) bool {
	fd, _, err := bindGuard(netip.AddrPortFrom(a, 0), cs.zone(a), false)
	if err == nil {
		unix.Close(fd)
	}
	e, ok := errors.AsType[*Error](err)
	return ok && e.Code == badAddress
}

// zone returns the index of the interface that has a.
func (cs *claims) zone(a netip.Addr) int {
	if d := cs.devices.owner(a); d != nil {
		return d.Index()
	}
	return 0
}

// bindTo binds the guard sockets of c to addrs.
func (cs *claims) bindTo(c *claim, addrs []netip.Addr) error {
	if len(addrs) == 0 {
		return errorf(badAddress, "ctrl: there is no address to listen on: give one to the interface (ip addr add)")
	}
	if c.addr.Port() != 0 {
		return cs.guard(c, addrs...)
	}
	// The kernel chooses a port that is free on the first address, and it may be in use on another. That one comes
	// first then: it has fewer free ports. The guard of the chosen port is kept for now, so that it is not chosen
	// again.
	addrs = slices.Clone(addrs)
	var kept []int
	defer func() { seqpacket.CloseAll(kept) }()
	for binds := 0; binds < portBinds+4*len(addrs); {
		err := cs.guard(c, addrs...)
		n := len(c.guards)
		if e, ok := errors.AsType[*Error](err); !ok || e.Code != portInUse || n == 0 {
			return err
		}
		binds += n + 1
		kept = append(kept, c.guards[addrs[0]])
		delete(c.guards, addrs[0])
		c.unguard()
		addrs[0], addrs[n] = addrs[n], addrs[0]
		c.addr = netip.AddrPortFrom(c.addr.Addr(), 0)
	}
	return errorf(portInUse, "ctrl: no port was found that is free on all addresses to listen on: name one, or listen on one address")
}

// portBinds is the number of guards that are bound to find a port, in addition to a few for each address. Server.mu is
// held meanwhile.
const portBinds = 512

// guard binds a kernel socket to the claim's port on each of addrs that has none yet. If the port is 0, the kernel
// chooses one that is free on the first.
func (cs *claims) guard(c *claim, addrs ...netip.Addr) error {
	chosen := c.addr.Port() == 0
	var over map[netip.Addr]int // those of ports that the kernel may have in TIME-WAIT
	for _, a := range addrs {
		if _, has := c.guards[a]; has {
			continue
		}
		want := netip.AddrPortFrom(a, c.addr.Port())
		zone := cs.zone(a)
		fd, port, err := bindGuard(want, zone, c.on.sockets())
		if e, ok := errors.AsType[*Error](err); ok && e.Code == portInUse && !chosen && !c.on.sockets() {
			if fd, port = bindOver(want, zone); fd >= 0 {
				if over == nil {
					over = make(map[netip.Addr]int)
				}
				over[a], err = fd, nil
			}
		}
		if err != nil {
			return err
		}
		c.guards[a] = fd
		if chosen {
			c.addr = netip.AddrPortFrom(c.addr.Addr(), port)
		}
	}
	return cs.checkOver(c, over)
}

// refresh updates steering and guards of claims for unspecified addresses after the interfaces'
// addresses have changed.
func (cs *claims) refresh(now clock.Time) {
	all, known := cs.devices.addrs()
	if !known {
		return
	}
	present := make(map[netip.Addr]bool, len(all))
	for _, a := range all {
		present[a] = true
	}
	maps.DeleteFunc(cs.lost, func(a netip.Addr, _ clock.Time) bool { return present[a] })
	for a := range cs.inUse {
		if _, noticed := cs.lost[a]; !present[a] && !noticed {
			cs.lost[a] = now.Add(lostTime)
		}
	}
	cs.steerAddrs()
	var failed error
	short := false
	for _, c := range cs.byAddr {
		if !c.addr.Addr().IsUnspecified() || c.on.sockets() { // the kernel follows the sockets' addresses
			continue
		}
		for _, ep := range c.wants {
			failed = cmp.Or(failed, cs.steer(c, ep)) // the other addresses remain usable
		}
		addrs, _ := cs.devices.only(c.on).addrs()
		for _, a := range addrs {
			if cs.noGuard || short {
				break
			}
			// Another program may use the port there.
			err := cs.guard(c, a)
			if e, ok := errors.AsType[*Error](err); ok && e.Code == internal {
				failed, short = cmp.Or(failed, err), true // the next refresh binds the others: mu is held
			}
		}
		cs.forgetGone(c, present)
		cs.count(c)
	}
	if failed != nil {
		cs.failed(failed)
	}
}

// lostTime is for how long an address that the host has lost is steered for the connections that use it.
const lostTime = 8 * time.Second

// endLost leaves lost addresses whose time is over at now to the kernel, and returns when the next one's is, or 0.
func (cs *claims) endLost(now clock.Time) (next clock.Time) {
	over := false
	for a, until := range cs.lost {
		if until.Due(now) {
			cs.lost[a], over = 0, true
		} else {
			next = clock.Earliest(next, until)
		}
	}
	if over {
		cs.steerAddrs()
	}
	return next
}

// steerAddrs steers the addresses of the host, and those that it has lost a moment ago.
func (cs *claims) steerAddrs() {
	var lost []netip.Addr
	for a, until := range cs.lost {
		if until != 0 {
			lost = append(lost, a)
		}
	}
	if err := cs.devices.refresh(lost); err != nil {
		cs.failed(err)
	}
}

// forgetGone closes guards of c, and ends its steering, on addresses that are not present, down to goneAddrs of them.
func (cs *claims) forgetGone(c *claim, present map[netip.Addr]bool) {
	most := len(present) + goneAddrs
	for a, fd := range c.guards {
		if len(c.guards) > most && !present[a] {
			unix.Close(fd)
			delete(c.guards, a)
		}
	}
	for ep := range c.eps {
		if len(c.eps) > len(c.wants)*most && ep.Addr.IsValid() && !present[ep.Addr] {
			cs.devices.unclaim(ep)
			delete(c.eps, ep)
		}
	}
}

// goneAddrs is the number of addresses that have gone on which a claim keeps guards and steering: they may be back, and
// no program is to take the port meanwhile.
const goneAddrs = 64

// uncounted returns the number of guards of c that neither an account nor count has counted. A listener has one for each
// address.
func (cs *claims) uncounted(c *claim) uint64 {
	counted := c.extra
	if c.listening {
		counted += cs.accounts.files.per[resListens]
	}
	return less(uint64(len(c.guards)), counted)
}

// count counts the guards of c that no account counts. Connections keep those of their listener after it has ended.
func (cs *claims) count(c *claim) {
	cs.accounts.files.extra -= c.extra
	c.extra = 0
	c.extra = cs.uncounted(c)
	cs.accounts.files.extra += c.extra
}

// join adds a connection to c, whose listener accepted it on the address local. If local belongs to another interface,
// its frames were steered for another listener of the port. That may end first, so c steers them too.
func (cs *claims) join(c *claim, local netip.Addr) {
	c.refs++
	if c.follows(local) {
		cs.inUse[local]++
	}
	if c.on == nil || c.on.sockets() || c.on.has(local) {
		return
	}
	for _, ep := range c.wants {
		if ep.Addr.IsUnspecified() {
			ep.Addr = local
			_ = cs.steerOne(c, ep) // the steering map is full
		}
	}
}

// follows reports whether frames to c's port are steered because the host has the address local.
func (c *claim) follows(local netip.Addr) bool {
	return c.addr.Addr().IsUnspecified() && !c.on.sockets() && !local.IsLoopback()
}

// leave undoes join.
func (cs *claims) leave(c *claim, local netip.Addr) {
	if c.follows(local) {
		if cs.inUse[local]--; cs.inUse[local] == 0 {
			delete(cs.inUse, local)
			if _, lost := cs.lost[local]; lost {
				delete(cs.lost, local)
				cs.steerAddrs()
			}
		}
	}
	cs.drop(c)
}

// unlisten removes a listener from c.
func (cs *claims) unlisten(c *claim) {
	c.listening = false
	cs.count(c)
	cs.drop(c)
}

// drop removes a user from c.
func (cs *claims) drop(c *claim) {
	if c == nil {
		return
	}
	if c.refs--; c.refs > 0 {
		return
	}
	c.dropped.Store(true)
	delete(cs.byAddr, c.key())
	port := c.addr.Port()
	cs.byPort[port] = slices.DeleteFunc(cs.byPort[port], func(o *claim) bool { return o == c })
	if len(cs.byPort[port]) == 0 {
		delete(cs.byPort, port)
	}
	cs.undo(c)
	if c.active {
		cs.accounts.portFreed(c.uid)
	}
}

// unguard closes the guards of c.
func (c *claim) unguard() {
	seqpacket.CloseAll(values(c.guards))
	clear(c.guards)
}

func (cs *claims) undo(c *claim) {
	for ep := range c.eps {
		cs.devices.unclaim(ep)
	}
	c.unguard()
	c.wants = nil
	clear(c.eps)
	cs.count(c)
}

// freePort returns a port that is free on a, if a is unspecified on the addresses of on, when the
// kernel does not assign one. The range is that of RFC 6335 section 6.
func (cs *claims) freePort(a netip.Addr, on *device) (uint16, error) {
	const first, n = 49152, 65536 - 49152
	for range n {
		p := first + cs.nextPort%n
		cs.nextPort++
		ap := netip.AddrPortFrom(a, p)
		if cs.byAddr[claimKey{ap, on}] == nil && cs.overlap(ap, on) == nil {
			return p, nil
		}
	}
	return 0, errorf(portInUse, "ctrl: every port from %d on is in use on %v", first, a)
}

// bindGuard binds a TCP socket to addr, and returns its port. zone is the index of the interface if
// addr is link-local. If share is set, sockets of the engine can be bound to the same port.
func bindGuard(addr netip.AddrPort, zone int, share bool) (fd int, port uint16, err error) {
	domain := unix.AF_INET
	if addr.Addr().Is6() {
		domain = unix.AF_INET6
	}
	fd, err = unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if errors.Is(err, unix.EAFNOSUPPORT) && addr.Addr().IsUnspecified() { // the host has no IPv6
		return bindGuard(netip.AddrPortFrom(netip.IPv4Unspecified(), addr.Port()), zone, share)
	}
	if err != nil {
		return -1, 0, errorf(internal, "ctrl: guard socket: the daemon: %w", shm.Limit(err))
	}
	if share {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	var sa unix.Sockaddr
	if domain == unix.AF_INET {
		sa = &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	} else {
		only := 1
		if addr.Addr().IsUnspecified() { // both families
			only = 0
		}
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, only)
		sa = &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16(), ZoneId: uint32(zone)}
	}
	if err := unix.Bind(fd, sa); err != nil {
		unix.Close(fd)
		return -1, 0, bindError(addr, err)
	}
	got, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return -1, 0, errorf(internal, "ctrl: guard socket of %v: %w", addr, err)
	}
	switch got := got.(type) {
	case *unix.SockaddrInet4:
		port = uint16(got.Port)
	case *unix.SockaddrInet6:
		port = uint16(got.Port)
	}
	return fd, port, nil
}

func bindError(addr netip.AddrPort, err error) error {
	switch {
	case errors.Is(err, unix.EADDRINUSE) && addr.Port() == 0:
		return errorf(portInUse, "ctrl: every local port of %v is in use: close connections, wait for those in TIME-WAIT (tcp-time-wait), or widen net.ipv4.ip_local_port_range", addr.Addr())
	case errors.Is(err, unix.EADDRINUSE):
		return errorf(portInUse, "ctrl: %v is in use by another program: choose another port, stop that program, or wait for the end of TIME-WAIT (ss -tanp 'sport = :%d')", addr, addr.Port())
	case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.ENODEV), // ENODEV, EINVAL: its interface is gone
		errors.Is(err, unix.EINVAL) && addr.Addr().IsLinkLocalUnicast():
		return errorf(badAddress, "ctrl: %v is not an address of this host: choose one of the interface's (iwarpctl status)", addr.Addr())
	case errors.Is(err, unix.EACCES):
		return errorf(permission, "ctrl: port %d needs CAP_NET_BIND_SERVICE: choose a port from 1024 on, or give the daemon the capability", addr.Port())
	}
	return errorf(internal, "ctrl: guard socket of %v: %w", addr, err)
}

// parseAddrPort parses "addr:port", "[addr]:port", ":port", "addr" or "".
func parseAddrPort(s string) (netip.AddrPort, error) {
	if s == "" {
		return netip.AddrPort{}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.AddrPortFrom(a.Unmap(), 0), nil
	}
	if s[0] == ':' {
		ap, err := netip.ParseAddrPort("0.0.0.0" + s)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("%q is not a port", s)
		}
		return netip.AddrPortFrom(netip.Addr{}, ap.Port()), nil
	}
	ap, err := netip.ParseAddrPort(s)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%q is not an address and port", s)
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
}
