package hostnet

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFollowLinkAfterLoss checks that FollowLink still reports the interface after the kernel has dropped events
// because the socket was full.
func TestFollowLinkAfterLoss(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	ctx, cancel := context.WithCancel(t.Context())
	began, goOn, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var mtu atomic.Int64
	go func() {
		err := v.A.NS.Do(func() error {
			r, err := New(v.A.Name)
			if err != nil {
				return err
			}
			defer r.Close()
			first := true
			r.Device(v.A.Name).FollowLink(ctx, func(_, now LinkState) {
				if first {
					first = false
					close(began)
					<-goOn
				}
				mtu.Store(int64(now.MTU))
			}, func(int) {})
			return nil
		})
		done <- err
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	<-began
	const last, changes = 1300, 2000 // events of that many do not fit in the default buffer of a socket
	err := v.A.NS.Do(func() error {
		l, err := netlink.LinkByName(v.A.Name)
		for i := 0; i < changes && err == nil; i++ {
			err = netlink.LinkSetMTU(l, 1400+i%2)
		}
		if err == nil {
			err = netlink.LinkSetMTU(l, last)
		}
		return err
	})
	close(goOn)
	if err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the last MTU is reported", func() bool { return mtu.Load() == last })
}

// TestFollowLinkName checks that FollowLink does not report an interface that has got the name of one that was removed,
// as long as another Device holds it.
func TestFollowLinkName(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	name := v.A.Name
	v.A.NS.IP(t, "link", "add", "other0", "mtu", "1400", "type", "veth", "peer", "name", "other1")
	var r *Resolver
	must(t, v.A.NS.Do(func() (err error) {
		r, err = New(name, "other0")
		return err
	}))
	defer r.Close()
	ctx, cancel := context.WithCancel(t.Context())
	states, done := make(chan LinkState, 100), make(chan error, 1)
	go func() {
		done <- v.A.NS.Do(func() error {
			r.Device(name).FollowLink(ctx, func(_, now LinkState) { states <- now }, func(int) {})
			return nil
		})
	}()
	defer func() {
		cancel()
		must(t, <-done)
	}()
	expect := func(mtu int, enabled bool) {
		t.Helper()
		for {
			select {
			case s := <-states:
				switch {
				case s.Name == name && s.MTU == mtu && s.Enabled == enabled:
					return
				case s.MTU == 1400 || s.MTU == 1450:
					t.Fatalf("state %+v of another Device's interface; want MTU %d, enabled %v", s, mtu, enabled)
				}
			case <-time.After(time.Minute):
				t.Fatal("no state")
			}
		}
	}
	expect(1500, true)
	v.A.NS.IP(t, "link", "del", name)
	expect(1500, false)
	v.A.NS.IP(t, "link", "set", "other0", "name", name)
	v.A.NS.IP(t, "link", "set", name, "mtu", "1450", "up")
	testenv.Until(t, "the other Device has the MTU", func() bool { return r.Device("other0").MTU() == 1450 })
	v.A.NS.IP(t, "link", "del", name)
	testenv.Until(t, "the other Device has noticed it", func() bool { return r.Device("other0").Index() == 0 })
	v.A.NS.IP(t, "link", "add", name, "mtu", "1333", "type", "veth", "peer", "name", "other1")
	expect(1333, false)
}

// TestFollowLink checks that FollowLink reports the changes of an interface and of the routes over it.
func TestFollowLink(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	name := v.A.Name
	v.A.NS.IP(t, "link", "add", "other0", "type", "veth", "peer", "name", "other1")
	v.A.NS.IP(t, "link", "set", "other1", "up")
	v.A.NS.IP(t, "link", "set", "other0", "up")
	ctx, cancel := context.WithCancel(t.Context())
	type change struct{ before, now LinkState }
	links, routes, done := make(chan change, 100), make(chan int, 100), make(chan error, 1)
	go func() {
		done <- v.A.NS.Do(func() error {
			r, err := New(name)
			if err != nil {
				return err
			}
			defer r.Close()
			link := func(before, now LinkState) { links <- change{before, now} }
			r.Device(name).FollowLink(ctx, link, func(n int) { routes <- n })
			return nil
		})
	}()
	defer func() {
		cancel()
		must(t, <-done)
	}()
	var last LinkState
	expect := func(what string, ok func(LinkState) bool) {
		t.Helper()
		for first := last == (LinkState{}); first || !ok(last); first = false {
			select {
			case c := <-links:
				if first && c.before != c.now || !first && (c.before != last || c.now == last) {
					t.Errorf("from %+v to %+v after %+v", c.before, c.now, last)
				}
				last = c.now
			case <-time.After(time.Minute):
				t.Fatalf("not %s: %+v", what, last)
			}
		}
	}
	changed := func(what string) {
		t.Helper()
		select {
		case n := <-routes:
			if n < 1 {
				t.Errorf("%s: %d changes", what, n)
			}
		case <-time.After(time.Minute):
			t.Fatalf("no change of routes: %s", what)
		}
	}
	expect("up", func(s LinkState) bool { return s.Up && s.Enabled && s.Name == name && s.MTU == 1500 })
	v.A.NS.IP(t, "link", "set", name, "mtu", "1400")
	expect("another MTU", func(s LinkState) bool { return s.MTU == 1400 })
	v.A.NS.IP(t, "route", "add", "198.51.100.0/24", "dev", name)
	changed("a route")
	v.A.NS.IP(t, "route", "add", "203.0.113.0/24", "nexthop", "dev", "other0", "nexthop", "dev", name)
	changed("a route with two next hops")
	v.A.NS.IP(t, "link", "set", name, "down")
	expect("down", func(s LinkState) bool { return !s.Up && !s.Enabled })
	v.A.NS.IP(t, "link", "del", name)
	expect("gone", func(s LinkState) bool { return s == LinkState{Name: name, MTU: 1400} })
}

func TestOverLink(t *testing.T) {
	for name, tt := range map[string]struct {
		r    netlink.Route
		want bool
	}{
		"over it":              {netlink.Route{LinkIndex: 3, Table: unix.RT_TABLE_MAIN}, true},
		"over another":         {netlink.Route{LinkIndex: 4, Table: unix.RT_TABLE_MAIN}, false},
		"of its own addresses": {netlink.Route{LinkIndex: 3, Table: unix.RT_TABLE_LOCAL}, false},
		"over it and another":  {netlink.Route{MultiPath: []*netlink.NexthopInfo{{LinkIndex: 4}, {LinkIndex: 3}}}, true},
		"over two others":      {netlink.Route{MultiPath: []*netlink.NexthopInfo{{LinkIndex: 4}, {LinkIndex: 5}}}, false},
	} {
		if got := overLink(&tt.r, 3); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// TestFollowLinkLate checks that FollowLink follows an interface whose state could not be read at first.
func TestFollowLinkLate(t *testing.T) {
	r, err := New("lo")
	must(t, err)
	defer r.Close()
	restore := testenv.FewFiles(t, 0)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	known, ended := make(chan LinkState, 1), make(chan struct{})
	go func() {
		defer close(ended)
		r.Device("lo").FollowLink(ctx, func(_, now LinkState) {
			select {
			case known <- now:
			default:
			}
		}, func(int) {})
	}()
	select {
	case <-ended:
		t.Error("it gave up")
	case <-time.After(2 * resubscribe): // it has tried once or more
	}
	restore()
	select {
	case now := <-known:
		if now.Name != "lo" {
			t.Errorf("state %+v", now)
		}
	case <-time.After(time.Minute):
		t.Error("no state")
	}
	cancel()
	<-ended
}

// TestNeighbourEventLost checks that a neighbour is found whose notification the kernel has dropped because the socket
// was full.
func TestNeighbourEventLost(t *testing.T) {
	here, _ := wire(t)
	must(t, os.WriteFile("/proc/sys/net/ipv4/neigh/a0/mcast_solicit", []byte("1000"), 0)) // the kernel asks until the end of the test
	r := newResolver(t, "a0")
	r.patience = time.Minute
	link, err := here.LinkByName("a0")
	must(t, err)
	silent := neighbour{link.Attrs().Index, netip.MustParseAddr("10.77.0.9")}
	type result struct {
		mac [6]byte
		err error
	}
	found := make(chan result, 1)
	go func() {
		mac, _, err := r.neighbourMAC(silent)
		found <- result{mac, err}
	}()
	waits := func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.waiting[silent]) > 0
	}
	testenv.Until(t, "a look-up waits for the neighbour", waits)
	set := func(addr string, last byte) error {
		return here.NeighSet(&netlink.Neigh{
			LinkIndex: silent.iface, IP: net.ParseIP(addr), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, last},
		})
	}
	r.mu.Lock() // nobody reads events any more
	for i := 0; i < 5000 && err == nil; i++ {
		err = set("10.77.0.8", byte(i))
	}
	if err == nil {
		err = set("10.77.0.9", 7)
	}
	r.mu.Unlock()
	must(t, err)
	if got := <-found; got.err != nil || got.mac != [6]byte{2, 5: 7} {
		t.Errorf("%x, %v", got.mac, got.err)
	}
}

// TestRefreshAgain checks that the addresses of an interface become known though reading them failed after the last
// notification.
func TestRefreshAgain(t *testing.T) {
	here, _ := wire(t)
	must(t, os.WriteFile("/proc/sys/net/ipv6/conf/a0/disable_ipv6", []byte("1"), 0)) // IPv6 would notify of more later
	var fails atomic.Bool
	failed := make(chan struct{}, 1000)
	list := linkList
	linkList = func(h *netlink.Handle) ([]netlink.Link, error) {
		if fails.Load() {
			failed <- struct{}{}
			return nil, errors.New("for the test")
		}
		return list(h)
	}
	defer func() { linkList = list }()
	r := newResolver(t, "a0")
	link, err := here.LinkByName("a0")
	must(t, err)
	fails.Store(true)
	addr, err := netlink.ParseAddr("10.77.1.1/24")
	must(t, err)
	must(t, here.AddrAdd(link, addr))
	<-failed
	fails.Store(false)
	testenv.Until(t, "the device has the address", func() bool { return slices.Contains(r.Device("a0").Addrs(), netip.MustParseAddr("10.77.1.1")) })
}
