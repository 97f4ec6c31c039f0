package ctrl

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/mpa"
	ddp "github.com/iwarpd/iwarpd/sctp/session"
)

func reqListenSCTP() *ctrlpb.Request {
	req := reqListen(addrA.String(), 7174)
	req.GetListen().Startup = &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP}
	return req
}

// listenSCTP creates the only listener and returns the client's handle and the engine's ID.
func (h *harness) listenSCTP(c *tclient) (l uint32, id dataplane.ListenerID) {
	l = c.ok(reqListenSCTP()).GetListen().Listen
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	for id = range h.e.listens {
	}
	return l, id
}

// TestSCTPClaims checks that a port stays steered while an association needs it, which may be longer than its
// listener or connection exists.
func TestSCTPClaims(t *testing.T) {
	h, c := newClient(t, Config{})
	steered := func(port uint16) bool {
		h.steer.mu.Lock()
		defer h.steer.mu.Unlock()
		return h.steer.eps[bpf.Endpoint{Proto: pkt.ProtoSCTP, Addr: addrA, Port: port}] > 0
	}

	req := reqListenSCTP()
	l, id := h.listenSCTP(c)
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Listener: id, Flow: flow})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
	if !steered(7174) {
		t.Error("the port went with the listener")
	}
	if l2 := c.ok(req).GetListen(); l2 == nil { // an earlier association does not prevent listening again
		t.Error("no second listener")
	} else {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l2.Listen}}})
	}
	// Late packets for an ended association must not reach the host's kernel; others may use the port.
	part := func(port uint16) {
		t.Helper()
		h.advance(lateTime / 2)
		h.OnEvent(dataplane.Event{Kind: dataplane.EventParted, Flow: flow})
		h.advance(lateTime - time.Second)
		if !steered(port) {
			t.Error("the host has the packets that come late")
		}
		h.mu.Lock()
		for _, cl := range h.claims.byAddr {
			t.Errorf("%v is taken", cl.addr)
		}
		h.mu.Unlock()
		h.advance(2 * time.Second)
		if steered(port) {
			t.Error("the port outlives the association")
		}
	}
	part(7174)

	q := reqConnect(c.qp(), peerA.String())
	q.GetConnect().Startup = &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP}
	c.ok(q)
	h.awaitDialed(t)
	conn, fc := h.e.only(t, peerA)
	flow = flowOf(fc.local, fc.remote)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Conn: conn, Flow: flow})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: conn, Flow: flow, Err: errors.New("no")})
	if !steered(fc.local.Port()) {
		t.Error("the port went with the connection")
	}
	part(fc.local.Port())
	if len(h.assocs)+len(h.late) != 0 {
		t.Error("something is left")
	}
}

// TestSCTPLateAddress checks that the end of an association is charged for its own address, not for all those on which
// its listener is.
func TestSCTPLateAddress(t *testing.T) {
	h := newHarness(t, Config{})
	others := []netip.Addr{addrA, netip.MustParseAddr("10.0.0.8"), netip.MustParseAddr("10.0.0.9")}
	h.mu.Lock()
	h.devices[0].Addrs = func() []netip.Addr { return others }
	h.mu.Unlock()
	c := h.hello(t)
	req := reqListenSCTP()
	req.GetListen().Address, req.GetListen().Device = "", "eth9"
	c.ok(req)
	h.mu.Lock()
	var id dataplane.ListenerID
	for id = range h.listeners {
	}
	h.mu.Unlock()
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Listener: id, Flow: flow})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventParted, Flow: flow})
	if q := c.quota("ports"); q.Used != 1 {
		t.Errorf("%d ports are charged, want 1", q.Used)
	}
	h.advance(lateTime + time.Second)
	if q := c.quota("ports"); q.Used != 0 {
		t.Errorf("%d ports are charged afterwards", q.Used)
	}
}

