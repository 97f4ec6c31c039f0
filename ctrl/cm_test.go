package ctrl

import (
	"bytes"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/marked"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
)

// mpaPeer is the MPA startup of the other end, driven by hand.
type mpaPeer struct {
	t   *testing.T
	h   *harness
	id  dataplane.ConnID
	c   *fakeConn
	st  *mpa.Startup
	got int // bytes of c.sent that st has received
}

// deliver passes st what the server has sent since the last call.
func (p *mpaPeer) deliver() {
	p.t.Helper()
	p.h.e.mu.Lock()
	b := bytes.Clone(p.c.sent[p.got:])
	p.got = len(p.c.sent)
	p.h.e.mu.Unlock()
	p.st.HandleStream(clock.Time(1e9), b)
}

// send passes the server what st sends.
func (p *mpaPeer) send() {
	p.t.Helper()
	b, ok := p.st.PollTransmit()
	if !ok {
		p.t.Fatal("the peer has nothing to say")
	}
	p.h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: p.id, Data: b})
}

func (p *mpaPeer) event(kind mpa.EventKind) mpa.Event {
	p.t.Helper()
	ev, ok := p.st.PollEvent()
	if !ok || ev.Kind != kind {
		p.t.Fatalf("the peer has event %+v, want kind %d", ev, kind)
	}
	return ev
}

// accept receives the server's Request and answers it with the private data.
func (p *mpaPeer) accept(private string, ird, ord int) mpa.Event {
	p.t.Helper()
	ev := p.event(mpa.EventRequest)
	if err := p.st.Accept([]byte(private), ird, ord); err != nil {
		p.t.Fatal(err)
	}
	p.send()
	return ev
}

// dial starts a connect and answers the TCP part.
func (h *harness) dial(t *testing.T, c *tclient, req *ctrlpb.Request, cfg mpa.Config) (*mpaPeer, uint32) {
	t.Helper()
	conn := c.ok(req).GetConnect().Conn
	h.awaitDialed(t)
	p := h.opened(t, cfg)
	return p, conn
}

// awaitDialed waits for a call of the engine's Connect, and until it has returned.
func (h *harness) awaitDialed(t *testing.T) {
	t.Helper()
	h.e.await(t, "connect")
	h.dialed(t)
}

// opened finds the connection that the server has dialed and completes its TCP handshake.
func (h *harness) opened(t *testing.T, cfg mpa.Config) *mpaPeer {
	t.Helper()
	id, fc := h.e.only(t, peerA)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventConnected, Conn: id, Flow: flowOf(fc.local, fc.remote)})
	h.e.await(t, "send")
	p := &mpaPeer{t: t, h: h, id: id, c: fc, st: mpa.NewResponder(cfg, 1e9)}
	p.deliver()
	return p
}

// arrive opens a connection from a peer to the listener's port.
func (h *harness) arrive(t *testing.T, remote string, port uint16, cfg mpa.Config) *mpaPeer {
	t.Helper()
	r, local := netip.MustParseAddrPort(remote), netip.AddrPortFrom(addrA, port)
	h.e.mu.Lock()
	id := h.e.add(local, r)
	fc := h.e.conns[id]
	var lid dataplane.ListenerID
	for l, a := range h.e.listens {
		if a.Port() == port {
			lid = l
		}
	}
	h.e.mu.Unlock()
	h.OnEvent(dataplane.Event{Kind: dataplane.EventAccepted, Conn: id, Listener: lid, Flow: flowOf(local, r)})
	return &mpaPeer{t: t, h: h, id: id, c: fc, st: mpa.NewInitiator(cfg, 1e9)}
}

func (p *mpaPeer) attached() *dataplane.Attachment {
	p.t.Helper()
	p.h.e.mu.Lock()
	defer p.h.e.mu.Unlock()
	if p.c.attached == nil {
		p.t.Fatal("not attached")
	}
	return p.c.attached
}

func (p *mpaPeer) ended() (ended, abort bool) {
	p.h.e.mu.Lock()
	defer p.h.e.mu.Unlock()
	return p.c.ended, p.c.abort
}

// resetsAfter checks that the server resets a connection after d, and not before.
func (h *harness) resetsAfter(p *mpaPeer, d time.Duration) {
	h.t.Helper()
	h.advance(d - time.Nanosecond)
	if _, abort := p.ended(); abort {
		h.t.Error("reset early")
	}
	h.advance(time.Nanosecond)
	if _, abort := p.ended(); !abort {
		h.t.Error("not reset")
	}
}

