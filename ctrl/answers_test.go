package ctrl

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestPanic checks that a request that panics ends its client, says so in the log, and holds no lock.
func TestPanic(t *testing.T) {
	h := newHarness(t, Config{})
	core, logs := observer.New(zap.ErrorLevel)
	h.log = zap.New(core)
	c, other := h.hello(t), h.hello(t)
	qp := c.qp()
	h.e.mu.Lock()
	h.e.onFence = func() {
		h.e.onFence = nil
		panic("a test")
	}
	h.e.mu.Unlock()
	c.send(&ctrlpb.Request{Body: &ctrlpb.Request_ModifyQp{ModifyQp: &ctrlpb.ModifyQP{Qp: qp}}})
	if m := c.next(); m != nil {
		t.Errorf("answered by %v", m)
	}
	other.qp()
	if n := logs.FilterMessage("request panicked").Len(); n != 1 {
		t.Errorf("%d lines", n)
	}
	other.c.Close()
	h.settled(t)
}

// TestEngineRefuses checks that a client and a listener that the engine refuses leave nothing.
func TestEngineRefuses(t *testing.T) {
	h, c := newClient(t, Config{})
	h.e.mu.Lock()
	h.e.unable = errors.New("refused")
	h.e.mu.Unlock()
	c.ok(reqQuotas()) // the daemon has closed what it sent with Hello
	before := openFDs(t)
	d := h.client(t)
	d.fails(internal, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	d.fails(cVersion, &ctrlpb.Request{Body: &ctrlpb.Request_AllocPd{AllocPd: &ctrlpb.AllocPD{}}})
	d.c.Close()
	h.until(t, "the client has left", func() bool { return len(h.sessions) == 1 })
	if after := openFDs(t); after > before {
		t.Errorf("%d descriptors are open, %d before", after, before)
	}
	c.fails(internal, reqListen("", 7174))
	if n := c.quota("listens").Used; n != 0 || h.steer.len() != 0 {
		t.Errorf("%d listeners and %d endpoints are left", n, h.steer.len())
	}
	h.e.mu.Lock()
	h.e.unable = nil
	h.e.mu.Unlock()
	c.ok(reqListen("", 7174))
	h.leave(t, c)
}

// TestSRQLimit checks that a shared receive queue counts its receives, and reports once that fewer than its limit are
// left.
func TestSRQLimit(t *testing.T) {
	h, c := newClient(t, Config{})
	pd := c.pd()
	create := &ctrlpb.CreateSRQ{Pd: pd, Depth: 8, MaxSge: 1, Limit: 9}
	c.fails(cInvalid, &ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: create}})
	create.Limit = 2
	srq := c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: create}}).GetSrq().Srq
	client, err := shm.MapRQ(c.fds[len(c.fds)-1])
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	h.mu.Lock()
	q := h.sessions[h.lastID].srqs[srq]
	h.mu.Unlock()
	post := func(n int) {
		t.Helper()
		for range n {
			if err := client.Post(&verbs.RecvWR{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	take := func(want bool) {
		t.Helper()
		var wr verbs.RecvWR
		if q.NextRecv(&wr) != want {
			t.Errorf("a receive: %v", !want)
		}
	}
	modify := func(limit uint32) *ctrlpb.Request {
		return &ctrlpb.Request{Body: &ctrlpb.Request_ModifySrq{ModifySrq: &ctrlpb.ModifySRQ{Srq: srq, Limit: limit}}}
	}
	reported := func() {
		t.Helper()
		if ev := c.event().GetAsyncError(); ev.GetKind() != ctrlpb.AsyncKind_ASYNC_SRQ_LIMIT || ev.Srq != srq {
			t.Errorf("event %v", ev)
		}
	}
	info := func() *ctrlpb.SRQInfo {
		t.Helper()
		return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListSrqs{ListSrqs: &ctrlpb.ListSRQs{}}}).GetSrqs().Srqs[0]
	}
	post(4)
	take(true)
	take(true) // as many as the limit are left
	if i := info(); i.Limit != 2 || i.Posted != 2 || i.Pd != pd || i.Depth != 8 || len(c.events) != 0 {
		t.Errorf("%v, events %v", i, c.events)
	}
	take(true)
	reported()
	if i := info(); i.Limit != 0 || i.Posted != 1 {
		t.Errorf("%v", i)
	}
	take(true)
	take(false)
	if i := info(); i.Posted != 0 || i.Counters[0].Value != 4 || i.Counters[1].Value != 1 {
		t.Errorf("%v", i)
	}
	c.fails(cInvalid, modify(9))
	c.ok(modify(8))
	post(8)
	take(true)
	reported()
	c.ok(modify(1))
	c.ok(modify(0))
	for range 7 {
		take(true)
	}
	if info(); len(c.events) != 0 {
		t.Errorf("events of a limit that is not set: %v", c.events)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroySrq{DestroySrq: &ctrlpb.DestroySRQ{Srq: srq}}})
	c.srqGone(q)
}

