package ctrl

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/verbs"
)

const (
	cInvalid  = ctrlpb.Code_CODE_INVALID
	cNoObject = ctrlpb.Code_CODE_NO_OBJECT
	cQuota    = ctrlpb.Code_CODE_QUOTA
	cVersion  = ctrlpb.Code_CODE_VERSION
	cState    = ctrlpb.Code_CODE_STATE
	cBusy     = ctrlpb.Code_CODE_BUSY
)

func TestHello(t *testing.T) {
	h := newHarness(t, Config{Version: "1.2"})
	c := h.client(t)
	c.fails(cVersion, &ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	hello := func(max, min uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: max, MinVersion: min, Name: strings.Repeat("x", 100)}}}
	}
	c.fails(cVersion, hello(0, 0))
	c.fails(cVersion, hello(9, 2))
	r := c.ok(hello(9, 1)).GetHello()
	if r.Version != 1 || r.Server != "iwarpd 1.2" || r.Workers != 1 || len(c.fds) != 2 {
		t.Errorf("%v with %d descriptors", r, len(c.fds))
	}
	if a := r.Device.Addresses; len(a) != 1 || a[0] != "10.0.0.1" {
		t.Errorf("addresses %v", a)
	}
	c.fails(cState, hello(1, 1))
	list := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListClients{ListClients: &ctrlpb.ListClients{}}}).GetClients().Clients
	if len(list) != 1 || len(list[0].Name) != 64 || list[0].Pid != uint32(os.Getpid()) || list[0].Errors != 4 {
		t.Errorf("%v", list)
	}
}

// TestCutOff checks that an invalid packet disconnects its client and no other.
func TestCutOff(t *testing.T) {
	h := newHarness(t, Config{})
	other := h.hello(t)
	for _, tt := range []struct {
		name string
		b    []byte
		fds  int
	}{
		{"no protobuf", []byte{0xff, 0xff, 0xff}, 0},
		{"no id", []byte{0x12, 0}, 0},
		{"empty packet", nil, 0},
		{"many descriptors", []byte{8, 1}, 5},
		{"too long", make([]byte, seqpacket.MaxPacket), 0},
	} {
		c := h.hello(t)
		var fds []int
		for range tt.fds {
			fds = append(fds, memfd(t, 4096))
		}
		if err := c.c.Write(tt.b, fds); err != nil {
			t.Fatalf("%s: %v", tt.name, err)
		}
		if m := c.next(); m != nil {
			t.Errorf("%s: answered by %v", tt.name, m)
		}
	}
	other.pd()
}

// TestCutOffServed checks that no request of a client is served while it is being cut off, which takes a while if the
// client reads nothing.
func TestCutOffServed(t *testing.T) {
	h, c := newClient(t, Config{})
	h.mu.Lock()
	sess := h.sessions[h.lastID]
	h.mu.Unlock()
	sess.cut.Store(true) // cutOff begins
	before := h.counters.requests.Load()
	for range 2 {
		c.send(&ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	}
	testenv.Until(t, "the requests are read", func() bool { return c.c.Unread() == 0 })
	sess.shutdown() // cutOff ends
	h.leave(t, c)
	if n := h.counters.requests.Load() - before; n != 0 {
		t.Errorf("%d requests were served", n)
	}
}

func TestObjects(t *testing.T) {
	before := openFDs(t)
	h, c := newClient(t, Config{})
	pd, cq := c.pd(), c.cq()
	mr := c.ok(reqMR(pd, 8192), memfd(t, 8192)).GetMr()
	if r := h.table.Lookup(mr.Rkey); r == nil || r.Base() != 4096 || r.Len() != 8192 {
		t.Errorf("rkey %#x is not registered", mr.Rkey)
	}
	qp := c.ok(reqQP(pd, cq)).GetQp()
	mw := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: pd}}}).GetMw()
	if st := h.Status(); st.Pds != 1 || st.Mrs != 1 || st.Mws != 1 || st.Cqs != 1 || st.Qps != 1 || st.Registered != 8192 {
		t.Errorf("status %v", st)
	}

	c.fails(cBusy, &ctrlpb.Request{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: pd}}})
	c.fails(cBusy, &ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}})
	c.fails(cInvalid, reqMR(pd, 8192)) // of no descriptor

	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp.Qp}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: mr.Mr}}})
	c.fails(cBusy, &ctrlpb.Request{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: pd}}}) // because of the window
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: mw.Mw}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: pd}}})
	if h.table.Lookup(mr.Rkey) != nil || h.table.Len() != 0 {
		t.Error("the region is still there")
	}
	if st := h.Status(); st.Pds+st.Mrs+st.Mws+st.Cqs+st.Qps+uint32(st.Registered) != 0 {
		t.Errorf("status %v", st)
	}
	c.c.Close()
	seqpacket.CloseAll(c.fds)
	c.fds = nil
	h.settled(t)
	h.Close()
	// The memfd of this test and the fake's eventfd, which its clean-up closes.
	if after := openFDs(t); after > before+2 {
		t.Errorf("%d descriptors open, %d before", after, before)
	}
}

