package ctrl

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/mpa"
)

// routed is a resolver whose routes lead to 10.0.1.0/24 by eth1, and elsewhere by eth0, but for
// the host's own addresses, which end in 1.
type routed struct{ fakeResolver }

func (routed) Resolve(dst, src netip.Addr, device string) (dataplane.Hop, error) {
	h := dataplane.Hop{Src: addrA, MTU: 1500, Device: "eth0"}
	if netip.MustParsePrefix("10.0.1.0/24").Contains(dst) || device == "eth1" {
		h.Src, h.Device = netip.MustParseAddr("10.0.1.1"), "eth1"
	}
	if b := dst.AsSlice(); len(b) == 4 && b[3] == 1 {
		h = dataplane.Hop{Src: dst, MTU: 1500, Local: true}
	}
	if src.IsValid() {
		h.Src = src
	}
	return h, nil
}

// severalDevices is a harness of two devices, and of others.
func severalDevices(t *testing.T, others ...Device) (h *harness, steer [2]*fakeSteering) {
	t.Helper()
	h = &harness{t: t, e: newFakeEngine(), steer: &fakeSteering{}}
	var ds []Device
	for i, d := range []struct{ name, addr, local string }{{"eth0", "10.0.0.1", "fe80::a"}, {"eth1", "10.0.1.1", "fe80::b"}} {
		steer[i] = &fakeSteering{}
		ds = append(ds, Device{
			Name: d.name, MTU: 1500 * (i + 1), Steering: steer[i],
			Addrs:     func() []netip.Addr { return []netip.Addr{netip.MustParseAddr(d.addr)} },
			LinkLocal: func() []netip.Addr { return []netip.Addr{netip.MustParseAddr(d.local).WithZone(d.name)} },
		})
	}
	s, err := New(Config{}, Options{Resolver: routed{}, NoGuard: true, Devices: append(ds, others...)})
	if err != nil {
		t.Fatal(err)
	}
	h.Server = s
	s.now = func() clock.Time { return 1e9 }
	s.Bind(h.e)
	t.Cleanup(func() {
		s.Close()
		for i, st := range steer {
			if n := st.len(); n != 0 {
				t.Errorf("%d endpoints still claimed of device %d", n, i)
			}
		}
	})
	return h, steer
}

// TestDevices checks that a connection uses the device of its route, or the one that the
// client names, directly or by a zone.
func TestDevices(t *testing.T) {
	h, steer := severalDevices(t)
	c := h.hello(t)
	connect := func(remote, local, device string) *ctrlpb.Request {
		r := reqConnect(c.qp(), remote)
		b := r.GetConnect()
		b.Local, b.Device = local, device
		return r
	}
	for _, tt := range []struct{ remote, local, device, want string }{
		{"10.0.0.2:7174", "", "", "eth0"},
		{"10.0.1.2:7174", "", "", "eth1"},
		{"10.0.1.2:7175", "10.0.0.1", "", "eth1"},
		{"10.0.0.2:7175", "", "eth1", "eth1"},
		{"[fe80::2%eth1]:7176", "", "", "eth1"},
		{"[fe80::2]:7177", "", "eth1", "eth1"},
		{"[fe80::2]:7178", "fe80::b%eth1", "", "eth1"},
	} {
		c.ok(connect(tt.remote, tt.local, tt.device))
		h.e.await(t, "connect")
		remote := netip.MustParseAddrPort(tt.remote)
		id, _ := h.e.only(t, netip.AddrPortFrom(remote.Addr().WithZone(""), remote.Port()))
		if got := h.e.Device(id); got != tt.want {
			t.Errorf("%+v: by %s", tt, got)
		}
	}
	for _, tt := range []struct{ remote, local, device, want string }{
		{"10.0.0.2:7174", "", "eth2", "choose one of eth0, eth1"},
		{"[fe80::2]:7174", "", "", "name the interface"},
		{"[fe80::2%eth0]:7174", "", "eth1", "not a link-local address of the interface eth1"},
		{"[fe80::2%eth2]:7174", "", "", "only on eth0, eth1"},
		{"[fe80::2%eth0]:7174", "fe80::b%eth1", "", "not a link-local address of the interface eth1"},
	} {
		if text := c.fails(invalid, connect(tt.remote, tt.local, tt.device)); !strings.Contains(text, tt.want) {
			t.Errorf("%+v: %s", tt, text)
		}
	}
	for i, st := range steer { // frames for an address may come by both
		if !steers(st, "10.0.0.1") || !steers(st, "10.0.1.1") {
			t.Errorf("device %d does not steer all: %v", i, st.eps)
		}
	}

	listen := func(addr, device string, port uint32) *ctrlpb.Request {
		r := reqListen(addr, port)
		r.GetListen().Device = device
		return r
	}
	for i, tt := range []struct{ addr, device, want string }{
		{"", "", ""}, {"0.0.0.0", "", ""}, {"10.0.0.1", "", ""}, {"", "eth1", "eth1"}, {"10.0.1.1", "eth1", "eth1"},
		{"fe80::b%eth1", "", "eth1"}, {"fe80::a", "eth0", "eth0"},
	} {
		c.ok(listen(tt.addr, tt.device, uint32(8000+i)))
		h.e.mu.Lock()
		if got := h.e.on[dataplane.ListenerID(h.e.next)]; got != tt.want {
			t.Errorf("%+v: on %q", tt, got)
		}
		h.e.mu.Unlock()
	}
	c.fails(badAddress, listen("10.0.0.1", "eth1", 9000))
	c.fails(invalid, listen("fe80::a", "", 9000))
	if steers(steer[0], "fe80::b") || !steers(steer[1], "fe80::b") {
		t.Error("a link-local address is not of its interface alone")
	}

	st := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}}).GetStatus()
	if d := st.Devices; len(d) != 2 || d[1].Interface != "eth1" || d[1].Mtu != 3000 || d[1].Addresses[0] != "10.0.1.1" || st.Device.Interface != "eth0" {
		t.Errorf("status %v", st)
	}
}

