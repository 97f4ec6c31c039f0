package system

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
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
	e.NS.Run(t, func() error {
		l, err := netlink.LinkByName(e.Name)
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	})
}

// route makes, or with gone removes, routes in the namespace of e to addresses by e.
func route(t *testing.T, e *testenv.End, gone bool, to ...netip.Addr) {
	t.Helper()
	e.NS.Run(t, func() error {
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
	})
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
		testenv.Until(t, "the connection ends", func() bool { return len(a.devices())+len(b.devices()) == 0 })
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
	// paused starts a copy and stops it when it has begun, so that it does not end before another one begins. A copy that has
	// ended before it could be stopped is repeated.
	paused := func(from, name string, to *testenv.End) *testenv.Process {
		t.Helper()
		files := func() int { e, _ := os.ReadDir(there); return len(e) }
		for {
			before, p := files(), copying(from, name, to)
			testenv.Until(t, "the copy begins", func() bool { return files() > before || ended(p) })
			if stop(t, p) {
				return p
			}
			if code := p.Wait(limit); code != 0 {
				t.Fatalf("a copy: exit code %d: %s", code, p)
			}
		}
	}
	resume := func(both ...*testenv.Process) {
		t.Helper()
		testenv.Until(t, "both are connected", func() bool { return len(a.devices()) == 2 })
		for _, p := range both {
			p.Signal(unix.SIGCONT)
		}
	}

	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	flaps := 0
	for round := 0; flaps < 10; round++ { // the copies of a round may end after fewer
		if round == 20 {
			t.Fatalf("routes changed only %d times during %d copies", flaps, 2*round)
		}
		first, second := paused(file, "0", &w.v0.B), paused(file, "1", &w.v1.B)
		resume(first, second)
		done := make(chan int, 2)
		for _, p := range []*testenv.Process{first, second} {
			go func() { done <- p.Wait(2 * limit) }()
		}
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
			flaps++
		}
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

// verifiedWriter writes blocks of 1 MiB to the memory of a peer, which compares each with what was sent.
type verifiedWriter struct {
	by   string // the interface
	n    atomic.Int64
	over chan error // why it ended
}

const writtenBlock = 1 << 20

// newVerifiedWriter connects from to the address of an end of the other host, by the interface of that end, and writes
// until the connection or ctx ends.
func newVerifiedWriter(ctx context.Context, t *testing.T, from *iwarp.Device, l *iwarp.Listener, to *testenv.End) *verifiedWriter {
	t.Helper()
	data := make([]byte, 2*writtenBlock)
	_, _ = rand.NewChaCha8([32]byte{byte(testenv.Seed(t))}).Read(data)
	block := func(i int64) []byte { return data[i*4099%writtenBlock:][:writtenBlock] }
	w := &verifiedWriter{by: to.Name, over: make(chan error, 2)}

	accepted := make(chan *iwarp.Conn, 1)
	go func() {
		c, err := l.Accept(ctx)
		if err != nil {
			w.over <- err
		}
		accepted <- c
	}()
	c, err := from.Dial(ctx, net.JoinHostPort(to.Addr4.String(), strconv.Itoa(int(l.Addr().Port()))), nil)
	if err != nil {
		t.Fatal(err)
	}
	peer := <-accepted
	if peer == nil {
		t.Fatal(<-w.over)
	}
	t.Cleanup(func() { c.Abort(); peer.Abort() })
	target, err := peer.Alloc(ctx, 2*writtenBlock, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	source, err := c.Alloc(ctx, 2*writtenBlock, iwarp.AccessLocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	verify := func() error {
		var b [8]byte
		for i := int64(0); ; i++ {
			if _, err := peer.Recv(ctx, b[:]); err != nil {
				return err
			}
			if !bytes.Equal(target.Bytes()[i%2*writtenBlock:][:writtenBlock], block(i)) {
				return fmt.Errorf("block %d arrived with wrong bytes", i)
			}
			w.n.Add(1)
			if err := peer.Send(ctx, b[:1]); err != nil {
				return err
			}
		}
	}
	write := func() error {
		var b [8]byte
		for i := int64(0); ; i++ {
			if i >= 2 { // until the peer has compared the block before in the same place
				if _, err := c.Recv(ctx, b[:]); err != nil {
					return err
				}
			}
			at := uint32(i % 2 * writtenBlock)
			from := source.Bytes()[at:][:writtenBlock]
			copy(from, block(i))
			if err := c.Write(ctx, target.Remote().At(at, writtenBlock), from); err != nil {
				return err
			}
			if err := c.Send(ctx, b[:1]); err != nil {
				return err
			}
		}
	}
	go func() { w.over <- verify() }()
	go func() { w.over <- write() }()
	return w
}

// ended returns why the writer has ended, or nil.
func (w *verifiedWriter) ended() error {
	select {
	case err := <-w.over:
		return err
	default:
		return nil
	}
}

// awaitBlocks waits until each writer has written n more blocks, unless one ends.
func awaitBlocks(t *testing.T, n int64, writers ...*verifiedWriter) {
	t.Helper()
	for _, w := range writers {
		end := w.n.Load() + n
		testenv.Until(t, fmt.Sprintf("%d more Writes by %s", n, w.by), func() bool {
			if err := w.ended(); err != nil {
				t.Fatalf("a connection by %s ended: %v", w.by, err)
			}
			return w.n.Load() >= end
		})
	}
}

// TestWritesWhileRoutesChange checks Writes of 1 MiB in both directions between two daemons of two interfaces each while
// routes change: no byte is wrong and no connection ends. When a route is lost with its interface only its
// connections end.
func TestWritesWhileRoutesChange(t *testing.T) {
	w := newTwice(t)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	hosts := []*host{w.a, w.b}
	ends := [][]*testenv.End{{&w.v0.A, &w.v1.A}, {&w.v0.B, &w.v1.B}}
	var devs []*iwarp.Device
	var listeners []*iwarp.Listener
	for _, h := range hosts {
		d, err := iwarp.Open(ctx, h.socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		l, err := d.Listen(ctx, ":7200", nil)
		if err != nil {
			t.Fatal(err)
		}
		devs, listeners = append(devs, d), append(listeners, l)
	}
	var by [2][]*verifiedWriter // by wire
	for i := range by {
		for from := range hosts {
			by[i] = append(by[i], newVerifiedWriter(ctx, t, devs[from], listeners[1-from], ends[1-from][i]))
		}
	}
	all := slices.Concat(by[:]...)
	awaitBlocks(t, 1, all...)

	const changes = 20
	for i := range changes {
		gone := i%2 == 1
		for side, e := range ends { // the address behind each wire by the other one, and back
			for wire := range e {
				route(t, e[1-wire], gone, ends[1-side][wire].Addr4)
			}
		}
		awaitBlocks(t, 2, all...)
	}

	remove(t, &w.v1.A)
	for _, x := range by[1] {
		for range 2 { // both ends
			select {
			case err := <-x.over:
				if strings.Contains(err.Error(), "wrong bytes") {
					t.Error(err)
				}
			case <-time.After(limit):
				t.Fatalf("a connection by %s, which was removed, goes on", x.by)
			}
		}
	}
	awaitBlocks(t, 20, by[0]...)
}
