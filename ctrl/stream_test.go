package ctrl

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/dataplane"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/mpa"
)

// TestStreamQuota checks the limit of byte streams that a client keeps in streaming mode, even if it listens again
// for each of them. One that is closed, or on which MPA starts, makes room.
func TestStreamQuota(t *testing.T) {
	const limit = 3
	h, c := newClient(t, Config{Limits: Limits{QPs: limit}})
	port := uint16(7000)
	// arrive opens a connection to a temporary listener.
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
	var peers []*mpaPeer
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
		conns, peers = append(conns, ev.Conn), append(peers, p)
	}
	for range limit {
		ready()
	}
	full()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conns[0]}}})
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: peers[0].id})
	ready()
	full()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StartMpa{StartMpa: &ctrlpb.StartMPA{Conn: conns[1]}}})
	ready()
	full()
	h.leave(t, c)
}

// TestStreamMemory checks that the daemon memory that a byte stream may use is charged to the ring memory quota until
// MPA is started or the stream has ended, whichever side opened it.
func TestStreamMemory(t *testing.T) {
	const window = 100 << 10
	size := uint64(2*window + maxUnsent)
	h, c := newClient(t, Config{ReceiveWindow: window, Limits: Limits{Rings: 2*size + size/2}})
	pd, cq := c.pd(), c.cq()
	qps := []uint32{c.ok(reqQP(pd, cq)).GetQp().Qp, c.ok(reqQP(pd, cq)).GetQp().Qp}
	empty := c.quota("rings").Used
	used := func(streams uint64) {
		t.Helper()
		if q := c.quota("rings"); q.Used != empty+streams*size {
			t.Errorf("%d bytes are charged, want %d of %d streams", q.Used-empty, streams*size, streams)
		}
	}
	req := reqListen(addrA.String(), 7000)
	req.GetListen().Streaming = true
	c.ok(req)
	firstPeer := h.arrive(t, "10.0.0.2:1", 7000, mpa.DefaultConfig())
	first := c.event().GetStreamReady().GetConn()
	used(1)
	active := reqConnect(qps[0], peerA.String())
	active.GetConnect().Streaming = true
	c.ok(active)
	used(2)
	if ended, _ := h.arrive(t, "10.0.0.2:2", 7000, mpa.DefaultConfig()).ended(); !ended {
		t.Error("a stream above the quota was not reset")
	}
	active.GetConnect().Qp = qps[1]
	if text := c.fails(cQuota, active); !strings.Contains(text, "max-rings") {
		t.Errorf("refused by %q", text)
	}
	used(2)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qps[0]}}})
	used(1)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: first}}})
	if q := c.quota("rings"); q.Used != empty+maxUnsent {
		t.Errorf("%d bytes are charged for what a closed stream may still send, want %d", q.Used-empty, maxUnsent)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: firstPeer.id})
	used(0)
	h.leave(t, c)
}

// TestStreamCloseBlocked checks that a peer that keeps its window closed after the byte stream is closed is reset
// after some time, and that the stream is charged until then, even if the client has left.
func TestStreamCloseBlocked(t *testing.T) {
	h, c := newClient(t, Config{})
	conn, p := h.accepted(t, c)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn}}})
	c.c.Close()
	charged := func() uint64 {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.account(uint32(os.Getuid()))[resRings]
	}
	testenv.Until(t, "maxUnsent bytes are charged", func() bool { return charged() == maxUnsent })
	h.resetsAfter(p, lingerTime)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	h.settled(t)
}

