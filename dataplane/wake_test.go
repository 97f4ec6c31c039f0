package dataplane

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// A ringing is a worker's link that makes clients post and ring whenever the worker calls it: between any two of its
// steps, on its way to sleep, and asleep. When it would sleep forever, no unseen work may be posted.
type ringing struct {
	link.Link
	s         *loadLanes
	rng       *rand.Rand
	loadLanes []*ringLane
	left      int // work requests to be posted
	waits     int // true sleeps
	pace      int // a client acts at one of this many points
	err       error
}

// ringLane is a lane whose work requests come from a ring.
type ringLane struct {
	*loadLane
	sp     *shm.SQProducer
	ringer *shm.DoorbellRinger
	sq     *shm.SQ
	fast   uint32
	valid  bool
	posted int
	got    int
}

func (l *ringLane) Push(_ int, wc *verbs.WC) bool {
	if wc.Status != verbs.WCSuccess {
		panic(fmt.Sprintf("work request %d: %v", wc.ID, wc.Status))
	}
	l.got++
	return true
}

// act makes a client post some work requests now and then, with a bell for each or for all.
func (r *ringing) act(chance int) {
	if r.left == 0 || r.rng.IntN(chance) > 0 {
		return
	}
	l := r.loadLanes[r.rng.IntN(len(r.loadLanes))]
	n := 1 + r.rng.IntN(3)
	if r.rng.IntN(8) == 0 {
		n = 2 * l.sp.Depth() // more than fits the queue pair
	}
	for ; n > 0 && r.left > 0 && l.sp.Space() > 0; n-- {
		wr := l.wr
		wr.Flags = verbs.Signaled
		switch r.rng.IntN(4) {
		case 0: // completes without a frame
			wr = verbs.SendWR{Op: verbs.OpReg, Flags: verbs.Signaled, RKey: l.fast, SGEs: []verbs.SGE{{Len: 64}}, Access: verbs.LocalWrite}
			if l.valid {
				wr = verbs.SendWR{Op: verbs.OpLocalInv, Flags: verbs.Signaled, Inv: l.fast}
			}
			l.valid = !l.valid
		case 1:
			wr.Op = rdmap.OpRead
		}
		wr.ID = uint64(l.posted)
		if err := l.sp.Post(&wr); err != nil {
			panic(err)
		}
		l.posted++
		r.left--
		if r.rng.IntN(4) == 0 {
			l.ringer.Ring(l.Bit)
		}
	}
	l.ringer.Ring(l.Bit)
}

func (r *ringing) Receive(fs []link.Frame) int {
	r.act(r.pace)
	n := r.Link.Receive(fs)
	r.act(r.pace)
	return n
}
func (r *ringing) Flush() { r.act(r.pace); r.Link.Flush(); r.act(r.pace) }
func (r *ringing) Reap(d []link.Slot) int {
	r.act(r.pace)
	n := r.Link.Reap(d)
	r.act(r.pace)
	return n
}

// Wait returns when there is a reason to wake up, as poll would.
func (r *ringing) Wait(timeout time.Duration, wakefd int) (woken bool) {
	r.act(4) // on the way to sleep
	r.pace = 8 << r.rng.IntN(10)
	far := r.s.hosts[1].w
	for range 1000 { // the other host runs until it is idle
		if far.turn() == 0 {
			break
		}
		r.s.hosts[1].drain()
	}
	fds := []unix.PollFd{{Fd: int32(wakefd), Events: unix.POLLIN}}
	n, _ := unix.Poll(fds, 0)
	switch {
	case n > 0:
		return true
	case r.s.hosts[0].link.Deadline() != 0:
		return false
	}
	r.waits++
	w := r.s.hosts[0].w
	for i, l := range r.loadLanes {
		free := w.freeSlots()
		m := &l.c.lane.member
		forSlots := m.Queued() && (free <= 0 || m.Group().Slots() >= sched.GroupShare*free) || m.Slots() >= sched.MemberShare*free
		if taken := int(l.QP.Taken() - l.QP.Retired()); l.sq.Posted()+taken > 0 && !forSlots && r.err == nil {
			r.err = fmt.Errorf("the worker sleeps, and queue pair %d has %d work requests posted and %d taken", i, l.sq.Posted(), taken)
		}
	}
	// The next timer, unless a client wakes the worker first.
	next := clock.Earliest(far.timers.Next(), r.s.hosts[0].w.timers.Next())
	if r.left > 0 && (next == 0 || r.rng.IntN(4) > 0) {
		r.act(1) // always rings
		n, _ := unix.Poll(fds, 0)
		if n == 0 && r.err == nil {
			r.err = fmt.Errorf("a bell did not wake the worker")
		}
		return n > 0
	}
	if next != 0 {
		r.s.now = max(r.s.now, next)
	}
	return false
}

