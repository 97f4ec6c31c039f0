package hostnet

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routePause is how long route changes are collected for one call.
const routePause = time.Second

// resubscribe is the time before a new subscription after events were lost, and before a failed
// read of the interfaces is repeated.
const resubscribe = 100 * time.Millisecond

// LinkState is the state of an interface.
type LinkState struct {
	Name    string
	Up      bool // set up by the administrator, and with a carrier
	Enabled bool // administratively
	MTU     int
	Speed   uint64 // bits per second; 0 if the driver does not report it
}

// FollowLink calls link with the state of the interface that d holds, and again when it changes or d
// holds another one. In the first call before equals now. It calls routes with the number of changes
// when routes over the interface change. All calls come from one goroutine. It returns when ctx is done.
func (d *Device) FollowLink(ctx context.Context, link func(before, now LinkState), routes func(changes int)) {
	f := linkFollower{dev: d, link: link, routes: routes, held: make(chan struct{}, 1)}
	d.r.Watch(func() {
		select {
		case f.held <- struct{}{}:
		default:
		}
	})
	for ctx.Err() == nil {
		// It ends when the kernel has more to report than a socket holds, and fails for example without memory. An
		// error that lasts would have ended the daemon earlier, in New.
		_ = f.follow(ctx)
		select {
		case <-time.After(resubscribe):
		case <-ctx.Done():
		}
	}
}

// A linkFollower is a call of FollowLink.
type linkFollower struct {
	dev     *Device
	link    func(before, now LinkState)
	routes  func(changes int)
	held    chan struct{} // dev may hold another interface
	index   int           // of the interface, 0 while it is gone
	last    LinkState
	known   bool // last has been reported
	changes int  // of routes, not reported yet
}

// follow reports changes until events are lost or ctx is done.
func (f *linkFollower) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	links, routes := make(chan netlink.LinkUpdate, 16), make(chan netlink.RouteUpdate, 64)
	defer cancel()
	if err := netlink.LinkSubscribe(links, ctx.Done()); err != nil {
		return fmt.Errorf("hostnet: follow links: %w", err)
	}
	defer func() { go drain(links) }()
	if err := netlink.RouteSubscribe(routes, ctx.Done()); err != nil {
		return fmt.Errorf("hostnet: follow routes: %w", err)
	}
	defer func() { go drain(routes) }()
	if err := f.look(); err != nil {
		return err
	}
	var pause <-chan time.Time
	for {
		if f.changes > 0 && pause == nil {
			pause = time.After(routePause)
		}
		select {
		case u, ok := <-links:
			if !ok {
				return nil
			}
			switch {
			case u.Attrs().Index != f.index:
			case isRemoval(&u):
				f.gone()
				if err := f.look(); err != nil { // the Device may hold the next one already, even with the same index
					return err
				}
			default:
				f.set(stateOf(u.Link))
			}
		case <-f.held:
			if f.dev.Index() == f.index {
				continue
			}
			if err := f.look(); err != nil {
				return err
			}
		case r, ok := <-routes:
			if !ok {
				f.changes++ // at least
				return nil
			}
			if overLink(&r.Route, f.index) {
				f.changes++
			}
		case <-pause:
			f.routes(f.changes)
			f.changes, pause = 0, nil
		}
	}
}

// isRemoval reports whether an interface was removed, and not only taken out of a bridge.
func isRemoval(u *netlink.LinkUpdate) bool {
	return u.Header.Type == unix.RTM_DELLINK && u.Family != unix.AF_BRIDGE
}

// look reads the state of the interface that the Device holds.
func (f *linkFollower) look() error {
	index := f.dev.Index()
	if index == 0 {
		f.gone()
		return nil
	}
	l, err := netlink.LinkByIndex(index)
	if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone { // the Device will notice
		f.gone()
		return nil
	}
	if err != nil {
		return fmt.Errorf("hostnet: interface %s: %w", f.dev.name, err)
	}
	f.index = index
	f.set(stateOf(l))
	return nil
}

// gone reports that the interface was removed, unless it has never been there.
func (f *linkFollower) gone() {
	f.index = 0
	if f.known {
		f.set(LinkState{Name: f.last.Name, MTU: f.last.MTU})
	}
}

// set reports the state if it is the first one, or not the last.
func (f *linkFollower) set(now LinkState) {
	if !f.known {
		f.last = now
	}
	if before := f.last; !f.known || now != before {
		f.last, f.known = now, true
		f.link(before, now)
	}
}

func stateOf(l netlink.Link) LinkState {
	a := l.Attrs()
	const up = unix.IFF_UP | unix.IFF_RUNNING
	return LinkState{a.Name, a.RawFlags&up == up, a.RawFlags&unix.IFF_UP != 0, a.MTU, speed(a.Name)}
}

// speed returns the speed of the interface's link in bits per second, or 0 if it is not known.
func speed(name string) uint64 {
	var cmd ethtool.EthtoolCmd
	mbits, err := cmd.CmdGet(name)
	if err != nil || mbits == math.MaxUint32 {
		return 0
	}
	return uint64(mbits) * 1e6
}

// Received returns the number of frames that the interface with that index has received. It is
// the driver's count, which some drivers update only every second or two.
func Received(index int) (uint64, error) {
	l, err := netlink.LinkByIndex(index)
	if err != nil {
		return 0, fmt.Errorf("hostnet: interface %d: %w", index, err)
	}
	if st := l.Attrs().Statistics; st != nil {
		return st.RxPackets, nil
	}
	return 0, fmt.Errorf("hostnet: interface %d: no statistics", index)
}

// overLink reports whether frames of r leave by the interface. The kernel's own entries for
// local and broadcast addresses come and go with the addresses.
func overLink(r *netlink.Route, index int) bool {
	if r.Table == unix.RT_TABLE_LOCAL {
		return false
	}
	for _, hop := range r.MultiPath {
		if hop.LinkIndex == index {
			return true
		}
	}
	return r.LinkIndex == index
}
