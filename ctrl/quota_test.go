package ctrl

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// reqQuotas asks for the quotas.
func reqQuotas() *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_ListQuotas{ListQuotas: &ctrlpb.ListQuotas{}}}
}

// quota returns a quota of the client's own user, as the daemon lists it.
func (c *tclient) quota(name string) *ctrlpb.Quota {
	c.t.Helper()
	for _, u := range c.ok(reqQuotas()).GetQuotas().GetUsers() {
		if i := slices.IndexFunc(u.Quotas, func(q *ctrlpb.Quota) bool { return q.Name == name }); i >= 0 && u.Uid == uint32(os.Getuid()) {
			return u.Quotas[i]
		}
	}
	c.t.Fatalf("no quota %q is listed", name)
	return nil
}

// TestListQuotas checks that the list holds the user's usage over all its clients and the limits of the rule that
// applies to it.
func TestListQuotas(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{QPs: 7, Registered: 1 << 20}})
	a, b := h.hello(t), h.hello(t)
	a.qp()
	b.qp()
	a.ok(reqMR(a.pd(), 8192), memfd(t, 8192))
	if q := b.quota("qps"); q.Used != 2 || q.Limit != 7 || q.Bytes || q.Key != "max-qps" {
		t.Errorf("queue pairs: %v", q)
	}
	if q := b.quota("registered"); q.Used != 8192 || q.Limit != 1<<20 || !q.Bytes {
		t.Errorf("registered memory: %v", q)
	}
	a.c.Close()
	for b.quota("clients").Used != 1 {
	}
	if q := b.quota("registered"); q.Used != 0 {
		t.Errorf("registered memory of a client that is gone: %v", q)
	}
	b.c.Close()
	h.settled(t)
}

// TestQuotaTable checks that each resource has a name, a default limit, and the configuration key that changes it.
func TestQuotaTable(t *testing.T) {
	l := DefaultLimits
	for r, q := range quotas {
		if q.name == "" || q.noun == "" || q.limit(&l) == 0 || !strings.HasPrefix(q.key, "max-") {
			t.Errorf("resource %d: %q, %q, key %q, default %d", r, q.name, q.noun, q.key, q.limit(&l))
		}
	}
}

// held returns the bytes of memory behind the descriptors that the client was sent.
func (c *tclient) held() (n int64) {
	c.t.Helper()
	for _, fd := range c.fds {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			c.t.Fatal(err)
		}
		n += st.Blocks * 512
	}
	return n
}

// TestResizeUnread checks that rings that ResizeCQ has replaced count against the quota until they are freed, whether
// or not the client reads the replies and keeps the descriptors.
func TestResizeUnread(t *testing.T) {
	const depth, limit = 4096, 4 << 20
	_, c := newClient(t, Config{Limits: Limits{Rings: limit}})
	cq := c.cq()
	const n = 100
	for range n { // none of the replies is read
		c.send(&ctrlpb.Request{Body: &ctrlpb.Request_ResizeCq{ResizeCq: &ctrlpb.ResizeCQ{Cq: cq, Depth: depth}}})
	}
	done := 0
	for range n {
		r := c.next().GetReply()
		if r.GetError() != nil || r.GetCq().GetDepth() != depth {
			t.Fatalf("a resize: %v", r)
		}
		done++
	}
	if got := c.held(); got > limit || got < cqSizeHeld(depth) {
		t.Errorf("%d resizes: the daemon holds %d bytes, the limit is %d", done, got, limit)
	}
	if q := c.quota("rings"); q.Used < 2*uint64(cqSizeHeld(depth)) {
		t.Errorf("%d bytes are charged, the client has two sets of rings", q.Used)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}})
	if q := c.quota("rings"); q.Used != 0 {
		t.Errorf("%d bytes of rings are charged after DestroyCQ", q.Used)
	}
}

// cqSizeHeld is the memory of the entries of a completion queue with one worker.
func cqSizeHeld(depth int64) int64 { return depth * shm.CQESize }

// TestFreedRings checks that the daemon's memory for an object is freed with the object, even if the client keeps the
// descriptors.
func TestFreedRings(t *testing.T) {
	h, c := newClient(t, Config{})
	pd, cq := c.pd(), c.cq()
	qp := c.ok(reqQP(pd, cq)).GetQp().Qp
	srq := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: pd, Depth: 64, MaxSge: 1}}}).GetSrq().Srq
	if c.held() == 0 {
		t.Fatal("the rings hold no memory")
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: qp}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroySrq{DestroySrq: &ctrlpb.DestroySRQ{Srq: srq}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}})
	if n, bells := c.held(), int64(2*shm.PageSize); n != bells {
		t.Errorf("%d bytes are held after all objects are destroyed, want %d of the doorbell page", n, bells)
	}
	c.cq()
	h.leave(t, c)
	if n := c.held(); n != 0 {
		t.Errorf("%d bytes are held after the client has ended", n)
	}
}