// srqGone checks that nothing is reported of a queue that has been destroyed.
func (c *tclient) srqGone(q *srq) {
	c.t.Helper()
	q.sess.srqLimit(q)
	if c.ok(reqQuotas()); len(c.events) != 0 {
		c.t.Errorf("events %v", c.events)
	}
}

// establish opens a connection of a queue pair whose completion queues are two.
func (h *harness) establish(t *testing.T, c *tclient) (p *mpaPeer, qp, send, recv uint32) {
	t.Helper()
	send, recv = c.cq(), c.cq()
	req := reqQP(c.pd(), send)
	req.GetCreateQp().RecvCq = recv
	qp = c.ok(req).GetQp().Qp
	p, _ = h.dial(t, c, reqConnect(qp, peerA.String()), mpa.DefaultConfig())
	p.accept("", -1, -1)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
	if c.event().GetEstablished() == nil {
		t.Fatal("not established")
	}
	return p, qp, send, recv
}

// TestOverrun checks that a client learns which of the completion queues was full.
func TestOverrun(t *testing.T) {
	for _, ofSend := range []bool{false, true} {
		h, c := newClient(t, Config{})
		p, qp, send, recv := h.establish(t, c)
		want := recv
		if ofSend {
			want = send
		}
		h.mu.Lock()
		ring := h.sessions[h.lastID].cqs[want].ring
		h.mu.Unlock()
		for ring.Push(0, &verbs.WC{}) {
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id, Err: dataplane.ErrCQOverrun})
		ev := c.event().GetAsyncError()
		if ev.GetKind() != ctrlpb.AsyncKind_ASYNC_CQ_OVERRUN || ev.Qp != qp || ev.Cq != want || ev.Error.GetCode() != cQuota {
			t.Errorf("event %v, want one of queue %d", ev, want)
		}
		if ev := c.event().GetDisconnected(); ev.GetQp() != qp || ev.Error == nil {
			t.Errorf("event %v", ev)
		}
		h.leave(t, c)
	}
}

// TestPeerClosed checks that we close after the peer has, which must not take forever, and which a close by the client
// does not change.
func TestPeerClosed(t *testing.T) {
	for _, disconnects := range []bool{false, true} {
		h, c := newClient(t, Config{})
		p, qp, _, _ := h.establish(t, c)
		if q := c.listQPs()[0]; q.State != "RTS" || q.Negotiated == nil {
			t.Errorf("queue pair %v", q)
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
		if ended, abort := p.ended(); !ended || abort {
			t.Errorf("closed %v, reset %v", ended, abort)
		}
		if q := c.listQPs()[0]; q.State != "CLOSING" || q.Negotiated == nil {
			t.Errorf("queue pair %v", q)
		}
		if disconnects {
			c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
		}
		h.resetsAfter(p, closeTimeout)
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
		if ev := c.event().GetDisconnected(); ev.GetQp() != qp {
			t.Errorf("event %v", ev)
		}
		if q := c.listQPs()[0]; q.State != "ERROR" {
			t.Errorf("queue pair %v", q)
		}
		h.leave(t, c)
	}
}

// TestStreamConsumed checks the window of a byte stream: what the client has consumed makes room, and so does what the
// peer has acknowledged.
func TestStreamConsumed(t *testing.T) {
	h, c := newClient(t, Config{})
	conn, p := h.accepted(t, c)
	consumed := func(n uint32) *ctrlpb.Request {
		r := &ctrlpb.StreamConsumed{Conn: conn, Count: n}
		return &ctrlpb.Request{Body: &ctrlpb.Request_StreamConsumed{StreamConsumed: r}}
	}
	send := func(n int) *ctrlpb.Request {
		r := &ctrlpb.StreamSend{Conn: conn, Data: make([]byte, n)}
		return &ctrlpb.Request{Body: &ctrlpb.Request_StreamSend{StreamSend: r}}
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: p.id, Data: []byte("one")})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: p.id, Data: []byte("two")})
	data := func(want string, end bool) {
		t.Helper()
		if ev := c.event().GetStreamData(); string(ev.GetData()) != want || ev.GetEnd() != end {
			t.Errorf("event %v, want %q, end %v", ev, want, end)
		}
	}
	data("one", false)
	c.fails(cInvalid, consumed(4)) // as two is not shown
	c.ok(consumed(2))
	if len(c.events) != 0 {
		t.Errorf("events before all is consumed: %v", c.events)
	}
	c.ok(consumed(1))
	data("two", false)
	c.ok(consumed(3))
	h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
	data("", true)
	h.e.mu.Lock()
	if got := p.c.consumed; !slices.Equal(got, []int{2, 1, 3}) {
		t.Errorf("the engine learns that %v are consumed", got)
	}
	h.e.mu.Unlock()

	for range maxUnsent / maxChunk {
		c.ok(send(maxChunk))
	}
	for range 2 {
		c.fails(cBusy, send(1))
	}
	c.fails(cInvalid, send(maxChunk+1))
	h.OnEvent(dataplane.Event{Kind: dataplane.EventWritable, Conn: p.id})
	c.ok(send(maxChunk))
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	if n := len(p.c.sent); n != maxUnsent+maxChunk {
		t.Errorf("%d bytes were sent", n)
	}
}

