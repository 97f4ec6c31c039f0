package ctrl

import (
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// stuck is calls that block until they are let go.
type stuck struct {
	awayThreads
	began atomic.Int64
	let   chan struct{}
}

func newStuck() *stuck {
	return &stuck{awayThreads: awayThreads{most: mostAway}, let: make(chan struct{})}
}

// block makes a user block n calls.
func (s *stuck) block(uid uint32, n int) {
	for range n {
		s.do(uid, func() {
			s.began.Add(1)
			<-s.let
		})
	}
}

func (s *stuck) runs() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.running
}

// used reports whether something is running or waiting.
func (t *awayThreads) used() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.users) > 0
}

// waits returns how many users have something waiting.
func (t *awayThreads) waits() (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, u := range t.users {
		if len(u.calls) > 0 {
			n++
		}
	}
	return n
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
	testenv.Until(t, "no call runs", func() bool { return s.runs() == 0 })
	if n := s.began.Load(); n != want || len(s.users) != 0 || s.waits() != 0 {
		t.Errorf("%d calls were run of %d; %d users are left, %d wait", n, want, len(s.users), s.waits())
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

// Users that run something have their turns one after the other, too.
func TestBusyThreadsTakeTurns(t *testing.T) {
	s := newStuck()
	defer close(s.let)
	for uid := range uint32(mostAway) {
		s.block(1000+uid, 1)
	}
	began, let := make(chan uint32), make(chan struct{})
	defer close(let)
	for uid := range uint32(2) {
		for range 4 {
			s.do(uid, func() {
				began <- uid
				<-let
			})
		}
	}
	for range mostAway/4 + 2 { // the last quarter is for users that run nothing, as these two do at first
		s.let <- struct{}{}
	}
	if a, b := <-began, <-began; a == b {
		t.Errorf("user %d began twice before the other", a)
	}
	for i := range 6 {
		s.let <- struct{}{}
		if uid := <-began; uid != uint32(i%2) {
			t.Errorf("user %d had turn %d", uid, i)
		}
	}
}

// A client whose calls wait for those of others is not cut off, and goes on when it is its turn.
func TestAwayWaits(t *testing.T) {
	h, c := newClient(t, Config{})
	cq := c.cq()
	let := make(chan struct{})
	for range userAway {
		h.threads.do(uint32(os.Getuid()), func() { <-let })
	}
	c.send(&ctrlpb.Request{Body: &ctrlpb.Request_DestroyCq{DestroyCq: &ctrlpb.DestroyCQ{Cq: cq}}})
	testenv.Until(t, "the rings wait to be freed", func() bool { return h.threads.waits() != 0 })
	time.Sleep(awayWait + awayWait/2) // a client that delays the daemon is cut off by then
	close(let)
	if m := c.next(); m.GetReply().GetId() != c.id || m.GetReply().Error != nil {
		t.Fatalf("the client got %v", m)
	}
	c.pd()
}

// TestClosedInTime checks that a call that has returned is not taken for late when the time is over too, as after the process
// was stopped.
func TestClosedInTime(t *testing.T) {
	over := make(chan struct{})
	if closed(over, 0) {
		t.Error("closed before it is")
	}
	close(over)
	for range 100 {
		if !closed(over, 0) {
			t.Fatal("not closed although it is")
		}
	}
}