// TestLingerSteered checks that a connection that is closed in order keeps its port after its listener and its client
// have ended: the kernel would reset it, and the peer would miss the last data.
func TestLingerSteered(t *testing.T) {
	h, c := newClient(t, Config{})
	c.ok(reqListen("", 7174))
	p := h.arrive(t, "10.0.0.2:4000", 7174, mpa.DefaultConfig())
	p.send()
	conn := c.event().GetConnectRequest().GetConn()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: conn}}})
	c.c.Close()
	h.until(t, "the client has ended", func() bool { return len(h.sessions) == 0 })
	if h.steer.len() == 0 {
		t.Error("the port is not steered any more")
	}
	other := h.helloAs(t, 61009)
	other.pd() // its session has seen the uid
	if text := other.fails(ctrlpb.Code_CODE_PORT_IN_USE, reqListen("", 7174)); !strings.Contains(text, "last connections") {
		t.Errorf("another user: %s", text) // whom iwarpctl listen list shows no listener
	}
	other.c.Close()
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	if n := h.steer.len(); n != 0 {
		t.Errorf("%d endpoints are steered after the connection", n)
	}
	h.settled(t)
}

// TestLingerFiles checks that the kernel socket of a connection that is closed in order counts as a descriptor of the
// daemon until the engine has closed it.
func TestLingerFiles(t *testing.T) {
	h := newHarness(t, Config{})
	h.overSockets()
	c := h.hello(t)
	h.mu.Lock()
	out := &h.sessions[h.lastID].out
	h.mu.Unlock()
	used := func() uint64 { // without what the client has not read, as far as the server knows
		h.mu.Lock()
		defer h.mu.Unlock()
		out.mu.Lock()
		defer out.mu.Unlock()
		return h.files.used + h.files.extra - uint64(out.fds)
	}
	conn, p := h.accepted(t, c)
	with := used()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn}}})
	if n := used(); n != with {
		t.Errorf("%d descriptors are counted while the stream is being closed, %d before", n, with)
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: p.id})
	if n := used(); n != with-1 {
		t.Errorf("%d descriptors are counted after the stream, %d with it", n, with)
	}
	h.leave(t, c)
}

// TestLingerQP checks that a client cannot end the charge of a byte stream that the engine still closes: a Disconnect
// of its queue pair would make the engine report the stream as gone.
func TestLingerQP(t *testing.T) {
	h, c := newClient(t, Config{})
	conn, qp, p := h.connected(t, c)
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_StreamClose{StreamClose: &ctrlpb.StreamClose{Conn: conn}}})
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Disconnect{Disconnect: &ctrlpb.Disconnect{Qp: qp}}})
	h.e.await(t, "attach")
	h.e.mu.Lock()
	defer h.e.mu.Unlock()
	if p.c.attached != nil {
		t.Error("the queue pair is attached to the stream")
	}
}

// TestRejectedStay checks that a peer that keeps its rejected connections open has only a
// limited number of them, in the engine and in the server.
func TestRejectedStay(t *testing.T) {
	const most, more = 4, 3
	h, c := newClient(t, Config{Limits: Limits{QPs: most}})
	c.ok(reqListen("", 7174))
	var peers []*mpaPeer
	for i := range most + more {
		p := h.arrive(t, fmt.Sprintf("10.0.0.2:%d", 4000+i), 7174, mpa.DefaultConfig())
		p.send()
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: c.event().GetConnectRequest().GetConn()}}})
		peers = append(peers, p)
	}
	for i, p := range peers {
		if _, abort := p.ended(); abort != (i < more) {
			t.Errorf("connection %d: reset: %v", i, abort)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lingers) != most {
		t.Errorf("%d connections are kept", len(h.lingers))
	}
}

const (
	roleInitiator = ctrlpb.MPARole_MPA_ROLE_INITIATOR
	roleResponder = ctrlpb.MPARole_MPA_ROLE_RESPONDER
)

func reqStart(m *ctrlpb.StartMPA) *ctrlpb.Request {
	return &ctrlpb.Request{Body: &ctrlpb.Request_StartMpa{StartMpa: m}}
}