func (p *mpaPeer) deaf() bool {
	p.h.e.mu.Lock()
	defer p.h.e.mu.Unlock()
	return p.c.deaf
}

func TestConnect(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqConnect(c.qp(), peerA.String())
	req.GetConnect().PrivateData = []byte("hello")
	p, conn := h.dial(t, c, req, mpa.DefaultConfig())
	if ev := p.accept("welcome", 3, 4); string(ev.Frame.PrivateData) != "hello" || !ev.Frame.P2P || !ev.Frame.CRC {
		t.Fatalf("request %+v", ev.Frame)
	}
	a := p.attached()
	if !a.Params.Initiator || !a.Params.CRC || a.Params.RTR == mpa.RTRNone || a.Params.ORD != 3 {
		t.Errorf("params %+v", a.Params)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	ev := c.event().GetEstablished()
	if ev == nil || ev.Conn != conn || string(ev.PrivateData) != "welcome" || ev.Negotiated.Revision != 2 || ev.Remote != peerA.String() {
		t.Fatalf("event %v", ev)
	}
	for _, silent := range [][]int{nil, {0}} { // workers
		h.e.mu.Lock()
		h.e.silent = silent
		h.e.mu.Unlock()
		if q := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{}}}).GetQps().Qps[0]; q.State != "RTS" || q.Remote != peerA.String() || q.Silent != (silent != nil) {
			t.Errorf("queue pair %v", q)
		}
		s := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}}).GetStatus()
		if len(s.Silent) != len(silent) {
			t.Errorf("status %v", s)
		}
	}
	// A worker looks only at the connections that are listed.
	for after, want := range map[uint32][]dataplane.ConnID{0: {p.id}, ev.Qp: {}} {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{After: after}}})
		h.e.mu.Lock()
		if h.e.queried == nil || !slices.Equal(h.e.queried, want) {
			t.Errorf("after %d the connections %v were queried, want %v", after, h.e.queried, want)
		}
		h.e.mu.Unlock()
	}
	c.fails(cState, req) // a QP has one connection

	h.OnEvent(dataplane.Event{Kind: dataplane.EventFailed, Conn: p.id, Err: term.ErrBounds})
	if ev := c.event().GetTerminated(); ev == nil || ev.Remote || ev.Layer != 1 || ev.Type != 1 || ev.Code != 1 {
		t.Errorf("event %v", ev)
	}
	if ev := c.event().GetAsyncError(); ev.GetKind() != ctrlpb.AsyncKind_ASYNC_QP_FATAL || ev.Qp == 0 || ev.Error == nil {
		t.Errorf("event %v", ev)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, Err: errors.New("reset by the peer")})
	if ev := c.event().GetDisconnected(); ev == nil || !strings.Contains(ev.Error.GetText(), "reset by the peer") {
		t.Errorf("event %v", ev)
	}
	if n := h.Status().Conns; n != 0 || h.steer.len() != 0 {
		t.Errorf("%d connections and %d endpoints left", n, h.steer.len())
	}
}

func TestConnectFails(t *testing.T) {
	for _, tt := range []struct {
		name string
		to   string
		run  func(*testing.T, *harness)
		code ctrlpb.Code
		text string
	}{
		{"no route", "192.0.2.1:7", func(*testing.T, *harness) {}, ctrlpb.Code_CODE_UNREACHABLE, "no route"},
		{"engine refuses", "10.0.0.2:7174", func(t *testing.T, h *harness) {}, ctrlpb.Code_CODE_TIMEOUT, "timed out"},
		{"reset", "10.0.0.2:7174", func(t *testing.T, h *harness) {
			id, fc := h.e.only(t, peerA)
			h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id, Flow: flowOf(fc.local, fc.remote), Err: errors.New("refused")})
		}, ctrlpb.Code_CODE_REFUSED, "refused"},
		{"silent", "10.0.0.2:7174", func(t *testing.T, h *harness) {
			h.opened(t, mpa.DefaultConfig())
			h.advance(11 * time.Second)
		}, ctrlpb.Code_CODE_TIMEOUT, "10.0.0.2:7174"},
		{"slow handshake", "10.0.0.2:7174", func(t *testing.T, h *harness) { h.advance(31 * time.Second) }, ctrlpb.Code_CODE_TIMEOUT, "TCP handshake"},
		{"garbage", "10.0.0.2:7174", func(t *testing.T, h *harness) {
			p := h.opened(t, mpa.DefaultConfig())
			h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: p.id, Data: make([]byte, 600)})
		}, ctrlpb.Code_CODE_PROTOCOL, "key"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarness(t, Config{})
			if tt.name == "engine refuses" {
				h.e.refuse = dataplane.ErrTimeout
			}
			c := h.hello(t)
			qp := c.qp()
			c.ok(reqConnect(qp, tt.to))
			h.dialed(t)
			tt.run(t, h)
			ev := c.event().GetConnectFailed()
			if ev.GetError().GetCode() != tt.code || !strings.Contains(ev.GetError().GetText(), tt.text) {
				t.Errorf("event %v, want %v with %q", ev, tt.code, tt.text)
			}
			if n := h.Status().Conns; n != 0 || h.steer.len() != 0 {
				t.Errorf("%d connections and %d endpoints left", n, h.steer.len())
			}
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
			h.e.await(t, "attach") // flushes what was posted
		})
	}
}