// steers reports whether an endpoint of that address is claimed of s.
func steers(s *fakeSteering, addr string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for ep := range s.eps {
		if ep.Addr.IsValid() && ep.Addr.String() == addr {
			return true
		}
	}
	return false
}

// TestManyAddresses checks that a client is served if the interface has more addresses than fit in a reply.
func TestManyAddresses(t *testing.T) {
	var addrs []netip.Addr
	for a := netip.MustParseAddr("fd00:1111:2222:3333:4444:5555:6666:1000"); len(addrs) < 2000; a = a.Next() {
		addrs = append(addrs, a)
	}
	h := &harness{t: t, e: newFakeEngine(), steer: &fakeSteering{}}
	s, err := New(Config{}, Options{Resolver: fakeResolver{addrA}, NoGuard: true, Devices: []Device{
		{Name: "eth0", Steering: h.steer, Addrs: func() []netip.Addr { return addrs }},
	}})
	if err != nil {
		t.Fatal(err)
	}
	h.Server = s
	s.Bind(h.e)
	t.Cleanup(func() { s.Close() })
	c := h.hello(t)
	d := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}}).GetStatus().Device
	if n := len(d.Addresses); n != 512 || d.Addresses[n-1] != addrs[n-1].String() {
		t.Errorf("%d addresses", n)
	}
	c.ok(reqListen(addrs[len(addrs)-1].String(), 7174))
}

// TestUnplug checks that a device whose interface was removed opens nothing until it is
// back, and that the other device is not affected.
func TestUnplug(t *testing.T) {
	h, _ := severalDevices(t)
	c := h.hello(t)
	c.ok(reqListen("", 7174))
	q := c.qp()
	c.ok(reqConnect(q, "10.0.1.2:7174"))
	h.e.await(t, "connect")
	id, _ := h.e.only(t, netip.MustParseAddrPort("10.0.1.2:7174"))
	h.Unplug("eth1")
	why := h.e.unplugged["eth1"]
	if why == nil || h.e.unplugged["eth0"] != nil {
		t.Fatalf("unplugged %v", h.e.unplugged)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id, Err: why})
	if e := c.event().GetConnectFailed(); e.GetError().GetCode() != unreachable || e.Error.Text != printable.Error(why) {
		t.Errorf("event %v", e)
	}
	c.ok(reqConnect(c.qp(), "10.0.1.2:7174"))
	if e := c.event().GetConnectFailed(); e.GetError().GetText() != printable.Error(why) {
		t.Errorf("event %v", e)
	}
	if st := h.Status(); st.Devices[0].Down != "" || st.Devices[1].Down != printable.Error(why) || st.Detached != "" {
		t.Errorf("status %v", st)
	}
	p := &fakeProgram{}
	p.off.Store(true)
	h.devices[1].Program = p
	h.checkProgram(h.devices[1])
	if h.value(t, "ctrl.program_detachments") != 0 {
		t.Error("the program of an interface that is gone was taken for detached")
	}
	c.ok(reqListen("10.0.0.1", 7175))
	c.ok(reqConnect(c.qp(), "10.0.0.2:7174"))
	h.e.await(t, "connect")
	if err := h.Plug("eth1", 9000, nil); err != nil {
		t.Fatal(err)
	}
	c.ok(reqConnect(c.qp(), "10.0.1.2:7175"))
	h.e.await(t, "connect")
	if st := h.Status(); st.Devices[1].Down != "" || st.Devices[1].Mtu != 9000 {
		t.Errorf("status %v", st)
	}
}

