package ctrl

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestDrain checks that a draining server announces it, refuses new connections in both directions, and waits until
// clients have ended the existing ones.
func TestDrain(t *testing.T) {
	h, c, _, _ := detachable(t, Config{})
	left := make(chan int, 1)
	go func() { left <- h.Drain(t.Context(), 90*time.Second) }()
	if e := c.event().GetDraining(); e.GetTimeoutMs() != 90000 {
		t.Fatalf("event %v; want Draining in 90 s", e)
	}
	for _, req := range []*ctrlpb.Request{reqListen("", 7175), reqConnect(c.qp(), peerA.String())} {
		if text := c.fails(ctrlpb.Code_CODE_DRAINING, req); !strings.Contains(text, "the daemon is stopping") {
			t.Errorf("refused for %q", text)
		}
	}
	late := h.client(t) // it connected before
	late.fails(ctrlpb.Code_CODE_DRAINING, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: Version, MinVersion: MinVersion}}})
	h.e.mu.Lock()
	listens := len(h.e.listens)
	h.e.mu.Unlock()
	if listens != 0 {
		t.Errorf("%d listeners still take connections", listens)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}}) // a running transfer may still need objects
	if h.Drain(t.Context(), time.Second) != 3 {
		t.Error("a second Drain does not count the connections")
	}

	var conns []dataplane.ConnID
	h.mu.Lock()
	for id := range h.conns {
		conns = append(conns, id)
	}
	h.mu.Unlock()
	for _, id := range conns {
		select {
		case n := <-left:
			t.Fatalf("did not wait: %d connections left", n)
		default:
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id})
	}
	if n := <-left; n != 0 {
		t.Errorf("%d connections left", n)
	}
}

// TestDrainLocks checks that requests are served while the engine ends the listeners of a draining server.
func TestDrainLocks(t *testing.T) {
	h, _, _, _ := detachable(t, Config{})
	calls := 0
	h.e.mu.Lock()
	h.e.onUnlisten = func() {
		calls++
		locked := make(chan struct{})
		go func() {
			defer close(locked)
			h.mu.Lock()
			defer h.mu.Unlock()
		}()
		select {
		case <-locked:
		case <-time.After(10 * time.Second):
			t.Error("the server is locked while the engine ends a listener")
		}
	}
	h.e.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	h.Drain(ctx, time.Second)
	h.e.mu.Lock()
	h.e.onUnlisten = nil
	h.e.mu.Unlock()
	if calls == 0 {
		t.Error("no listener was ended")
	}
}

// TestDrainStartups checks that a draining server resets connections whose request has not arrived, and does not wait
// for them.
func TestDrainStartups(t *testing.T) {
	h, c := newClient(t, Config{})
	c.ok(reqListen("", 7174))
	p := h.arrive(t, "10.0.0.3:1", 7174, mpa.DefaultConfig())
	h.mu.Lock()
	l := h.conns[p.id].listener.id
	h.mu.Unlock()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if n := h.Drain(over, 0); n != 0 {
		t.Errorf("it would wait for %d connections", n)
	}
	if _, abort := p.ended(); !abort {
		t.Error("a connection without a request was not reset")
	}
	late := h.e.add(p.c.local, p.c.remote)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventAccepted, Conn: late, Listener: l, Flow: flowOf(p.c.local, p.c.remote)})
	h.e.with(late, func(c *fakeConn) {
		if !c.abort {
			t.Error("a connection that the engine had accepted before was not reset")
		}
	})
}

// TestDrainLate checks that the wait is bounded and that a server without connections does not wait.
func TestDrainLate(t *testing.T) {
	h, c, _, _ := detachable(t, Config{})
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if n := h.Drain(over, 0); n != 3 {
		t.Errorf("%d connections left; want 3", n)
	}
	if c.event().GetDraining() == nil {
		t.Error("not announced")
	}
	if n := newHarness(t, Config{}).Drain(t.Context(), time.Hour); n != 0 {
		t.Errorf("%d connections without a client", n)
	}
}

// TestDrainLinger checks that a draining server waits for the last data of a byte stream that its client has closed.
func TestDrainLinger(t *testing.T) {
	h, c := newClient(t, Config{})
	conn, p := h.accepted(t, c)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn}}})
	left := make(chan int, 1)
	go func() { left <- h.Drain(t.Context(), time.Minute) }()
	if c.event().GetDraining() == nil {
		t.Fatal("not announced")
	}
	c.pd() // Drain has looked
	if len(left) != 0 {
		t.Error("did not wait")
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	if n := <-left; n != 0 {
		t.Errorf("%d connections left", n)
	}
}

// TestDrainLingers checks that Drain waits for the last data of a byte stream that takes the place of another one.
func TestDrainLingers(t *testing.T) {
	h, c := newClient(t, Config{Limits: Limits{QPs: 1}})
	streamClose := func(conn uint32) {
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn}}})
	}
	first, _ := h.accepted(t, c)
	streamClose(first)
	p := h.arrive(t, "10.0.0.2:1000", 7174, mpa.DefaultConfig())
	second := c.event().GetStreamReady().GetConn()
	left := make(chan int, 1)
	go func() { left <- h.Drain(t.Context(), time.Minute) }()
	if c.event().GetDraining() == nil {
		t.Fatal("not announced")
	}
	streamClose(second)
	h.mu.Lock()
	select {
	case <-h.drained:
		t.Error("did not wait")
	default:
	}
	h.mu.Unlock()
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	<-left
}