// TestNoDoorbellIsLost makes many clients with many queue pairs post at every point of the worker's loop.
func TestNoDoorbellIsLost(t *testing.T) {
	for _, c := range []struct{ clients, each, slots int }{{1, 150, 1024}, {40, 3, 1024}, {5, 10, 80}} {
		t.Run(fmt.Sprintf("%dx%d/slots=%d", c.clients, c.each, c.slots), func(t *testing.T) {
			r := &ringing{s: newLoadLanes(t, link.PipeConfig{Slots: c.slots}), rng: testenv.Rand(t), pace: 64}
			s := r.s
			w := s.hosts[0].w
			bells := map[*ClientBinding]int{}
			for i := range c.clients * c.each {
				sq, err := shm.CreateSQ(4<<r.rng.IntN(4), 1, 0)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { sq.Close() })
				sp, err := shm.MapSQ(sq.FD())
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { sp.Close() })
				l := &ringLane{sq: sq, sp: sp}
				cb := s.client(0, i%c.clients)
				if l.ringer, err = shm.MapDoorbells(cb.Doorbells[0].FD(), cb.Doorbells[0].WakeFD()); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { l.ringer.Close() })
				bit := bells[cb]
				bells[cb]++
				l.loadLane = s.addLane(0, cb, bit, rdmap.OpWrite, 1+r.rng.IntN(4096), max(sp.Depth()/4, 1), sq, l)
				fast, err := s.hosts[0].table.RegisterFast(1, make([]byte, 64), verbs.LocalWrite)
				if err != nil {
					t.Fatal(err)
				}
				l.fast = fast.STag()
				r.loadLanes = append(r.loadLanes, l)
			}
			r.Link, r.left = w.link, 3000+20*c.clients*c.each
			total := r.left
			w.link = r
			got := func() (n int) {
				for _, l := range r.loadLanes {
					n += l.got
				}
				return n
			}
			for turns := 0; r.err == nil && (r.left > 0 || got() < total); turns++ {
				if turns > 100*total {
					t.Fatalf("%d of %d work requests completed after %d turns", got(), total, turns)
				}
				if w.turn() == 0 {
					w.sleep()
				}
				s.hosts[0].drain()
				s.hosts[1].w.turn()
				s.hosts[1].drain()
				s.now = s.now.Add(time.Microsecond)
			}
			if r.err != nil {
				t.Error(r.err)
			}
			if t.Logf("%d work requests, %d sleeps", total, r.waits); r.waits < 30 {
				t.Errorf("the worker has slept %d times", r.waits)
			}
			w.link = r.Link
		})
	}
}

// TestNoSpin checks that a worker that may not spin sleeps as soon as it is idle.
func TestNoSpin(t *testing.T) {
	e := startSockets(t, Config{Spin: -1})
	const wakes = 50
	for range wakes {
		e.Fence()
	}
	var all []Stats
	testenv.Until(t, "the worker answers", func() (ok bool) {
		var silent []int
		all, silent = e.Stats()
		return len(silent) == 0
	})
	if n := all[0].Turns; n > 10*wakes {
		t.Errorf("%d turns for %d wake-ups", n, wakes)
	}
}
