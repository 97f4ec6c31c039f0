package ctrl

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

// helloAs is hello of a client of another user.
func (h *harness) helloAs(t testing.TB, uid uint32) *tclient {
	t.Helper()
	c := h.hello(t)
	h.mu.Lock()
	defer h.mu.Unlock()
	o := h.sessions[h.lastID]
	o.use = h.usageOf(uid)
	for r, n := range o.own {
		h.account(o.cred.Uid)[r] -= n
		o.use.account[r] += n
	}
	h.settle(o.cred.Uid)
	o.cred.Uid = uid
	return c
}

// churn opens a connection to peerA and closes it from our side, so that its port is in TIME-WAIT. It returns the
// port, or the error of the connect.
func (h *harness) churn(t *testing.T, c *tclient, pd, cq uint32) (port uint16, err string) {
	t.Helper()
	qp := c.ok(reqQP(pd, cq)).GetQp().Qp
	defer c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
	c.ok(reqConnect(qp, peerA.String()))
	for {
		h.mu.Lock()
		cn := h.qps[qp].conn
		dialing := cn != nil && cn.state == connDialing
		h.mu.Unlock()
		if cn == nil {
			for {
				if f := c.event().GetConnectFailed(); f != nil {
					return 0, f.Error.Text
				}
			}
		}
		if dialing {
			break
		}
	}
	h.awaitDialed(t)
	p := h.opened(t, mpa.DefaultConfig())
	p.accept("", -1, -1)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, TimeWait: true})
	h.e.mu.Lock()
	delete(h.e.conns, p.id)
	h.e.mu.Unlock()
	c.events = nil
	seqpacket.CloseAll(c.fds)
	c.fds = nil
	return p.c.local.Port(), ""
}

// TestPortsOfOneUser checks that a user that makes 150 connections per second, until each port of its quota has been used
// again, never fails, holds no more ports than its quota, and does not keep other users from connecting.
func TestPortsOfOneUser(t *testing.T) {
	const rate, limit, seconds = 150, 1024, 12
	h := newHarness(t, Config{Limits: Limits{Ports: limit}})
	busy, other := h.helloAs(t, 1001), h.helloAs(t, 1002)
	pd, cq := busy.pd(), busy.cq()
	opd, ocq := other.pd(), other.cq()
	for s := range seconds {
		for i := range rate {
			if _, err := h.churn(t, busy, pd, cq); err != "" {
				t.Fatalf("connection %d of second %d: %s", i, s, err)
			}
		}
		h.advance(time.Second)
		if n := h.steer.len(); n > limit {
			t.Fatalf("after %d s: %d endpoints are claimed, the quota is %d", s, n, limit)
		}
	}
	if _, err := h.churn(t, other, opd, ocq); err != "" {
		t.Errorf("another user: %s", err)
	}
	h.mu.Lock()
	have := h.account(1001)[resPorts]
	h.mu.Unlock()
	if have != limit {
		t.Errorf("%d ports are charged, want %d", have, limit)
	}
	// TIME-WAIT still counts after the last client of the user has left.
	busy.c.Close()
	other.c.Close()
	testenv.Until(t, "the clients have left", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		gone := len(h.sessions) == 0
		if gone && (h.account(1001)[resPorts] != limit || h.account(1002)[resPorts] != 1) {
			t.Errorf("ports charged after the clients: %v, %v", h.account(1001)[resPorts], h.account(1002)[resPorts])
		}
		return gone
	})
	h.advance(h.cfg.TimeWait)
	h.settled(t)
	if n := h.steer.len(); n != 0 {
		t.Errorf("%d endpoints are claimed after TIME-WAIT", n)
	}
}

// TestPortQuota checks that ports are not reused within a second, nor those of other users, and that the error names
// the limit to raise.
func TestPortQuota(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{Ports: 2}})
	c, other := h.helloAs(t, 1001), h.helloAs(t, 1002)
	pd, cq := c.pd(), c.cq()
	if _, err := h.churn(t, other, other.pd(), other.cq()); err != "" {
		t.Fatal(err)
	}
	first, _ := h.churn(t, c, pd, cq)
	h.advance(reuseAfter / 2)
	second, _ := h.churn(t, c, pd, cq)
	if _, err := h.churn(t, c, pd, cq); !strings.Contains(err, "max-ports") {
		t.Errorf("a third connection at once: %q", err)
	}
	h.advance(reuseAfter / 2)
	if port, err := h.churn(t, c, pd, cq); port != first || err != "" {
		t.Errorf("port %d (%s); want the oldest, %d", port, err, first)
	}
	h.advance(reuseAfter)
	if port, err := h.churn(t, c, pd, cq); port != second || err != "" {
		t.Errorf("port %d (%s); want %d", port, err, second)
	}
}

