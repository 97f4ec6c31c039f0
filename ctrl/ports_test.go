package ctrl

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFreePortOfAllAddresses checks that port 0 yields a port that is free on each address to listen on, if there is one.
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
	const first, last = 40000, 40007
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", fmt.Appendf(nil, "%d %d", first, last), 0); err != nil {
		t.Fatal(err)
	}
	addrs := []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2")}
	cs := claims{files: new(pool), devices: devices{{Device: Device{Name: "lo", Addrs: func() []netip.Addr { return addrs }}}}}
	c := &claim{addr: netip.AddrPortFrom(netip.IPv6Unspecified(), 0), guard: make(map[netip.Addr]bool)}
	var taken []net.Listener
	for port := first; port <= last; port++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.2:%d", port))
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
	taken[5].Close()
	if err := cs.bind(c); err != nil || c.addr.Port() != first+5 || len(c.fds) != 2 {
		t.Errorf("%v, %d sockets, %v; want port %d", c.addr, len(c.fds), err, first+5)
	}
	cs.undo(c)
}

// TestPortInTimeWait checks that the error for a port that no program has, but a connection of the kernel in TIME-WAIT, says so:
// it would name a program in vain, which ss -l does not show.
func TestPortInTimeWait(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	peer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	here, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	here.Close() // first, so that TIME-WAIT is here
	if _, err := io.ReadAll(peer); err != nil {
		t.Fatal(err)
	}
	peer.Close()
	fd, _, err := bindGuard(l.Addr().(*net.TCPAddr).AddrPort(), 0, false)
	if err == nil {
		unix.Close(fd)
	}
	if e, ok := errors.AsType[*Error](err); !ok || e.Code != portInUse || !strings.Contains(e.Text, "TIME-WAIT (ss -tanp") {
		t.Errorf("%v", err)
	}
}