// TestUnclaimAfterMove checks that a link-local address that has left its interface is
// unclaimed where it was claimed.
func TestUnclaimAfterMove(t *testing.T) {
	h, steer := severalDevices(t)
	ep := bpf.Endpoint{Proto: pkt.ProtoTCP, Addr: netip.MustParseAddr("fe80::b"), Port: 1}
	if err := h.devices.claim(ep); err != nil || steer[0].len() != 0 || steer[1].len() != 1 {
		t.Fatalf("%v: %v, %v", err, steer[0].eps, steer[1].eps)
	}
	h.devices[1].LinkLocal = nil
	if h.devices.unclaim(ep); steer[1].len() != 0 {
		t.Error("still claimed")
	}
}

// TestAddressOfAnotherDevice checks that a connection that came by one interface for an address of another keeps its
// steering when the other one's listener ends, as the servers of librdmacm do that take one connection.
func TestAddressOfAnotherDevice(t *testing.T) {
	h, steer := severalDevices(t)
	c := h.hello(t)
	var listens []uint32
	for _, device := range []string{"eth0", "eth1"} { // arrive finds the last one
		r := reqListen("", 7174)
		r.GetListen().Device = device
		listens = append(listens, c.ok(r).GetListen().Listen)
		if device == "eth0" {
			h.e.mu.Lock()
			clear(h.e.listens)
			h.e.mu.Unlock()
		}
	}
	p := h.arrive(t, "10.0.1.2:999", 7174, mpa.DefaultConfig()) // to 10.0.0.1, which is eth0's
	unlisten := func(l uint32) {
		t.Helper()
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
	}
	if unlisten(listens[0]); !steers(steer[1], "10.0.0.1") {
		t.Error("the connection is not steered any more")
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	if unlisten(listens[1]); steers(steer[1], "10.0.0.1") {
		t.Error("a connection that has ended is steered")
	}
}

// TestAddressInUse checks that an address that the host loses is steered until the last connection to it has ended: the
// kernel would reset them if it came back.
func TestAddressInUse(t *testing.T) {
	h, c := newClient(t, Config{})
	h.mu.Lock()
	addrs := []netip.Addr{addrA}
	h.devices[0].Addrs = func() []netip.Addr { return addrs }
	h.mu.Unlock()
	become := func(now ...netip.Addr) {
		h.mu.Lock()
		defer h.mu.Unlock()
		addrs = now
		h.claims.refresh(h.now())
	}
	check := func(when string, want bool) {
		t.Helper()
		h.steer.mu.Lock()
		defer h.steer.mu.Unlock()
		if slices.Contains(h.steer.addrs, addrA) != want {
			t.Errorf("%s: %v are steered", when, h.steer.addrs)
		}
	}
	listen := c.ok(reqListen("", 7174)).GetListen().Listen
	first := h.arrive(t, "10.0.0.2:999", 7174, mpa.DefaultConfig())
	become()
	check("two connections, one to come", true)
	second := h.arrive(t, "10.0.0.2:998", 7174, mpa.DefaultConfig())
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: first.id})
	check("one connection", true)
	become(addrA)
	become()
	check("after the address was back", true)
	h.advance(lostTime)
	check("when another host may have it", false)
	become()
	check("later", false)
	become(addrA)
	become()
	check("lost again", true)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: second.id})
	check("no connection", false)

	become(addrA)
	req := reqListen("", 7175)
	req.GetListen().Streaming = true
	stream := c.ok(req).GetListen().Listen
	lingering := h.arrive(t, "10.0.0.2:997", 7175, mpa.DefaultConfig())
	h.arrive(t, "10.0.0.2:996", 7174, mpa.DefaultConfig())
	become()
	conn := c.event().GetStreamReady().Conn
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn}}})
	for _, l := range []uint32{listen, stream} {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
	}
	check("a connection that sends its last data", true)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: lingering.id})
	check("nothing", false)
}