// TestReusedPortRests checks that a reused port stays claimed until the TIME-WAIT of the earlier connection is over,
// however the later one ended, and for the peers of both.
func TestReusedPortRests(t *testing.T) {
	h, c := newClient(t, Config{Limits: Limits{Ports: 1}})
	pd, cq := c.pd(), c.cq()
	port, err := h.churn(t, c, pd, cq)
	if err != "" {
		t.Fatal(err)
	}
	h.advance(2 * reuseAfter)
	qp := c.ok(reqQP(pd, cq)).GetQp().Qp
	local := netip.AddrPortFrom(addrA, port)
	if all := h.steer.peers(local); !slices.Equal(all, []netip.AddrPort{peerA}) {
		t.Errorf("the port is claimed for %v, want its peer %v", all, peerA)
	}
	p, _ := h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	if p.c.local != local {
		t.Fatalf("%v, want %v", p.c.local, local)
	}
	if all := h.steer.peers(local); !slices.Contains(all, netip.AddrPort{}) {
		t.Errorf("a port that is used again is claimed for %v alone", all)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, Err: dataplane.ErrTimeout})
	if n := h.steer.len(); n != 1 {
		t.Errorf("%d endpoints are claimed", n)
	}
	h.advance(h.cfg.TimeWait - 2*reuseAfter)
	if n := h.steer.len(); n != 0 {
		t.Errorf("%d endpoints are claimed after TIME-WAIT", n)
	}
}

// TestListenOnUsedPort checks that a listener on the port of a connection of the same user has the frames of all peers.
func TestListenOnUsedPort(t *testing.T) {
	h := newHarness(t, Config{})
	c := h.hello(t)
	qp := c.ok(reqQP(c.pd(), c.cq())).GetQp().Qp
	p, _ := h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	c.ok(reqListen(p.c.local.Addr().String(), uint32(p.c.local.Port())))
	if all := h.steer.peers(p.c.local); !slices.Contains(all, netip.AddrPort{}) {
		t.Errorf("the port is claimed for %v alone", all)
	}
}

// TestReuse checks which port in TIME-WAIT is used again, and in which order they end.
func TestReuse(t *testing.T) {
	const now = clock.Time(time.Minute)
	other := netip.MustParseAddrPort("10.0.0.3:1")
	at := func(remote netip.AddrPort, f ...func(*claim)) *claim {
		cl := &claim{addr: netip.AddrPortFrom(addrA, 5000), remote: remote, since: now.Add(-reuseAfter)}
		for _, f := range f {
			f(cl)
		}
		return cl
	}
	var many []*claim
	for range reuseLook + 1 {
		many = append(many, at(peerA))
	}
	young := func(cl *claim) { cl.since++ }
	elsewhere := func(cl *claim) { cl.addr = netip.AddrPortFrom(other.Addr(), 5000) }
	kernel := func(cl *claim) { cl.on = &device{Device: Device{Sockets: true}} }
	for _, tt := range []struct {
		name string
		all  []*claim
		want int // index, or -1
	}{
		{"none", nil, -1},
		{"of the same peer", []*claim{at(peerA), at(peerA)}, 0},
		{"of another peer", []*claim{at(peerA), at(peerA), at(other)}, 2},
		{"the first of another peer", []*claim{at(other), at(other)}, 0},
		{"of another peer, too far", append(slices.Clone(many), at(other)), 0},
		{"of another peer, just near enough", append(slices.Clone(many[:reuseLook]), at(other)), reuseLook},
		{"too young", []*claim{at(other, young)}, -1},
		{"of another address", []*claim{at(other, elsewhere)}, -1},
		{"of the kernel", []*claim{at(other, kernel)}, -1},
		{"after those that cannot be used",
			[]*claim{at(other, young), at(other, elsewhere), at(other, kernel), at(peerA)}, 3},
	} {
		u := &usage{timeWait: slices.Clone(tt.all)}
		got := u.reuse(&conn{remote: peerA}, addrA, now)
		i := slices.Index(tt.all, got)
		if i != tt.want || got != nil && (got.since != 0 || slices.Contains(u.timeWait, got)) {
			t.Errorf("%s: %d, want %d", tt.name, i, tt.want)
		}
	}
	var u usage
	for _, until := range []clock.Time{5, 3, 5, 9, 4, 1} {
		u.startTimeWait(&claim{until: until}, now)
	}
	sooner := func(a, b *claim) int { return cmp.Compare(a.until, b.until) }
	if !slices.IsSortedFunc(u.timeWait, sooner) || len(u.timeWait) != 6 {
		t.Error("not in the order in which they end")
	}
}
