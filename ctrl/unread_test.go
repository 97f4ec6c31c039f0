package ctrl

import (
	"context"
	"errors"
	"os"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/ctrl/seqpacket"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestUnread checks that a client that reads nothing is disconnected, and counts as a client until it has read what
// the kernel holds for it or has closed its socket.
func TestUnread(t *testing.T) {
	t.Run("reads", func(t *testing.T) {
		testUnread(t, func(c *tclient) {
			for c.next() != nil {
			}
		})
	})
	t.Run("closes", func(t *testing.T) { testUnread(t, func(c *tclient) { c.c.Close() }) })
}

func testUnread(t *testing.T, leave func(*tclient)) {
	h, c := newClient(t, Config{Limits: Limits{Clients: 1}})
	h.mu.Lock()
	sess := h.sessions[h.lastID]
	h.mu.Unlock()
	c.ok(reqListen("", 7174))
	var err error
	for range 1 << 20 {
		b := []byte{8, 1, 0x82, 2, 0} // QueryStatus
		if err = c.c.Write(b, nil); err != nil {
			break
		}
	}
	if err == nil {
		t.Fatal("a million requests without reading a reply")
	}
	<-sess.out.quit
	for range 10 {
		late := h.client(t)
		late.fails(cQuota, &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	}
	leave(c)
	h.settled(t)
	if n := h.counters.cutOff.Load(); n != 1 {
		t.Errorf("%d clients cut off", n)
	}
}

// TestRefusedUnread checks the limit of refused clients that do not read the reason.
func TestRefusedUnread(t *testing.T) {
	h := newHarness(t, Config{Limits: Limits{Clients: 1}})
	h.hello(t)
	hello := &ctrlpb.Request{Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}}
	var refused []*tclient
	for range maxRefusing {
		c := h.client(t)
		c.send(hello)
		refused = append(refused, c)
	}
	answered := func(c *tclient) bool { // also after a disconnect
		b := marshal(t, hello)
		_ = c.c.Write(b, nil)
		return c.next() != nil
	}
	h.until(t, "maxRefusing clients are being refused", func() bool { return h.refusing[uint32(os.Getuid())] == maxRefusing })
	if answered(h.client(t)) {
		t.Errorf("more than %d answers wait to be read", maxRefusing)
	}
	for refused[0].next() != nil {
	}
	testenv.Until(t, "there is an answer after one was read", func() bool { return answered(h.client(t)) })
}

// pair returns two connected ends, which the caller closes.
func pair(t *testing.T) (ours, theirs *seqpacket.Conn) {
	t.Helper()
	fds := socketpair(t)
	ours, err1 := seqpacket.FromFD(fds[0])
	theirs, err2 := seqpacket.FromFD(fds[1])
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return ours, theirs
}

// TestRefusedLate checks that a refused client whose request has arrived gets the reason although the time to wait for
// it is over, as after the process stood still.
func TestRefusedLate(t *testing.T) {
	for range 1000 {
		ours, theirs := pair(t)
		hello, err := proto.Marshal(&ctrlpb.Request{Id: 1})
		if err := errors.Join(err, theirs.Write(hello, nil)); err != nil {
			t.Fatal(err)
		}
		answerRefused(ours, errDraining, 0)
		ours.Close()
		if _, _, err := theirs.Read(0); err != nil {
			t.Fatal(err)
		}
		theirs.Close()
	}
}

// TestRefusedUsers checks that one person with many uids cannot take the daemon's descriptors and memory by refused clients that do
// not read the reason.
func TestRefusedUsers(t *testing.T) {
	h := newHarness(t, Config{})
	hello := marshal(t, &ctrlpb.Request{Id: 1, Body: &ctrlpb.Request_Hello{Hello: &ctrlpb.Hello{Version: 1, MinVersion: 1}}})
	var refusals sync.WaitGroup
	defer refusals.Wait()
	refused := func(uid uint32) *seqpacket.Conn {
		t.Helper()
		ours, theirs := pair(t)
		if err := theirs.Write(hello, nil); err != nil {
			t.Fatal(err)
		}
		refusals.Go(func() {
			if h.answers(uid) {
				h.refuse(ours, uid, errDraining)
			} else {
				ours.Abandon()
			}
		})
		return theirs
	}
	answered := func(c *seqpacket.Conn) bool {
		defer c.Close()
		_, _, err := c.Read(0)
		return err == nil
	}
	for uid := range uint32(maxRefusingUsers) {
		defer refused(uid).Close()
	}
	h.until(t, "the clients of all users are being refused", func() bool { return len(h.refusing) == maxRefusingUsers })
	if answered(refused(maxRefusingUsers)) {
		t.Errorf("answers to clients of more than %d users wait to be read", maxRefusingUsers)
	}
	if !answered(refused(0)) {
		t.Error("no answer to another client of a user that has one")
	}
}

// TestUnreadBytes checks that a client is cut off when all clients of its user leave too many bytes unread.
func TestUnreadBytes(t *testing.T) {
	const limit = 256 << 10
	h := newHarness(t, Config{Limits: Limits{Messages: limit}})
	polite, c := h.hello(t), h.hello(t)
	pd := c.pd()
	for range pageSize { // a list of them is long
		c.ok(reqMR(pd, 4096), memfd(t, 4096))
	}
	b := marshal(t, &ctrlpb.Request{Id: 1 << 40, Body: &ctrlpb.Request_ListMrs{ListMrs: &ctrlpb.ListMRs{}}})
	for range maxQueued - 1 {
		if c.c.Write(b, nil) != nil {
			break
		}
	}
	testenv.Until(t, "the client is cut off", func() bool { return h.counters.cutOff.Load() == 1 })
	if q := polite.quota("messages"); q.Limit != limit || !q.Bytes {
		t.Errorf("%v", q)
	}
}

// TestUnreadShare checks that a limit covers the bytes that all clients of a user leave unread, and that each may leave
// messageShare because of others.
func TestUnreadShare(t *testing.T) {
	const limit = 4 * messageShare
	user := new(usage)
	a, b := newTestOutbox(user, limit), newTestOutbox(user, limit)
	for i, step := range []struct {
		o    *outbox
		size int // with its overhead; 0: it reads a message
		ok   bool
		all  uint64 // what all leave unread then
	}{
		{a, messageShare, true, messageShare},
		{a, limit - messageShare, true, limit},
		{a, messageOverhead, false, limit},
		{b, messageShare, true, limit + messageShare},
		{b, messageOverhead, false, limit + messageShare},
		{a, 0, true, limit},
		{b, messageOverhead, false, limit},
		{b, 0, true, limit - messageShare},
		{b, messageShare + 1, false, limit - messageShare},
		{a, messageShare, true, limit},
		{b, messageShare, true, limit + messageShare},
	} {
		if step.size == 0 {
			m := step.o.next()
			step.o.written(m, true)
		} else if err := step.o.put(&outMessage{b: make([]byte, step.size-messageOverhead)}); (err == nil) != step.ok {
			t.Errorf("step %d: %v", i, err)
		}
		if all := user.unread.Load(); all != step.all {
			t.Errorf("step %d: %d bytes unread, want %d", i, all, step.all)
		}
	}
}

// TestUnreadMemory checks that what clients leave unread takes no more memory than is charged for it, be the messages
// short, or large ones that they have read but for the last.
func TestUnreadMemory(t *testing.T) {
	for name, tt := range map[string]struct{ n, size, read int }{
		"short": {1 << 15, 4, 0}, "short, read": {1 << 15, 4, 1<<15 - 1},
		"long": {64, 48 << 10, 0}, "long, read": {64, 48 << 10, 63},
	} {
		t.Run(name, func(t *testing.T) {
			user := new(usage)
			o := newTestOutbox(user, 1<<30)
			o.room.Store(1 << 20) // it has had many queue pairs
			before := heap()
			for range tt.n {
				if err := o.put(&outMessage{b: make([]byte, tt.size)}); err != nil {
					t.Fatal(err)
				}
			}
			for range tt.read {
				m := o.next()
				o.written(m, true)
			}
			if held, charged := heap()-before, user.unread.Load(); held > int64(charged)+32<<10 {
				t.Errorf("%d bytes are held, %d are charged", held, charged)
			}
			runtime.KeepAlive(o)
		})
	}
}

// newTestOutbox returns the outbox of a client of user, all of whose clients may leave limit bytes unread.
func newTestOutbox(user *usage, limit uint64) *outbox {
	o := &outbox{sess: &session{tenant: tenant{use: user}}, more: make(chan struct{}, 1), less: make(chan struct{}, 1)}
	o.room.Store(maxQueued)
	o.sess.pol.Store(&policy{limits: Limits{Messages: limit}})
	return o
}

// reqChurn returns the request that creates the next queue pair if i is even, or destroys it again if i is odd.
func reqChurn(i int, pd, cq uint32) []byte {
	req := reqQP(pd, cq)
	if i%2 == 1 {
		req = &ctrlpb.Request{Body: &ctrlpb.Request_DestroyQp{DestroyQp: &ctrlpb.DestroyQP{Qp: uint32(i/2 + 1)}}}
	}
	req.Id = uint64(i + 1)
	b, err := proto.Marshal(req)
	if err != nil {
		panic(err)
	}
	return b
}

// TestUnreadFDs checks that a client that does not read the descriptors of replies is disconnected and uses few of
// the daemon's descriptors.
func TestUnreadFDs(t *testing.T) {
	h := newHarness(t, Config{})
	h.unread = 100 * time.Millisecond
	c := h.hello(t)
	pd, cq := c.pd(), c.cq()
	before, most := openFDs(t), 0
	var err error
	for i := range 1 << 16 {
		if err = c.c.Write(reqChurn(i, pd, cq), nil); err != nil {
			break
		}
		if i%64 == 0 {
			most = max(most, openFDs(t)-before)
		}
	}
	if err == nil {
		t.Fatal("65536 requests without reading a reply")
	}
	h.leave(t, c)
	if n := h.counters.cutOff.Load(); n != 1 {
		t.Errorf("%d clients cut off", n)
	}
	if most > maxQueuedFDs+32 {
		t.Errorf("%d descriptors open for it", most)
	}
	testenv.Until(t, "the queued descriptors, and the socket, are closed", func() bool { return openFDs(t) <= before })
}

// TestUnreadClose checks that a client that leaves descriptors unread does not delay the end of the daemon.
func TestUnreadClose(t *testing.T) {
	h := newHarness(t, Config{})
	h.unread = time.Hour
	c := h.hello(t)
	pd, cq := c.pd(), c.cq()
	for i := range 2 * maxQueuedFDs {
		if err := c.c.Write(reqChurn(i, pd, cq), nil); err != nil {
			t.Fatal(err)
		}
	}
	h.until(t, "the daemon waits", func() bool { return h.sessions[1].out.fds > maxQueuedFDs })
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		h.Close()
	}()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Error("the daemon waits for the client")
		c.c.Close()
	}
}

