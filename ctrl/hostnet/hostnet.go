// Package hostnet resolves destinations as the host's kernel does: routes, neighbours, addresses,
// VLANs and MTU, by netlink. Static does the same for links without a kernel.
package hostnet

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
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
	ErrGone        = errors.New("the interface is gone")
	ErrZone        = errors.New("a link-local address, which may belong to several interfaces")
)

// Resolver tracks the kernel's state of some interfaces and of the VLANs on top of them. It is safe for
// concurrent use.
type Resolver struct {
	devices []*Device
	handle  *netlink.Handle
	neighs  nl.SocketHandle // for entry
	ns      netns.NsHandle
	done    chan struct{}
	wg      sync.WaitGroup

	patience time.Duration // neighbourWait, except in tests
	changed  chan struct{}
	// withLoopback is whether the addresses of loopback are served.
	withLoopback bool

	mu      sync.Mutex            // guards the rest
	macs    map[neighbour][6]byte // last resolved address of each
	waiting map[neighbour][]chan struct{}
	addresses
	ifaces   map[int]iface // the interfaces themselves and the VLANs on them
	watchers []func()
	closed   bool
}

// addresses are those that belong to all interfaces together.
type addresses struct {
	hostless []netip.Addr // see Hostless
	networks []netip.Addr // lowest addresses of the networks of the interfaces
	loopback []netip.Addr // see Loopback
}

// New returns a Resolver for the named interfaces in the network namespace of the calling thread. They
// must exist; one that is removed later is tracked again when there is an interface of its name.
func New(names ...string) (*Resolver, error) { return open(false, names) }

// NewWithLoopback is New for a Resolver whose first interface also has the addresses of loopback.
func NewWithLoopback(names ...string) (*Resolver, error) { return open(true, names) }

func open(withLoopback bool, names []string) (*Resolver, error) {
	ns, err := netns.Get()
	if err != nil {
		return nil, fmt.Errorf("hostnet: network namespace: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("hostnet: open a netlink socket: %w", err)
	}
	neighs, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		h.Close()
		ns.Close()
		return nil, fmt.Errorf("hostnet: open a netlink socket: %w", err)
	}
	r := &Resolver{
		withLoopback: withLoopback, handle: h, neighs: nl.SocketHandle{Socket: neighs}, ns: ns, patience: neighbourWait,
		done: make(chan struct{}), changed: make(chan struct{}, 1),
		macs: make(map[neighbour][6]byte), waiting: make(map[neighbour][]chan struct{}),
	}
	for _, name := range names {
		link, err := h.LinkByName(name)
		if err != nil {
			r.Close()
			if _, gone := errors.AsType[netlink.LinkNotFoundError](err); gone {
				err = ErrGone
			}
			return nil, fmt.Errorf("hostnet: interface %s: %w", name, err)
		}
		d := &Device{r: r, name: name, index: link.Attrs().Index}
		r.devices = append(r.devices, d)
	}
	s, err := r.subscribe()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("hostnet: follow addresses and routes: %w", err)
	}
	if err := r.refresh(); err != nil {
		s.end()
		r.Close()
		return nil, fmt.Errorf("hostnet: read the interfaces: %w", err)
	}
	r.wg.Go(func() { r.follow(s) })
	r.wg.Go(r.notify)
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
	r.neighs.Close()
	return r.ns.Close()
}
