package dataplane

import (
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestIdling checks that an idle worker first yields if there is news, then keeps its CPU for half of the time if it
// awaits an answer, or as long as a client may respond, then yields again, and sleeps at the end.
func TestIdling(t *testing.T) {
	const spin = 50 * time.Microsecond
	for _, c := range []struct {
		name   string
		spin   time.Duration
		awaits bool
		busy   time.Duration
		near   bool
		news   bool
		want   []pause // after 0, 10, 20, 30, 40 and 50 us
	}{
		{"it awaits an answer", spin, true, 0, false, false, []pause{noPause, noPause, noPause, yieldPause, yieldPause, sleepPause}},
		{"it has received something and awaits an answer", spin, true, 0, false, true, []pause{yieldPause, noPause, noPause, yieldPause, yieldPause, sleepPause}},
		{"it awaits nothing", spin, false, 0, false, false, []pause{yieldPause, yieldPause, yieldPause, yieldPause, yieldPause, sleepPause}},
		{"a client may respond", spin, false, 15 * time.Microsecond, false, true, []pause{yieldPause, noPause, yieldPause, yieldPause, yieldPause, sleepPause}},
		{"a client may respond within the host", spin, false, 15 * time.Microsecond, true, true, []pause{noPause, noPause, yieldPause, yieldPause, yieldPause, sleepPause}},
		{"it does not spin", 0, true, 0, false, true, []pause{sleepPause}},
	} {
		t.Run(c.name, func(t *testing.T) {
			const start = clock.Time(1)
			var i idling
			r := response{start.Add(c.busy), c.near, c.news}
			for n, want := range c.want {
				now := start.Add(time.Duration(n) * 10 * time.Microsecond)
				if got := i.next(now, c.spin, c.awaits, &r); got != want {
					t.Errorf("after %v: %v, want %v", now.Sub(start), got, want)
				}
			}
		})
	}
}

// TestTimeslice checks that a timeslice ends at first, then 8 ms after each end, and not before.
func TestTimeslice(t *testing.T) {
	var s timeslice
	for _, c := range []struct {
		at   time.Duration
		want bool
	}{
		{time.Hour, true},
		{time.Hour + time.Microsecond, false},
		{time.Hour + 8*time.Millisecond - 1, false},
		{time.Hour + 9*time.Millisecond, true},
		{time.Hour + 16*time.Millisecond, false},
		{time.Hour + 17*time.Millisecond, true},
	} {
		if got := s.ends(clock.Time(c.at)); got != c.want {
			t.Errorf("at %v: %v, want %v", c.at, got, c.want)
		}
	}
}

// TestNews checks that a turn which only sends what a client has posted is no news to others on the CPU, and that others are.
func TestNews(t *testing.T) {
	oneGoroutine(t)
	p := mpa.Params{CRC: true, IRD: 16, ORD: 16}
	turn := func(s *sim, host int, what string, want bool) {
		t.Helper()
		w := s.hosts[host].w
		w.response.news = false
		w.turn()
		if got := w.response.news; got != want {
			t.Errorf("%s: news is %v, want %v", what, got, want)
		}
		s.now += 5000
	}

	s, a, q := newLoad(t, link.PipeConfig{MTU: 1500}, p, rdmap.OpRead, 64)
	for range 64 {
		s.load(a, q, 1)
	}
	q.left = 1
	s.hosts[0].w.mark(a.lane)
	turn(s, 0, "Read Request", false)
	turn(s, 1, "Read Response", true)
	turn(s, 0, "completion", true)

	s = hostSim(t)
	a, b := s.open()
	q = &loadQP{simQP: newSimQP(t, s.hosts[0], 4096)}
	target := newSimQP(t, s.hosts[1], 4096)
	q.QP = verbs.NewQP(verbs.QPConfig{Num: 1, PD: 1, Table: q.h.table, SQDepth: 256, MaxSGE: 1, Sends: q, Recvs: q})
	q.SendCQ, q.RecvCQ = q, q
	q.wr = verbs.SendWR{Op: rdmap.OpWrite, SGEs: q.sge(0, 64), RKey: target.reg.STag(), Remote: 0x10000}
	s.attach(a, b, q.simQP, target, p)
	for range 64 {
		s.hosts[0].w.turn()
	}
	q.left = 1
	s.hosts[0].w.mark(a.lane)
	turn(s, 0, "Write within the host without a completion", true)
}
