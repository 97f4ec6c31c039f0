package ctrl

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestCaptureLog checks that a client cannot write long lines into the log: the zone of an address has any length.
func TestCaptureLog(t *testing.T) {
	h := newHarness(t, Config{Allow: []Rule{{Admin: true}}})
	core, logs := observer.New(zap.InfoLevel)
	h.log = zap.New(core)
	c := h.hello(t)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{Address: "fe80::1%" + strings.Repeat("x", 4096)}}})
	all := logs.FilterMessage("capture begins").All()
	if len(all) != 1 {
		t.Fatalf("logged %v", all)
	}
	if a := all[0].ContextMap()["address"].(string); len(a) > 64 || !strings.HasPrefix(a, "fe80::1%x") {
		t.Errorf("%d bytes: %.100s", len(a), a)
	}
}

// TestCaptureCharged checks that the rings of a capture are charged as long as a worker may write to them, even after
// the client has left.
func TestCaptureCharged(t *testing.T) {
	h := newHarness(t, Config{Allow: []Rule{{Admin: true}}}) // only root is an administrator without a rule
	untap, goOn := make(chan struct{}), make(chan struct{})
	h.e.onUntap = func() { untap <- struct{}{}; <-goOn }
	c := h.hello(t)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{}}})
	h.mu.Lock()
	sess := h.sessions[h.lastID]
	h.mu.Unlock()
	c.c.Close()
	<-sess.out.quit
	<-untap
	h.mu.Lock()
	a := *h.account(uint32(os.Getuid()))
	h.mu.Unlock()
	if a[resCaptures] != 1 || a[resRings] == 0 {
		t.Errorf("%d captures and %d bytes are charged", a[resCaptures], a[resRings])
	}
	close(goOn)
	h.settled(t)
}

// TestCaptureUnread checks that frames in the socket of an ended capture are charged until the reader has read them
// or closed the socket.
func TestCaptureUnread(t *testing.T) {
	for _, leave := range []func(fd int){
		func(fd int) { _, _ = unix.Read(fd, make([]byte, 16)) },
		func(fd int) { _ = unix.Close(fd) },
	} {
		h := newHarness(t, Config{})
		fds := socketpair(t)
		if _, err := unix.Write(fds[0], []byte("frame")); err != nil {
			t.Fatal(err)
		}
		over := make(chan struct{})
		go func() { closeCapture(fds[0], h.done); close(over) }()
		if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fds[1]), Events: unix.POLLRDHUP}}, 60000); n != 1 || err != nil {
			t.Fatalf("no hang-up: %v", err) // it is shut down
		}
		select {
		case <-over:
			t.Error("closed with a frame unread")
		default:
		}
		leave(fds[1])
		<-over
	}
}

// TestCapturePortFreed checks that a capture of a connection sees no later connection from
// the same port, which another user may have.
func TestCapturePortFreed(t *testing.T) {
	h, c := newClient(t, Config{})
	qp := c.qp()
	p, _ := h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	flow := flowOf(p.c.local, p.c.remote)
	h.mu.Lock()
	match, err := h.sessions[h.lastID].viewer().captureFilter(&ctrlpb.Capture{Qp: qp})
	h.mu.Unlock()
	if err != nil || !match(&flow) {
		t.Fatalf("the connection is not captured: %v", err)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp, Abort: true}}})
	if match(&flow) {
		t.Error("a later connection is captured")
	}
}

// TestCaptureLimit checks the limit of captures of users, in which those of administrators do not count.
func TestCaptureLimit(t *testing.T) {
	const uid = 61008
	cfg := Config{Limits: Limits{Captures: maxCaptures + 1}, Allow: []Rule{{UIDs: []uint32{uid}}, {Admin: true}}}
	h := newHarness(t, cfg)
	admin, c := h.hello(t), h.helloAs(t, uid)
	h.Reload(cfg) // applies the rule to c
	qp := c.qp()
	h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	for range maxCaptures {
		admin.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{}}})
	}
	own := &ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{Qp: qp}}}
	for range maxCaptures {
		c.ok(own)
	}
	c.fails(busy, own)
}

