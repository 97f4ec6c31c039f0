package testenv

import (
	"context"
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

	queues int // 0 means one

	offloads bool // offloads stay enabled, as the kernel creates a veth
}

// Veth is a pair of namespaces joined by a veth pair.
type Veth struct{ A, B End }

var unique atomic.Uint32

// prefix begins the names of all namespaces. The process ID follows, so that leftovers of processes
// that no longer exist can be recognized.
const prefix = "iwt"

// NewVeth creates two namespaces joined by a veth pair with offloads disabled, and removes them
// when the test ends. It skips the test if it lacks the privileges.
func NewVeth(t testing.TB, mtu int) *Veth {
	t.Helper()
	return NewVethQueues(t, mtu, 1)
}

// Another joins the namespaces of v by one more veth pair, offloads off.
func (v *Veth) Another(t testing.TB) *Veth {
	t.Helper()
	n := unique.Add(1)
	w := &Veth{A: v.A, B: v.B}
	for i, e := range []*End{&w.A, &w.B} {
		e.Name, e.queues, e.offloads = fmt.Sprintf("veth%d", n), 0, false
		e.number(n, byte(i))
	}
	w.Restore(t)
	return w
}

// Restore makes the pair of v, with what it had, after one of its ends was removed.
func (v *Veth) Restore(t testing.TB) {
	t.Helper()
	join(t, &v.A, &v.B)
	bringUp(t, &v.A, &v.B)
}

// NewVethQueues is NewVeth with several queues per end.
func NewVethQueues(t testing.TB, mtu, queues int) *Veth {
	t.Helper()
	v := newVeth(t, mtu)
	v.A.queues = queues
	v.Restore(t)
	return v
}

// NewVethOffloads is NewVeth with the default offloads of a veth: the kernel's TCP leaves checksums
// partial and sends up to 64 KiB as one frame.
func NewVethOffloads(t testing.TB, mtu int) *Veth {
	t.Helper()
	v := newVeth(t, mtu)
	v.A.offloads, v.B.offloads = true, true
	v.Restore(t)
	return v
}

// NewBridged creates a Wire whose ends have offloads enabled. The bridge in the middle has none
// towards B, so the kernel segments there what A sends as one frame.
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

// Wire is two namespaces with one interface each, and a third between them. What A sends is
// received on MidA, and reaches MidB only if a program forwards it. See Impair.
type Wire struct {
	A, B       End
	Mid        *Namespace
	MidA, MidB string
}

// NewWire creates a Wire with offloads disabled, and removes it when the test ends.
func NewWire(t testing.TB, mtu int) *Wire {
	t.Helper()
	return newWire(t, mtu, false)
}

func newWire(t testing.TB, mtu int, offloads bool) *Wire {
	t.Helper()
	v := newVeth(t, mtu)
	w := &Wire{A: v.A, B: v.B, MidA: "mid-a", MidB: "mid-b"}
	w.A.offloads, w.B.offloads = offloads, offloads
	w.Mid = newNamespace(t, w.A.NS.Name[:len(w.A.NS.Name)-1]+"m")
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

// newVeth creates two namespaces, and assigns the addresses of the pair that is to join them.
func newVeth(t testing.TB, mtu int) *Veth {
	t.Helper()
	RequireRoot(t)
	removeLeftovers()
	n := unique.Add(1)
	end := func(i byte) End {
		e := End{
			NS:   newNamespace(t, fmt.Sprintf("%s%d-%d%c", prefix, os.Getpid(), n, 'a'+i)),
			Name: "veth0",
			MTU:  mtu,
		}
		e.number(n, i)
		return e
	}
	return &Veth{end(0), end(1)}
}

// number gives e the addresses of the i-th end of wire n.
func (e *End) number(n uint32, i byte) {
	e.Addr4 = netip.AddrFrom4([4]byte{10, 99, byte(n), i + 1})
	e.Addr6 = netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x99, 3: byte(n), 15: i + 1})
	e.Prefix4 = netip.PrefixFrom(e.Addr4, 24)
}

// join creates the veth pair between two ends.
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

// bringUp sets ends up and waits until they are operational.
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

// waitUp waits until the kernel transmits on the interface; it drops all frames until shortly after
// both ends are up. It must run in the namespace of e.
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

// setup configures an end. It must run in the namespace of e.
func (e *End) setup() error {
	// Disable duplicate address detection, so that IPv6 addresses are usable at once.
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
			continue // an end in the middle has no addresses
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
		if err := OffloadsOff(e.Name); err != nil {
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

// OffloadsOff makes the kernel neither merge frames of an interface nor leave segmentation, checksums or tags to it.
func OffloadsOff(name string) error {
	e, err := ethtool.NewEthtool()
	if err != nil {
		return err
	}
	defer e.Close()
	have, err := e.Features(name)
	if err != nil {
		return err
	}
	for f, on := range have {
		if on && (strings.HasPrefix(f, "tx-checksum") || strings.HasPrefix(f, "tx-vlan") || strings.Contains(f, "segmentation") ||
			strings.HasPrefix(f, "rx-gro") || f == "rx-lro") {
			_ = e.Change(name, map[string]bool{f: false}) // each on its own: kernels and drivers differ in what may change
		}
	}
	return nil
}

// newNamespace creates a named namespace without entering it.
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
	if errors.Is(err, os.ErrExist) { // left by an earlier process with our ID
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

// Do runs f on a thread in the namespace. Sockets that f creates stay in the namespace; goroutines
// that it starts do not run there.
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

// Run is Do for what must succeed.
func (n *Namespace) Run(t testing.TB, f func() error) {
	t.Helper()
	if err := n.Do(f); err != nil {
		t.Fatal(err)
	}
}

// Listen listens on a port of addr with the kernel's TCP until the test ends.
func (e *End) Listen(t testing.TB, addr netip.Addr) (l net.Listener) {
	t.Helper()
	e.NS.Run(t, func() (err error) {
		l, err = net.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
		return err
	})
	t.Cleanup(func() { l.Close() })
	return l
}

// Dial connects to an address with the kernel's TCP.
func (e *End) Dial(ctx context.Context, to string) (c net.Conn, err error) {
	err = e.NS.Do(func() (err error) {
		c, err = (&net.Dialer{Timeout: time.Minute}).DialContext(ctx, "tcp", to)
		return err
	})
	return c, err
}

// Command returns a command that runs in the namespace. It is killed when the thread that starts it
// exits, at the latest with the test process. Tests whose threads exit early, such as those of an
// engine's workers, must not rely on it.
func (n *Namespace) Command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command("ip", append([]string{"netns", "exec", n.Name, name}, args...)...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	return cmd
}

// IP runs ip in the namespace.
func (n *Namespace) IP(t testing.TB, args ...string) {
	t.Helper()
	if out, err := n.Command("ip", args...).CombinedOutput(); err != nil {
		t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// removeLeftovers deletes the namespaces of test processes that no longer exist.
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

// Route makes the namespace in the middle a router with interfaces of the given MTUs; the ends
// treat each other as neighbors. A packet larger than the MTU of the outgoing interface is
// fragmented or answered with an ICMP error. One larger than the MTU of the incoming interface is
// lost.
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
			// The router needs an address to answer neighbor requests and to send ICMP
			// errors from.
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