// TestQPSize checks that the quota covers the memory that a queue pair really uses, also with a
// shared receive queue whose work requests have more pieces.
func TestQPSize(t *testing.T) {
	for _, tt := range []struct{ sq, rq, sge, inline, srq int }{
		{16384, 16384, 1, 0, 0}, {16384, 16384, 1, 0, 16}, {4096, 1, 16, 256, 0}, {1, 16384, 16, 0, 0}, {8192, 8192, 4, 64, 0}, {16384, 1, 1, 256, 0},
	} {
		most := max(tt.sge, tt.srq)
		var sizes []int64 // the collector may free what earlier tests left during one of them
		for range 5 {
			before := heap()
			qp := verbs.NewQP(verbs.QPConfig{SQDepth: tt.sq, RQDepth: tt.rq, MaxSGE: most, MaxInline: tt.inline})
			qp.Start(rdmap.Config{IRD: 16, ORD: 16})
			sizes = append(sizes, heap()-before)
			runtime.KeepAlive(qp)
		}
		slices.Sort(sizes)
		used := uint64(sizes[len(sizes)/2])
		sq, err := shm.CreateSQ(tt.sq, tt.sge, tt.inline)
		if err != nil {
			t.Fatal(err)
		}
		defer sq.Close()
		rq, err := shm.CreateRQ(tt.rq, tt.sge)
		if err != nil {
			t.Fatal(err)
		}
		defer rq.Close()
		for _, fd := range []int{sq.FD(), rq.FD()} {
			var st unix.Stat_t
			if err := unix.Fstat(fd, &st); err != nil {
				t.Fatal(err)
			}
			used += uint64(st.Size)
		}
		charged := qpSize(&ctrlpb.CreateQP{SqDepth: uint32(tt.sq), RqDepth: uint32(tt.rq), MaxSge: uint32(tt.sge), MaxInline: uint32(tt.inline)}, most)
		if charged < used || charged > used*3/2+1<<16 {
			t.Errorf("%+v: %d bytes are charged, %d are used", tt, charged, used)
		}
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestSlowRequests checks that the requests of a user that hold Server.mu for long are served one after another, while
// others are served: a list of many objects takes milliseconds, and a user may have hundreds of clients.
func TestSlowRequests(t *testing.T) {
	h := newHarness(t, Config{})
	a, b, other := h.hello(t), h.hello(t), h.helloAs(t, 1001)
	h.mu.Lock()
	u := h.usageOf(uint32(os.Getuid()))
	h.mu.Unlock()
	for _, slow := range []*ctrlpb.Request{reqQuotas(), reqListen("", 7174)} {
		u.slow.Lock() // as for a request of another client
		served := make(chan struct{})
		go func() {
			defer close(served)
			b.ok(slow)
		}()
		for range 1000 {
			a.pd()
		}
		other.ok(reqQuotas())
		select {
		case <-served:
			t.Errorf("%T: two at a time", slow.Body)
		default:
		}
		u.slow.Unlock()
		<-served
	}
}

// TestCounts checks that errors about quotas and pools name one thing in the singular.
func TestCounts(t *testing.T) {
	files, maps, movers := newFiles(0, 1, false), newMaps(1), newMovers(0)
	for _, tt := range []struct {
		err  error
		want string
	}{
		{overQuota(7, resPorts, 1, 1, 1), "uid 7 has 1 connected or TIME-WAIT port, its limit is 1"},
		{overQuota(7, resPDs, 2, 1, 2), "uid 7 has 2 protection domains, its limit is 2"},
		{overQuota(7, resRegistered, 1, 2, 1), "uid 7 has 1 byte of registered memory, 2 bytes more exceed its limit of 1 byte:"},
		{files.room(7, 1, 1<<40), "uid 7 has 1 descriptor of the daemon"},
		{maps.room(7, 2, 1<<40), "uid 7 has 2 mappings of the daemon"},
		{movers.room(7, 1, 1), "uid 7 has 1 far-memory thread of the daemon"},
	} {
		if got := fmt.Sprint(tt.err); !strings.Contains(got, tt.want) {
			t.Errorf("%s; want %s", got, tt.want)
		}
	}
}
