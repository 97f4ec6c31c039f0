package testenv

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a named network namespace, as `ip netns` makes them.
type Namespace struct {
	Name   string
	handle netns.NsHandle
}

// End is one end of a veth pair, up and with addresses.
type End struct {
	NS      *Namespace
	Name    string
	Index   int
	MAC     net.HardwareAddr
	Addr4   netip.Addr // 10.x.y.1 or .2, /24
	Addr6   netip.Addr // fdxx::1 or ::2, /64
	MTU     int
	Prefix4 netip.Prefix

	queues int // 0: one

	offloads bool // they stay on, as the kernel makes a veth
}

// Veth is a pair of namespaces joined by a veth pair.
type Veth struct{ A, B End }

var unique atomic.Uint32

// prefix begins the names of all namespaces of all runs; the process id
// follows, so that leftovers of processes that are gone can be told.
const prefix = "iwt"

// NewVeth makes two namespaces with a veth pair between them, offloads off, and
// removes them when the test ends. It skips the test when that cannot be done.
func NewVeth(t testing.TB, mtu int) *Veth {
	t.Helper()
	return NewVethQueues(t, mtu, 1)
}

// NewVethQueues is NewVeth with ends of several queues each way.
func NewVethQueues(t testing.TB, mtu, queues int) *Veth {
	t.Helper()
	v := &Veth{}
	a, b := newEnds(t, mtu)
	a.queues = queues
	v.A, v.B = *a, *b
	join(t, &v.A, &v.B)
	bringUp(t, &v.A, &v.B)
	return v
}

// NewVethOffloads is NewVeth with the offloads that the kernel gives every veth: its TCP
// leaves checksums partial and sends up to 64 KiB as one frame.
func NewVethOffloads(t testing.TB, mtu int) *Veth {
	t.Helper()
	v := &Veth{}
	a, b := newEnds(t, mtu)
	a.offloads, b.offloads = true, true
	v.A, v.B = *a, *b
	join(t, &v.A, &v.B)
	bringUp(t, &v.A, &v.B)
	return v
}

// NewBridged makes a Wire whose ends have their offloads, and a kernel bridge in the
// middle that has none towards B: the kernel cuts up there what A sends as one frame.
func NewBridged(t testing.TB, mtu int) *Wire {
	t.Helper()
	w := newWire(t, mtu, true)
	if err := w.Mid.Do(func() error {
		br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", MTU: mtu}}
		if err := netlink.LinkAdd(br); err != nil {
			return err
		}
		for _, name := range []string{w.MidA, w.MidB} {
			l, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetMaster(l, br); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(br)
	}); err != nil {
		Skip(t, "a bridge: %v", err)
	}
	return w
}

// Wire is two namespaces with an interface each, and a third between them: what
// A sends comes out at MidA, and nothing gets from there to MidB but by a
// program that carries it. See Impair.
type Wire struct {
	A, B       End
	Mid        *Namespace
	MidA, MidB string
}

// NewWire makes a Wire, offloads off, and removes it when the test ends.
func NewWire(t testing.TB, mtu int) *Wire {
	t.Helper()
	return newWire(t, mtu, false)
}

func newWire(t testing.TB, mtu int, offloads bool) *Wire {
	t.Helper()
	w := &Wire{MidA: "mid-a", MidB: "mid-b"}
	a, b := newEnds(t, mtu)
	a.offloads, b.offloads = offloads, offloads
	w.A, w.B = *a, *b
	w.Mid = newNamespace(t, a.NS.Name[:len(a.NS.Name)-1]+"m")
	ma := &End{NS: w.Mid, Name: w.MidA, MTU: mtu, offloads: offloads}
	mb := &End{NS: w.Mid, Name: w.MidB, MTU: mtu}
	// The namespace in the middle has no addresses and sends nothing itself.
	if err := w.Mid.Do(func() error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", []byte("1"), 0)
	}); err != nil && !os.IsNotExist(err) {
		t.Fatalf("testenv: %v", err)
	}
	join(t, &w.A, ma)
	join(t, mb, &w.B)
	bringUp(t, &w.A, &w.B, ma, mb)
	return w
}

