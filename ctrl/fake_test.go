package ctrl

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/internal/testenv"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

// fakeEngine records the server's calls. The test generates the events.
type fakeEngine struct {
	mu      sync.Mutex
	next    uint64
	listens map[dataplane.ListenerID]netip.AddrPort
	admit   func(netip.Addr) bool // of the last Listen

	listenIP, connectIP dataplane.IPOptions // of the last calls
	dscp                map[dataplane.ConnID]uint8

	conns      map[dataplane.ConnID]*fakeConn
	bound      int
	onUntap    func() // of RemoveTap; nil: nothing
	onUnlisten func() // of Unlisten; nil: nothing
	onDetach   func(*dataplane.QPBinding)
	onFence    func()        // called when a worker has passed a turn; may be nil
	refuse     error         // of Connect
	unable     error         // of Bind and Listen
	hold       chan struct{} // if set, Connect returns when it is closed
	late       bool          // and opens the connection only then
	connects   []netip.AddrPort
	calls      chan string        // one for each call that a test awaits
	silent     []int              // workers that do not respond
	queried    []dataplane.ConnID // by the last QueryConns

	devices   map[dataplane.ConnID]string // by NewID
	on        map[dataplane.ListenerID]string
	unplugged map[string]error
}

type fakeConn struct {
	local, remote netip.AddrPort
	sent          []byte
	attached      *dataplane.Attachment
	asked         ddp.Setup // of Connect, over SCTP
	sctp          *dataplane.SCTP
	answer        *ddp.Setup // of Answer
	ended, abort  bool
	deaf          bool // drops what is received
	consumed      []int
}

func newFakeEngine() *fakeEngine {
	return &fakeEngine{
		listens: make(map[dataplane.ListenerID]netip.AddrPort), conns: make(map[dataplane.ConnID]*fakeConn),
		devices: make(map[dataplane.ConnID]string), on: make(map[dataplane.ListenerID]string), unplugged: make(map[string]error),
		calls: make(chan string, 1<<16),
	}
}

// QueryConns reports no connection.
func (e *fakeEngine) QueryConns(ids []dataplane.ConnID) (conns []dataplane.ConnInfo, silent []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.queried = ids
	return nil, e.silent
}

func (e *fakeEngine) Silent() []int {
	_, silent := e.Stats()
	return silent
}

func (e *fakeEngine) Stats() (all []dataplane.Stats, silent []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return nil, e.silent
}

// NewTap returns a tap of no worker.
func (e *fakeEngine) NewTap(int, int, func(*pkt.Flow) bool) *dataplane.Tap { return new(dataplane.Tap) }
func (e *fakeEngine) AddTap(*dataplane.Tap)                                {}

func (e *fakeEngine) RemoveTap(*dataplane.Tap) {
	if e.onUntap != nil {
		e.onUntap()
	}
}

func (e *fakeEngine) Workers() int { return 1 }

// Device returns that of NewID.
func (e *fakeEngine) Device(id dataplane.ConnID) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.devices[id]
}

// Unplug notes why, and ends nothing.
func (e *fakeEngine) Unplug(device string, why error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.unplugged[device] = why
}

func (e *fakeEngine) Plug(device string, _ []dataplane.Queue) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.unplugged, device)
	return nil
}

func (e *fakeEngine) Listen(r dataplane.ListenRequest) (dataplane.ListenerID, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unable != nil {
		return 0, e.unable
	}
	e.next++
	id := dataplane.ListenerID(e.next)
	e.listens[id], e.on[id], e.admit, e.listenIP = r.Local, r.Device, r.Admit, r.IP
	return id, nil
}

func (e *fakeEngine) SetDSCP(id dataplane.ConnID, dscp uint8) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.dscp == nil {
		e.dscp = make(map[dataplane.ConnID]uint8)
	}
	e.dscp[id] = dscp
	return nil
}

func (e *fakeEngine) Leave(b *dataplane.QPBinding) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.conns {
		c.deaf = c.deaf || c.attached != nil && c.attached.QP == b
	}
}

// admits reports what the listener made last says of a peer.
func (e *fakeEngine) admits(peer netip.Addr) bool {
	e.mu.Lock()
	admit := e.admit
	e.mu.Unlock()
	return admit(peer)
}

