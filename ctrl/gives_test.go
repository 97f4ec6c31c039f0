package ctrl

import (
	"bytes"
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// held is what the daemon has for the clients of a user, and the process has.
type held struct {
	quotas      [4]uint64
	account     account
	fds, memfds int // descriptors, and mappings of memfds
}

// within reports whether h is what was held before. What an earlier test has left may have gone meanwhile.
func (h held) within(before held) bool {
	return h.quotas == before.quotas && h.account == before.account && h.fds <= before.fds && h.memfds <= before.memfds
}

func (h *harness) held(t *testing.T, c *tclient) held {
	c.ok(reqQuotas()) // its reply shows that the request before has ended
	seqpacket.CloseAll(c.fds)
	c.fds = nil
	memfds := bytes.Count(testenv.ReadFile(t, "/proc/self/maps"), []byte("/memfd:"))
	h.mu.Lock()
	defer h.mu.Unlock()
	u := h.usageOf(uint32(os.Getuid()))
	all := [4]uint64{u.movers, h.movers.used + h.movers.extra, h.files.used, h.maps.used + h.maps.extra}
	return held{all, u.account, openFDs(t), memfds}
}

// TestGivesBack checks that a request that fails, for lack of descriptors or because it is wrong, and an object that is
// destroyed, leave nothing: no quota, no use of another object, and no descriptor.
func TestGivesBack(t *testing.T) {
	h, c := newClient(t, Config{Allow: []Rule{{Admin: true}}})
	pd, cq, cq2 := c.pd(), c.cq(), c.cq()
	srq := c.ok(reqSRQ(pd)).GetSrq().Srq
	channel, other := c.channel()
	reqChannel := &ctrlpb.Request{Body: &ctrlpb.Request_CreateChannel{CreateChannel: &ctrlpb.CreateChannel{}}}
	reqCapture := &ctrlpb.Request{Body: &ctrlpb.Request_Capture{Capture: &ctrlpb.Capture{}}}
	reqMW := &ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: pd}}}
	reqFar := &ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}
	two := func(srq uint32) *ctrlpb.Request {
		r := reqQP(pd, cq)
		r.GetCreateQp().RecvCq, r.GetCreateQp().Srq = cq2, srq
		return r
	}
	destroyPD := &ctrlpb.Request{Body: &ctrlpb.Request_DeallocPd{DeallocPd: &ctrlpb.DeallocPD{Pd: pd}}}
	destroyCQ := func(h uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: h}}}
	}
	destroyQP := func(r *ctrlpb.Reply) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: r.GetQp().GetQp()}}}
	}
	destroySRQ := func(h uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_DestroySrq{DestroySrq: &ctrlpb.DestroySRQ{Srq: h}}}
	}
	destroyChannel := func(h uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_DestroyChannel{DestroyChannel: &ctrlpb.DestroyChannel{Channel: h}}}
	}
	destroyMR := func(r *ctrlpb.Reply) *ctrlpb.Request {
		d := &ctrlpb.DeregisterMR{Mr: r.GetMr().GetMr()}
		return &ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: d}}
	}
	destroyMW := func(r *ctrlpb.Reply) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_DeallocMw{DeallocMw: &ctrlpb.DeallocMW{Mw: r.GetMw().GetMw()}}}
	}
	theCQ := func(r *ctrlpb.Reply) *ctrlpb.Request { return destroyCQ(r.GetCq().GetCq()) }
	theSRQ := func(r *ctrlpb.Reply) *ctrlpb.Request { return destroySRQ(r.GetSrq().GetSrq()) }
	theChannel := func(r *ctrlpb.Reply) *ctrlpb.Request { return destroyChannel(r.GetChannel().GetChannel()) }
	close := func(*ctrlpb.Reply) *ctrlpb.Request { return nil }
	mem, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(mem)
	page, null := memfd(t, 4096), nullFD(t)
	fast := reqMR(pd, 4096)
	fast.GetRegisterMr().Fast = true
	for _, tt := range []struct {
		name    string
		few     int // it fails with fewer free descriptors than this
		create  *ctrlpb.Request
		fds     []int
		destroy func(*ctrlpb.Reply) *ctrlpb.Request // nil: it always fails; returns nil if closing its descriptor ends it
		busy    []*ctrlpb.Request                   // of what it uses
	}{
		{"completion queue", 3, reqCQ(0), nil, theCQ, nil},
		{"completion queue on a channel", 1, reqCQ(channel), nil, theCQ, []*ctrlpb.Request{destroyChannel(channel)}},
		{"channel", 2, reqChannel, nil, theChannel, nil},
		{"queue pair", 2, two(0), nil, destroyQP, []*ctrlpb.Request{destroyPD, destroyCQ(cq), destroyCQ(cq2)}},
		{"queue pair with shared receives", 1, two(srq), nil, destroyQP,
			[]*ctrlpb.Request{destroyCQ(cq), destroyCQ(cq2), destroySRQ(srq)}},
		{"shared receive queue", 1, reqSRQ(pd), nil, theSRQ, []*ctrlpb.Request{destroyPD}},
		{"region", 1, reqMR(pd, 4096), []int{page}, destroyMR, []*ctrlpb.Request{destroyPD}},
		{"fast region", 1, fast, []int{page}, destroyMR, []*ctrlpb.Request{destroyPD}},
		{"window", 0, reqMW, nil, destroyMW, []*ctrlpb.Request{destroyPD}},
		{"region of what is no memory", 2, reqMR(pd, 4096), []int{null}, nil, nil},
		{"near memory", 3, reqAttach(), []int{null}, nil, nil},
		{"far memory", 3, reqFar, []int{null}, nil, nil},
		{"mover of far memory", 3, reqFar, []int{mem}, nil, nil},
		{"larger completion queue", 1, reqResize(cq, 64), nil, nil, nil},
		{"capture", 2, reqCapture, nil, close, nil},
	} {
		before := h.held(t, c)
		unchanged := func(when string) {
			t.Helper()
			var now held
			defer func() {
				if !now.within(before) {
					t.Errorf("%s, %s: %+v, before %+v", tt.name, when, now, before)
				}
			}()
			testenv.Until(t, "what it had is given back", func() bool { now = h.held(t, c); return now.within(before) })
		}
		for room := range tt.few {
			restore := testenv.FewFiles(t, room)
			r := c.do(proto.CloneOf(tt.create), tt.fds...)
			restore()
			if r.Error == nil {
				t.Fatalf("%s: succeeded with %d descriptors", tt.name, room)
			}
			unchanged("failed")
		}
		if tt.destroy == nil {
			continue
		}
		r := c.ok(tt.create, tt.fds...)
		for _, b := range tt.busy {
			c.fails(cBusy, b)
		}
		destroy := tt.destroy(r)
		if destroy == nil {
			unchanged("closed")
			continue
		}
		c.ok(destroy)
		unchanged("destroyed")
		c.fails(cNoObject, destroy)
	}
	before := h.held(t, c)
	h.mu.Lock()
	maps, movers := h.maps.most, h.movers.most
	h.maps.most, h.movers.most = 0, 0
	h.mu.Unlock()
	c.fails(cQuota, reqAttach(), page)
	c.fails(cQuota, reqFar, mem)
	testenv.Until(t, "memory that was not attached leaves nothing", func() bool { return h.held(t, c).within(before) })
	h.mu.Lock()
	h.maps.most, h.movers.most = maps, movers
	h.mu.Unlock()
	for _, r := range []*ctrlpb.Request{
		destroySRQ(srq), destroyPD, destroyCQ(cq), destroyCQ(cq2), destroyCQ(other), destroyChannel(channel),
	} {
		c.ok(r)
	}
	if got := h.held(t, c).account; got != (account{resClients: 1}) {
		t.Errorf("left: %v", got)
	}
	h.leave(t, c)
}

// TestLeavesNothing checks that a client that ends with all kinds of objects leaves no descriptor and no mapping.
func TestLeavesNothing(t *testing.T) {
	h, other := newClient(t, Config{})
	mem, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(mem)
	near := memfd(t, 4096)
	before := h.held(t, other)
	for range 2 {
		c := h.hello(t)
		_, cq := c.channel()
		c.ok(reqResize(cq, 64))
		pd := c.pd()
		c.ok(reqQP(pd, c.cq()))
		c.ok(reqSRQ(pd))
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}, mem)
		c.ok(reqAttach(), near)
		c.ok(reqNear(pd, 0, 4096))
		c.ok(reqMR(pd, 4096), near)
		for range 100 { // their replies are queued, since the client reads none
			c.send(reqResize(cq, 64))
		}
		c.c.Close()
		seqpacket.CloseAll(c.fds)
		c.fds = nil
		var now held
		testenv.Until(t, "the client has left nothing", func() bool { now = h.held(t, other); return now.within(before) })
	}
}
