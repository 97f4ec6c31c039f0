package ctrl

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestDescriptors checks that the daemon keeps no descriptor of what it has mapped, except the one that wakes the
// client of a completion queue.
func TestDescriptors(t *testing.T) {
	h, c := newClient(t, Config{})
	pd, fd := c.pd(), memfd(t, 4096)
	keeps := func(what string, want int, do func()) {
		t.Helper()
		seqpacket.CloseAll(c.fds)
		c.fds = nil
		before := openFDs(t)
		do()
		seqpacket.CloseAll(c.fds)
		c.fds = nil
		// The daemon may close its copies after we have received ours.
		testenv.Until(t, fmt.Sprintf("%s: %d descriptors more are open", what, want), func() bool { return openFDs(t) == before+want })
	}
	var cq uint32
	keeps("completion queue", 1, func() { cq = c.cq() })
	var ch uint32
	keeps("channel", 1, func() {
		ch = c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}).GetChannel().Channel
	})
	keeps("completion queue on it", 0, func() {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 16, Channel: ch}}})
	})
	keeps("resizing it", 0, func() {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ResizeCq{ResizeCq: &ctrlpb.ResizeCQ{Cq: cq, Depth: 64}}})
	})
	keeps("queue pair", 0, func() { c.ok(reqQP(pd, cq)) })
	keeps("shared receive queue", 0, func() {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: pd, Depth: 8, MaxSge: 1}}})
	})
	keeps("memory region", 0, func() { c.ok(reqMR(pd, 4096), fd) })
	keeps("client", 3, func() { c = h.hello(t) }) // the two ends of its socket, and the worker's wake-up descriptor for it
	keeps("near memory", 1, func() { c.ok(reqAttach(), fd) })
	keeps("far memory", 2, func() { // and what wakes its mover
		mem, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(mem)
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}, mem)
	})
	if n := h.files.per[resClients]; n != 2+1+2 {
		t.Errorf("%d descriptors of a client are counted", n)
	}
}

// TestNoDescriptors checks that a daemon that has run out of descriptors reports it and recovers when it can open
// files again.
func TestNoDescriptors(t *testing.T) {
	h, c := newClient(t, Config{})
	cq, fd := c.cq(), memfd(t, 4096)
	pd := c.pd() // its reply shows that those of the queue are closed
	restore := testenv.FewFiles(t, 0)
	for what, text := range map[string]string{
		"queue pair":       c.fails(internal, reqQP(pd, cq)),
		"completion queue": c.fails(internal, &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 4}}}),
		"memory region":    c.fails(internal, reqMR(pd, 4096), fd),
	} {
		if !strings.Contains(text, "too many open files") || !strings.Contains(text, "LimitNOFILE") {
			t.Errorf("%s: %q", what, text)
		}
	}
	restore()
	if st := h.Status(); st.Qps != 0 || st.Cqs != 1 || st.Mrs != 0 || st.Registered != 0 {
		t.Errorf("status %v", st)
	}
	c.ok(reqQP(pd, cq))
	c.ok(reqMR(pd, 4096), fd)
}