// TestStreamEndsBeforeMPA checks that the end of the peer's data, which came while the connection was a byte stream,
// counts when MPA begins.
func TestStreamEndsBeforeMPA(t *testing.T) {
	h, c := newClient(t, Config{})
	conn, p := h.accepted(t, c)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventPeerClosed, Conn: p.id})
	if ev := c.event().GetStreamData(); !ev.GetEnd() {
		t.Errorf("event %v", ev)
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StartMpa{StartMpa: &ctrlpb.StartMPA{Conn: conn}}})
	if ended, _ := p.ended(); !ended {
		t.Error("it waits for the request of a peer that sends no more")
	}
}

// TestUnlistenDrops checks that Unlisten ends the connections of that listener that wait for an answer.
func TestUnlistenDrops(t *testing.T) {
	h, c := newClient(t, Config{})
	l := c.ok(reqListen("", 7174)).GetListen().Listen
	c.ok(reqListen("", 7175))
	cfg := mpa.DefaultConfig()
	cfg.P2P = true
	ask := func(remote string, port uint16) (*mpaPeer, uint32) {
		t.Helper()
		p := h.arrive(t, remote, port, cfg)
		p.send()
		req := c.event().GetConnectRequest()
		if req == nil {
			t.Fatal("no request")
		}
		return p, req.Conn
	}
	accepted, conn := ask("10.0.0.2:4000", 7174)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: &ctrlpb.Accept{Conn: conn, Qp: c.qp()}}})
	p, _ := ask("10.0.0.2:4001", 7174)
	other, _ := ask("10.0.0.2:4002", 7175)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Unlisten{Unlisten: &ctrlpb.Unlisten{Listen: l}}})
	if ended, abort := p.ended(); !ended || !abort {
		t.Errorf("ended %v, reset %v", ended, abort)
	}
	for _, o := range []*mpaPeer{accepted, other} {
		if ended, _ := o.ended(); ended {
			t.Error("a connection that has been accepted, or of another listener, was ended")
		}
	}
	if n := c.quota("waiting").Used; n != 1 {
		t.Errorf("%d wait", n)
	}
	h.leave(t, c)
}

// TestAcceptDepths checks that the depths in Accept are those of the connection, up to the limit.
func TestAcceptDepths(t *testing.T) {
	h, c := newClient(t, Config{Startup: StartupDefaults{MaxIRD: 20}})
	c.ok(reqListen("", 7174))
	cfg := mpa.DefaultConfig() // of a peer that sends its first FPDU later
	cfg.P2P = true
	cfg.IRD, cfg.ORD, cfg.MaxIRD, cfg.MaxORD = 50, 50, 50, 50
	u32 := func(v uint32) *uint32 { return &v }
	for i, tt := range []struct {
		ird, ord *uint32
		want     [2]int // of the connection
	}{{nil, nil, [2]int{20, 20}}, {u32(3), u32(2), [2]int{3, 2}}, {u32(1000), u32(1 << 31), [2]int{20, 20}}} {
		p := h.arrive(t, "10.0.0.2:400"+string(rune('0'+i)), 7174, cfg)
		p.send()
		req := c.event().GetConnectRequest()
		qp := c.qp()
		accept := &ctrlpb.Accept{Conn: req.GetConn(), Qp: qp, Ird: tt.ird, Ord: tt.ord, PrivateData: make([]byte, 600)}
		c.fails(cInvalid, &ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: accept}})
		accept.PrivateData = nil
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: accept}})
		if got := p.attached().Params; [2]int{got.IRD, got.ORD} != tt.want {
			t.Errorf("IRD %d, ORD %d, want %v", got.IRD, got.ORD, tt.want)
		}
	}
}