// TestRevoked checks that no worker is still accessing memory by a key when the reply says that it is not valid any more.
func TestRevoked(t *testing.T) {
	h, c := newClient(t, Config{})
	pd := c.pd()
	mr := c.ok(reqMR(pd, 4096), memfd(t, 4096)).GetMr()
	mw := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: pd}}}).GetMw()
	for _, tt := range []struct {
		key    uint32
		revoke *ctrlpb.Request
	}{
		{mw.Rkey, &ctrlpb.Request{Body: &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: mw.Mw}}}},
		{mr.Rkey, &ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: mr.Mr}}}},
	} {
		fenced := false
		h.e.mu.Lock()
		h.e.onFence = func() { fenced = fenced || h.table.Lookup(tt.key) == nil }
		h.e.mu.Unlock()
		c.ok(tt.revoke)
		h.e.mu.Lock()
		if h.e.onFence = nil; !fenced {
			t.Errorf("%T: no worker was waited for", tt.revoke.Body)
		}
		h.e.mu.Unlock()
	}
}

// TestForeignHandles checks that a client cannot use another client's handles in any request.
func TestForeignHandles(t *testing.T) {
	h := newHarness(t, Config{})
	victim, thief := h.hello(t), h.hello(t)
	for range 100 { // its handles are none of the thief's, which count from 1 too
		victim.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: victim.pd()}}})
	}
	pd, cq := victim.pd(), victim.cq()
	mr := victim.ok(reqMR(pd, 4096), memfd(t, 4096)).GetMr().Mr
	qp := victim.ok(reqQP(pd, cq)).GetQp().Qp
	l := victim.ok(reqListen("", 7174)).GetListen().Listen
	mw := victim.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: pd}}}).GetMw().Mw

	ch := victim.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}).GetChannel().Channel

	ownCQ := thief.cq()
	half := func(f func(*ctrlpb.CreateQP)) *ctrlpb.Request { // of what it names is its own
		r := reqQP(thief.pd(), ownCQ)
		f(r.GetCreateQp())
		return r
	}
	for _, req := range []*ctrlpb.Request{
		{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: pd}}},
		{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: mr}}},
		{Body: &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: mw}}},
		{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}},
		{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}},
		{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}},
		{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: l, Qp: qp}}},
		{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: l}}},
		{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: pd}}},
		{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}},
		{Body: &ctrlpb.Request_DestroyChannel{DestroyChannel: &ctrlpb.DestroyChannel{Channel: ch}}},
		{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 4, Channel: ch}}},
		reqConnect(qp, "10.0.0.2:7174"),
		reqQP(pd, ownCQ),
		reqQP(thief.pd(), cq),
		half(func(r *ctrlpb.CreateQP) { r.SendCq = cq }),
		half(func(r *ctrlpb.CreateQP) { r.RecvCq = cq }),
	} {
		thief.fails(cNoObject, req)
	}
	thief.fails(cNoObject, reqMR(pd, 4096), memfd(t, 4096))
	domains := make(map[verbs.PDID]bool)
	h.mu.Lock()
	for _, s := range h.sessions {
		for _, p := range s.pds {
			if domains[p.id] {
				t.Errorf("two protection domains are %d", p.id)
			}
			domains[p.id] = true
		}
	}
	h.mu.Unlock()
	if text := thief.fails(ctrlpb.Code_CODE_PORT_IN_USE, reqListen("", 7174)); !strings.Contains(text, "choose another port") {
		t.Errorf("no fix named: %q", text)
	}
	thief.fails(ctrlpb.Code_CODE_PORT_IN_USE, reqListen("10.0.0.1", 7174))
	if st := h.Status(); st.Qps != 1 || st.Mrs != 1 || st.Listens != 1 || st.Mws != 1 {
		t.Errorf("status %v", st)
	}
	victim.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
}