// TestRefreshFails checks that addresses and VLANs that could not be passed to the steering, as when there is no
// memory, are logged and passed a moment later: the kernel reports each change only once.
func TestRefreshFails(t *testing.T) {
	h, c := newClient(t, Config{})
	core, logs := observer.New(zap.WarnLevel)
	listen := reqListen("", 7174)
	listen.GetListen().Device = "eth9"
	c.ok(listen)
	more := netip.MustParseAddr("10.0.0.9")
	served := func() [3]bool {
		h.steer.mu.Lock()
		defer h.steer.mu.Unlock()
		return [3]bool{
			slices.Contains(h.steer.addrs, more), len(h.steer.vlans) == 1,
			h.steer.eps[bpf.Endpoint{Proto: pkt.ProtoTCP, Addr: more, Port: 7174}] == 1,
		}
	}
	fails := func(err error) {
		h.steer.mu.Lock()
		defer h.steer.mu.Unlock()
		h.steer.fails = err
	}
	fails(unix.ENOMEM)
	h.mu.Lock()
	h.log = zap.New(core)
	h.devices[0].Addrs = func() []netip.Addr { return []netip.Addr{addrA, more} }
	h.devices[0].VLANs = func() [][]uint16 { return [][]uint16{{7}} }
	h.claims.refresh(h.now())
	h.mu.Unlock()
	h.advance(2 * refreshRetry)
	if got := served(); got != [3]bool{} {
		t.Fatalf("served without memory: %v", got)
	}
	fails(nil)
	h.advance(2 * refreshRetry)
	if got := served(); got != [3]bool{true, true, true} {
		t.Errorf("the address, the VLAN and the listener are served: %v", got)
	}
	all := logs.FilterMessageSnippet("not yet served").All()
	if len(all) != 1 || !strings.Contains(fmt.Sprint(all[0].ContextMap()["error"]), "memory") {
		t.Errorf("logged: %v", all)
	}
	h.advance(2 * refreshRetry)
	if h.mu.Lock(); h.refreshAt != 0 {
		t.Error("the refresh is repeated after it has succeeded")
	}
	h.mu.Unlock()
}

// TestSamePortOnDevices checks that listeners on every address of different devices may have the same
// port, each for the addresses of its device, and that a connection within the host comes to the one
// that has the address.
func TestSamePortOnDevices(t *testing.T) {
	h, steer := severalDevices(t)
	c := h.hello(t)
	listen := func(addr, device string, port uint32) *ctrlpb.Request {
		r := reqListen(addr, port)
		r.GetListen().Device = device
		return r
	}
	c.ok(listen("", "eth1", 7174))
	if steers(steer[0], "10.0.0.1") || !steers(steer[0], "10.0.1.1") || steers(steer[0], "fe80::b") || !steers(steer[1], "fe80::b") {
		t.Errorf("a listener on eth1 steers %v and %v", steer[0].eps, steer[1].eps)
	}
	for _, r := range []*ctrlpb.Request{listen("", "eth1", 7174), listen("", "", 7174), listen("10.0.1.1", "", 7174), listen("::", "eth1", 7174)} {
		if text := c.fails(portInUse, r); !strings.Contains(text, "7174") {
			t.Errorf("%v: %s", r, text)
		}
	}
	c.ok(listen("10.0.0.1", "", 7174))
	c.fails(portInUse, listen("", "eth0", 7174))
	c.ok(listen("", "eth0", 7175))
	c.ok(listen("", "eth1", 7175))
	if got := c.ok(listen("", "eth0", 0)).GetListen().Address; got != "[::]:49152" {
		t.Errorf("the first free port of eth0: %s", got)
	}
	if got := c.ok(listen("", "eth1", 49152)).GetListen().Address; got != "[::]:49152" {
		t.Errorf("the same port of eth1: %s", got)
	}

	// An address that comes later belongs to the listeners of its device.
	sctp := listen("", "eth0", 7176)
	sctp.GetListen().Startup = &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP}
	c.ok(sctp)
	h.mu.Lock()
	h.devices[0].Addrs = func() []netip.Addr {
		return []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.9")}
	}
	h.claims.refresh(h.now())
	h.mu.Unlock()
	steer[1].mu.Lock()
	for _, proto := range []uint8{pkt.ProtoTCP, pkt.ProtoSCTP} {
		ep := bpf.Endpoint{Proto: proto, Addr: netip.MustParseAddr("10.0.0.9"), Port: 7176}
		if steer[1].eps[ep] != 1 {
			t.Errorf("%v is claimed %d times", ep, steer[1].eps[ep])
		}
	}
	steer[1].mu.Unlock()

	// Addresses that come and go do not fill the steering map.
	before := steer[1].len()
	h.mu.Lock()
	for i := range byte(3 * goneAddrs) {
		addr := netip.AddrFrom4([4]byte{10, 0, 2, i})
		h.devices[0].Addrs = func() []netip.Addr { return []netip.Addr{netip.MustParseAddr("10.0.0.1"), addr} }
		h.claims.refresh(h.now())
	}
	h.mu.Unlock()
	if n, most := steer[1].len()-before, 4*(goneAddrs+4); n > most {
		t.Errorf("%d endpoints more are steered after addresses came and went, at most %d are to stay", n, most)
	}

	for _, want := range []struct{ remote, device string }{{"10.0.0.1:7175", "eth0"}, {"10.0.1.1:7175", "eth1"}, {"127.0.0.1:7175", "eth0"}} {
		c.ok(reqConnect(c.qp(), want.remote))
		h.e.await(t, "connect")
		id, _ := h.e.only(t, netip.MustParseAddrPort(want.remote))
		if got := h.e.Device(id); got != want.device {
			t.Errorf("to %s: by %s", want.remote, got)
		}
	}
	h.mu.Lock()
	h.devices[1].down = unix.ENODEV
	h.mu.Unlock()
	c.ok(reqConnect(c.qp(), "10.0.1.1:7176"))
	h.e.await(t, "connect")
	if id, _ := h.e.only(t, netip.MustParseAddrPort("10.0.1.1:7176")); h.e.Device(id) != "eth0" {
		t.Errorf("to an interface that is gone: by %s", h.e.Device(id))
	}
}