// accepted accepts a byte stream from a peer and returns its handle.
func (h *harness) accepted(t *testing.T, c *tclient) (uint32, *mpaPeer) {
	t.Helper()
	req := reqListen(addrA.String(), 7174)
	req.GetListen().Streaming = true
	l := c.ok(req).GetListen().Listen
	p := h.arrive(t, "10.0.0.2:999", 7174, mpa.DefaultConfig())
	ev := c.event().GetStreamReady()
	if ev.GetListen() != l {
		t.Errorf("%v, want listener %d", ev, l)
	}
	return ev.GetConn(), p
}

// connected opens a byte stream and returns its handle and queue pair too.
func (h *harness) connected(t *testing.T, c *tclient) (conn, qp uint32, p *mpaPeer) {
	t.Helper()
	qp = c.qp()
	req := reqConnect(qp, peerA.String())
	req.GetConnect().Streaming = true
	conn = c.ok(req).GetConnect().Conn
	h.awaitDialed(t)
	id, fc := h.e.only(t, peerA)
	h.OnEvent(dataplane.Event{Kind: dataplane.EventConnected, Conn: id, Flow: flowOf(fc.local, fc.remote)})
	if ev := c.event().GetStreamReady(); ev.GetConn() != conn || ev.GetQp() != qp {
		t.Fatalf("StreamReady %v", ev)
	}
	return conn, qp, &mpaPeer{t: t, h: h, id: id, c: fc, st: mpa.NewInitiator(mpa.DefaultConfig(), 1e9)}
}

// responding opens a byte stream on which we are MPA's responder.
func (h *harness) responding(t *testing.T, c *tclient) (conn, qp uint32, p *mpaPeer) {
	t.Helper()
	conn, qp, p = h.connected(t, c)
	c.ok(reqStart(&ctrlpb.StartMPA{Conn: conn, Role: roleResponder}))
	return conn, qp, p
}