// newEnds makes two namespaces, and says which addresses go where.
func newEnds(t testing.TB, mtu int) (a, b *End) {
	t.Helper()
	RequireRoot(t)
	removeLeftovers()
	n := unique.Add(1)
	end := func(i byte) *End {
		e := &End{
			NS:    newNamespace(t, fmt.Sprintf("%s%d-%d%c", prefix, os.Getpid(), n, 'a'+i)),
			Name:  "veth0",
			MTU:   mtu,
			Addr4: netip.AddrFrom4([4]byte{10, 99, byte(n), i + 1}),
			Addr6: netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x99, 3: byte(n), 15: i + 1}),
		}
		e.Prefix4 = netip.PrefixFrom(e.Addr4, 24)
		return e
	}
	return end(0), end(1)
}

// join makes the veth pair of two ends.
func join(t testing.TB, a, b *End) {
	t.Helper()
	n := max(a.queues, 1)
	if err := a.NS.Do(func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs:       netlink.LinkAttrs{Name: a.Name, MTU: a.MTU, NumTxQueues: n, NumRxQueues: n},
			PeerName:        b.Name,
			PeerNamespace:   netlink.NsFd(int(b.NS.handle)),
			PeerMTU:         uint32(b.MTU),
			PeerNumTxQueues: uint32(n),
			PeerNumRxQueues: uint32(n),
		})
	}); err != nil {
		t.Fatalf("testenv: make a veth pair: %v", err)
	}
}

// bringUp brings ends up and waits until they are.
func bringUp(t testing.TB, ends ...*End) {
	t.Helper()
	for _, do := range []func(*End) error{(*End).setup, (*End).waitUp} {
		for _, e := range ends {
			if err := e.NS.Do(func() error { return do(e) }); err != nil {
				t.Fatalf("testenv: %s in %s: %v", e.Name, e.NS.Name, err)
			}
		}
	}
}

// waitUp waits until the kernel sends on the interface: it drops everything
// until some time after both ends are set up. It runs in its namespace.
func (e *End) waitUp() error {
	for began := time.Now(); time.Since(began) < patience; time.Sleep(time.Millisecond) {
		l, err := netlink.LinkByName(e.Name)
		if err != nil {
			return err
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
	}
	return errors.New("does not come up")
}

// setup brings an end up. It runs in its namespace.
func (e *End) setup() error {
	// No duplicate address detection: an IPv6 address is usable at once.
	for _, f := range []string{"all", "default", e.Name} {
		_ = os.WriteFile("/proc/sys/net/ipv6/conf/"+f+"/accept_dad", []byte("0"), 0)
	}
	l, err := netlink.LinkByName(e.Name)
	if err != nil {
		return err
	}
	e.Index = l.Attrs().Index
	e.MAC = l.Attrs().HardwareAddr
	for _, p := range []netip.Prefix{netip.PrefixFrom(e.Addr4, 24), netip.PrefixFrom(e.Addr6, 64)} {
		if !p.Addr().IsValid() {
			continue // an end in the middle has none
		}
		a := &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
		if p.Addr().Is6() {
			a.Flags = 0x02 // IFA_F_NODAD
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %v: %w", p, err)
		}
	}
	if !e.offloads {
		if err := offloadsOff(e.Name); err != nil {
			return err
		}
	}
	if lo, err := netlink.LinkByName("lo"); err == nil {
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(l)
}

// offloadsOff makes the kernel send whole frames with whole checksums: without
// it a veth's frames are neither.
func offloadsOff(name string) error {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return err
	}
	defer e.Close()
	have, err := e.Features(name)
	if err != nil {
		return err
	}
	off := map[string]bool{}
	for f, on := range have {
		if on && (strings.HasPrefix(f, "tx-checksum") || strings.HasPrefix(f, "tx-vlan") || strings.Contains(f, "segmentation") || strings.HasPrefix(f, "rx-gro")) {
			off[f] = false
		}
	}
	// Some bits are fixed on some kernels: each is tried by itself.
	for f := range off {
		_ = e.Change(name, map[string]bool{f: false})
	}
	return nil
}

// newNamespace makes a named namespace without leaving the current one.
func newNamespace(t testing.TB, name string) *Namespace {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	old, err := netns.Get()
	if err != nil {
		Skip(t, "network namespaces: %v", err)
	}
	defer old.Close()
	h, err := netns.NewNamed(name)
	if errors.Is(err, os.ErrExist) { // of a process that is gone and had our id
		_ = netns.DeleteNamed(name)
		h, err = netns.NewNamed(name)
	}
	if err != nil {
		Skip(t, "make network namespace %s: %v", name, err)
	}
	if err := netns.Set(old); err != nil {
		panic(fmt.Sprintf("testenv: cannot go back to the first network namespace: %v", err))
	}
	t.Cleanup(func() {
		_ = h.Close()
		if err := netns.DeleteNamed(name); err != nil {
			t.Errorf("testenv: delete network namespace %s: %v", name, err)
		}
	})
	return &Namespace{Name: name, handle: h}
}

// Do runs f on a thread that is in the namespace. Sockets that f makes stay
// there; goroutines that it starts do not.
func (n *Namespace) Do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	old, err := netns.Get()
	if err != nil {
		return err
	}
	defer old.Close()
	if err := netns.Set(n.handle); err != nil {
		return err
	}
	defer func() {
		if err := netns.Set(old); err != nil {
			panic(fmt.Sprintf("testenv: cannot go back to the first network namespace: %v", err))
		}
	}()
	return f()
}