// TestListTransports checks that the list of listeners says what each listens over.
func TestListTransports(t *testing.T) {
	all := []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	h, _ := severalDevices(t, Device{Name: "any", Sockets: true, MTU: 16384, Addrs: func() []netip.Addr { return all }})
	c := h.hello(t)
	tests := []struct {
		transport ctrlpb.Transport
		udp       bool
		want      string
	}{
		{ctrlpb.Transport_TRANSPORT_TCP, false, "tcp"},
		{ctrlpb.Transport_TRANSPORT_SCTP, false, "sctp"},
		{ctrlpb.Transport_TRANSPORT_SCTP, true, "sctp-udp"},
		{ctrlpb.Transport_TRANSPORT_SCTP_DRAFT, false, "sctp-draft"},
		{ctrlpb.Transport_TRANSPORT_SCTP_DRAFT, true, "sctp-draft-udp"},
		{ctrlpb.Transport_TRANSPORT_SOCKET, false, "socket"},
	}
	for i, tt := range tests {
		r := reqListen("", uint32(8000+i))
		r.GetListen().Startup = &ctrlpb.Startup{Transport: tt.transport, UdpEncapsulation: tt.udp}
		c.ok(r)
	}
	list := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListListens{ListListens: &ctrlpb.ListListens{}}}).GetListens().Listens
	if len(list) != len(tests) {
		t.Fatalf("%d listeners, not %d", len(list), len(tests))
	}
	for i, tt := range tests {
		if list[i].Transport != tt.want {
			t.Errorf("%s: %q, not %q", list[i].Address, list[i].Transport, tt.want)
		}
	}
}