// TestStartMPARoles checks that either side of the TCP connection may be the initiator, with the queue pair that this
// requires, and that invalid requests are refused.
func TestStartMPARoles(t *testing.T) {
	t.Run("refused", func(t *testing.T) {
		h, c := newClient(t, Config{})
		in, _ := h.accepted(t, c)
		out, qp, _ := h.connected(t, c)
		other := c.qp()
		private := []byte("private")
		for _, tt := range []struct {
			code ctrlpb.Code
			m    *ctrlpb.StartMPA
		}{
			{invalid, &ctrlpb.StartMPA{Conn: in, Role: 3}},
			{invalid, &ctrlpb.StartMPA{Conn: in, PrivateData: private}},
			{invalid, &ctrlpb.StartMPA{Conn: out, Role: roleResponder, PrivateData: private}},
			{invalid, &ctrlpb.StartMPA{Conn: in, Qp: other}},
			{invalid, &ctrlpb.StartMPA{Conn: out, Qp: other}},
			{invalid, &ctrlpb.StartMPA{Conn: out, Role: roleResponder, Qp: other}},
			{invalid, &ctrlpb.StartMPA{Conn: in, Role: roleInitiator, Qp: other, PrivateData: make([]byte, 513)}},
			{noObject, &ctrlpb.StartMPA{Conn: in, Role: roleInitiator}},
			{noObject, &ctrlpb.StartMPA{Conn: in, Role: roleInitiator, Qp: 1 << 23}},
			{badState, &ctrlpb.StartMPA{Conn: in, Role: roleInitiator, Qp: qp}},
			{noObject, &ctrlpb.StartMPA{Conn: out + 1000}},
		} {
			c.fails(tt.code, reqStart(tt.m))
		}
		// None of the refused requests has changed anything.
		c.ok(reqStart(&ctrlpb.StartMPA{Conn: in, Role: roleInitiator, Qp: other, PrivateData: private}))
		c.ok(reqStart(&ctrlpb.StartMPA{Conn: out, Role: roleResponder, Qp: qp}))
		c.fails(badState, reqStart(&ctrlpb.StartMPA{Conn: in}))
	})
	t.Run("the side that accepted initiates", func(t *testing.T) {
		h, c := newClient(t, Config{})
		conn, p := h.accepted(t, c)
		p.st = mpa.NewResponder(mpa.DefaultConfig(), 1e9)
		qp := c.qp()
		c.ok(reqStart(&ctrlpb.StartMPA{Conn: conn, Role: roleInitiator, Qp: qp, PrivateData: []byte("hello")}))
		p.deliver()
		if ev := p.accept("welcome", -1, -1); string(ev.Frame.PrivateData) != "hello" || !ev.Frame.P2P {
			t.Fatalf("request %+v", ev.Frame)
		}
		a := p.attached()
		if !a.Params.Initiator || a.Params.RTR == mpa.RTRNone || len(a.Reply) != 0 {
			t.Errorf("attached with %+v", a)
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
		ev := c.event().GetEstablished()
		if ev.GetQp() != qp || ev.Conn != conn || string(ev.PrivateData) != "welcome" || !ev.Negotiated.Initiator {
			t.Errorf("event %v", ev)
		}
	})
	t.Run("the side that connected responds", func(t *testing.T) {
		h, c := newClient(t, Config{})
		conn, qp, p := h.responding(t, c)
		p.send()
		if ev := c.event().GetConnectRequest(); ev.GetConn() != conn || ev.Qp != qp || ev.Listen != 0 || ev.Remote != peerA.String() {
			t.Fatalf("event %v", ev)
		}
		accept := &ctrlpb.Accept{Conn: conn, Qp: c.qp()}
		c.fails(invalid, &ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: accept}})
		accept.Qp = qp
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Accept{Accept: accept}})
		p.deliver()
		p.event(mpa.EventAccepted)
		a := p.attached()
		if a.Params.Initiator || len(a.Reply) == 0 {
			t.Errorf("attached with %+v", a)
		}
		h.OnEvent(dataplane.Event{Kind: dataplane.EventEstablished, Conn: p.id})
		if ev := c.event().GetEstablished(); ev.GetQp() != qp || ev.Negotiated.Initiator {
			t.Errorf("event %v", ev)
		}
	})
	t.Run("the side that connected rejects", func(t *testing.T) {
		h, c := newClient(t, Config{})
		conn, qp, p := h.responding(t, c)
		p.send()
		c.event()
		c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_Reject{Reject: &ctrlpb.Reject{Conn: conn, PrivateData: []byte("no")}}})
		p.deliver()
		if ev := p.event(mpa.EventRejected); string(ev.Frame.PrivateData) != "no" {
			t.Errorf("rejected with %q", ev.Frame.PrivateData)
		}
		if ended, abort := p.ended(); !ended || abort {
			t.Errorf("ended %v, reset %v", ended, abort)
		}
		if ev := c.event().GetConnectFailed(); ev.GetQp() != qp || ev.Conn != conn || ev.Error.Code != canceled {
			t.Errorf("event %v", ev)
		}
	})
	t.Run("the answer takes too long", func(t *testing.T) {
		h, c := newClient(t, Config{})
		_, qp, p := h.responding(t, c)
		p.send()
		c.event()
		h.advance(time.Hour)
		if ev := c.event().GetConnectFailed(); ev.GetQp() != qp || ev.Error.Code != timedOut {
			t.Errorf("event %v", ev)
		}
	})
	t.Run("both initiate", func(t *testing.T) {
		h, c := newClient(t, Config{})
		conn, p := h.accepted(t, c)
		p.send() // it waits to be read
		if ev := c.event().GetStreamData(); ev == nil {
			t.Fatal("no StreamData")
		}
		qp := c.qp()
		c.ok(reqStart(&ctrlpb.StartMPA{Conn: conn, Role: roleInitiator, Qp: qp}))
		p.deliver()
		if ev := p.event(mpa.EventFailed); !errors.Is(ev.Err, mpa.ErrBothInitiators) {
			t.Errorf("the peer fails with %v", ev.Err)
		}
		if ended, abort := p.ended(); !ended || abort {
			t.Errorf("ended %v, reset %v: it must not overtake the request", ended, abort)
		}
		if ev := c.event().GetConnectFailed(); ev.GetQp() != qp || ev.Error.Code != protocol || !strings.Contains(ev.Error.Text, "both sides started as initiator") {
			t.Errorf("event %v", ev)
		}
	})
	t.Run("both respond", func(t *testing.T) {
		h, c := newClient(t, Config{})
		_, qp, _ := h.responding(t, c)
		h.advance(time.Minute)
		if ev := c.event().GetConnectFailed(); ev.GetQp() != qp || ev.Error.Code != timedOut || !strings.Contains(ev.Error.Text, "may be a responder too") {
			t.Errorf("event %v", ev)
		}
	})
}