// Command returns a command that runs in the namespace, and ends with the test's
// process at the latest: with its thread, to be exact, so that a test with
// threads that end before it (an engine's workers do) must not rely on it.
func (n *Namespace) Command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command("ip", append([]string{"netns", "exec", n.Name, name}, args...)...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// removeLeftovers deletes namespaces of test processes that are gone.
func removeLeftovers() {
	entries, err := os.ReadDir("/run/netns")
	if err != nil {
		return
	}
	for _, e := range entries {
		rest, ok := strings.CutPrefix(e.Name(), prefix)
		if !ok {
			continue
		}
		pid, _, ok := strings.Cut(rest, "-")
		if _, err := strconv.Atoi(pid); !ok || err != nil {
			continue
		}
		if _, err := os.Stat("/proc/" + pid); os.IsNotExist(err) {
			_ = netns.DeleteNamed(e.Name())
		}
	}
}

// Route makes the namespace in the middle a router, as the ends take each other
// for neighbours, with interfaces of the given MTUs. A packet that comes by one and
// is larger than the other's it cuts, or refuses with an ICMP error. One that is
// larger than that of the interface it comes by is lost.
func (w *Wire) Route(t testing.TB, mtuA, mtuB int) {
	t.Helper()
	if err := w.Mid.Do(func() error {
		for name, v := range map[string]string{
			"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1",
			"net/ipv6/conf/" + w.MidA + "/disable_ipv6": "0", "net/ipv6/conf/" + w.MidB + "/disable_ipv6": "0",
			"net/ipv4/conf/" + w.MidA + "/proxy_arp": "1", "net/ipv4/conf/" + w.MidB + "/proxy_arp": "1",
			"net/ipv6/conf/" + w.MidA + "/proxy_ndp": "1", "net/ipv6/conf/" + w.MidB + "/proxy_ndp": "1",
			"net/ipv4/conf/" + w.MidA + "/send_redirects": "0", "net/ipv4/conf/" + w.MidB + "/send_redirects": "0",
		} {
			if err := os.WriteFile("/proc/sys/"+name, []byte(v), 0); err != nil {
				return err
			}
		}
		for _, side := range []struct {
			name      string
			mtu       int
			end, peer *End
		}{{w.MidA, mtuA, &w.A, &w.B}, {w.MidB, mtuB, &w.B, &w.A}} {
			l, err := netlink.LinkByName(side.name)
			if err != nil {
				return err
			}
			if err := netlink.LinkSetMTU(l, side.mtu); err != nil {
				return err
			}
			// An address of its own, to answer neighbours and to send errors from.
			for _, a := range []string{"192.0.2.1/32", "fd98::1/128"} {
				addr, err := netlink.ParseAddr(a)
				if err != nil {
					return err
				}
				addr.Flags |= unix.IFA_F_NODAD
				if err := netlink.AddrAdd(l, addr); err != nil {
					return fmt.Errorf("address %s: %w", a, err)
				}
			}
			for _, a := range []netip.Addr{side.end.Addr4, side.end.Addr6} {
				r := &netlink.Route{LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
				if err := netlink.RouteReplace(r); err != nil {
					return fmt.Errorf("route to %v: %w", a, err)
				}
			}
			proxy := &netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_INET6, Flags: netlink.NTF_PROXY, IP: side.peer.Addr6.AsSlice()}
			if err := netlink.NeighAdd(proxy); err != nil {
				return fmt.Errorf("proxy for %v: %w", side.peer.Addr6, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatalf("testenv: router: %v", err)
	}
}
