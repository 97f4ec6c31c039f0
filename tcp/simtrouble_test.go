package tcp

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// trouble adds changes of conditions to a run and returns the time that they may cost.
func trouble(s *sim, seed uint64) (more time.Duration) {
	r := rand.New(rand.NewPCG(seed, 0x74726f75626c65))
	soon := func() clock.Time { return s.now.Add(time.Duration(r.Int64N(int64(2 * time.Second)))) }
	for _, w := range s.wire {
		switch r.IntN(5) {
		case 0:
			// At higher loss rates the run would consist of time-out back-off only.
			if w.ackLoss = pick(r, 0.1, 0.3); w.Loss >= 0.05 {
				w.ackLoss = 0.1
			}
		case 1:
			w.bunch = pick(r, time.Millisecond, 20*time.Millisecond, 100*time.Millisecond)
		case 2:
			w.burst = pick(r, 0.01, 0.1)
		}
	}
	if r.IntN(3) == 0 {
		// The MTU of one direction of the path is reduced, and later restored, without any ICMP error.
		w := s.wire[r.IntN(2)]
		was := w.mtu
		w.icmp = r.IntN(2) == 0
		s.plan.Push(soon(), func() { w.mtu = min(w.mtu, pick(r, 1400, 1280)) })
		s.plan.Push(s.now.Add(10*time.Second), func() { w.mtu = was })
	}
	if r.IntN(4) == 0 {
		// One link changes its MTU and later changes it back.
		i, to := r.IntN(2), pick(r, 1280, 1500, 9000)
		var was int
		s.plan.Push(soon(), func() {
			if c := s.h[i].c; c != nil {
				was = c.linkMTU
				c.SetMTU(s.now, to)
			}
		})
		s.plan.Push(s.now.Add(5*time.Second), func() {
			if c := s.h[i].c; c != nil && was != 0 {
				c.SetMTU(s.now, was)
			}
		})
	}
	if r.IntN(3) == 0 {
		// The reader stops and the window closes; then it reads everything at once.
		for range 1 + r.IntN(3) {
			h := s.h[r.IntN(2)]
			from, d := soon(), time.Duration(r.Int64N(int64(5*time.Second)))
			more += d
			s.plan.Push(from, func() { h.stopped = true })
			s.plan.Push(from.Add(d), func() {
				h.stopped = false
				if h.readRate == 0 && h.c != nil {
					h.backlog = 0
					h.c.SetBacklog(0)
				}
			})
		}
		more += 2 * s.h[0].cfg.MaxRTO
	}
	if r.IntN(4) == 0 {
		// Both ends close at once, whatever is still to be pushed.
		s.plan.Push(soon(), func() {
			for _, h := range s.h {
				if h.c == nil || h.c.State() < Established {
					return
				}
			}
			for _, h := range s.h {
				h.total, h.closeAt = h.pushed, -1
			}
		})
	}
	if r.IntN(4) == 0 {
		// The machine was asleep.
		d := time.Duration(r.Int64N(int64(pick(r, time.Second, 100*time.Second))))
		more += d
		s.plan.Push(soon(), func() { s.now = s.now.Add(d) })
	}
	return more + 60*time.Second
}

// TestSimTrouble is TestSim with paths, links, applications and clocks that change during the run.
func TestSimTrouble(t *testing.T) {
	from, only := firstSeed(t)
	n := *simSeeds / 4
	if only {
		n = 1
	} else if testing.Short() {
		n = min(n, 60)
	}
	for i := range uint64(n) {
		seed := from + i
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s, limit := gridSim(t, seed)
			limit += trouble(s, seed)
			s.trace = only
			s.run(limit)
			s.finish()
		})
	}
}