// TestAcceptNoDescriptors checks that a daemon that has run out of descriptors logs it once, serves its existing
// clients, and accepts waiting ones when it can.
func TestAcceptNoDescriptors(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "sock")
	h := newHarness(t, Config{Socket: sock})
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	if err := h.Listen(); err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- h.Serve(t.Context()) }()
	old := helloOn(t, sock)
	old.pd() // its reply shows that the daemon has closed its copies of what it sent
	var waiting []int
	for range 3 {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		waiting = append(waiting, fd)
	}
	restore := testenv.FewFiles(t, 0)
	for _, fd := range waiting {
		if err := unix.Connect(fd, &unix.SockaddrUnix{Name: sock}); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Until(t, "a line is logged", func() bool { return logs.Len() != 0 })
	old.pd()
	restore()
	for _, fd := range waiting {
		conn, err := seqpacket.FromFD(fd)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		c := &tclient{t: t, c: conn}
		defer func() { seqpacket.CloseAll(c.fds) }()
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	}
	if all := logs.TakeAll(); len(all) != 1 || all[0].Message != "clients not accepted" || !strings.Contains(all[0].ContextMap()["error"].(string), "LimitNOFILE") {
		t.Errorf("logged %v", all)
	}
	h.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestAcceptError checks that a client that cannot be accepted, for whatever reason, does not end the daemon with the
// connections of all others.
func TestAcceptError(t *testing.T) {
	sock := filepath.Join(t.TempDir(), "sock")
	h := newHarness(t, Config{Socket: sock})
	core, logs := observer.New(zap.WarnLevel)
	h.log = zap.New(core)
	if err := h.Listen(); err != nil {
		t.Fatal(err)
	}
	l := h.sockets[0].UnixListener
	if err := l.SetDeadline(time.Unix(1, 0)); err != nil { // an error as good as any
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- h.Serve(t.Context()) }()
	testenv.Until(t, "the log says that clients are not accepted", func() bool {
		select {
		case err := <-served:
			t.Fatalf("the server ended: %v", err)
		default:
		}
		return logs.FilterMessage("clients not accepted").Len() != 0
	})
	if err := l.SetDeadline(time.Time{}); err != nil {
		t.Fatal(err)
	}
	helloOn(t, sock)
	h.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// TestPoolsOfUsers checks that users who take as many descriptors or mappings as their quotas allow leave
// some for the client of the next user, however many they are.
func TestPoolsOfUsers(t *testing.T) {
	const most, users = 2000, 20
	for _, tt := range []struct {
		pool func(h *harness) *pool
		r    resource
		make func(c *tclient, pd uint32) *ctrlpb.Error
		want string
	}{
		{func(h *harness) *pool { return &h.files }, resChannels,
			func(c *tclient, _ uint32) *ctrlpb.Error { return c.do(reqChannel()).Error }, "raise LimitNOFILE"},
		{func(h *harness) *pool { return &h.maps }, resMRs,
			func(c *tclient, pd uint32) *ctrlpb.Error { return c.do(reqMR(pd, 4096), memfd(t, 4096)).Error }, "vm.max_map_count"},
	} {
		h := newHarness(t, Config{})
		p := tt.pool(h)
		h.mu.Lock()
		p.most = most
		h.mu.Unlock()
		for uid := range uint32(users) {
			c := h.helloAs(t, 1000+uid)
			pd := c.pd()
			for n := 0; ; n++ {
				if text := tt.make(c, pd).GetText(); strings.Contains(text, tt.want) {
					break
				} else if text != "" || n > most {
					t.Fatalf("%s %d: %q", p.noun, n, text)
				}
				seqpacket.CloseAll(c.fds)
				c.fds = nil
			}
		}
		c := h.helloAs(t, 999)
		c.cq()
		h.mu.Lock()
		used, first := p.used+p.extra, h.account(1000)[tt.r]
		h.mu.Unlock()
		if used > most || first < most/2 {
			t.Errorf("%d %s are used, the first user has %d", used, p.noun, first)
		}
		c.c.Close()
	}
}

// TestGuardsCounted checks that the guard sockets of a listener are counted, one for each address, and that those which
// connections keep after it are counted too.
func TestGuardsCounted(t *testing.T) {
	var addrs []netip.Addr
	for i := range byte(20) {
		addrs = append(addrs, netip.AddrFrom4([4]byte{127, 0, 0, 1 + i}))
	}
	h := newHarness(t, Config{})
	h.mu.Lock()
	h.claims.noGuard = false
	h.devices[0].Addrs = func() []netip.Addr { return addrs }
	h.mu.Unlock()
	c := h.hello(t)
	counted := func() int { // without those of the reply to Hello, which count until the server sees that they were read
		h.mu.Lock()
		defer h.mu.Unlock()
		out := &h.sessions[1].out
		out.mu.Lock()
		defer out.mu.Unlock()
		return int(h.files.used+h.files.extra) - out.fds
	}
	before := counted()
	check := func(what string, want int) {
		t.Helper()
		if got := counted() - before; got != want {
			t.Errorf("%s: %d descriptors are counted, want %d", what, got, want)
		}
	}
	listen := func(port uint32) *ctrlpb.ListenReply {
		t.Helper()
		req := reqListen("", port)
		req.GetListen().Streaming = true
		return c.ok(req).GetListen()
	}
	unlisten := func(l *ctrlpb.ListenReply) {
		t.Helper()
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l.Listen}}})
	}
	l := listen(0)
	check("listener", len(addrs))
	h.mu.Lock()
	addrs = append(addrs, netip.AddrFrom4([4]byte{127, 0, 1, 1}))
	h.claims.refresh(h.now())
	h.mu.Unlock()
	check("listener after an address came", len(addrs))
	h.mu.Lock()
	kept := addrs
	for i := range byte(2 * goneAddrs) {
		addrs = append(kept[:len(kept):len(kept)], netip.AddrFrom4([4]byte{127, 0, 2, i}))
		h.claims.refresh(h.now())
	}
	n := len(h.claims.byAddr[claimKey{netip.MustParseAddrPort(l.Address), nil}].guards)
	h.mu.Unlock()
	check("listener after addresses came and went", n)
	if most := len(addrs) + goneAddrs; n > most {
		t.Errorf("%d guards after addresses came and went, at most %d are to stay", n, most)
	}
	unlisten(l)
	check("no listener", 0)

	l = listen(0)
	port := netip.MustParseAddrPort(l.Address).Port()
	h.arrive(t, "127.0.0.99:7000", port, mpa.DefaultConfig())
	conn := c.event().GetStreamReady().Conn
	unlisten(l)
	check("connection after its listener", len(addrs))
	l = listen(uint32(port))
	check("listener on the port of the connection", len(addrs))
	unlisten(l)
	check("connection after both listeners", len(addrs))
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn, Abort: true}}})
	check("no connection", 0)

	h.mu.Lock()
	h.files.most = h.files.used + h.files.extra + uint64(len(addrs)) - 1
	h.mu.Unlock()
	open := openFDs(t)
	c.fails(cQuota, reqListen("", 0))
	check("refused listener", 0)
	if now := openFDs(t); now != open {
		t.Errorf("%d descriptors are open, %d were before", now, open)
	}
}