func (e *fakeEngine) Unlisten(id dataplane.ListenerID) {
	e.mu.Lock()
	delete(e.listens, id)
	f := e.onUnlisten
	e.mu.Unlock()
	if f != nil {
		f()
	}
}

func (e *fakeEngine) NewID(_ netip.AddrPort, device string) dataplane.ConnID {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next++
	e.devices[dataplane.ConnID(e.next)] = device
	return dataplane.ConnID(e.next)
}

// Connect opens the connection unless it joins an association.
func (e *fakeEngine) Connect(id dataplane.ConnID, r dataplane.ConnectRequest) error {
	if r.Join {
		return dataplane.ErrNoStream
	}
	e.mu.Lock()
	e.connects, e.connectIP = append(e.connects, r.Remote), r.IP
	err, hold, late := e.refuse, e.hold, e.late
	open := func() {
		if err == nil {
			e.conns[id] = &fakeConn{local: r.Local, remote: r.Remote, asked: r.Setup, sctp: r.SCTP}
		}
	}
	if !late {
		open()
	}
	e.mu.Unlock()
	e.calls <- "connect"
	if hold != nil {
		<-hold
	}
	if late {
		e.mu.Lock()
		open()
		e.mu.Unlock()
	}
	return err
}

func (e *fakeEngine) add(local, remote netip.AddrPort) dataplane.ConnID {
	e.next++
	id := dataplane.ConnID(e.next)
	e.conns[id] = &fakeConn{local: local, remote: remote}
	return id
}

func (e *fakeEngine) with(id dataplane.ConnID, f func(*fakeConn)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.conns[id]; c != nil {
		f(c)
	}
}

func (e *fakeEngine) Answer(id dataplane.ConnID, set ddp.Setup, a dataplane.Attachment) {
	e.with(id, func(c *fakeConn) { c.answer, c.attached = &set, &a })
	e.calls <- "answer"
}

func (e *fakeEngine) StreamSend(id dataplane.ConnID, b []byte) {
	e.with(id, func(c *fakeConn) { c.sent = append(c.sent, b...) })
	e.calls <- "send"
}

func (e *fakeEngine) StreamConsumed(id dataplane.ConnID, n int) {
	e.with(id, func(c *fakeConn) { c.consumed = append(c.consumed, n) })
}

func (e *fakeEngine) Attach(id dataplane.ConnID, a dataplane.Attachment) {
	e.with(id, func(c *fakeConn) { c.attached = &a; c.sent = append(c.sent, a.Reply...) })
	e.calls <- "attach"
}

func (e *fakeEngine) Disconnect(id dataplane.ConnID, abort bool) {
	e.with(id, func(c *fakeConn) { c.ended, c.abort = true, c.abort || abort })
	e.calls <- "disconnect"
}

func (e *fakeEngine) Detach(b *dataplane.QPBinding) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.onDetach != nil {
		e.onDetach(b)
	}
}

func (e *fakeEngine) Fence() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.onFence != nil {
		e.onFence()
	}
}

func (e *fakeEngine) Bind(*dataplane.ClientBinding) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.unable == nil {
		e.bound++
	}
	return e.unable
}

func (e *fakeEngine) Unbind(*dataplane.ClientBinding) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.bound--
}

// await waits for a call by its name.
func (e *fakeEngine) await(t testing.TB, name string) {
	t.Helper()
	for timeout := time.After(time.Minute); ; {
		select {
		case got := <-e.calls:
			if got == name {
				return
			}
		case <-timeout:
			t.Fatalf("the server did not call %s", name)
		}
	}
}

// only returns the one connection with that remote address that has not ended.
func (e *fakeEngine) only(t testing.TB, remote netip.AddrPort) (dataplane.ConnID, *fakeConn) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	var id dataplane.ConnID
	for i, c := range e.conns {
		if c.remote == remote && !c.ended {
			if id != 0 {
				t.Fatal("more than one connection")
			}
			id = i
		}
	}
	if id == 0 {
		t.Fatalf("no connection with %v", remote)
	}
	return id, e.conns[id]
}

// fakeSteering counts claims.
type fakeSteering struct {
	mu    sync.Mutex
	eps   map[bpf.Endpoint]int
	addrs []netip.Addr
	vlans [][]uint16
	fails error // of all but Unclaim
}

func (s *fakeSteering) Claim(e bpf.Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails != nil {
		return s.fails
	}
	if s.eps == nil {
		s.eps = make(map[bpf.Endpoint]int)
	}
	s.eps[e]++
	return nil
}

