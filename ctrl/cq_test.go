package ctrl

import (
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestDestroyModeratedCQ checks that a completion queue is not unmapped while a worker delays its wake-up, even if
// moderation was turned off meanwhile.
func TestDestroyModeratedCQ(t *testing.T) {
	for _, tt := range []struct {
		name string
		last uint32 // count of the last ModifyCQ
	}{{"moderated", 1000}, {"not any more", 0}} {
		t.Run(tt.name, func(t *testing.T) {
			h, c := newClient(t, Config{})
			handle := c.cq()
			client, err := shm.MapCQ(c.fds[len(c.fds)-2])
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			modify := func(count uint32) {
				t.Helper()
				c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ModifyCq{ModifyCq: &ctrlpb.ModifyCQ{Cq: handle, Count: count, PeriodUs: count * 1000}}})
			}
			modify(1000)
			client.Arm(false)

			var ring *shm.CQ
			h.mu.Lock()
			for _, s := range h.sessions {
				ring = s.cqs[handle].ring
			}
			h.mu.Unlock()
			ring.Push(0, &verbs.WC{})
			held := ring.Flush(0, clock.Time(1e9)) != 0
			if !held {
				t.Fatal("the wake-up is not held back")
			}
			turns := 0
			h.e.mu.Lock()
			h.e.onFence = func() { // in the middle of a turn, which flushes at its end
				if turns++; turns > 1 && held {
					held = ring.Flush(0, clock.Time(1e9)) != 0
				}
			}
			h.e.mu.Unlock()

			modify(tt.last)
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: handle}}})
			h.e.mu.Lock()
			defer h.e.mu.Unlock()
			h.e.onFence = nil
			if held {
				t.Error("unmapped while a worker looks at it")
			}
		})
	}
}
