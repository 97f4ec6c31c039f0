package ctrl

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFreePortOfAllAddresses checks that port 0 yields a port that is free on each address to listen on, if there is
// one, and that the daemon keeps some descriptors meanwhile, however many addresses there are.
func TestFreePortOfAllAddresses(t *testing.T) {
	testenv.RequireRoot(t)
	runtime.LockOSThread() // for good: the thread ends with the goroutine
	own, err := netns.New()
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ addrs, ports int }{{2, 8}, {300, 64}} {
		const first, free = 40000, 5
		ports := fmt.Appendf(nil, "%d %d", first, first+tt.ports-1)
		testenv.WriteFile(t, "/proc/sys/net/ipv4/ip_local_port_range", ports, 0)
		cs, addrs := loClaims(tt.addrs)
		c := wildcard(0)
		var taken []net.Listener
		for port := range tt.ports {
			l, err := net.Listen("tcp", netip.AddrPortFrom(addrs[tt.addrs-1], uint16(first+port)).String())
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			taken = append(taken, l)
		}
		if err := cs.bind(c); err == nil {
			t.Fatalf("port %d, although none is free", c.addr.Port())
		}
		cs.undo(c)
		taken[free].Close()
		restore := testenv.FewFiles(t, 2*tt.addrs+64)
		err := cs.bind(c)
		restore()
		if err != nil || c.addr.Port() != first+free || len(c.guards) != tt.addrs {
			t.Errorf("%d addresses: %v, %d sockets, %v; want port %d", tt.addrs, c.addr, len(c.guards), err, first+free)
		}
		cs.undo(c)
	}
}

// loClaims returns claims over an interface that has n addresses, and these.
func loClaims(n int) (claims, []netip.Addr) {
	a := netip.MustParseAddr("127.0.0.1")
	var addrs []netip.Addr
	for range n {
		addrs = append(addrs, a)
		a = a.Next()
	}
	lo := &device{Device: Device{Name: "lo", Addrs: func() []netip.Addr { return addrs }}}
	return claims{accounts: new(accounts), devices: devices{lo}}, addrs
}

// wildcard returns a claim of a port on all addresses.
func wildcard(port uint16) *claim {
	return &claim{addr: netip.AddrPortFrom(netip.IPv6Unspecified(), port), guards: make(map[netip.Addr]int)}
}

// TestBindBesideDeleted checks that an address that was deleted a moment ago, which has not been noticed, does not keep a
// listener from the others.
func TestBindBesideDeleted(t *testing.T) {
	for at := range 3 {
		for _, port := range []uint16{0, 40217} {
			cs, addrs := loClaims(3)
			addrs[at] = netip.MustParseAddr("203.0.113.9")
			c := wildcard(port)
			if err := cs.bind(c); err != nil || c.addr.Port() == 0 || len(c.guards) != 2 {
				t.Errorf("port %d, address %d deleted: %v, %d sockets, %v", port, at, c.addr, len(c.guards), err)
			}
			cs.undo(c)
		}
	}
}

// TestPortInTimeWaitOnAll checks that a port is free which the kernel has in TIME-WAIT on many addresses, after a
// server that listened on all.
func TestPortInTimeWaitOnAll(t *testing.T) {
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	cs, addrs := loClaims(2 * userLooks)
	for _, a := range addrs {
		peer, here := connectedTo(t, l, netip.AddrPortFrom(a, port).String())
		here.Close() // first, so that TIME-WAIT is here
		if _, err := io.ReadAll(peer); err != nil {
			t.Fatal(err)
		}
		peer.Close()
	}
	busy, here := connectedTo(t, l, netip.AddrPortFrom(addrs[userLooks], port).String())
	l.Close()
	c := wildcard(port)
	if err := cs.bind(c); err == nil {
		t.Error("the port of a connection is free")
	}
	cs.undo(c)
	_ = busy.(*net.TCPConn).SetLinger(0)
	busy.Close()
	here.Close()
	if err := cs.bind(c); err != nil || len(c.guards) != len(addrs) {
		t.Errorf("%d sockets: %v", len(c.guards), err)
	}
	cs.undo(c)
}

