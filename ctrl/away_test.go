package ctrl

import (
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// stuck is calls that block until they are let go.
type stuck struct {
	awayThreads
	began atomic.Int64
	let   chan struct{}
}

func newStuck() *stuck { return &stuck{let: make(chan struct{})} }

// block makes a user block n calls.
func (s *stuck) block(uid uint32, n int) (calls []*awayCall) {
	for range n {
		calls = append(calls, s.do(uid, func() {
			s.began.Add(1)
			<-s.let
		}))
	}
	return calls
}

func (s *stuck) runs() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

func ended(call *awayCall) bool {
	select {
	case <-call.over:
		return true
	case <-time.After(time.Minute):
		return false
	}
}

func begun(call *awayCall) bool {
	select {
	case <-call.began:
		return true
	default:
		return false
	}
}

// However many users block however many calls, the daemon has a bounded number of threads for them, and one user of its own.
func TestThreadsAreBounded(t *testing.T) {
	const users = 3 * mostAway
	s := newStuck()
	s.block(1, 10*userAway)
	if n := s.runs(); n != userAway {
		t.Errorf("%d threads of one user", n)
	}
	honest := uint32(1 << 20)
	if !ended(s.do(honest, func() {})) {
		t.Fatal("a user that blocks nothing waits beside one that does")
	}
	for uid := range uint32(users) {
		s.block(2+uid, 1+int(uid)%3*userAway)
		if s.runs() > mostAway {
			t.Fatalf("%d threads", s.runs())
		}
		if s.runs() < mostAway && !ended(s.do(honest, func() {})) {
			t.Fatalf("a user that blocks nothing waits beside %d users that do", uid)
		}
	}
	if n := s.runs(); n != mostAway {
		t.Fatalf("%d threads: this tests nothing", n)
	}
	last := s.do(honest, func() {})
	if begun(last) {
		t.Error("a call runs beyond the limit")
	}
	close(s.let)
	if !ended(last) {
		t.Fatal("the last call does not run when the others have ended")
	}
	want := int64(10 * userAway)
	for uid := range users {
		want += int64(1 + uid%3*userAway)
	}
	for deadline := time.Now().Add(time.Minute); s.runs() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d calls still run", s.runs())
		}
	}
	if n := s.began.Load(); n != want || len(s.users) != 0 || len(s.waiting) != 0 {
		t.Errorf("%d calls were run of %d; %d users are left, %d wait", n, want, len(s.users), len(s.waiting))
	}
}

// Users with waiting calls have their turns one after the other.
func TestThreadsTakeTurns(t *testing.T) {
	s := newStuck()
	for uid := range uint32(mostAway) {
		s.block(1000+uid, 1)
	}
	if n := s.runs(); n != mostAway {
		t.Fatalf("%d threads", n)
	}
	order := make(chan uint32, 100)
	for uid := range uint32(3) {
		for range 5 {
			s.do(uid, func() { order <- uid })
		}
	}
	s.let <- struct{}{} // one of those that block ends, so there is one thread for all of these
	var got []uint32
	for range 15 {
		select {
		case uid := <-order:
			got = append(got, uid)
		case <-time.After(time.Minute):
			t.Fatalf("only %d calls run", len(got))
		}
	}
	for i, uid := range got {
		if uid != uint32(i%3) {
			t.Fatalf("the users' turns were %v", got)
		}
	}
	close(s.let)
}

// A client whose calls wait for those of others is not cut off, and goes on when it is its turn.
func TestAwayWaits(t *testing.T) {
	h := newHarness(t, Config{})
	c := h.hello(t)
	cq := c.cq()
	let := make(chan struct{})
	for range userAway {
		h.threads.do(uint32(os.Getuid()), func() { <-let })
	}
	c.send(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}})
	waits := func() int {
		h.threads.mu.Lock()
		defer h.threads.mu.Unlock()
		return len(h.threads.waiting)
	}
	for deadline := time.Now().Add(time.Minute); waits() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("rings were freed beyond the limit")
		}
	}
	time.Sleep(awayWait + awayWait/2) // a client that delays the daemon is cut off by then
	close(let)
	if m := c.next(); m.GetReply().GetId() != c.id || m.GetReply().Error != nil {
		t.Fatalf("the client got %v", m)
	}
	c.pd()
}