func (s *fakeSteering) Unclaim(e bpf.Endpoint) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.eps[e] == 0 {
		return fmt.Errorf("%v is not claimed", e)
	}
	if s.eps[e]--; s.eps[e] == 0 {
		delete(s.eps, e)
	}
	return nil
}

func (s *fakeSteering) SetAddresses(all []netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails != nil {
		return s.fails
	}
	s.addrs = all
	return nil
}

func (s *fakeSteering) SetVLANs(all [][]uint16) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails != nil {
		return s.fails
	}
	s.vlans = all
	return nil
}

func (*fakeSteering) Counters() (bpf.Counters, error) { return bpf.Counters{}, nil }

// len returns the number of endpoints, of any peers.
func (s *fakeSteering) len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[bpf.Endpoint]bool)
	for e := range s.eps {
		e.Peer = netip.AddrPort{}
		all[e] = true
	}
	return len(all)
}

// peers returns the peers for which the TCP endpoint local is claimed.
func (s *fakeSteering) peers(local netip.AddrPort) (all []netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := range s.eps {
		if e.Proto == pkt.ProtoTCP && e.Addr == local.Addr() && e.Port == local.Port() {
			all = append(all, e.Peer)
		}
	}
	return all
}

// fakeResolver answers everything but 192.0.2.0/24.
type fakeResolver struct{ src netip.Addr }

func (r fakeResolver) Resolve(dst, src netip.Addr, _ string) (dataplane.Hop, error) {
	if netip.MustParsePrefix("192.0.2.0/24").Contains(dst) {
		return dataplane.Hop{}, errors.New("no route")
	}
	if src.IsValid() {
		return dataplane.Hop{Src: src, MTU: 1500}, nil
	}
	return dataplane.Hop{Src: r.src, MTU: 1500}, nil
}

func (fakeResolver) Watch(func()) {}

// harness is a server over a fake engine.
type harness struct {
	*Server
	t     testing.TB
	e     *fakeEngine
	steer *fakeSteering
	clock struct {
		sync.Mutex
		now clock.Time
	}
}

var (
	addrA = netip.MustParseAddr("10.0.0.1")
	peerA = netip.MustParseAddrPort("10.0.0.2:7174")
)

func newHarness(t testing.TB, cfg Config) *harness {
	t.Helper()
	return newHarnessWith(t, cfg, nil)
}

// newClient is newHarness with a client.
func newClient(t testing.TB, cfg Config) (*harness, *tclient) {
	t.Helper()
	h := newHarness(t, cfg)
	return h, h.hello(t)
}

// newHarnessWith is newHarness with a set of peers.
func newHarnessWith(t testing.TB, cfg Config, peers PeerSet) *harness {
	t.Helper()
	h := &harness{t: t, e: newFakeEngine(), steer: &fakeSteering{}}
	s, err := New(cfg, Options{
		Logger: zap.NewNop(), Resolver: fakeResolver{addrA}, NoGuard: true,
		Devices: []Device{{Name: "eth9", Steering: h.steer, Addrs: func() []netip.Addr { return []netip.Addr{addrA} }}},
		Peers:   peers,
	})
	if err != nil {
		t.Fatal(err)
	}
	h.Server = s
	h.clock.now = 1e9
	s.now = func() clock.Time {
		h.clock.Lock()
		defer h.clock.Unlock()
		return h.clock.now
	}
	s.Bind(h.e)
	t.Cleanup(func() {
		s.Close()
		// Threads that still close descriptors would confuse the next test that counts them.
		testenv.Until(t, "the system calls for clients have ended", func() bool { return !s.threads.used() })
		if n := h.steer.len(); n != 0 {
			t.Errorf("%d endpoints still claimed", n)
		}
		h.e.mu.Lock()
		defer h.e.mu.Unlock()
		if h.e.bound != 0 || len(h.e.listens) != 0 {
			t.Errorf("%d clients bound, %d listeners left", h.e.bound, len(h.e.listens))
		}
	})
	return h
}

// overSockets makes the connections of the harness kernel sockets, which count as descriptors.
func (h *harness) overSockets() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.devices[0].Sockets = true
	h.files.per = newFiles(0, 1, true).per
}

