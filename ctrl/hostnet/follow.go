package hostnet

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routePause is how long route changes are collected for one call.
const routePause = time.Second

// LinkState is the state of an interface.
type LinkState struct {
	Up      bool // set up by the administrator, and with a carrier
	Enabled bool // administratively
	MTU     int
	Speed   uint64 // bits per second; 0 if the driver does not report it
}

// FollowLink calls link with the state of the interface that has that name, and again when it
// changes. In the first call before equals now. It calls routes with the number of changes when
// routes over the interface change. All calls come from one goroutine. It returns nil when ctx
// is done.
func FollowLink(ctx context.Context, name string, link func(before, now LinkState), routes func(changes int)) error {
	linkUpdates, routeUpdates := make(chan netlink.LinkUpdate, 16), make(chan netlink.RouteUpdate, 64)
	if err := netlink.LinkSubscribe(linkUpdates, ctx.Done()); err != nil {
		return fmt.Errorf("hostnet: follow links: %w", err)
	}
	if err := netlink.RouteSubscribe(routeUpdates, ctx.Done()); err != nil {
		return fmt.Errorf("hostnet: follow routes: %w", err)
	}
	l, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("hostnet: interface %s: %w", name, err)
	}
	index, last := l.Attrs().Index, stateOf(l)
	link(last, last)
	var changed int
	var pause <-chan time.Time
	for linkUpdates != nil || routeUpdates != nil {
		select {
		case u, ok := <-linkUpdates:
			if !ok { // ctx is done, or the kernel had more to say than the socket holds
				linkUpdates = nil
			} else if u.Attrs().Name == name { // that of another one, perhaps, which has taken its place
				index = u.Attrs().Index
				if now := stateOf(u.Link); now != last {
					link(last, now)
					last = now
				}
			}
		case r, ok := <-routeUpdates:
			if !ok {
				routeUpdates = nil
			} else if overLink(&r.Route, index) {
				if changed++; pause == nil {
					pause = time.After(routePause)
				}
			}
		case <-pause:
			routes(changed)
			changed, pause = 0, nil
		}
	}
	if ctx.Err() == nil {
		return fmt.Errorf("hostnet: the kernel reported more changes than fit its socket")
	}
	return nil
}

func stateOf(l netlink.Link) LinkState {
	a := l.Attrs()
	const up = unix.IFF_UP | unix.IFF_RUNNING
	return LinkState{a.RawFlags&up == up, a.RawFlags&unix.IFF_UP != 0, a.MTU, speed(a.Name)}
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

// Received returns the number of frames that the interface with that name has received. It is
// the driver's count, which some drivers update only every second or two.
func Received(name string) (uint64, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return 0, fmt.Errorf("hostnet: interface %s: %w", name, err)
	}
	if st := l.Attrs().Statistics; st != nil {
		return st.RxPackets, nil
	}
	return 0, fmt.Errorf("hostnet: interface %s: no statistics", name)
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