// TestFallback checks that a peer that does not support revision 2 is asked again with revision 1.
func TestFallback(t *testing.T) {
	h, c := newClient(t, Config{})
	c.ok(reqConnect(c.qp(), peerA.String()))
	h.awaitDialed(t)
	p := h.opened(t, mpa.DefaultConfig())
	h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id}) // as rev-1 peers do
	h.awaitDialed(t)
	if ended, _ := p.ended(); !ended {
		t.Error("the first connection is left open")
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id}) // late event of the first attempt
	p = h.opened(t, mpa.DefaultConfig())
	if f := p.accept("", -1, -1).Frame; f.Rev != 1 || f.Enhanced {
		t.Fatalf("request %+v", f)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	if ev := c.event().GetEstablished(); ev == nil || ev.Negotiated.Revision != 1 || ev.Negotiated.P2P {
		t.Errorf("event %v", ev)
	}
	// With fallback off there is no second attempt.
	no := false
	req := reqConnect(c.qp(), "10.0.0.2:7174")
	req.GetConnect().Startup = &ctrlpb.Startup{Fallback: &no}
	h.e.with(p.id, func(fc *fakeConn) { fc.ended = true }) // for only
	c.ok(req)
	h.awaitDialed(t)
	p = h.opened(t, mpa.DefaultConfig())
	h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
	if ev := c.event().GetConnectFailed(); ev.GetError().GetCode() != ctrlpb.Code_CODE_REFUSED {
		t.Errorf("event %v", ev)
	}
}

func TestRejected(t *testing.T) {
	h, c := newClient(t, Config{})
	p, _ := h.dial(t, c, reqConnect(c.qp(), peerA.String()), mpa.DefaultConfig())
	p.event(mpa.EventRequest)
	if err := p.st.Reject([]byte("not today")); err != nil {
		t.Fatal(err)
	}
	p.send()
	if ev := c.event().GetRejected(); ev == nil || string(ev.PrivateData) != "not today" {
		t.Errorf("event %v", ev)
	}
	if ended, _ := p.ended(); !ended || h.Status().Conns != 0 {
		t.Error("the connection is left open")
	}
}

