package ctrl

import (
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestIdleStartups checks that a peer that opens connections and leaves them idle cannot keep others from starting
// up, at the same listener or at another client's. Its connections are reset, and the log reports them in one line at
// a limited rate.
func TestIdleStartups(t *testing.T) {
	h := newHarness(t, Config{Startup: StartupDefaults{PerListener: 4}})
	core, logs := observer.New(zap.InfoLevel)
	h.log = zap.New(core)
	a, b := h.hello(t), h.hello(t)
	a.ok(reqListen("", 7174))
	b.ok(reqListen("", 7175))
	cfg := mpa.DefaultConfig()
	var idle []*mpaPeer
	for i := range 64 {
		idle = append(idle, h.arrive(t, fmt.Sprintf("10.0.0.3:%d", 1000+i), 7174, cfg))
	}
	for _, tt := range []struct {
		c    *tclient
		port uint16
	}{{b, 7175}, {a, 7174}} {
		p := h.arrive(t, fmt.Sprintf("10.0.0.3:%d", tt.port), tt.port, cfg)
		p.send()
		if _, abort := p.ended(); abort {
			t.Fatalf("the start-up at port %d was reset because of idle ones", tt.port)
		}
		if r := tt.c.event().GetConnectRequest(); r == nil || r.Remote != fmt.Sprintf("10.0.0.3:%d", tt.port) {
			t.Fatalf("event %v", r)
		}
	}
	reset := 0
	for _, p := range idle {
		if _, abort := p.ended(); abort {
			reset++
		}
	}
	if reset != 61 { // the newest 4, less the one that was dropped for the good one
		t.Errorf("%d idle connections were reset; want 61", reset)
	}
	tell := func() (times []uint64) {
		for _, e := range logs.TakeAll() {
			if n, ok := e.ContextMap()["times"].(uint64); ok && e.Level >= zap.WarnLevel {
				times = append(times, n)
			}
		}
		return times
	}
	if got := tell(); len(got) != 1 || got[0] != 1 {
		t.Errorf("logged %v; want once, at the first", got)
	}
	h.advance(logEvery) // the idle ones time out meanwhile
	for i := range 5 {
		h.arrive(t, fmt.Sprintf("10.0.0.3:%d", 2000+i), 7174, cfg)
	}
	if got := tell(); len(got) != 1 || got[0] != 61 {
		t.Errorf("later logged %v; want once, for all since", got)
	}
	if n := h.counters.startupsEvicted.Load(); n != 62 {
		t.Errorf("counted %d; want 62", n)
	}
	h.advance(time.Minute)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.listeners {
		if l.starting.n != 0 || len(l.starting.by) != 0 {
			t.Errorf("%d still counted: %v", l.starting.n, l.starting.by)
		}
	}
}

// TestBurst checks that a peer may open many connections before it sends the first request.
func TestBurst(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqListen("", 7174)
	req.GetListen().Backlog = 500
	c.ok(req)
	var all []*mpaPeer
	for i := range 500 {
		all = append(all, h.arrive(t, fmt.Sprintf("10.0.0.2:%d", 1000+i), 7174, mpa.DefaultConfig()))
	}
	for i, p := range all {
		p.send()
		if _, abort := p.ended(); abort {
			t.Fatalf("connection %d was reset", i)
		}
		if r := c.event().GetConnectRequest(); r == nil {
			t.Fatalf("connection %d: no request", i)
		}
	}
}

// TestWaitingLeave checks that peers whose requests wait for an answer cannot get the client disconnected by leaving
// all at once.
func TestWaitingLeave(t *testing.T) {
	const peers = 2 * maxQueued
	h, c := newClient(t, Config{})
	req := reqListen("", 7174)
	req.GetListen().Backlog = peers
	c.ok(req)
	var all []*mpaPeer
	for i := range peers {
		p := h.arrive(t, fmt.Sprintf("10.0.0.2:%d", 1000+i), 7174, mpa.DefaultConfig())
		p.send()
		if ev := c.event(); ev.GetConnectRequest() == nil {
			t.Fatalf("event %v", ev)
		}
		all = append(all, p)
	}
	for _, p := range all {
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	}
	for range peers {
		if ev := c.event(); ev.GetConnectGone() == nil {
			t.Fatalf("event %v", ev)
		}
	}
}

// TestStartupsOfUser checks that the start-ups of all listeners of a user have a limit, and that each listener can have
// some nevertheless, so that a peer that fills one does not affect those of another.
func TestStartupsOfUser(t *testing.T) {
	const limit, listeners = 20, 4
	h, c := newClient(t, Config{Limits: Limits{QPs: limit}})
	for i := range listeners {
		c.ok(reqListen("", 7174+uint32(i)))
	}
	var idle []*mpaPeer
	for i := range limit {
		idle = append(idle, h.arrive(t, fmt.Sprintf("10.0.0.2:%d", 1000+i), 7174, mpa.DefaultConfig()))
	}
	honest := h.arrive(t, "10.0.0.5:1000", 7175, mpa.DefaultConfig())
	for i := range 100 {
		h.arrive(t, fmt.Sprintf("10.0.0.3:%d", 1000+i), 7175+uint16(i%(listeners-1)), mpa.DefaultConfig())
	}
	if _, abort := honest.ended(); abort {
		t.Error("a peer was reset because of another one")
	}
	h.mu.Lock()
	if n := len(h.conns); n != limit+(listeners-1)*leastPending {
		t.Errorf("%d connections in start-up", n)
	}
	h.mu.Unlock()
	for i, p := range idle {
		if _, abort := p.ended(); abort {
			t.Errorf("connection %d was reset because of other listeners", i)
		}
	}
	h.arrive(t, "10.0.0.4:1000", 7174, mpa.DefaultConfig())
	if _, abort := idle[0].ended(); !abort {
		t.Error("the oldest connection of the listener was not reset")
	}
	h.leave(t, c)
}

// TestIdleNetwork checks that idle connections of one address do not use up what all listeners of a user may have.
func TestIdleNetwork(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{QPs: 256}})
	a, b := h.hello(t), h.hello(t)
	a.ok(reqListen("", 7174))
	b.ok(reqListen("", 7175))
	for i := range 1000 {
		h.arrive(t, fmt.Sprintf("10.0.0.3:%d", 1000+i), 7174, mpa.DefaultConfig())
	}
	var honest []*mpaPeer
	for i := range 40 {
		honest = append(honest, h.arrive(t, fmt.Sprintf("10.0.0.4:%d", 1000+i), 7175, mpa.DefaultConfig()))
	}
	for i, p := range honest {
		if _, abort := p.ended(); abort {
			t.Errorf("start-up %d at the other listener was reset", i)
		}
	}
}