// TestPortInTimeWait checks that a port is free which the kernel has only in TIME-WAIT, after a server, and that no program of the kernel
// can listen on it then. The error of others says that there may be a TIME-WAIT: it would name a program in vain, which ss -l does not show.
func TestPortInTimeWait(t *testing.T) {
	for _, c := range []struct {
		name    string
		live    bool // the server has another connection, but does not listen any more
		private bool // its sockets do not have SO_REUSEADDR
		bound   bool // another socket is bound to the port
	}{{name: "server"}, {name: "connected", live: true}, {name: "private", private: true}, {name: "bound", bound: true}} {
		t.Run(c.name, func(t *testing.T) {
			cfg := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
				return raw.Control(func(fd uintptr) {
					if c.private {
						_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 0)
					}
				})
			}}
			l, err := cfg.Listen(t.Context(), "tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			peer, here := connected(t, l)
			if c.live {
				connected(t, l)
			}
			l.Close()
			here.Close() // first, so that TIME-WAIT is here
			if _, err := io.ReadAll(peer); err != nil {
				t.Fatal(err)
			}
			peer.Close()
			addr := l.Addr().(*net.TCPAddr).AddrPort()
			if c.bound {
				if release := kernel(t); release[0]*1000+release[1] < 6008 {
					testenv.Skip(t, "the kernel does not show sockets that are only bound (before Linux 6.8)")
				}
				fd, _, err := bindGuard(addr, 0, true)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
			}
			cs := claims{accounts: new(accounts)}
			guards := &claim{addr: addr, guards: make(map[netip.Addr]int)}
			err = cs.guard(guards, addr.Addr())
			defer cs.undo(guards)
			if e, ok := errors.AsType[*Error](err); c.live || c.private || c.bound {
				if !ok || e.Code != portInUse || !strings.Contains(e.Text, "TIME-WAIT (ss -tanp") {
					t.Errorf("%v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if again, err := net.Listen("tcp", addr.String()); !errors.Is(err, unix.EADDRINUSE) {
				t.Errorf("a program can listen on the port: %v", err)
				again.Close()
			}
		})
	}
}

// kernel returns the version of the kernel.
func kernel(t *testing.T) (release [2]int) {
	t.Helper()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &release[0], &release[1]); err != nil {
		t.Fatal(err)
	}
	return release
}

// TestPortLooks checks that a user who asks for ports in use does not keep others from a port in TIME-WAIT.
func TestPortLooks(t *testing.T) {
	l := testenv.Listen(t)
	peer, here := connected(t, l)
	l.Close()
	cs := claims{accounts: new(accounts)}
	addr := l.Addr().(*net.TCPAddr).AddrPort()
	guard := func(uid uint32) error {
		c := &claim{addr: addr, uid: uid, guards: make(map[netip.Addr]int)}
		defer cs.undo(c)
		return cs.guard(c, addr.Addr())
	}
	for range 100 {
		if guard(1000) == nil {
			t.Fatal("the port of a connection is free")
		}
	}
	here.Close() // first, so that TIME-WAIT is here
	if _, err := io.ReadAll(peer); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	if err := guard(1001); err != nil {
		t.Error(err)
	}
}

// connected returns both ends of a new connection to l, which the test closes.
func connected(t *testing.T, l net.Listener) (there, here net.Conn) {
	t.Helper()
	return connectedTo(t, l, l.Addr().String())
}

// connectedTo is connected to one of the addresses of l.
func connectedTo(t *testing.T, l net.Listener, addr string) (there, here net.Conn) {
	t.Helper()
	there, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { there.Close() })
	if here, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { here.Close() })
	return there, here
}

// TestPortBound checks that the port of a socket of the kernel is not free before that listens or connects: its frames would be
// steered away.
func TestPortBound(t *testing.T) {
	fd, port, err := bindGuard(netip.MustParseAddrPort("127.0.0.1:0"), 0, true)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	addr := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
	cs := claims{accounts: new(accounts)}
	guards := &claim{addr: addr, guards: make(map[netip.Addr]int)}
	before := openFDs(t)
	err = cs.guard(guards, addr.Addr())
	defer cs.undo(guards)
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
	if e, ok := errors.AsType[*Error](err); !ok || e.Code != portInUse {
		t.Errorf("%v", err)
	}
}