func TestAcceptReject(t *testing.T) {
	h, c := newClient(t, Config{})
	c.ok(reqListen("", 7174))
	cfg := mpa.DefaultConfig()
	cfg.PrivateData = []byte("may I")
	p := h.arrive(t, "10.0.0.2:4000", 7174, cfg)
	p.send()
	req := c.event().GetConnectRequest()
	if req == nil || string(req.PrivateData) != "may I" || req.Remote != "10.0.0.2:4000" || req.Local != "10.0.0.1:7174" || req.P2P {
		t.Fatalf("event %v", req)
	}
	accept := func(conn, qp uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: conn, Qp: qp, PrivateData: []byte("do")}}}
	}
	other := h.hello(t)
	other.fails(cNoObject, accept(req.Conn, other.qp()))
	qp := c.qp()
	c.fails(cNoObject, accept(req.Conn+1000, qp))
	c.fails(cNoObject, accept(req.Conn, qp+1000))
	c.ok(accept(req.Conn, qp))
	p.deliver()
	if ev := p.event(mpa.EventAccepted); string(ev.Frame.PrivateData) != "do" {
		t.Errorf("reply %+v", ev.Frame)
	}
	// Without peer-to-peer mode there is nothing to wait for.
	if ev := c.event().GetEstablished(); ev == nil || ev.Qp != qp {
		t.Errorf("event %v", ev)
	}
	c.fails(cState, accept(req.Conn, c.qp()))

	// In peer-to-peer mode it waits for the initiator's first FPDU.
	cfg.P2P = true
	p = h.arrive(t, "10.0.0.2:4001", 7174, cfg)
	p.send()
	req = c.event().GetConnectRequest()
	c.fails(cState, accept(req.Conn, qp)) // used already
	c.ok(accept(req.Conn, c.qp()))
	if len(c.events) != 0 {
		t.Errorf("event before the first FPDU: %v", c.events)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	if ev := c.event().GetEstablished(); ev == nil || !ev.Negotiated.P2P {
		t.Errorf("event %v", ev)
	}

	p = h.arrive(t, "10.0.0.2:4002", 7174, cfg)
	p.send()
	req = c.event().GetConnectRequest()
	reject := func(n int) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: req.Conn, PrivateData: make([]byte, n)}}}
	}
	c.fails(cInvalid, reject(600))
	c.ok(reject(7))
	p.deliver()
	if ev := p.event(mpa.EventRejected); len(ev.Frame.PrivateData) != 7 {
		t.Errorf("reply %+v", ev.Frame)
	}
	if ended, abort := p.ended(); !ended || abort {
		t.Errorf("after the reject: closed %v, reset %v", ended, abort)
	}
	c.fails(cNoObject, reject(1))
	l := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListListens{ListListens: &ctrlpb.ListListens{}}}).GetListens().Listens[0]
	if l.Accepted != 2 || l.Rejected != 1 || l.Waiting != 0 {
		t.Errorf("listener %v", l)
	}
}

// TestRequestOutlivesListener checks that a client may answer a connect request after it has closed a listener that keeps
// them, and which counts until then.
func TestRequestOutlivesListener(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqListen("", 7174)
	req.GetListen().KeepRequests = true
	l := c.ok(req).GetListen().Listen
	peers := []*mpaPeer{h.arrive(t, "10.0.0.2:1", 7174, mpa.DefaultConfig()), h.arrive(t, "10.0.0.2:2", 7174, mpa.DefaultConfig())}
	var conns []uint32
	for _, p := range peers {
		p.send()
		conns = append(conns, c.event().GetConnectRequest().Conn)
	}
	early := h.arrive(t, "10.0.0.2:3", 7174, mpa.DefaultConfig())
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
	if _, abort := early.ended(); !abort {
		t.Error("a connection whose request has not come is left")
	}
	c.ok(reqListen("", 7174)) // its port is free
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: conns[0], Qp: c.qp()}}})
	peers[0].deliver()
	peers[0].event(mpa.EventAccepted)
	if c.event().GetEstablished() == nil {
		t.Error("not established")
	}
	if used := c.quota("listens").Used; used != 2 {
		t.Errorf("%d listeners count, one of which has a request", used)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: conns[1]}}})
	peers[1].deliver()
	peers[1].event(mpa.EventRejected)
	if used := c.quota("listens").Used; used != 1 {
		t.Errorf("%d listeners count", used)
	}
}

