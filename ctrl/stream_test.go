package ctrl

import (
	"fmt"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestStreamQuota: byte streams that a client leaves as such are bounded, also where
// it listens anew for each of them; one that is closed, or becomes MPA's, makes room.
func TestStreamQuota(t *testing.T) {
	const limit = 3
	h := newHarness(t, Config{Limits: Limits{QPs: limit}})
	c := h.hello(t)
	port := uint16(7000)
	// arrive opens a connection to a listener of its own, which goes again.
	arrive := func() *mpaPeer {
		t.Helper()
		port++
		req := reqListen(addrA.String(), uint32(port))
		req.GetListen().Streaming = true
		l := c.ok(req).GetListen().Listen
		p := h.arrive(t, fmt.Sprintf("10.0.0.2:%d", port), port, mpa.DefaultConfig())
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
		return p
	}
	full := func() {
		t.Helper()
		if ended, abort := arrive().ended(); !ended || !abort || len(c.events) != 0 {
			t.Errorf("one above the limit: ended %v, reset %v, events %v", ended, abort, c.events)
		}
	}
	var conns []uint32
	ready := func() {
		t.Helper()
		p := arrive()
		if ended, _ := p.ended(); ended {
			t.Fatalf("one within the limit was ended; %d are there", len(conns))
		}
		ev := c.event().GetStreamReady()
		if ev == nil {
			t.Fatal("no StreamReady")
		}
		conns = append(conns, ev.Conn)
	}
	for range limit {
		ready()
	}
	full()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conns[0]}}})
	ready()
	full()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StartMpa{StartMpa: &ctrlpb.StartMPA{Conn: conns[1]}}})
	ready()
	full()
	c.c.Close()
	h.settled(t)
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.usage) != 0 {
		t.Errorf("usage left: %v", h.usage)
	}
}
