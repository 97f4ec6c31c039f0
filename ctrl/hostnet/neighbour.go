package hostnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// neighbour identifies a neighbour.
type neighbour struct {
	iface int
	addr  netip.Addr
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

// lookAgain ends what waits for a notification, which may be lost: those that wait for a neighbour look for it.
func (r *Resolver) lookAgain() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, d := range r.devices {
		d.missed = 0
	}
	for _, all := range r.waiting {
		for _, ch := range all {
			close(ch)
		}
	}
	clear(r.waiting)
}

// usable are the states in which the address of a neighbour may be used.
const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY | netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP

func macOf(n *netlink.Neigh) (mac [6]byte, ok bool) {
	if n.State&usable == 0 || len(n.HardwareAddr) != 6 {
		return mac, false
	}
	return [6]byte(n.HardwareAddr), true
}

// neighbourMAC returns the MAC address of a neighbour, and whether it had to be found: the kernel
// did not know it, or no longer. It makes the kernel resolve the neighbour, or probe it if the
// address is known, since the kernel does not see our traffic.
func (r *Resolver) neighbourMAC(n neighbour) (mac [6]byte, found bool, err error) {
	switch mac, state, err := r.lookup(n); {
	case err != nil, state == fixed:
		return mac, false, err
	case state == known:
		_ = r.kick(n)
		return mac, false, nil
	}
	changed := r.listen(n)
	defer func() { r.unwait(n, changed) }()
	if err := r.kick(n); err != nil {
		return mac, false, fmt.Errorf("asking the kernel for the neighbour: %w", err)
	}
	timeout := time.NewTimer(r.patience)
	defer timeout.Stop()
	mac, state, err := r.lookup(n) // it may have been resolved before listen
	for first := true; err == nil && (state == asked || first && state == unknown); first = false {
		select {
		case <-changed: // resolved or failed
			changed = r.listen(n)
			mac, state, err = r.lookup(n)
		case <-timeout.C:
			return mac, false, ErrNoNeighbour
		case <-r.done:
			return mac, false, net.ErrClosed
		}
	}
	if state != known && state != fixed && err == nil {
		err = ErrNoNeighbour
	}
	return mac, true, err
}

// listen returns a channel that is closed at the next notification about n. The caller must call
// unwait.
func (r *Resolver) listen(n neighbour) chan struct{} {
	changed := make(chan struct{})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waiting[n] = append(r.waiting[n], changed)
	return changed
}

func (r *Resolver) unwait(n neighbour, changed chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := slices.DeleteFunc(r.waiting[n], func(c chan struct{}) bool { return c == changed })
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
	fixed // set by an administrator, or resolution is impossible: kick would make the kernel forget it
)

// lookup reads a neighbour from the kernel's table.
func (r *Resolver) lookup(n neighbour) (mac [6]byte, state knowledge, err error) {
	r.mu.Lock()
	f := r.ifaces[n.iface]
	r.mu.Unlock()
	is, err := r.entry(n)
	switch {
	case err != nil:
		return mac, unknown, fmt.Errorf("neighbours: %w", err)
	case is == nil:
	case is.State&netlink.NUD_INCOMPLETE != 0:
		return mac, asked, nil
	default:
		if mac, ok := macOf(is); ok {
			r.learn(n, mac)
			if is.State&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 {
				return mac, fixed, nil
			}
			return mac, known, nil
		}
	}
	if f.noARP { // Linux then sends to the interface's own address
		return f.mac, fixed, nil
	}
	return mac, unknown, nil
}

// entry returns what the kernel's table has for n, or nil. It asks for that alone: of all neighbours, which netlink.NeighList reads, there
// may be thousands.
func (r *Resolver) entry(n neighbour) (*netlink.Neigh, error) {
	req := nl.NewNetlinkRequest(unix.RTM_GETNEIGH, 0)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: &r.neighs}
	msg := netlink.Ndmsg{Family: unix.AF_INET, Index: uint32(n.iface)}
	if n.addr.Is6() {
		msg.Family = unix.AF_INET6
	}
	req.AddData(&msg)
	req.AddData(nl.NewRtAttr(netlink.NDA_DST, n.addr.AsSlice()))
	found, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNEIGH)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case err != nil:
		return nil, err
	case len(found) != 1:
		return nil, fmt.Errorf("%d entries for %v", len(found), n.addr)
	}
	return netlink.NeighDeserialize(found[0])
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

// kick notifies the kernel that the neighbour is in use (NTF_USE), so that it resolves it, or
// probes it unless it takes it for reachable.
func (r *Resolver) kick(n neighbour) error {
	return r.set(n, netlink.Neigh{Flags: netlink.NTF_USE})
}

// set changes the entry of n in the kernel's table.
func (r *Resolver) set(n neighbour, to netlink.Neigh) error {
	to.LinkIndex, to.Family, to.IP = n.iface, unix.AF_INET, n.addr.AsSlice()
	if n.addr.Is6() {
		to.Family = unix.AF_INET6
	}
	return r.handle.NeighSet(&to)
}

// Probe makes the kernel probe the next hop to dst, which does not answer. The kernel would use
// the address of a neighbour that it takes for reachable for up to 45 s more (RFC 4861 section
// 7.3.3), since it does not know that nothing arrives.
func (r *Resolver) Probe(dst, src netip.Addr, device string) {
	if device == AnyInterface || !r.enter() {
		return
	}
	defer r.wg.Done()
	hop, via, err := r.way(dst, src, device)
	if err != nil || hop.Local {
		return
	}
	if _, state, err := r.lookup(via); err == nil && state == known {
		_ = r.set(via, netlink.Neigh{State: netlink.NUD_PROBE})
	}
}