// TestBadPeers checks that a peer that is silent, sends garbage, or leaves loses only its own connection and does not
// delay others.
func TestBadPeers(t *testing.T) {
	h, c := newClient(t, Config{Startup: StartupDefaults{PerListener: 4}})
	req := reqListen("", 7174)
	req.GetListen().Backlog = 2
	c.ok(req)
	cfg := mpa.DefaultConfig()
	silent := h.arrive(t, "10.0.0.3:1", 7174, cfg)
	garbage := h.arrive(t, "10.0.0.3:2", 7174, cfg)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: garbage.id, Data: bytes.Repeat([]byte("GET / "), 10)})
	if _, abort := garbage.ended(); !abort {
		t.Error("garbage is not reset")
	}
	late := []*mpaPeer{silent}
	for i := range 5 {
		late = append(late, h.arrive(t, netip.AddrPortFrom(netip.MustParseAddr("10.0.0.3"), uint16(10+i)).String(), 7174, cfg))
	}
	for i, want := range []bool{true, true, false, false, false, false} { // the oldest are dropped
		if _, abort := late[i].ended(); abort != want {
			t.Errorf("silent connection %d of one peer: reset %v", i, abort)
		}
	}
	silent = late[5]
	good := h.arrive(t, "10.0.0.4:1", 7174, cfg)
	good.send()
	first := c.event().GetConnectRequest()
	if first.GetRemote() != "10.0.0.4:1" {
		t.Fatalf("event %v", first)
	}
	gone := h.arrive(t, "10.0.0.4:2", 7174, cfg)
	gone.send()
	second := c.event().GetConnectRequest()
	full := h.arrive(t, "10.0.0.4:3", 7174, cfg)
	full.send()
	if _, abort := full.ended(); !abort {
		t.Error("a request beyond the backlog is not reset")
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: gone.id})
	if ev := c.event().GetConnectGone(); ev == nil || ev.Conn != second.Conn {
		t.Errorf("event %v", ev)
	}
	h.advance(11 * time.Second)
	if _, abort := silent.ended(); !abort {
		t.Error("a silent peer is not reset in time")
	}
	if _, abort := good.ended(); abort {
		t.Error("a request that waits for the client was reset")
	}
	h.advance(20 * time.Second) // the time limit for the client's own answer
	if ev := c.event().GetConnectGone(); ev.GetError().GetCode() != ctrlpb.Code_CODE_TIMEOUT {
		t.Errorf("event %v", ev)
	}
	h.mu.Lock()
	defer h.mu.Unlock() // other clients of this test are still closing
	for _, l := range h.listeners {
		if l.starting.n != 0 {
			t.Errorf("%d still counted", l.starting.n)
		}
	}
}

// TestClientDies checks that a client that dies at any point leaves nothing behind.
func TestClientDies(t *testing.T) {
	h := newHarness(t, Config{})
	for _, at := range []string{"dialing", "startup", "up", "request", "switching"} {
		c := h.hello(t)
		c.ok(reqMR(c.pd(), 4096), memfd(t, 4096))
		c.ok(reqListen("", 7174))
		qp := c.qp()
		switch at {
		case "request", "switching":
			cfg := mpa.DefaultConfig()
			cfg.P2P = true
			p := h.arrive(t, "10.0.0.2:4000", 7174, cfg)
			p.send()
			req := c.event().GetConnectRequest()
			if at == "switching" {
				c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: req.Conn, Qp: qp}}})
			}
		default:
			c.ok(reqConnect(qp, peerA.String()))
			h.e.await(t, "connect")
			if at == "dialing" {
				break
			}
			p := h.opened(t, mpa.DefaultConfig())
			if at == "startup" {
				break
			}
			p.accept("", -1, -1)
			h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
			c.event()
		}
		h.leave(t, c)
		st := h.Status()
		h.mu.Lock()
		left := len(h.conns) + len(h.pending) + len(h.qps) + len(h.usage) + len(h.listeners) + len(h.claims.byAddr)
		h.mu.Unlock()
		if left != 0 || st.Mrs+st.Qps+st.Conns+st.Listens+st.Cqs+st.Pds != 0 || h.table.Len() != 0 || h.steer.len() != 0 {
			t.Errorf("%s: left behind: %d entries, %v, %d endpoints", at, left, st, h.steer.len())
		}
		h.e.mu.Lock()
		for id, fc := range h.e.conns {
			if !fc.ended {
				t.Errorf("%s: connection %d still open", at, id)
			}
		}
		clear(h.e.conns)
		h.e.mu.Unlock()
	}
}

// TestStartupTerminate checks that an initiator that cannot continue sends a Terminate to a peer that is already in
// full operation.
func TestStartupTerminate(t *testing.T) {
	h, c := newClient(t, Config{Startup: StartupDefaults{IRD: 1, MaxIRD: 1, ORD: 1}})
	p, _ := h.dial(t, c, reqConnect(c.qp(), peerA.String()), mpa.DefaultConfig())
	p.event(mpa.EventRequest)
	// A peer that wants more reads outstanding than we can take (RFC 6581 9.1).
	f := mpa.Frame{Reply: true, CRC: true, Enhanced: true, Rev: 2, EnhancedData: mpa.EnhancedData{IRD: 1, ORD: 100, P2P: true, RTR: mpa.RTRs(mpa.RTRWrite)}}
	b, err := f.Append(nil)
	if err != nil {
		t.Fatal(err)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: p.id, Data: b})
	if a := p.attached(); a.Fail != term.ErrMPAIRD {
		t.Fatalf("attached with %v", a.Fail)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventFailed, Conn: p.id, Err: term.ErrMPAIRD})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	if ev := c.event().GetConnectFailed(); ev.GetError().GetCode() != ctrlpb.Code_CODE_PROTOCOL || !strings.Contains(ev.GetError().GetText(), "IRD") {
		t.Errorf("event %v", ev)
	}
}