// TestStreamTurnedAway checks that the client is notified when a byte stream on which it has started MPA is dropped
// because there is no room for the peer's request.
func TestStreamTurnedAway(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqListen(addrA.String(), 7174)
	req.GetListen().Streaming, req.GetListen().Backlog = true, 1
	c.ok(req)
	p := h.arrive(t, "10.0.0.2:999", 7174, mpa.DefaultConfig())
	conn := c.event().GetStreamReady().GetConn()
	c.ok(reqStart(&ctrlpb.StartMPA{Conn: conn}))
	h.arrive(t, "10.0.0.2:998", 7174, mpa.DefaultConfig()) // occupies the only place
	if ev := c.event().GetStreamReady(); ev == nil || ev.Conn == conn {
		t.Fatalf("event %v", ev)
	}
	p.send()
	if ended, abort := p.ended(); !ended || !abort {
		t.Errorf("ended %v, reset %v", ended, abort)
	}
	if ev := c.event().GetConnectGone(); ev.GetConn() != conn || ev.Error.GetCode() != quota {
		t.Errorf("event %v", ev)
	}
}

// heardOfSome checks, after many events that the client did not read, that the client got some of them and is still
// connected, and discards them.
func (c *tclient) heardOfSome(many int, is func(*ctrlpb.Event) bool) {
	c.t.Helper()
	c.ok(&ctrlpb.Request{Body: &ctrlpb.Request_ListListens{ListListens: &ctrlpb.ListListens{}}})
	n := 0
	for _, ev := range c.events {
		if is(ev) {
			n++
		}
	}
	if n < 100 || n == many {
		c.t.Errorf("the client heard of %d of %d", n, many)
	}
	c.events = nil
}

// TestStreamFlood checks that a peer that connects and leaves, faster than the listener's client reads the events,
// cannot get the client disconnected.
func TestStreamFlood(t *testing.T) {
	h, c := newClient(t, Config{})
	req := reqListen(addrA.String(), 7174)
	req.GetListen().Streaming = true
	c.ok(req)
	const many = 5000
	arrive := func() dataplane.ConnID { return h.arrive(t, "10.0.0.2:999", 7174, mpa.DefaultConfig()).id }
	for range many {
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: arrive(), Err: errors.New("left")})
	}
	c.heardOfSome(many, func(ev *ctrlpb.Event) bool { return ev.GetStreamReady() != nil })
	arrive()
	if ev := c.event(); ev.GetStreamReady() == nil {
		t.Errorf("after the flood: %v", ev)
	}
}