// advance moves the clock and makes the server check its deadlines. It checks that the timer goroutine knows the next
// one.
func (h *harness) advance(d time.Duration) {
	h.t.Helper()
	h.until(h.t, "the timer goroutine wakes for the next deadline", func() bool {
		next := h.next()
		return next == 0 || h.wakeAt != 0 && h.wakeAt <= next
	})
	h.clock.Lock()
	h.clock.now = h.clock.now.Add(d)
	h.clock.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	if next := h.expire(h.now()); next != h.next() {
		h.t.Errorf("the next deadline is at %v, not %v", h.next(), next)
	}
}

// next returns the next deadline of the server, or 0, and checks which connections are pending. Called with mu held.
func (h *harness) next() (next clock.Time) {
	h.t.Helper()
	earlier := func(at clock.Time) {
		if at != 0 && (next == 0 || at < next) {
			next = at
		}
	}
	all := values(h.conns)
	for _, c := range h.sessions {
		all = append(all, values(c.conns)...)
	}
	for _, c := range all {
		if _, has := h.pending[c]; !has && c.deadline() != 0 && c.state != connGone {
			h.t.Errorf("connection %d, %v, has a deadline and is not pending", c.handle, c.state)
		}
		earlier(c.deadline())
	}
	for c := range h.pending {
		if c.deadline() == 0 || c.state == connGone {
			h.t.Errorf("connection %d, %v, is pending", c.handle, c.state)
		}
	}
	for _, u := range h.usage {
		for _, cl := range u.timeWait {
			earlier(cl.until)
		}
		for _, l := range u.lingers {
			earlier(l.limit)
		}
	}
	for _, l := range h.late {
		earlier(l.until)
	}
	for _, until := range h.claims.lost {
		earlier(until)
	}
	earlier(h.refreshAt)
	return next
}

// tclient is a client that speaks the protocol by hand.
type tclient struct {
	t      testing.TB
	c      *seqpacket.Conn
	id     uint64
	events []*ctrlpb.Event
	fds    []int
}

func (h *harness) client(t testing.TB) *tclient {
	t.Helper()
	fds := socketpair(t)
	if err := h.ServeConn(fds[0]); err != nil {
		t.Fatal(err)
	}
	c, err := seqpacket.FromFD(fds[1])
	if err != nil {
		t.Fatal(err)
	}
	tc := &tclient{t: t, c: c}
	t.Cleanup(func() { c.Close(); seqpacket.CloseAll(tc.fds) })
	return tc
}

// hello is client with the greeting done.
func (h *harness) hello(t testing.TB) *tclient {
	t.Helper()
	c := h.client(t)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1, Name: "test"}}})
	return c
}

func (c *tclient) send(req *ctrlpb.Request, fds ...int) {
	c.t.Helper()
	c.id++
	req.Id = c.id
	b := marshal(c.t, req)
	if err := c.c.Write(b, fds); err != nil {
		c.t.Fatal(err)
	}
}

// next reads one message; nil means that the server has closed the connection.
func (c *tclient) next() *ctrlpb.Message {
	c.t.Helper()
	b, fds, err := c.c.Read(seqpacket.MaxFDs)
	if err != nil {
		return nil
	}
	c.fds = append(c.fds, fds...)
	m := new(ctrlpb.Message)
	if err := proto.Unmarshal(b, m); err != nil {
		c.t.Fatal(err)
	}
	return m
}

// do sends a request and returns its reply.
func (c *tclient) do(req *ctrlpb.Request, fds ...int) *ctrlpb.Reply {
	c.t.Helper()
	c.send(req, fds...)
	for {
		m := c.next()
		if m == nil {
			c.t.Fatalf("%T: the server hung up", req.Body)
		}
		if ev := m.GetEvent(); ev != nil {
			c.events = append(c.events, ev)
			continue
		}
		if m.GetReply().Id != c.id {
			c.t.Fatalf("reply to %d, want %d", m.GetReply().Id, c.id)
		}
		return m.GetReply()
	}
}

func (c *tclient) ok(req *ctrlpb.Request, fds ...int) *ctrlpb.Reply {
	c.t.Helper()
	r := c.do(req, fds...)
	if r.Error != nil {
		c.t.Fatalf("%T: %v", req.Body, r.Error)
	}
	return r
}