// TestEventsBeforeConnectReturns checks that the engine's events may arrive before its Connect returns, and that the
// client may cancel in between.
func TestEventsBeforeConnectReturns(t *testing.T) {
	for _, giveUp := range []bool{false, true} {
		h := newHarness(t, Config{})
		h.e.hold = make(chan struct{})
		c := h.hello(t)
		qp := c.qp()
		c.ok(reqConnect(qp, peerA.String()))
		h.e.await(t, "connect")
		id, fc := h.e.only(t, peerA)
		if giveUp {
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
			if ev := c.event().GetConnectFailed(); ev == nil {
				t.Fatal("no event")
			}
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventConnected, Conn: id, Flow: flowOf(fc.local, fc.remote)})
		if giveUp {
			close(h.e.hold)
			h.e.await(t, "disconnect")
		} else {
			h.e.await(t, "send")
			close(h.e.hold)
			h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id})
			h.e.await(t, "connect") // once more, with revision 1
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
		}
		h.leave(t, c)
		h.Close() // waits for dial
		if n := len(h.conns) + len(h.claims.byAddr) + len(h.pending); n != 0 {
			t.Errorf("given up %v: %d entries left", giveUp, n)
		}
	}
}

// TestGiveUpBeforeOpen checks that a connect that the client cancels before the engine has opened the connection is
// aborted once it is open.
func TestGiveUpBeforeOpen(t *testing.T) {
	h := newHarness(t, Config{})
	h.e.hold, h.e.late = make(chan struct{}), true
	c := h.hello(t)
	qp := c.qp()
	c.ok(reqConnect(qp, peerA.String()))
	h.e.await(t, "connect")
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
	if ev := c.event().GetConnectFailed(); ev == nil {
		t.Fatal("no event")
	}
	close(h.e.hold)
	h.leave(t, c)
	h.Close() // waits for dial
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	for id, fc := range h.e.conns {
		if !fc.ended {
			t.Errorf("connection %d is open", id)
		}
	}
	if len(h.e.conns) != 1 {
		t.Errorf("%d connections opened; want 1", len(h.e.conns))
	}
}

func TestDisconnect(t *testing.T) {
	h, c := newClient(t, Config{})
	qp := c.qp()
	disc := func(abort bool) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp, Abort: abort}}}
	}
	c.fails(cState, disc(false))
	c.ok(reqConnect(qp, peerA.String()))
	h.awaitDialed(t)
	c.ok(disc(false)) // cancels the set-up
	if ev := c.event().GetConnectFailed(); ev.GetError().GetCode() != ctrlpb.Code_CODE_CANCELED {
		t.Errorf("event %v", ev)
	}
	qp = c.qp()
	h.e.mu.Lock()
	clear(h.e.conns)
	h.e.mu.Unlock()
	c.ok(reqConnect(qp, peerA.String()))
	h.awaitDialed(t)
	p := h.opened(t, mpa.DefaultConfig())
	p.accept("", -1, -1)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	c.event()
	for _, leave := range []bool{false, true} { // the program destroys the queue pair after it has disconnected it
		req := disc(false)
		req.GetDisconnect().Leave = leave
		c.ok(req)
		if ended, abort := p.ended(); !ended || abort || p.deaf() != leave {
			t.Errorf("closed %v, reset %v, drops what it receives %v; want the last one to be %v", ended, abort, p.deaf(), leave)
		}
	}
	if q := c.listQPs()[1]; q.State != "CLOSING" {
		t.Errorf("queue pair %v", q)
	}
	h.advance(11 * time.Second) // the peer does not close its side
	if _, abort := p.ended(); !abort {
		t.Error("a close that does not end is not cut short")
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, TimeWait: true})
	if ev := c.event().GetDisconnected(); ev == nil || ev.Error != nil {
		t.Errorf("event %v", ev)
	}
	if h.steer.len() != 1 {
		t.Error("the port is free while TCP is in TIME-WAIT")
	}
	h.advance(61 * time.Second)
	if h.steer.len() != 0 {
		t.Error("the port is not free after TIME-WAIT")
	}
	c.ok(disc(true)) // flushes what was posted late
	if a := p.attached(); a.QP == nil {
		t.Error("nothing flushed")
	}
	qp = c.qp()
	c.ok(disc(true)) // ends a queue pair that has had no connection, once
	if ev := c.event().GetConnectFailed(); ev.GetQp() != qp || ev.Error.Code != canceled {
		t.Errorf("event %v", ev)
	}
	c.ok(disc(true))
	c.fails(cState, reqConnect(qp, peerA.String()))
}