// TestStreamDataUnread checks that the chunks of byte streams that a client does not read are charged to the user after their
// streams have ended, and that peers cannot get the client disconnected by them.
func TestStreamDataUnread(t *testing.T) {
	const limit = 1 << 20
	h, c := newClient(t, Config{Limits: Limits{Messages: limit}})
	req := reqListen(addrA.String(), 7174)
	req.GetListen().Streaming = true
	c.ok(req)
	h.mu.Lock()
	sess := h.sessions[h.lastID]
	h.mu.Unlock()
	held := func() (n uint64) {
		sess.out.mu.Lock()
		defer sess.out.mu.Unlock()
		for e := sess.out.queue.Front(); e != nil; e = e.Next() {
			n += uint64(len(e.Value.(*outMessage).b))
		}
		return n
	}
	chunk, most := make([]byte, maxChunk), uint64(0)
	for range 1000 {
		id := h.arrive(t, "10.0.0.2:999", 7174, mpa.DefaultConfig()).id
		h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: id, Data: chunk})
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id, Err: errors.New("left")})
		most = max(most, held())
	}
	if most > limit || most < limit/4 {
		t.Errorf("%d bytes were held, the limit is %d", most, limit)
	}
	if n := held(); c.quota("messages").Used > limit || n == 0 {
		t.Errorf("%d bytes are held", n)
	}
	if n := h.counters.cutOff.Load(); n != 0 {
		t.Errorf("%d clients cut off", n)
	}
}

// TestStreamDataHeld checks that data that peers send at a time on many byte streams waits in the daemon until the client
// reads it, and does not get the client cut off.
func TestStreamDataHeld(t *testing.T) {
	const limit, streams = 1 << 20, 100
	h, c := newClient(t, Config{Limits: Limits{Messages: limit}})
	req := reqListen(addrA.String(), 7174)
	req.GetListen().Streaming = true
	req.GetListen().Backlog = streams
	c.ok(req)
	var ids []dataplane.ConnID
	left := make(map[uint32]bool)
	for range streams {
		ids = append(ids, h.arrive(t, "10.0.0.2:999", 7174, mpa.DefaultConfig()).id)
		left[c.event().GetStreamReady().GetConn()] = true
	}
	chunk := make([]byte, maxChunk)
	for range 2 { // more comes while the first waits
		for _, id := range ids {
			h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: id, Data: chunk})
		}
	}
	h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: ids[streams-1], Err: errors.New("left")}) // while its data waits
	if n := h.counters.cutOff.Load(); n != 0 {
		t.Fatalf("%d clients cut off", n)
	}
	for len(left) > 0 {
		switch e := c.event(); {
		case e.GetStreamData() != nil:
			delete(left, e.GetStreamData().Conn)
		case e.GetConnectGone() != nil:
			delete(left, e.GetConnectGone().Conn)
		default:
			t.Fatalf("%v", e)
		}
	}
}

// TestStreamDataEnded checks that data that waits until the client reads is freed with its byte stream. No quota counts
// it any more.
func TestStreamDataEnded(t *testing.T) {
	const streams = 64
	h, c := newClient(t, Config{Limits: Limits{Messages: 1 << 20}})
	var qps []uint32
	for range streams {
		qps = append(qps, c.qp())
	}
	data, before := make([]byte, 1<<20), heap()
	for _, qp := range qps { // the client reads nothing from here on
		req := reqConnect(qp, peerA.String())
		req.GetConnect().Streaming = true
		c.send(req)
		h.awaitDialed(t)
		id, fc := h.e.only(t, peerA)
		h.OnEvent(dataplane.Event{Kind: dataplane.EventConnected, Conn: id, Flow: flowOf(fc.local, fc.remote)})
		h.OnEvent(dataplane.Event{Kind: dataplane.EventData, Conn: id, Data: data})
		h.OnEvent(dataplane.Event{Kind: dataplane.EventClosed, Conn: id, Err: errors.New("left")})
		h.e.with(id, func(c *fakeConn) { c.ended = true })
	}
	if n := h.counters.cutOff.Load(); n != 0 {
		t.Fatalf("%d clients cut off", n)
	}
	if held := heap() - before; held > streams/4<<20 {
		t.Errorf("%d bytes are held for %d streams that have ended", held, streams)
	}
	runtime.KeepAlive(h)
}
