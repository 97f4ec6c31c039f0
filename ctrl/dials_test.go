package ctrl

import (
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// stuckResolver finds no neighbour until it is released.
type stuckResolver struct {
	fakeResolver
	n       atomic.Int32 // calls in progress
	release chan struct{}
}

func (r *stuckResolver) Resolve(dst, src netip.Addr, device string) (dataplane.Hop, error) {
	r.n.Add(1)
	defer r.n.Add(-1)
	<-r.release
	return r.fakeResolver.Resolve(dst, src, device)
}

// TestCanceledDials checks that canceled connects count against the limit until their look-ups of the next hop have ended: each
// takes seconds, and delays those of others.
func TestCanceledDials(t *testing.T) {
	const limit = 8
	h := newHarness(t, Config{Limits: Limits{QPs: limit}})
	r := &stuckResolver{fakeResolver: fakeResolver{addrA}, release: make(chan struct{})}
	h.resolver = r
	release := sync.OnceFunc(func() { close(r.release) })
	defer release()
	refused := 0
	for range 4 {
		c := h.hello(t) // another client of the user
		pd, cq := c.pd(), c.cq()
		for range limit {
			qp := c.ok(reqQP(pd, cq)).GetQp().Qp
			if reply := c.do(reqConnect(qp, "10.0.0.2:7174")); reply.Error != nil {
				if reply.Error.Code != ctrlpb.Code_CODE_QUOTA {
					t.Fatal(reply.Error)
				}
				refused++
			}
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
		}
		c.c.Close()
	}
	if refused != 3*limit {
		t.Errorf("%d connects were refused; want %d: %d look-ups are in progress", refused, 3*limit, r.n.Load())
	}
	release()
	h.settled(t)
	c := h.hello(t)
	c.ok(reqConnect(c.qp(), "10.0.0.2:7174"))
	h.e.await(t, "connect")
}

// TestDialOrder checks that the connections of a client to one address are opened in the order of its requests, although
// the look-ups of their next hops end in any order.
func TestDialOrder(t *testing.T) {
	h := newHarness(t, Config{})
	r := &stuckResolver{fakeResolver: fakeResolver{addrA}, release: make(chan struct{})}
	h.resolver = r
	c := h.hello(t)
	const dials, first = 8, 7174
	for i := range dials {
		c.ok(reqConnect(c.qp(), fmt.Sprint("10.0.0.2:", first+i)))
	}
	testenv.Until(t, "all look-ups are in progress", func() bool { return r.n.Load() == dials })
	close(r.release)
	for range dials {
		h.e.await(t, "connect")
	}
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	for i, remote := range h.e.connects {
		if want := uint16(first + i); remote.Port() != want {
			t.Errorf("connect %d is to port %d, want %d", i, remote.Port(), want)
		}
	}
}