// TestTransportSocket checks that listeners and connections use kernel sockets if they ask for them,
// and only then, and that an endpoint is either steered or a socket.
func TestTransportSocket(t *testing.T) {
	all := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.1.1"), netip.MustParseAddr("127.0.0.1")}
	h, steer := severalDevices(t, Device{Name: "any", Sockets: true, MTU: 16384, Addrs: func() []netip.Addr { return all }})
	c := h.hello(t)
	over := &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SOCKET}
	listen := func(addr string, port uint32, on string, s *ctrlpb.Startup) *ctrlpb.Request {
		r := reqListen(addr, port)
		r.GetListen().Device, r.GetListen().Startup = on, s
		return r
	}
	connect := func(remote, local string, s *ctrlpb.Startup) *ctrlpb.Request {
		r := reqConnect(c.qp(), remote)
		r.GetConnect().Local, r.GetConnect().Startup = local, s
		return r
	}
	for i, tt := range []struct {
		addr, on string
		startup  *ctrlpb.Startup
		want     string
		steered  int // endpoints of the first interface
	}{
		{"", "", nil, "", 1}, {"", "", over, "any", 0}, {"10.0.1.1", "", over, "any", 0}, {"127.0.0.1", "", over, "any", 0}, {"", "any", nil, "any", 0}, {"", "eth0", nil, "eth0", 2},
	} {
		before := steer[0].len()
		c.ok(listen(tt.addr, uint32(8000+i), tt.on, tt.startup))
		h.e.mu.Lock()
		if got := h.e.on[dataplane.ListenerID(h.e.next)]; got != tt.want {
			t.Errorf("%+v: on %q", tt, got)
		}
		h.e.mu.Unlock()
		if n := steer[0].len() - before; n != tt.steered {
			t.Errorf("%+v: %d endpoints are steered", tt, n)
		}
	}
	for _, r := range []*ctrlpb.Request{
		listen("", 8000, "", over), listen("10.0.0.1", 8000, "", over), listen("", 8001, "", nil), listen("10.0.0.1", 8001, "", nil),
		listen("", 8001, "eth1", nil), listen("10.0.1.1", 8002, "", nil), listen("", 8002, "eth1", nil),
	} {
		c.fails(portInUse, r)
	}
	for _, r := range []*ctrlpb.Request{listen("fe80::a", 9000, "", over), listen("fe80::a%eth0", 9000, "", over), connect("[fe80::2]:7174", "", over)} {
		if text := c.fails(badAddress, r); !strings.Contains(text, "no link-local addresses") {
			t.Errorf("refused for %q", text)
		}
	}
	c.ok(listen("10.0.0.1", 8002, "", nil)) // another address
	for _, tt := range []struct {
		remote, local string
		startup       *ctrlpb.Startup
		want          string
	}{
		{"10.0.0.2:7174", "", nil, "eth0"}, {"10.0.0.2:7175", "", over, "any"}, {"10.0.1.2:7176", "10.0.1.1:9000", over, "any"},
		{"127.0.0.1:7177", "", nil, "eth0"}, {"127.0.0.1:7178", "", over, "any"},
	} {
		before := steer[0].len()
		c.ok(connect(tt.remote, tt.local, tt.startup))
		h.e.await(t, "connect")
		id, _ := h.e.only(t, netip.MustParseAddrPort(tt.remote))
		if got := h.e.Device(id); got != tt.want {
			t.Errorf("%+v: by %s", tt, got)
		}
		if tt.want == "any" && steer[0].len() != before {
			t.Errorf("%+v: the endpoint is steered", tt)
		}
		h.mu.Lock()
		_, err := h.sessions[h.lastID].viewer().captureFilter(&ctrlpb.Capture{Qp: h.conns[id].qp.num})
		h.mu.Unlock()
		if errors.Is(err, errNoFrames) != (tt.want == "any") {
			t.Errorf("%+v: a capture: %v", tt, err)
		}
	}
	c.ok(connect("10.0.1.2:7179", "10.0.1.1:9000", nil))
	if e := c.event().GetConnectFailed(); e.GetError().GetCode() != portInUse {
		t.Errorf("from the port of a socket: %v", e)
	}
	for _, transport := range []ctrlpb.Transport{ctrlpb.Transport_TRANSPORT_SCTP, ctrlpb.Transport_TRANSPORT_SCTP_DRAFT} {
		r := reqConnect(c.qp(), "10.0.0.2:7180")
		r.GetConnect().Device, r.GetConnect().Startup = "any", &ctrlpb.Startup{Transport: transport}
		for _, r := range []*ctrlpb.Request{listen("", 8101, "any", &ctrlpb.Startup{Transport: transport}), r} {
			if text := c.fails(invalid, r); !strings.Contains(text, "SCTP needs AF_XDP") {
				t.Error(text)
			}
		}
	}
	if text := c.fails(invalid, listen("", 8100, "eth0", over)); !strings.Contains(text, "leave out eth0") {
		t.Error(text)
	}

	h.mu.Lock()
	h.devices[0].down, h.devices[1].down = unix.ENODEV, unix.ENODEV
	h.mu.Unlock()
	c.ok(listen("", 8101, "", over))
	c.fails(internal, listen("", 8102, "", nil))

	without, _ := severalDevices(t)
	if text := without.hello(t).fails(invalid, listen("", 8000, "", over)); !strings.Contains(text, "transport: both") {
		t.Error(text)
	}
}
