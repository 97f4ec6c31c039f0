package system

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// twice is two hosts joined by two wires, with one daemon each that serves both.
type twice struct {
	a, b   *host
	v0, v1 *testenv.Veth
}

func newTwice(t *testing.T) *twice {
	t.Helper()
	testenv.RequireRoot(t)
	w := &twice{v0: testenv.NewVeth(t, 1500)}
	w.v1 = w.v0.Another(t)
	both := func(x, y *testenv.End) []string {
		return []string{"--interface", "", "--interfaces", x.Name + "," + y.Name}
	}
	w.a, w.b = newHost(t, &w.v0.A, both(&w.v0.A, &w.v1.A)...), newHost(t, &w.v0.B, both(&w.v0.B, &w.v1.B)...)
	return w
}

// devices returns the interfaces of the connections that h has.
func (h *host) devices() (all []string) {
	h.t.Helper()
	var qps []struct{ Device, State string }
	if err := json.Unmarshal([]byte(h.must("--json", "qp", "list")), &qps); err != nil {
		h.t.Fatal(err)
	}
	for _, q := range qps {
		if q.State == "RTS" {
			all = append(all, q.Device)
		}
	}
	return all
}

// remove removes the pair of which e is an end.
func remove(t *testing.T, e *testenv.End) {
	t.Helper()
	if err := e.NS.Do(func() error {
		l, err := netlink.LinkByName(e.Name)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}); err != nil {
		t.Fatal(err)
	}
}