// TestCaptureReload checks that a capture of an administrator, which may show frames of other users, ends when a new
// configuration makes it a user.
func TestCaptureReload(t *testing.T) {
	const uid = 61007
	h := newHarness(t, Config{})
	c := h.helloAs(t, uid)
	h.Reload(Config{Allow: []Rule{{UIDs: []uint32{uid}, Admin: true}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{}}})
	h.Reload(Config{Allow: []Rule{{UIDs: []uint32{uid}}}})
	capture := c.fds[len(c.fds)-1]
	if n, err := unix.Poll([]unix.PollFd{{Fd: int32(capture), Events: unix.POLLRDHUP}}, 60000); n != 1 || err != nil {
		t.Errorf("the capture does not end: %v", err)
	}
	c.pd() // the client stays
}

// TestCaptureWithin checks that a capture of a connection within the host, which has no frames, is refused.
func TestCaptureWithin(t *testing.T) {
	h, c := newClient(t, Config{})
	qp := c.qp()
	h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	h.mu.Lock()
	h.qps[qp].conn.within = true
	h.mu.Unlock()
	text := c.fails(badState, &ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{Qp: qp}}})
	if !strings.Contains(text, "both ends") {
		t.Error(text)
	}
}

// TestCaptureFilter checks which frames an administrator captures, and how much of them.
func TestCaptureFilter(t *testing.T) {
	h, _ := newClient(t, Config{Allow: []Rule{{Admin: true}}})
	h.mu.Lock()
	defer h.mu.Unlock()
	v := h.sessions[h.lastID].viewer()
	flow := flowOf(netip.AddrPortFrom(addrA, 5000), peerA)
	for _, tt := range []struct {
		addr string
		port uint32
		want bool
	}{
		{"10.0.0.1", 0, true}, {"10.0.0.2", 0, true}, {"::ffff:10.0.0.2", 0, true}, {"10.0.0.3", 0, false},
		{"", 5000, true}, {"", 7174, true}, {"", 5001, false}, {"", 65535, false},
		{"10.0.0.1", 7174, true}, {"10.0.0.1", 1, false}, {"10.0.0.3", 7174, false},
	} {
		f, err := v.captureFilter(&ctrlpb.Capture{Address: tt.addr, Port: tt.port})
		if err != nil || f(&flow) != tt.want {
			t.Errorf("address %q, port %d: %v; want %v", tt.addr, tt.port, err, tt.want)
		}
	}
	if f, err := v.captureFilter(&ctrlpb.Capture{}); f != nil || err != nil {
		t.Errorf("of everything: %v", err)
	}
	for _, r := range []*ctrlpb.Capture{{Address: "x"}, {Port: 65536}} {
		if _, err := v.captureFilter(r); toPB(err).GetCode() != cInvalid {
			t.Errorf("%v: %v", r, err)
		}
	}
	ds := devices{{Device: Device{MTU: 1500}}, {Device: Device{MTU: 9000}}}
	for want, snap := range map[uint32]int{0: 9064, 1: 14, 100: 100, 1 << 31: 9064} {
		if n := ds.snaplen(want); n != snap {
			t.Errorf("%d bytes: %d, want %d", want, n, snap)
		}
	}
	if n := (devices{{}}).snaplen(0); n != 16<<10 {
		t.Errorf("without MTU: %d", n)
	}
}

// TestCaptureQP checks that a capture of a queue pair has no frames of other connections.
func TestCaptureQP(t *testing.T) {
	h, c := newClient(t, Config{})
	p, qp, _, _ := h.establish(t, c)
	local := p.c.local
	h.mu.Lock()
	defer h.mu.Unlock()
	f, err := h.sessions[h.lastID].viewer().captureFilter(&ctrlpb.Capture{Qp: qp})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		local, remote netip.AddrPort
		want          bool
	}{
		{local, peerA, true},
		{local, netip.MustParseAddrPort("10.0.0.2:7175"), false},
		{netip.AddrPortFrom(addrA, local.Port()+1), peerA, false},
		{peerA, local, false},
	} {
		if flow := flowOf(tt.local, tt.remote); f(&flow) != tt.want {
			t.Errorf("from %v to %v: %v", tt.local, tt.remote, !tt.want)
		}
	}
}