// TestQuotasOfOthers checks that users without clients are listed to administrators and to themselves only.
func TestQuotasOfOthers(t *testing.T) {
	h, root := newClient(t, Config{})
	var user *tclient
	testenv.AsUser(t, 54321, 54321, nil, func() { user = h.client(t) })
	user.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	charge := func(n uint64) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.account(4711)[resPorts] += n
		h.settle(4711)
	}
	charge(1)
	defer charge(^uint64(0))
	list := func(c *tclient) (uids []uint32) {
		for _, u := range c.ok(reqQuotas()).GetQuotas().GetUsers() {
			uids = append(uids, u.Uid)
		}
		return uids
	}
	if got := list(user); !slices.Equal(got, []uint32{54321}) {
		t.Errorf("a user sees %v", got)
	}
	if got := list(root); !slices.Equal(got, []uint32{uint32(os.Getuid()), 4711, 54321}) {
		t.Errorf("an administrator sees %v", got)
	}
}

// TestServeClosed checks that a server that is closed opens no socket, and ends a client at once.
func TestServeClosed(t *testing.T) {
	h := newHarness(t, Config{Socket: filepath.Join(t.TempDir(), "sock")})
	h.Close()
	before := openFDs(t)
	if err := h.Listen(); !errors.Is(err, net.ErrClosed) || openFDs(t) > before {
		t.Errorf("Listen: %v; %d descriptors are open, %d before", err, openFDs(t), before)
	}
	if m := h.client(t).next(); m != nil {
		t.Errorf("message %v", m)
	}
}

// TestListCQs checks what the list of completion queues says, and that it can be read in parts.
func TestListCQs(t *testing.T) {
	_, c := newClient(t, Config{})
	channel, first := c.channel()
	second := c.cq()
	modify := &ctrlpb.ModifyCQ{Cq: second, Count: 3, PeriodUs: 1000000}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ModifyCq{ModifyCq: modify}})
	list := func(after uint32) []*ctrlpb.CQInfo {
		return c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListCqs{ListCqs: &ctrlpb.ListCQs{After: after}}}).GetCqs().Cqs
	}
	all := list(0)
	if len(all) != 2 || all[0].Cq != first || all[0].Channel != channel || all[1].Cq != second || all[1].Channel != 0 ||
		all[1].ModerationCount != 3 || all[1].ModerationUs != 1000000 || len(all[1].Counters) == 0 {
		t.Fatalf("%v", all)
	}
	if rest := list(all[0].Index); len(rest) != 1 || rest[0].Cq != second {
		t.Errorf("after the first: %v", rest)
	}
}

// TestRingFault checks that a client is cut off when a worker finds that it has written an invalid index into one of
// its rings, or that its memory cannot be accessed.
func TestRingFault(t *testing.T) {
	for name, fault := range map[string]func(*session) func(){
		"completion queue": func(s *session) func() { return values(s.cqs)[0].ring.OnFault },
		"send queue":       func(s *session) func() { return values(s.qps)[0].sq.OnFault },
		"receive queue":    func(s *session) func() { return values(s.qps)[0].rq.OnFault },
		"shared receives":  func(s *session) func() { return values(s.srqs)[0].ring.OnFault },
		"memory":           func(s *session) func() { return s.binding.OnFault },
	} {
		h, c := newClient(t, Config{})
		pd := c.pd()
		c.ok(reqQP(pd, c.cq()))
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_CreateSrq{CreateSrq: &ctrlpb.CreateSRQ{Pd: pd, Depth: 8, MaxSge: 1}}})
		h.mu.Lock()
		f := fault(h.sessions[h.lastID])
		h.mu.Unlock()
		f()
		f() // by another worker
		if ev := c.event().GetCutOff(); ev.GetError().GetCode() != cInvalid {
			t.Errorf("%s: event %v", name, ev)
		}
		if m := c.next(); m != nil {
			t.Errorf("%s: %v after it was cut off", name, m)
		}
		h.leave(t, c)
		if n, cut := h.counters.faults.Load(), h.counters.cutOff.Load(); n != 2 || cut != 1 {
			t.Errorf("%s: %d faults and %d ends are counted", name, n, cut)
		}
	}
}