func TestInvalidRequests(t *testing.T) {
	h, c := newClient(t, Config{Limits: Limits{QueueDepth: 64, CQDepth: 64, MaxInline: 64, MaxSGE: 4}})
	pd, cq := c.pd(), c.cq()
	qp := func(f func(*ctrlpb.CreateQP)) *ctrlpb.Request {
		r := reqQP(pd, cq)
		f(r.GetCreateQp())
		return r
	}
	q := c.ok(reqQP(pd, cq)).GetQp().Qp
	otherSRQ := c.ok(reqSRQ(c.pd())).GetSrq().Srq
	connect := func(f func(*ctrlpb.Connect)) *ctrlpb.Request {
		r := reqConnect(q, "10.0.0.2:7174")
		f(r.GetConnect())
		return r
	}
	u32 := func(v uint32) *uint32 { return &v }
	yes := true
	for _, req := range []*ctrlpb.Request{
		{},
		{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{}}},
		{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 65}}},
		{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 1 << 31}}},
		qp(func(r *ctrlpb.CreateQP) { r.SqDepth = 0 }),
		qp(func(r *ctrlpb.CreateQP) { r.RqDepth = 1 << 31 }),
		qp(func(r *ctrlpb.CreateQP) { r.MaxSge = 0 }),
		qp(func(r *ctrlpb.CreateQP) { r.MaxSge = 5 }),
		qp(func(r *ctrlpb.CreateQP) { r.MaxInline = 65 }),
		qp(func(r *ctrlpb.CreateQP) { r.ReceiveWaitMs = 60001 }),
		qp(func(r *ctrlpb.CreateQP) { r.Srq = otherSRQ }), // of another protection domain
		{Body: &ctrlpb.Request_ModifyCq{ModifyCq: &ctrlpb.ModifyCQ{Cq: cq, Count: 1, PeriodUs: 1000001}}},
		reqMR(pd, 4096), // no descriptor
		reqListen("nonsense", 1), reqListen("224.0.0.1", 1), reqListen("", 65536),
		connect(func(r *ctrlpb.Connect) { r.Remote = "" }),
		connect(func(r *ctrlpb.Connect) { r.Remote = "10.0.0.2" }),
		connect(func(r *ctrlpb.Connect) { r.Remote = "0.0.0.0:7" }),
		connect(func(r *ctrlpb.Connect) { r.Remote = "224.0.0.1:7" }),
		connect(func(r *ctrlpb.Connect) { r.Remote = "[fe80::1%elsewhere]:7" }),
		connect(func(r *ctrlpb.Connect) { r.Remote, r.Local = "[fe80::1]:7", "fe80::2%elsewhere" }),
		reqListen("fe80::1%elsewhere", 7),
		connect(func(r *ctrlpb.Connect) { r.Local = "x" }),
		connect(func(r *ctrlpb.Connect) { r.Local = "fd00::1" }),
		connect(func(r *ctrlpb.Connect) { r.PrivateData = make([]byte, 509) }),
		connect(func(r *ctrlpb.Connect) { r.PrivateData = make([]byte, 513) }),
		connect(func(r *ctrlpb.Connect) { r.Streaming, r.PrivateData = true, make([]byte, 1) }),
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Revision: u32(3)} }),
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Revision: u32(1), P2P: &yes} }),
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Rtr: u32(8)} }),
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Ird: u32(1 << 20)} }),
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Ord: u32(1 << 20)} }),
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Ird: u32(129)} }), // more than StartupDefaults.MaxIRD
		connect(func(r *ctrlpb.Connect) { r.Startup = &ctrlpb.Startup{Ord: u32(129)} }),
	} {
		c.fails(cInvalid, req)
	}
	for _, req := range []*ctrlpb.Request{ // the greatest that are valid
		{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 64}}},
		{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: pd, Depth: 64, MaxSge: 4, Limit: 64}}},
		{Body: &ctrlpb.Request_ModifyCq{ModifyCq: &ctrlpb.ModifyCQ{Cq: cq, Count: 1, PeriodUs: 1000000}}},
		qp(func(r *ctrlpb.CreateQP) {
			r.SqDepth, r.RqDepth, r.MaxSge, r.MaxInline, r.ReceiveWaitMs = 64, 64, 4, 64, 60000
		}),
	} {
		c.ok(req)
	}
	c.fails(cInvalid, reqMR(pd, 0), memfd(t, 4096))
	c.fails(cInvalid, reqMR(pd, 8192), memfd(t, 4096)) // longer than the memfd
	c.fails(cInvalid, reqMR(pd, 1<<33), memfd(t, 4096))
	pipe := make([]int, 2)
	if err := unix.Pipe(pipe); err != nil {
		t.Fatal(err)
	}
	defer seqpacket.CloseAll(pipe)
	c.fails(cInvalid, reqMR(pd, 4096), pipe[0])
	bad := reqMR(pd, 4096)
	bad.GetRegisterMr().Access = 1 << 20
	c.fails(cInvalid, bad, memfd(t, 4096))
	bad = reqMR(pd, 4096)
	bad.GetRegisterMr().Offset = 1<<64 - 4096
	c.fails(cInvalid, bad, memfd(t, 4096))
	c.fails(ctrlpb.Code_CODE_ADDRESS, reqListen("10.9.9.9", 7174))
	last := c.ok(reqListen("", 65535)).GetListen().Listen
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: last}}})
	loopback := reqListenSCTP()
	loopback.GetListen().Address = "127.0.0.1"
	c.fails(ctrlpb.Code_CODE_ADDRESS, loopback)
	if st := h.Status(); st.Mrs != 0 || st.Qps != 2 || st.Registered != 0 || st.Listens != 0 {
		t.Errorf("refused requests left something: %v", st)
	}
}