// TestReadAtLast checks that a client that reads its descriptors just before the time is over is not disconnected.
func TestReadAtLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, Config{})
		h.unread = 5*lookAgain + lookAgain/2 // between two looks
		ours, theirs := pair(t)
		defer ours.Close()
		defer theirs.Close()
		sess := &session{srv: h.Server, conn: ours, log: zap.NewNop()}
		sess.hungUp, sess.hangUp = context.WithCancel(t.Context())
		sess.out.sess = sess
		var unread []int
		mem := memfd(t, 4096)
		for range maxQueuedFDs + 1 {
			fd, err := seqpacket.Dup(mem)
			if err != nil {
				t.Fatal(err)
			}
			unread = append(unread, fd)
		}
		if !sess.out.try([]byte("reply"), unread) {
			t.Fatal("not sent")
		}
		time.AfterFunc(h.unread-lookAgain/4, func() {
			_, fds, err := theirs.Read(seqpacket.MaxFDs)
			seqpacket.CloseAll(fds)
			if err != nil {
				t.Error(err)
			}
		})
		if err := sess.awaitRead(); err != nil {
			t.Error(err)
		}
		sess.out.close()
	})
}

// TestLateReader checks that a client that sends many requests before it reads gets all replies.
func TestLateReader(t *testing.T) {
	h := newHarness(t, Config{})
	h.unread = time.Minute
	c := h.hello(t)
	pd, cq := c.pd(), c.cq()
	const n = 2000
	sent := make(chan error, 1)
	go func() {
		for i := range n {
			if err := c.c.Write(reqChurn(i, pd, cq), nil); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	full := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		for _, s := range h.sessions {
			s.out.mu.Lock()
			defer s.out.mu.Unlock()
			return s.out.fds > maxQueuedFDs
		}
		return false
	}
	testenv.Until(t, "the daemon waits", full)
	for i := range n {
		m := c.next()
		if r := m.GetReply(); r == nil || r.Error != nil || r.Id != uint64(i+1) {
			t.Fatalf("message %d: %v", i, m)
		}
		seqpacket.CloseAll(c.fds)
		c.fds = nil
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
}