// TestModifyQP checks that no worker is in the turn in which it may have looked at the former access of a queue pair
// when the reply comes.
func TestModifyQP(t *testing.T) {
	h, c := newClient(t, Config{})
	modify := func(qp uint32) *ctrlpb.Request {
		const remoteRead = 4
		return &ctrlpb.Request{Body: &ctrlpb.Request_ModifyQp{ModifyQp: &ctrlpb.ModifyQP{Qp: qp, Access: remoteRead}}}
	}
	pd := c.pd()
	q := c.ok(reqQP(pd, c.cq())).GetQp().Qp
	mr := c.ok(reqMR(pd, 4096), memfd(t, 4096)).GetMr()
	h.mu.Lock()
	core := h.qps[q].binding.QP
	h.mu.Unlock()
	written := func() bool { // by the peer
		p := &rdmap.Placement{Kind: rdmap.PlaceTagged, Op: rdmap.OpWrite, STag: mr.Rkey, TO: 4096}
		return core.Place(p, marked.Bytes{B: []byte{7}}) == nil
	}
	if !written() {
		t.Error("the peer may not write at first")
	}
	turns := 0
	h.e.mu.Lock()
	h.e.onFence = func() { turns++ }
	h.e.mu.Unlock()
	c.ok(modify(q))
	if written() {
		t.Error("the peer may write")
	}
	h.e.mu.Lock()
	h.e.onFence = nil
	h.e.mu.Unlock()
	if turns != 1 {
		t.Errorf("%d fences", turns)
	}
	c.fails(ctrlpb.Code_CODE_NO_OBJECT, modify(q+1))
}

// TestLeave checks that what a queue pair has used can be destroyed once its program has left it, and counts no more,
// though the connection has not ended.
func TestLeave(t *testing.T) {
	h, c := newClient(t, Config{})
	pd := c.pd()
	ch := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}).GetChannel().Channel
	cq := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 16, Channel: ch}}}).GetCq().Cq
	srq := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: pd, Depth: 8, MaxSge: 1}}}).GetSrq().Srq
	req := reqQP(pd, cq)
	req.GetCreateQp().Srq = srq
	qp := c.ok(req).GetQp().Qp
	leave := &ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp, Leave: true}}}
	c.fails(cState, leave) // it may still connect

	p, _ := h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	p.accept("", -1, -1)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	c.event()
	used := []*ctrlpb.Request{
		{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}},
		{Body: &ctrlpb.Request_DestroySrq{DestroySrq: &ctrlpb.DestroySRQ{Srq: srq}}},
		{Body: &ctrlpb.Request_DestroyChannel{DestroyChannel: &ctrlpb.DestroyChannel{Channel: ch}}},
		{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: pd}}},
	}
	for _, req := range used {
		c.fails(busy, req)
	}
	for range 2 {
		c.ok(leave)
	}
	for _, req := range used {
		c.ok(req)
	}
	for name, want := range map[string]uint64{"cqs": 0, "srqs": 0, "channels": 0, "pds": 0, "qps": 1} {
		if q := c.quota(name); q.Used != want {
			t.Errorf("%d %s are charged, want %d", q.Used, name, want)
		}
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	if ev := c.event().GetDisconnected(); ev.GetQp() != qp {
		t.Errorf("event %v", ev)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
	if q := c.quota("rings"); q.Used != 0 {
		t.Errorf("%d bytes of rings are charged", q.Used)
	}
}

// TestLeftBehind checks that a connection whose program has left it, and is gone, is not reset before its time is up or
// the daemon ends, while others of the program are reset at once.
func TestLeftBehind(t *testing.T) {
	for _, tt := range []struct {
		name  string
		end   func(h *harness)
		abort bool
	}{
		{"it ends", func(*harness) {}, false},
		{"it does not end", func(h *harness) { h.advance(11 * time.Second) }, true},
		{"the daemon ends", func(h *harness) { h.Close() }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h, c := newClient(t, Config{})
			var peers []*mpaPeer
			for range 2 {
				qp := c.qp()
				p, _ := h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
				p.accept("", -1, -1)
				h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
				if peers = append(peers, p); len(peers) == 1 {
					c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp, Leave: true}}})
				}
			}
			c.c.Close()
			testenv.Until(t, "the other connection is reset", func() bool { _, abort := peers[1].ended(); return abort })
			if _, abort := peers[0].ended(); abort {
				t.Error("reset at once")
			}
			tt.end(h)
			if _, abort := peers[0].ended(); abort != tt.abort {
				t.Errorf("reset %v, want %v", abort, tt.abort)
			}
			h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: peers[0].id})
			h.settled(t)
		})
	}
}