// TestSCTPLate checks that a port that associations leave one after the other stays steered until a while after the
// last one ended, even if there was a listener on it meanwhile.
func TestSCTPLate(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqListenSCTP()
	l, id := h.listenSCTP(c)
	ep := bpf.Endpoint{Proto: pkt.ProtoSCTP, Addr: addrA, Port: 7174}
	claims := func(want int) {
		t.Helper()
		h.steer.mu.Lock()
		defer h.steer.mu.Unlock()
		if n := h.steer.eps[ep]; n != want {
			t.Errorf("claimed %d times, want %d", n, want)
		}
	}
	assoc := func(remote netip.AddrPort) {
		flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), remote)
		h.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Listener: id, Flow: flow})
		h.OnEvent(dataplane.Event{Kind: dataplane.EventParted, Flow: flow})
	}
	for port := range uint16(100) {
		assoc(netip.AddrPortFrom(peerA.Addr(), 5000+port))
		h.advance(time.Second)
		claims(2)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
	claims(1)
	h.advance(lateTime - 2*time.Second)
	claims(1)
	h.advance(lateTime)
	claims(0)
	c.ok(req)
	assoc(peerA) // the server closes while one is still steered
	h.OnEvent(dataplane.Event{Kind: dataplane.EventParted, Flow: pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)})
	h.Close()
	if n := h.steer.len(); n != 0 {
		t.Errorf("%d endpoints still claimed", n)
	}
}

// TestSCTPClaimsAtClose checks that closing the server releases the claims of associations.
func TestSCTPClaimsAtClose(t *testing.T) {
	h, c := newClient(t, Config{})
	_, id := h.listenSCTP(c)
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventJoined, Listener: id, Flow: flow})
	h.Close()
	if n := h.steer.len(); n != 0 {
		t.Errorf("%d endpoints still claimed", n)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventParted, Flow: flow}) // the engine still runs
}

// TestSCTPRequestFlood checks that a peer that requests sessions and leaves, faster than the listener's client reads
// the events, cannot get the client disconnected, and that the client gets new requests once it has read.
func TestSCTPRequestFlood(t *testing.T) {
	h, c := newClient(t, Config{})
	_, id := h.listenSCTP(c)
	flow := pkt.NewFlow(netip.AddrPortFrom(addrA, 7174), peerA)
	ask := func(conn dataplane.ConnID) {
		h.OnEvent(dataplane.Event{Kind: dataplane.EventRequest, Conn: conn, Listener: id, Flow: flow, Setup: &ddp.Setup{}})
	}
	const many = 5000
	for conn := range dataplane.ConnID(many) {
		ask(1000 + conn)
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: 1000 + conn, Flow: flow, Err: errors.New("left")})
	}
	c.heardOfSome(many, func(ev *ctrlpb.Event) bool { return ev.GetConnectRequest() != nil })
	ask(1)
	if ev := c.event(); ev.GetConnectRequest() == nil {
		t.Errorf("after the flood: %v", ev)
	}
}

// TestRetryLeavesAssociation checks that a connection that is opened again leaves the association that it shares: its
// claim was released, and would be released twice.
func TestRetryLeavesAssociation(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqConnect(c.qp(), peerA.String())
	req.GetConnect().Startup = &ctrlpb.Startup{Transport: ctrlpb.Transport_TRANSPORT_SCTP, SharedAssociation: true}
	c.ok(req)
	h.e.await(t, "connect")
	h.mu.Lock()
	for _, cn := range h.conns {
		h.retry(cn, mpa.RetryRev1)
		if n := len(cn.sess.shared); n != 0 {
			t.Errorf("it is on %d associations", n)
		}
		break
	}
	h.mu.Unlock()
	h.e.await(t, "connect")
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.usage {
		if n := a.account[resPorts]; n != 1 && n != 2 { // 2 until the first Connect has returned
			t.Errorf("%d ports are charged", int64(n))
		}
	}
}