// TestWaitingQuota checks that the requests that wait for an answer count in a quota, over all listeners of the user, and
// that each listener can have some nevertheless, so that a program that hangs keeps none from another one.
func TestWaitingQuota(t *testing.T) {
	const limit = 20
	h, c := newClient(t, Config{Limits: Limits{QPs: limit}})
	c.ok(reqListen("", 7174))
	c.ok(reqListen("", 7175))
	var peers []*mpaPeer
	arrive := func(port uint16) (taken bool) {
		p := h.arrive(t, fmt.Sprintf("10.0.0.2:%d", 1000+len(peers)), port, mpa.DefaultConfig())
		p.send()
		peers = append(peers, p)
		_, abort := p.ended()
		return !abort
	}
	for i := range limit + 2 {
		if taken := arrive(7174); taken != (i < limit) {
			t.Errorf("request %d: taken %v", i, taken)
		}
	}
	for i := range leastPending + 2 {
		if taken := arrive(7175); taken != (i < leastPending) {
			t.Errorf("request %d of the other listener: taken %v", i, taken)
		}
	}
	if q := c.quota("waiting"); q.Used != limit+leastPending || q.Limit != limit {
		t.Errorf("%v", q)
	}
	reject := &ctrlpb.Reject{Conn: c.event().GetConnectRequest().GetConn()}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: reject}})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: peers[0].id})
	if q := c.quota("waiting"); q.Used != limit+leastPending-1 || arrive(7174) {
		t.Errorf("after one was rejected: %v, or another one was taken", q)
	}
	h.leave(t, c)
}