func TestQuota(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{Clients: 2, PDs: 3, MRs: 2, MWs: 1, CQs: 2, QPs: 2, Listens: 1, Registered: 10000}})
	a, b := h.hello(t), h.hello(t)
	third := h.client(t)
	text := third.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	if m := third.next(); m != nil || !strings.Contains(text, "max-clients") {
		t.Errorf("a third client got %q, then %v", text, m)
	}
	pd, cq := a.pd(), a.cq()
	bpd, bcq := b.pd(), b.cq()
	a.pd()
	b.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	b.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 1}}})
	a.ok(reqMR(pd, 6000), memfd(t, 8192))
	b.fails(cQuota, reqMR(bpd, 4001), memfd(t, 8192))
	b.ok(reqMR(bpd, 4000), memfd(t, 8192))
	b.fails(cQuota, reqMR(bpd, 1), memfd(t, 8192))
	a.ok(reqQP(pd, cq))
	b.ok(reqQP(bpd, bcq))
	a.fails(cQuota, reqQP(pd, cq))
	a.ok(reqListen("", 1))
	b.fails(cQuota, reqListen("", 2))
	a.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: pd}}})
	text = b.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: bpd}}})
	if !strings.Contains(text, "raise max-windows in") {
		t.Errorf("no fix named: %q", text)
	}
	// What a client held is available to the other after it has left.
	a.c.Close()
	for b.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStatus{QueryStatus: &ctrlpb.QueryStatus{}}}).GetStatus().Clients > 1 {
	}
	b.ok(reqListen("", 3))
	b.ok(reqMR(bpd, 6000), memfd(t, 8192))
	b.ok(reqQP(bpd, bcq))
}

// TestRingQuota checks that deep queues are charged by their memory.
func TestRingQuota(t *testing.T) {
	h, c := newClient(t, Config{Limits: Limits{Rings: 2 << 20}})
	pd, cq := c.pd(), c.cq()
	big := func() *ctrlpb.Request {
		r := reqQP(pd, cq)
		r.GetCreateQp().SqDepth = 2048
		return r
	}
	qp := c.ok(big()).GetQp().Qp
	c.ok(big())
	c.fails(cQuota, big())
	c.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_CreateCq{CreateCq: &ctrlpb.CreateCQ{Depth: 16384}}})
	if st := h.Status(); st.Qps != 2 || st.Cqs != 1 {
		t.Errorf("status %v", st)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
	c.ok(big())
	h.leave(t, c)
}