// TestPortRests checks that the port of a connection that we opened is kept while the engine has it in TIME-WAIT, for
// whatever reason the connection ended, and is free at once otherwise.
func TestPortRests(t *testing.T) {
	h, c := newClient(t, Config{TimeWait: 20 * time.Second})
	pd, cq := c.pd(), c.cq()
	for _, tt := range []struct {
		name  string
		end   func(p *mpaPeer, qp uint32)
		err   error
		rests bool
	}{
		{"we close", func(p *mpaPeer, qp uint32) {
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
			h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
		}, nil, true},
		{"the peer closes", func(p *mpaPeer, _ uint32) {
			h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
		}, nil, false},
		{"a Terminate, then the peer closes", func(p *mpaPeer, _ uint32) {
			h.OnEvent(dataplane.Event{Kind: dataplane.EventFailed, Conn: p.id, Err: term.ErrBounds})
			h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
		}, term.ErrBounds, true},
		{"the peer resets", func(*mpaPeer, uint32) {}, errors.New("reset"), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			qp := c.ok(reqQP(pd, cq)).GetQp().Qp
			p, _ := h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
			p.accept("", -1, -1)
			h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
			ports := func(want, timeWait int) {
				t.Helper()
				if n := h.steer.len(); n != want {
					t.Errorf("%d endpoints claimed, want %d", n, want)
				}
				for _, k := range h.Counters() {
					if k.Name == "ctrl.ports" && k.Value != uint64(want) || k.Name == "ctrl.ports_time_wait" && k.Value != uint64(timeWait) ||
						k.Name == "ctrl.clients" && k.Value != 1 {
						t.Errorf("%s is %d", k.Name, k.Value)
					}
				}
			}
			ports(1, 0)
			tt.end(p, qp)
			h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, Err: tt.err, TimeWait: tt.rests})
			h.e.Disconnect(p.id, true) // so that only() finds just the next one
			if tt.rests {
				ports(1, 1)
				h.mu.Lock()
				_, err := h.claims.take(p.c.local, nil, 0, p.c.remote)
				h.mu.Unlock()
				if err == nil || !strings.Contains(err.Error(), "in TIME-WAIT") {
					t.Errorf("the port of a connection in TIME-WAIT: %v", err)
				}
				h.advance(h.cfg.TimeWait - time.Second)
				ports(1, 1)
				h.advance(2 * time.Second)
			}
			ports(0, 0)
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
		})
	}
}

// TestLateClose checks that the end of an abandoned attempt is not taken for that of the next one from the same port.
func TestLateClose(t *testing.T) {
	h, c := newClient(t, Config{})
	qp := c.qp()
	req := reqConnect(qp, peerA.String())
	req.GetConnect().Local = "10.0.0.1:5000"
	c.ok(req)
	h.awaitDialed(t)
	first, fc := h.e.only(t, peerA)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventConnected, Conn: first, Flow: flowOf(fc.local, fc.remote)})
	h.e.await(t, "send")
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
	if ev := c.event().GetConnectFailed(); ev == nil {
		t.Fatal("no event")
	}
	h.e.await(t, "disconnect")

	h.e.mu.Lock()
	h.e.hold = make(chan struct{})
	defer close(h.e.hold)
	h.e.mu.Unlock()
	req.GetConnect().Qp = c.qp()
	c.ok(req)
	h.e.await(t, "connect")
	second, sc := h.e.only(t, peerA)
	if sc.local != fc.local {
		t.Fatalf("from %v, after %v", sc.local, fc.local)
	}
	flow := flowOf(sc.local, sc.remote)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: first, Flow: flow})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventConnected, Conn: second, Flow: flow})
	h.e.await(t, "send") // the MPA request
}