// TestCrowdedListener checks that when a listener has too many start-ups in total, the network with the most of them
// loses one.
func TestCrowdedListener(t *testing.T) {
	h, c := newClient(t, Config{Startup: StartupDefaults{PerListener: 8}})
	c.ok(reqListen("", 7174))
	cfg := mpa.DefaultConfig()
	honest := []*mpaPeer{h.arrive(t, "10.0.0.7:1", 7174, cfg), h.arrive(t, "[2001:db8:2::1]:1", 7174, cfg)}
	var hostile []*mpaPeer
	for i := range 100 { // any number of addresses in one network
		hostile = append(hostile, h.arrive(t, fmt.Sprintf("[2001:db8:1::%x]:1", i+1), 7174, cfg))
	}
	for i, p := range hostile {
		if _, abort := p.ended(); abort != (i < 94) {
			t.Errorf("connection %d of the network: reset %v", i, abort)
		}
	}
	for _, p := range honest {
		if _, abort := p.ended(); abort {
			t.Error("a connection of another network was evicted")
		}
		p.send()
		if c.event().GetConnectRequest() == nil {
			t.Error("no connect request")
		}
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: hostile[99].id})
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.listeners {
		if l.starting.n != 5 {
			t.Errorf("%d counted; want 5", l.starting.n)
		}
	}
}

// TestStartupFiles checks that connections over kernel sockets without a queue pair count as
// descriptors of the daemon. If few descriptors are left, a new connection replaces one of the
// same listener, and a request that waits for its client is dropped.
func TestStartupFiles(t *testing.T) {
	h := newHarness(t, Config{})
	h.overSockets()
	c := h.hello(t)
	c.ok(reqListen("", 7174))
	testenv.Until(t, "the descriptors that the client has read count no longer", func() bool {
		c.ok(reqQuotas()) // the session looks before each request
		h.mu.Lock()
		defer h.mu.Unlock()
		unread := 0
		for _, s := range h.sessions {
			s.out.mu.Lock()
			unread += s.out.fds
			s.out.mu.Unlock()
		}
		return unread == 0
	})
	h.mu.Lock()
	h.files.most = 4 * (h.files.used + h.files.extra + 8) / 3
	h.mu.Unlock()
	loose := func() uint64 {
		h.mu.Lock()
		defer h.mu.Unlock()
		n := uint64(0)
		for _, l := range h.listeners {
			n += uint64(l.starting.n)
		}
		if h.files.extra < n {
			t.Errorf("%d connections, %d descriptors are counted", n, h.files.extra)
		}
		return n
	}
	cfg := mpa.DefaultConfig()
	var all []*mpaPeer
	for i := range 64 {
		all = append(all, h.arrive(t, fmt.Sprintf("10.0.%d.3:1000", i), 7174, cfg))
	}
	if n := loose(); n == 0 || n > 10 {
		t.Errorf("%d connections are in start-up", n)
	}
	p := all[len(all)-1]
	p.send()
	if _, abort := p.ended(); !abort {
		t.Error("a request was taken though few descriptors are left")
	}
	h.mu.Lock()
	h.files.most *= 4
	h.mu.Unlock()
	held := func() uint64 {
		n := loose()
		h.mu.Lock()
		defer h.mu.Unlock()
		return n + h.files.used
	}
	qp := c.qp()
	before := held()
	p = h.arrive(t, "10.1.0.3:1000", 7174, cfg)
	p.send()
	r := c.event().GetConnectRequest()
	if n := held(); n != before+1 {
		t.Errorf("%d descriptors for a request", n-before)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: r.GetConn(), Qp: qp}}})
	if n := held(); n != before {
		t.Errorf("%d descriptors for a connection with a queue pair", n-before)
	}
}