// TestSocketsCounted checks that the kernel sockets on which the workers listen are counted.
func TestSocketsCounted(t *testing.T) {
	const workers = 5
	var queues []dataplane.Queue
	for range workers {
		socks, err := dataplane.NewSockets(0)
		if err != nil {
			t.Fatal(err)
		}
		defer socks.Close()
		queues = append(queues, dataplane.Queue{Link: socks, Device: hostnet.AnyInterface, CPU: -1})
	}
	s, err := New(Config{}, Options{Resolver: hostnet.Sockets{}, Devices: []Device{{Name: hostnet.AnyInterface, Sockets: true}}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := dataplane.New(dataplane.Config{OnEvent: s.OnEvent}, queues, hostnet.Sockets{})
	if err != nil {
		t.Fatal(err)
	}
	s.Bind(e)
	e.Start()
	defer e.Stop()
	defer s.Close()
	c := (&harness{Server: s}).hello(t)
	counted := func() uint64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.files.used
	}
	c.pd() // its reply shows that the daemon has closed its copies of what it sent
	for _, addr := range []string{"127.0.0.1", "0.0.0.0", "::"} {
		open, before := openFDs(t), counted()
		l := c.ok(reqListen(addr, 0)).GetListen().Listen
		if is, n := openFDs(t)-open, counted()-before; is != workers+1 || n != workers+1 {
			t.Errorf("%s: a listener has %d descriptors, of which %d are counted", addr, is, n)
		}
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
		if is, n := openFDs(t)-open, counted()-before; is != 0 || n != 0 {
			t.Errorf("%s: without the listener %d more descriptors are open, and %d counted", addr, is, n)
		}
	}
}

// TestUnreadCounted checks that descriptors which clients have not read are counted, and that a
// client which does not read them is not served while few are left.
func TestUnreadCounted(t *testing.T) {
	for _, tt := range []struct {
		name        string
		few         bool
		least, most uint64
	}{
		{"some are left", false, maxQueuedFDs + 1, maxQueuedFDs + 8},
		{"few are left", true, 1, 8},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, Config{})
			h.unread = 100 * time.Millisecond
			counted := make(chan uint64, 1)
			core, _ := observer.New(zap.WarnLevel)
			h.log = zap.New(core, zap.Hooks(func(e zapcore.Entry) error {
				if e.Message == "client cut off" {
					h.mu.Lock()
					defer h.mu.Unlock()
					counted <- h.files.extra
				}
				return nil
			}))
			c := h.hello(t)
			pd, cq := c.pd(), c.cq()
			if tt.few {
				h.mu.Lock()
				h.files.most = h.files.used + h.files.extra
				h.mu.Unlock()
			}
			for i := range 1 << 16 {
				if c.c.Write(reqChurn(i, pd, cq), nil) != nil {
					break
				}
			}
			select {
			case n := <-counted:
				if n < tt.least || n > tt.most {
					t.Errorf("%d unread descriptors are counted when the client is cut off; want %d to %d", n, tt.least, tt.most)
				}
			case <-time.After(time.Minute):
				t.Error("the client was not cut off")
			}
			h.leave(t, c)
		})
	}
}

func reqChannel() *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}
}

// TestPool checks that a user may have a few while some are free, and more while more than a quarter is free.
func TestPool(t *testing.T) {
	for _, tt := range []struct {
		used, extra, have, more uint64
		ok, spare               bool
	}{
		{0, 0, 0, 1, true, true},
		{70, 3, 17, 2, true, true}, // 75 of 100 then
		{70, 4, 17, 2, false, true},
		{70, 5, 17, 1, false, false},
		{70, 5, 15, 1, true, false}, // 16 are a few
		{70, 5, 15, 2, false, false},
		{90, 9, 0, 1, true, false},
		{90, 9, 0, 2, false, false},
		{90, 20, 99, 0, true, false}, // no more
	} {
		p := pool{most: 100, used: tt.used, extra: tt.extra}
		if err := p.room(1000, tt.have, tt.more); (err == nil) != tt.ok || p.spare() != tt.spare {
			t.Errorf("%+v: %v, spare %v", tt, err, p.spare())
		}
	}
}
