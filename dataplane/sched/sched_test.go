package sched

import (
	"slices"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestRound compares a Round with a slice.
func TestRound(t *testing.T) {
	rng := testenv.Rand(t)
	var r round[int]
	var want []int
	for i := range 10000 {
		switch op := rng.IntN(8); {
		case op < 3:
			r.push(i)
			want = append(want, i)
		case op < 4:
			r.pushFront(i)
			want = slices.Insert(want, 0, i)
		case op < 7 && len(want) > 0:
			if v := r.pop(); v != want[0] {
				t.Fatalf("step %d: pop is %d; want %d", i, v, want[0])
			}
			want = want[1:]
		case len(want) > 0:
			v := want[rng.IntN(len(want))]
			r.remove(v)
			want = slices.DeleteFunc(want, func(w int) bool { return w == v })
		}
		head := 0
		if len(want) > 0 {
			head = want[0]
		}
		if r.n != len(want) || r.head() != head {
			t.Fatalf("step %d: %d with %d at the head; want %d with %d", i, r.n, r.head(), len(want), head)
		}
	}
}

// TestMost checks that Most counts the records that May would allow one after the other.
func TestMost(t *testing.T) {
	rng := testenv.Rand(t)
	for range 10000 {
		free := 1 + rng.IntN(200)
		var s Scheduler[int]
		var g Group[int]
		var m Member[int]
		s.Init(1500, func() int { return free }, func(int, *Grant) int { return 0 })
		s.Join(&m, &g)
		for range rng.IntN(MemberShare * free) {
			s.Own(&m)
		}
		gr := Grant{Left: 1 + rng.IntN(300000)}
		if rng.IntN(2) == 0 {
			gr.until = s.composed + 1 + uint64(rng.IntN(100))
		}
		cost := 1 + rng.IntN(3000)
		got, want := s.Most(&m, &gr, cost), 0
		for ; s.May(&m, &gr); want++ {
			s.Own(&m)
			free--
			gr.Left -= cost
		}
		if got != want {
			t.Fatalf("%d records of cost %d; want %d", got, cost, want)
		}
	}
}

// TestMemberShare checks that a member holds at most a multiple of the number of free
// slots.
func TestMemberShare(t *testing.T) {
	free := 10
	var s Scheduler[int]
	var g Group[int]
	var m Member[int]
	s.Init(1500, func() int { return free }, func(int, *Grant) int { return 0 })
	s.Join(&m, &g)
	for range MemberShare*free - 1 {
		s.Own(&m)
	}
	if gr := (Grant{Left: 1}); !s.May(&m, &gr) {
		t.Errorf("below its share it stops for %d", gr.Why)
	}
	s.Own(&m)
	if gr := (Grant{Left: 1}); s.May(&m, &gr) || gr.Why != Share {
		t.Errorf("at its share: %d", gr.Why)
	}
	free = 0
	if gr := (Grant{Left: 1}); s.May(&m, &gr) || gr.Why != Slots {
		t.Errorf("without slots: %d", gr.Why)
	}
	s.Disown(&m)
	if m.Slots() != MemberShare*10-1 || g.Slots() != m.Slots() {
		t.Errorf("%d and %d slots", m.Slots(), g.Slots())
	}
	s.Leave(&m)
	if g.Slots() != 0 || m.Group() != nil {
		t.Errorf("%d slots left", g.Slots())
	}
}