// route makes, or with gone removes, routes in the namespace of e to addresses by e.
func route(t *testing.T, e *testenv.End, gone bool, to ...netip.Addr) {
	t.Helper()
	if err := e.NS.Do(func() error {
		l, err := netlink.LinkByName(e.Name)
		if err != nil {
			return err
		}
		for _, a := range to {
			r := &netlink.Route{LinkIndex: l.Attrs().Index, Scope: netlink.SCOPE_LINK, Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
			if gone {
				err = netlink.RouteDel(r)
			} else {
				err = netlink.RouteReplace(r)
			}
			if err != nil {
				return fmt.Errorf("route to %v: %w", a, err)
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// A daemon serves two interfaces: a connect takes the one that the route names, or that the
// client does, and a listener takes connections by both.
func TestTwoInterfaces(t *testing.T) {
	w := newTwice(t)
	a, b := w.a, w.b
	var st struct {
		Devices []struct {
			Interface string
			Addresses []string
			Mtu       int
		}
	}
	if err := json.Unmarshal([]byte(a.must("--json", "status")), &st); err != nil || len(st.Devices) != 2 {
		t.Fatalf("%+v, %v", st, err)
	}
	for i, e := range []*testenv.End{&w.v0.A, &w.v1.A} {
		if d := st.Devices[i]; d.Interface != e.Name || d.Mtu != 1500 || !strings.Contains(strings.Join(d.Addresses, " "), e.Addr4.String()) {
			t.Errorf("device %d: %+v", i, d)
		}
	}
	if out := a.must("status"); strings.Count(out, "interface ") != 2 {
		t.Errorf("status: %s", out)
	}

	ping := func(device string, args ...string) {
		t.Helper()
		p := testenv.Start(t, a.command(append([]string{"ping", "-c", "-v"}, args...)...))
		p.Expect("rdma-ping-3")
		for _, h := range []*host{a, b} {
			names := map[string]string{w.v0.A.Name: w.v0.A.Name, w.v1.A.Name: w.v1.A.Name}
			if got := h.devices(); len(got) != 1 || got[0] != names[device] {
				t.Errorf("%v: connections by %v; want %s", args, got, device)
			}
		}
		p.Signal(os.Interrupt)
		p.Wait(limit)
		waitFor(t, "the connection ends", func() bool { return len(a.devices())+len(b.devices()) == 0 })
	}
	for _, address := range [][]string{nil, {"-a", "0.0.0.0"}, {"-a", "::"}} {
		server := testenv.Start(t, b.command(append([]string{"ping", "-s", "-P"}, address...)...))
		server.Expect("listening on")
		ping(w.v0.A.Name, "-a", w.v0.B.Addr4.String())
		ping(w.v1.A.Name, "-a", w.v1.B.Addr4.String())
		ping(w.v1.A.Name, "-a", w.v1.B.Addr6.String())
		server.Signal(os.Interrupt)
		server.Wait(limit)
	}

	// By a route that names another interface than the address would.
	server := testenv.Start(t, b.command("ping", "-s", "-P"))
	server.Expect("listening on")
	route(t, &w.v1.A, false, w.v0.B.Addr4)
	route(t, &w.v1.B, false, w.v1.A.Addr4)
	ping(w.v1.A.Name, "-a", w.v0.B.Addr4.String())
	// A client that names the interface has it in spite of the route.
	ping(w.v0.A.Name, "-a", w.v0.B.Addr4.String(), "--device", w.v0.A.Name)
	route(t, &w.v1.A, true, w.v0.B.Addr4)

	// A listener by one interface.
	server.Signal(os.Interrupt)
	server.Wait(limit)
	server = testenv.Start(t, b.command("ping", "-s", "-P", "--device", w.v1.B.Name))
	server.Expect("listening on")
	ping(w.v1.A.Name, "-a", w.v1.B.Addr4.String())
	if code, out := a.ctl("ping", "-c", "-C", "1", "-a", w.v0.B.Addr4.String()); code == 0 || !strings.Contains(out, "refused") {
		t.Errorf("by another interface than the listener's: exit code %d: %s", code, out)
	}
	if code, out := a.ctl("ping", "-c", "-a", w.v0.B.Addr4.String(), "--device", "eth9"); code != 2 || !strings.Contains(out, w.v0.A.Name+", "+w.v1.A.Name) {
		t.Errorf("an interface that is not served: exit code %d: %s", code, out)
	}
	if code, out := a.ctl("ping", "-c", "-a", "fe80::2"); code == 0 || !strings.Contains(out, "name the interface") {
		t.Errorf("a link-local address without an interface: exit code %d: %s", code, out)
	}
}

// Routes change while files are copied over both wires: no byte is wrong. Then a wire is
// removed: only its copy ends, the other goes on, and it is served again when it is back.
func TestRoutesAndInterfacesChange(t *testing.T) {
	w := newTwice(t)
	a, b := w.a, w.b
	dir, there := t.TempDir(), t.TempDir()
	file, long := filepath.Join(dir, "f"), filepath.Join(dir, "long")
	sum := randomFile(t, file, 128<<20)
	longFile(t, long)
	serve := testenv.Start(t, b.command("serve", "--dir", there)) // on all, by the port alone
	serve.Expect("listening on")
	copying := func(from, name string, to *testenv.End) *testenv.Process {
		t.Helper()
		return testenv.Start(t, a.command("cp", from, to.Addr4.String()+":7176/"+name))
	}
	// paused starts a copy and stops it when it has begun, so that it does not end before another one begins.
	paused := func(from, name string, to *testenv.End) *testenv.Process {
		t.Helper()
		files := func() int { e, _ := os.ReadDir(there); return len(e) }
		before, p := files(), copying(from, name, to)
		waitFor(t, "the copy begins", func() bool { return files() > before })
		p.Signal(unix.SIGSTOP)
		return p
	}
	resume := func(both ...*testenv.Process) {
		t.Helper()
		waitFor(t, "both are connected", func() bool { return len(a.devices()) == 2 })
		for _, p := range both {
			p.Signal(unix.SIGCONT)
		}
	}

	first, second := paused(file, "0", &w.v0.B), paused(file, "1", &w.v1.B)
	resume(first, second)
	done := make(chan int, 2)
	for _, p := range []*testenv.Process{first, second} {
		go func() { done <- p.Wait(2 * limit) }()
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	flaps := 0
	for left := 2; left > 0; {
		select {
		case code := <-done:
			left--
			if code != 0 {
				t.Errorf("a copy: exit code %d: %s %s", code, first, second)
			}
		case <-tick.C:
			// Each address by the other wire, and back.
			route(t, &w.v1.A, flaps%2 == 1, w.v0.B.Addr4)
			route(t, &w.v0.A, flaps%2 == 1, w.v1.B.Addr4)
			route(t, &w.v1.B, flaps%2 == 1, w.v0.A.Addr4)
			flaps++
		}
	}
	if flaps%2 == 1 {
		route(t, &w.v1.A, true, w.v0.B.Addr4)
		route(t, &w.v0.A, true, w.v1.B.Addr4)
		route(t, &w.v1.B, true, w.v0.A.Addr4)
	}
	if flaps < 10 {
		t.Errorf("routes changed only %d times meanwhile", flaps)
	}
	checkFile(t, filepath.Join(there, "0"), sum)
	checkFile(t, filepath.Join(there, "1"), sum)

	other, victim := paused(file, "2", &w.v0.B), paused(long, "victim", &w.v1.B)
	resume(other, victim)
	remove(t, &w.v1.A)
	for _, h := range []*host{a, b} {
		h.daemon.Expect("was removed, and its connections were ended")
	}
	if code := victim.Wait(limit); code == 0 || !strings.Contains(victim.String(), w.v1.A.Name+" was removed") {
		t.Errorf("the copy over the interface that was removed: exit code %d: %s", code, victim)
	}
	if code, out := a.ctl("ping", "-c", "-a", w.v1.B.Addr4.String(), "--device", w.v1.A.Name); code == 0 || !strings.Contains(out, w.v1.A.Name+" was removed") {
		t.Errorf("a connect by it: exit code %d: %s", code, out)
	}
	if out := a.must("status"); !strings.Contains(out, "DOWN: ") {
		t.Errorf("status: %s", out)
	}
	if code := other.Wait(2 * limit); code != 0 {
		t.Errorf("the copy over the other interface: exit code %d: %s", code, other)
	}
	checkFile(t, filepath.Join(there, "2"), sum)

	w.v1.Restore(t)
	for _, h := range []*host{a, b} {
		h.daemon.Expect("is served again")
	}
	if code := copying(file, "3", &w.v1.B).Wait(2 * limit); code != 0 { // the listener is the same
		t.Errorf("a copy over the interface that is back: exit code %d", code)
	}
	checkFile(t, filepath.Join(there, "3"), sum)
	if out := a.must("status"); strings.Contains(out, "DOWN: ") {
		t.Errorf("status: %s", out)
	}
}
