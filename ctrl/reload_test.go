package ctrl

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// TestReload checks that new quotas and rules apply to existing clients, and that a client that is no longer allowed
// is disconnected with the reason.
func TestReload(t *testing.T) {
	uid := uint32(os.Getuid())
	h, c := newClient(t, Config{})
	c.qp()
	h.Reload(Config{Limits: Limits{QPs: 1}})
	c.fails(cQuota, reqQP(c.pd(), c.cq()))
	h.Reload(Config{Limits: Limits{QPs: 2}, Allow: []Rule{{UIDs: []uint32{uid}, Listen: []PortRange{{7000, 7001}}}}})
	c.qp()
	c.fails(ctrlpb.Code_CODE_PERMISSION, reqListen("10.0.0.1", 7174))
	if st := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}}).GetStatus(); st.Device.Interface != "eth9" || st.Device.MaxQp != 2 {
		t.Errorf("%v", st.Device)
	}
	h.Reload(Config{Allow: []Rule{{GIDs: []uint32{uint32(os.Getgid())}}}})
	c.ok(reqListen("10.0.0.1", 7174))
	h.Reload(Config{Allow: []Rule{{UIDs: []uint32{uid}, Deny: true}}})
	m := c.next()
	if m == nil || !strings.Contains(m.GetEvent().GetCutOff().GetError().GetText(), "no longer allowed") {
		t.Errorf("got %v", m)
	}
	if m := c.next(); m != nil {
		t.Errorf("after the end %v", m)
	}
	h.settled(t)
}

// TestNotReloaded checks that administrators, and no others, learn why a reload was refused, until one is not.
func TestNotReloaded(t *testing.T) {
	h := newHarness(t, Config{Allow: []Rule{{UIDs: []uint32{1000001}, Admin: true}, {}}})
	why := func(uid uint32) string {
		c := h.hello(t)
		h.mu.Lock()
		s := h.sessions[h.lastID]
		pol, _ := h.cfg.policyOf(uid, nil, false)
		s.pol.Store(&pol)
		h.mu.Unlock()
		return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}}).GetStatus().NotReloaded
	}
	const admin, other = 1000001, 1000002
	for _, tt := range []struct {
		err   error
		text  string
		gauge uint64
	}{{nil, "", 0}, {errors.New("max-qps: many: must be a number"), "max-qps: many: must be a number", 1}, {nil, "", 0},
		{errors.New("\xff\n" + strings.Repeat("x", 1<<20)), "\ufffd\\u000a" + strings.Repeat("x", maxText-9), 1}, // what a message holds
	} {
		h.NotReloaded(tt.err)
		if got := why(admin); got != tt.text {
			t.Errorf("an administrator is shown %q; want %q", got, tt.text)
		}
		if got := why(other); got != "" {
			t.Errorf("another user is shown %q", got)
		}
		if n := h.value(t, "ctrl.not_reloaded"); n != tt.gauge {
			t.Errorf("the gauge is %d; want %d", n, tt.gauge)
		}
	}
}

// TestReloadReceiveWindow checks that byte streams are still charged for the window that the engine has.
func TestReloadReceiveWindow(t *testing.T) {
	h := newHarness(t, Config{ReceiveWindow: 1 << 20})
	h.Reload(Config{ReceiveWindow: 1 << 16})
	c := h.hello(t)
	qp := c.qp()
	used := func() uint64 {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.account(uint32(os.Getuid()))[resRings]
	}
	before := used()
	req := reqConnect(qp, peerA.String())
	req.GetConnect().Streaming = true
	c.ok(req)
	if n := used() - before; n < 1<<20 {
		t.Errorf("%d bytes are charged", n)
	}
}

// TestReloadBelow checks that a client that holds more than a new quota can do what takes nothing of it.
func TestReloadBelow(t *testing.T) {
	h, c := newClient(t, Config{})
	qp := c.qp()
	h.Reload(Config{Limits: Limits{Rings: 1}})
	c.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 16}}})
	c.ok(reqConnect(qp, peerA.String()))
}
