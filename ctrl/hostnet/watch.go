package hostnet

import (
	"errors"
	"runtime"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// subscription is one set of netlink subscriptions.
type subscription struct {
	done   chan struct{}
	links  chan netlink.LinkUpdate
	addrs  chan netlink.AddrUpdate
	routes chan netlink.RouteUpdate
	neighs chan netlink.NeighUpdate
}

// subscribe subscribes to changes of links, addresses, routes and neighbours.
func (r *Resolver) subscribe() (*subscription, error) {
	s := &subscription{
		done: make(chan struct{}), links: make(chan netlink.LinkUpdate, 64), addrs: make(chan netlink.AddrUpdate, 64),
		routes: make(chan netlink.RouteUpdate, 64), neighs: make(chan netlink.NeighUpdate, 64),
	}
	runtime.LockOSThread() // netlink sockets use the thread's namespace
	defer runtime.UnlockOSThread()
	ns := r.elsewhere()
	if err := errors.Join(
		begin(s.links, func() error {
			return netlink.LinkSubscribeWithOptions(s.links, s.done, netlink.LinkSubscribeOptions{Namespace: ns})
		}),
		begin(s.addrs, func() error {
			return netlink.AddrSubscribeWithOptions(s.addrs, s.done, netlink.AddrSubscribeOptions{Namespace: ns})
		}),
		begin(s.routes, func() error {
			return netlink.RouteSubscribeWithOptions(s.routes, s.done, netlink.RouteSubscribeOptions{Namespace: ns})
		}),
		begin(s.neighs, func() error {
			return netlink.NeighSubscribeWithOptions(s.neighs, s.done, netlink.NeighSubscribeOptions{Namespace: ns})
		}),
	); err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// begin subscribes to what comes over ch. If that fails it closes ch, so that end can drain it like the others.
func begin[T any](ch chan T, subscribe func() error) error {
	err := subscribe()
	if err != nil {
		close(ch)
	}
	return err
}

// elsewhere returns the namespace in which to open sockets, or nil if it is the current one.
// Entering a namespace takes CAP_SYS_ADMIN, which the daemon may not have.
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
	defer func() { s.end() }()
	var again <-chan time.Time // the time of the next refresh, after one that failed
	refresh := func() {
		again = nil
		if r.refresh() != nil {
			again = time.After(resubscribe) // until then keep the previous state
		}
		r.change()
	}
	for {
		ok := true
		select {
		case <-r.done:
			return
		case <-again:
			refresh()
		case l, more := <-s.links:
			if ok = more; ok && isRemoval(&l) {
				r.removed(int(l.Index))
			}
			refresh()
		case _, ok = <-s.addrs:
			for ok && len(s.addrs) > 0 { // one refresh sees them all
				_, ok = <-s.addrs
			}
			refresh()
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
			case <-time.After(resubscribe):
			}
			if next, err := r.subscribe(); err == nil {
				s.end()
				s, ok = next, true
				refresh()
				r.lookAgain()
			}
		}
	}
}

// change schedules a call of the watchers. Several changes may share one call.
func (r *Resolver) change() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

func (r *Resolver) notify() {
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