// TestRefusedSilent checks that a client that is refused and asks for nothing holds up nothing for long.
func TestRefusedSilent(t *testing.T) {
	fds := socketpair(t)
	client, err := seqpacket.FromFD(fds[1])
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := seqpacket.FromFD(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	answerRefused(c, errors.New("refused"), time.Millisecond) // the test is that it returns
}

// TestNumbers checks that numbers of queue pairs and handles begin again at their end, and that none is used twice.
func TestNumbers(t *testing.T) {
	h, c := newClient(t, Config{})
	first := c.qp()
	domain := c.pd()
	c.channel()
	c.ok(reqSRQ(domain))
	c.ok(reqMR(domain, 4096), memfd(t, 4096))
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AllocMw{AllocMw: &ctrlpb.AllocMW{Pd: domain}}})
	c.ok(reqListen("", 7174))
	h.mu.Lock()
	h.lastQP = maxQPNum - 1
	h.mu.Unlock()
	if last, next := c.qp(), c.qp(); first != 1 || last != maxQPNum || next != 2 {
		t.Errorf("queue pair %d after the first one, %d, and then %d", last, first, next)
	}
	h.mu.Lock()
	o := &h.sessions[h.lastID].objects
	used := make(map[uint32]bool)
	for h := range o.lastH { // all are in use
		used[h+1] = true
	}
	o.lastH = 1<<32 - 2
	h.mu.Unlock()
	for range 20 {
		pd := c.pd()
		if pd == 0 || used[pd] {
			t.Errorf("handle %d is used twice", pd)
		}
		used[pd] = true
	}
	if !used[1<<32-1] {
		t.Errorf("handles %v", used)
	}
}

// TestDoorbellBits checks that queue pairs beyond the quota take no doorbells.
func TestDoorbellBits(t *testing.T) {
	_, c := newClient(t, Config{Limits: Limits{QPs: 2}})
	pd, cq := c.pd(), c.cq()
	c.ok(reqQP(pd, cq))
	second := c.ok(reqQP(pd, cq)).GetQp()
	for range 2 * 64 {
		c.fails(cQuota, reqQP(pd, cq))
	}
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: second.Qp}}})
	if again := c.ok(reqQP(pd, cq)).GetQp(); again.Doorbell != second.Doorbell {
		t.Errorf("doorbell %d, want %d", again.Doorbell, second.Doorbell)
	}
}

// TestFarRegions checks which regions of far memory are registered.
func TestFarRegions(t *testing.T) {
	h, c := newClient(t, Config{Limits: Limits{MRs: 1}})
	pd := c.pd()
	far := func(off, length uint64, fast bool) *ctrlpb.Request {
		r := reqMR(pd, length)
		r.GetRegisterMr().Far, r.GetRegisterMr().Offset, r.GetRegisterMr().Fast = true, off, fast
		return r
	}
	if text := c.fails(cInvalid, far(4096, 4096, false)); !strings.Contains(text, "AttachMemory") {
		t.Errorf("before the memory is attached: %q", text)
	}
	mem, err := unix.Open("/proc/self/mem", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(mem)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_AttachMemory{AttachMemory: &ctrlpb.AttachMemory{}}}, mem)
	const end = 1 << 57
	for _, r := range []*ctrlpb.Request{
		far(4096, 4096, true), far(0, end+1, false), far(end-4095, 4096, false), far(1<<64-1, 1, false),
	} {
		c.fails(cInvalid, r)
	}
	for range 2 { // the quota is for one
		mr := c.ok(far(end-4096, 4096, false)).GetMr()
		if r := h.table.Lookup(mr.Rkey); r == nil || r.Len() != 4096 {
			t.Errorf("%v is not registered", mr)
		}
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_DeregisterMr{DeregisterMr: &ctrlpb.DeregisterMR{Mr: mr.Mr}}})
		if h.table.Lookup(mr.Rkey) != nil {
			t.Errorf("%v is still registered", mr)
		}
	}
}