func (c *tclient) fails(code ctrlpb.Code, req *ctrlpb.Request, fds ...int) string {
	c.t.Helper()
	r := c.do(req, fds...)
	if r.Error.GetCode() != code {
		c.t.Errorf("%v: %v, want %v", req, r.Error, code)
	}
	if r.Error != nil && r.Body != nil {
		c.t.Errorf("%v: error with a body", req)
	}
	return r.Error.GetText()
}

// event waits for the next event.
func (c *tclient) event() *ctrlpb.Event {
	c.t.Helper()
	if len(c.events) > 0 {
		ev := c.events[0]
		c.events = c.events[1:]
		return ev
	}
	m := c.next()
	if m == nil || m.GetEvent() == nil {
		c.t.Fatalf("want an event, have %v", m)
	}
	return m.GetEvent()
}

func (c *tclient) pd() uint32 {
	return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}}).GetPd().Pd
}

func (c *tclient) cq() uint32 {
	return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 16}}}).GetCq().Cq
}

// channel returns a channel and a completion queue on it.
func (c *tclient) channel() (channel, cq uint32) {
	r := &ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}
	channel = c.ok(r).GetChannel().Channel
	return channel, c.ok(reqCQ(channel)).GetCq().Cq
}

// reqCQ asks for a completion queue on a channel, or with one of its own if that is 0.
func reqCQ(channel uint32) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 16, Channel: channel}}}
}

func (c *tclient) listQPs() []*ctrlpb.QPInfo {
	return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{}}}).GetQps().Qps
}

func reqSRQ(pd uint32) *ctrlpb.Request {
	r := &ctrlpb.CreateSRQ{Pd: pd, Depth: 8, MaxSge: 1}
	return &ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: r}}
}

func reqResize(cq, depth uint32) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_ResizeCq{ResizeCq: &ctrlpb.ResizeCQ{Cq: cq, Depth: depth}}}
}

func reqQP(pd, cq uint32) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_CreateQp{CreateQp: &ctrlpb.CreateQP{
		Pd: pd, SendCq: cq, RecvCq: cq, SqDepth: 8, RqDepth: 8, MaxSge: 2, MaxInline: 32,
	}}}
}

func (c *tclient) qp() uint32 {
	return c.ok(reqQP(c.pd(), c.cq())).GetQp().Qp
}

func reqListen(addr string, port uint32) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_Listen{Listen: &ctrlpb.Listen{Address: addr, Port: port}}}
}

func reqConnect(qp uint32, remote string) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_Connect{Connect: &ctrlpb.Connect{Qp: qp, Remote: remote}}}
}

func reqMR(pd uint32, length uint64) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_RegisterMr{RegisterMr: &ctrlpb.RegisterMR{Pd: pd, Length: length, Base: 4096, Access: 7}}}
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func socketpair(t testing.TB) [2]int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fds
}

// memfd creates a memfd of n bytes, all allocated.
func memfd(t testing.TB, n int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Fallocate(fd, 0, 0, n); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// openFDs counts the descriptors of the process.
func openFDs(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range list {
		if target, err := os.Readlink(filepath.Join("/proc/self/fd", f.Name())); err == nil && target != "" {
			n++
		}
	}
	return n
}

// dialed waits until all calls of the engine's Connect have returned. Until then the server holds the ports of the connections,
// even of those that have ended.
func (h *harness) dialed(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		h.mu.Lock()
		n := 0
		for _, u := range h.usage {
			n += u.dials
		}
		h.mu.Unlock()
		if n == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("Connect has not returned to the server")
		}
		runtime.Gosched()
	}
}

// until waits for a state of the server.
func (h *harness) until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	testenv.Until(t, what, func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return ok()
	})
}

// leave ends a client, the last one, and checks that the server holds nothing of it.
func (h *harness) leave(t testing.TB, c *tclient) {
	t.Helper()
	c.c.Close()
	h.settled(t)
}

// settled waits until the server has no client and dials nothing, and checks that all usage counts are zero.
func (h *harness) settled(t testing.TB) {
	t.Helper()
	h.until(t, "all clients have ended", func() bool { return len(h.sessions) == 0 })
	h.dialed(t)
	h.mu.Lock()
	defer h.mu.Unlock()
	files, mapped := h.files.used+h.files.extra, h.maps.used+h.maps.extra
	if len(h.usage) != 0 || files != 0 || mapped != 0 {
		t.Errorf("usage left: %v, %d descriptors, and %d mappings", h.usage, files, mapped)
	}
}
