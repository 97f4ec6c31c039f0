package ctrl

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
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