func TestPolicy(t *testing.T) {
	uid := uint32(os.Getuid())
	h := newHarness(t, Config{Allow: []Rule{
		{UIDs: []uint32{uid + 1}, Deny: true},
		{UIDs: []uint32{uid}, Listen: []PortRange{{7000, 7999}}, Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/24")}, Limits: &Limits{QPs: 1}},
	}})
	c := h.hello(t)
	c.fails(ctrlpb.Code_CODE_PERMISSION, reqListen("10.0.0.1", 80))
	if text := c.fails(ctrlpb.Code_CODE_PERMISSION, reqListen("", 7174)); !strings.Contains(text, "not in addresses of rule 2 of allow: choose one that is") {
		t.Error(text)
	}
	c.ok(reqListen("10.0.0.1", 7174))
	c.qp()
	c.fails(cQuota, reqQP(c.pd(), c.cq()))

	for _, tt := range []struct {
		uid   uint32
		gids  []uint32
		ok    bool
		admin bool
	}{
		{uid + 1, nil, false, false},
		{uid + 2, nil, uid+2 == 0, uid+2 == 0},
		{uid + 3, []uint32{50}, true, true},
	} {
		cfg := Config{Allow: append(h.cfg.Allow, Rule{GIDs: []uint32{50}, Admin: true})}.fill()
		pol, ok := cfg.policyOf(tt.uid, tt.gids, false)
		if ok != tt.ok || ok && pol.admin != tt.admin {
			t.Errorf("uid %d, groups %v: %v, admin %v", tt.uid, tt.gids, ok, pol.admin)
		}
	}
	deny := newHarness(t, Config{Allow: []Rule{{UIDs: []uint32{uid}, Deny: true}}})
	denied := deny.client(t)
	text := denied.fails(ctrlpb.Code_CODE_PERMISSION, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	if !strings.Contains(text, "is not allowed: rule 1 of allow denies it: change it, and reload iwarpd") {
		t.Error(text)
	}
	if m := denied.next(); m != nil {
		t.Errorf("a denied client got %v", m)
	}
}

func TestSocket(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "sock")
	h := newHarness(t, Config{Socket: path, Mode: 0o600})
	if err := h.Listen(); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- h.Serve(ctx) }()
	c, err := seqpacket.Dial(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	tc := &tclient{t: t, c: c}
	tc.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	defer seqpacket.CloseAll(tc.fds)

	if _, err := listenSocket(path, 0o600, ""); err == nil || !strings.Contains(err.Error(), "another iwarpd answers") {
		t.Errorf("a second daemon: %v", err)
	}
	cancel()
	if err := <-served; err != nil {
		t.Errorf("Serve: %v", err)
	}
	c.Close()

	// A socket that a killed daemon left is replaced; a regular file is not.
	stale := filepath.Join(dir, "stale")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: stale, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	replaced, err := listenSocket(stale, 0o600, "")
	if err != nil {
		t.Fatalf("stale socket: %v", err)
	}
	replaced.Close()
	file := filepath.Join(dir, "file")
	testenv.WriteFile(t, file, nil, 0o600)
	if _, err := listenSocket(file, 0o600, ""); err == nil {
		t.Error("a file was taken for a socket")
	}
	other := filepath.Join(dir, "other") // of another program
	stream, err := net.Listen("unix", other)
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if _, err := listenSocket(other, 0o600, ""); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a socket of another type: %v", err)
	}
	if _, err := listenSocket(filepath.Join(dir, "x"), 0o600, "no-such-group"); err == nil {
		t.Error("no error for a group that is not there")
	}
	if _, err := listenSocket(filepath.Join(dir, "none", "x"), 0o600, ""); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing folder: %v", err)
	}
}

// TestSocketOwn checks that others cannot connect before the socket has its group and mode.
func TestSocketOwn(t *testing.T) {
	for _, network := range []string{"unix", "unixpacket"} {
		path := filepath.Join(t.TempDir(), "s")
		l, err := listenOwn(network, path)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if fi, err := os.Stat(path); err != nil || fi.Mode().Perm()&^0o600 != 0 {
			t.Errorf("%s: %v, %v", network, fi.Mode(), err)
		}
	}
}

// TestSocketOfAnother checks that a daemon whose socket file was removed does not remove that of the next one.
func TestSocketOfAnother(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first, err := ListenUnix("unixpacket", path, 0o600, -1)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second, err := ListenUnix("unixpacket", path, 0o600, -1)
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	if c, err := net.Dial("unixpacket", path); err != nil {
		t.Error(err)
	} else {
		c.Close()
	}
	second.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of a closed socket: %v", err)
	}
}

// TestSocketGroup checks that an unprivileged daemon can give its socket to a group that it is a member of, and to no other.
func TestSocketGroup(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	const daemon = 1 // gid on every Linux; 2 is bin
	testenv.AsUser(t, 54321, 54321, []int{daemon}, func() {
		l, err := listenSocket(filepath.Join(dir, "a"), 0o660, "daemon")
		if err != nil {
			t.Errorf("a group of the daemon's: %v", err)
			return
		}
		defer l.Close()
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "a"), &st); err != nil || st.Gid != daemon || st.Mode&0o777 != 0o660 {
			t.Errorf("group %d, mode %o, %v", st.Gid, st.Mode, err)
		}
		if _, err := listenSocket(filepath.Join(dir, "b"), 0o660, "bin"); !errors.Is(err, ErrNotMember) || !strings.Contains(err.Error(), "usermod -aG bin") {
			t.Errorf("another group: %v", err)
		}
	})
}

func TestLists(t *testing.T) {
	_, c := newClient(t, Config{})
	pd, cq := c.pd(), c.cq()
	fd := memfd(t, 4096)
	const n = 150
	for range n {
		c.ok(reqMR(pd, 100), fd)
		c.ok(reqQP(pd, cq))
	}
	seen := map[uint32]bool{}
	for after := uint32(0); ; {
		l := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListMrs{ListMrs: &ctrlpb.ListMRs{After: after}}}).GetMrs()
		for _, m := range l.Mrs {
			seen[m.Mr] = true
			after = m.Index
		}
		if !l.More {
			break
		}
	}
	if len(seen) != n {
		t.Errorf("%d regions listed, want %d", len(seen), n)
	}
	clear(seen)
	for after := uint32(0); ; {
		l := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{After: after}}}).GetQps()
		for _, q := range l.Qps {
			seen[q.Qp] = true
			after = q.Qp
		}
		if !l.More {
			break
		}
	}
	if len(seen) != n {
		t.Errorf("%d queue pairs listed, want %d", len(seen), n)
	}
	c.fails(cNoObject, &ctrlpb.Request{Body: &ctrlpb.Request_ListQps{ListQps: &ctrlpb.ListQPs{Qp: 1 << 23}}})
	if k := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_QueryStats{QueryStats: &ctrlpb.QueryStats{}}}).GetStats().Counters; len(k) < 10 {
		t.Errorf("%d counters", len(k))
	}
}

func TestSnake(t *testing.T) {
	for in, want := range map[string]string{
		"RxFPDUsEarly": "rx_fpdus_early", "TxNoSlot": "tx_no_slot", "CQOverruns": "cq_overruns", "Conns": "conns",
		"RxICMP": "rx_icmp", "SRTT": "srtt", "RxFPDUs": "rx_fpdus", "TCPSegs": "tcp_segs", "P50": "p50",
	} {
		if got := snake(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
}

// TestReaders checks that the number of threads that wait for clients has a bound, and that the clients beyond are served.
func TestReaders(t *testing.T) {
	const beyond = 100
	h := newHarness(t, Config{Limits: Limits{Clients: mostReaders + beyond}})
	most := int(h.readers.most)
	var clients []*tclient
	for range most + beyond {
		clients = append(clients, h.client(t))
	}
	ask := func() {
		for _, c := range clients {
			c.fails(badVersion, reqListen("", 1)) // before Hello
		}
	}
	waiting := func() int { return calling(t, unix.SYS_RECVMSG) }
	ask()
	testenv.Until(t, "as many threads wait as may", func() bool { return waiting() >= most })
	ask() // all but the last ones wait again
	testenv.Until(t, "no more of them wait", func() bool { return waiting() <= most })
	for _, c := range clients {
		c.c.Close()
	}
	testenv.Until(t, "no client is served", func() bool { return h.readers.Load() == 0 })
}
