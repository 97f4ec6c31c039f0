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

// A rig is a scheduler whose members send records of a fixed cost, which are acknowledged at once unless keep is set.
type rig struct {
	Scheduler[int]
	t       *testing.T
	members []*Member[int]
	cost    []int   // of a record of each member
	left    []int   // records that each has to send
	sent    []int   // cost of what each has sent
	grants  []Grant // of each turn, as it began
	served  []int   // the member of each
	free    int     // TX slots
	keep    bool
}

// newRig makes a member with the given cost for each element, in the group of that index.
func newRig(t *testing.T, groups ...[]int) *rig {
	r := &rig{t: t, free: 1000}
	r.Init(1500, func() int { return r.free }, r.send)
	for _, costs := range groups {
		g := new(Group[int])
		for _, c := range costs {
			m := &Member[int]{Owner: len(r.members)}
			r.Join(m, g)
			r.members, r.cost, r.left, r.sent = append(r.members, m), append(r.cost, c), append(r.left, 0), append(r.sent, 0)
		}
	}
	return r
}

func (r *rig) send(i int, g *Grant) (n int) {
	r.grants, r.served = append(r.grants, *g), append(r.served, i)
	if len(r.served) > 1<<20 {
		r.t.Fatal("Serve does not end")
	}
	for ; r.left[i] > 0 && r.May(r.members[i], g); n++ {
		r.Own(r.members[i])
		if r.keep {
			r.free--
		} else {
			r.Disown(r.members[i])
		}
		g.Left -= r.cost[i]
		r.sent[i] += r.cost[i]
		r.left[i]--
	}
	return n
}

// post gives a member n records to send.
func (r *rig) post(i, n int) {
	r.left[i] += n
	r.Enqueue(r.members[i])
	r.Enqueue(r.members[i]) // no second place
}

// Serve is Scheduler.Serve. It checks that members and groups that wait have one place.
func (r *rig) Serve() int {
	r.t.Helper()
	n := r.Scheduler.Serve()
	ready := map[*Group[int]]int{}
	for i := range r.ready.n {
		ready[*r.ready.at(i)]++
	}
	for i, m := range r.members {
		g, places := m.group, 0
		if g != nil {
			for k := range g.queue.n {
				if *g.queue.at(k) == m {
					places++
				}
			}
			if (ready[g] == 1) != g.queued || ready[g] > 1 || places > ready[g] {
				r.t.Fatalf("the group of member %d has %d places, queued %v", i, ready[g], g.queued)
			}
		}
		if (places == 1) != m.queued || places > 1 {
			r.t.Fatalf("member %d has %d places, queued %v", i, places, m.queued)
		}
	}
	return n
}

// TestEqualShares checks that groups get equal parts, however many members they have, and members equal parts of their
// group's, whatever a record costs, also if it is more than the quantum.
func TestEqualShares(t *testing.T) {
	r := newRig(t, []int{700}, []int{700, 9000, 100 << 10}, []int{2000, 2000})
	for i := range r.members {
		r.post(i, 1<<30)
	}
	for range 1000 {
		before := r.composed
		if n := r.Serve(); n == 0 || uint64(n) != r.composed-before || n > turnBudget+r.Quantum()/700 {
			t.Fatalf("a turn of %d records, %d composed", n, r.composed-before)
		}
	}
	part := r.sent[0]
	for i, want := range []int{part, part / 3, part / 3, part / 3, part / 2, part / 2} {
		if d := r.sent[i] - want; d < -200<<10 || d > 200<<10 || part < 2<<20 {
			t.Errorf("member %d has sent %d; want %d", i, r.sent[i], want)
		}
	}
	for _, g := range r.grants {
		if g.Alone() || g.Left > r.Quantum() || g.Left <= 0 {
			t.Fatalf("a grant of %d, alone %v", g.Left, g.Alone())
		}
	}
}

// TestGrants checks what a member may send alone and with others, and that it keeps none of it when it stops.
func TestGrants(t *testing.T) {
	r := newRig(t, []int{1000}, []int{1000, 1000})
	check := func(what string, want ...int) {
		t.Helper()
		r.Serve()
		var got []int
		for i := range r.grants {
			if got = append(got, r.grants[i].Left); r.grants[i].Alone() != (got[i] > r.Quantum()) {
				t.Errorf("%s: a grant of %d, alone %v", what, got[i], r.grants[i].Alone())
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: grants %v; want %v", what, got, want)
		}
		r.grants = nil
	}
	q := r.Quantum()
	for range 3 {
		r.post(0, 1)
		check("alone", q+aloneBonus)
		r.post(1, 1)
		r.post(2, 1)
		check("with one of its group", q, q+aloneBonus)
		r.post(0, 1)
		r.post(1, 1)
		check("with one of another group", q, q+aloneBonus)
		if r.Len() != 0 {
			t.Errorf("%d groups wait", r.Len())
		}
	}
	r.post(0, 1000)
	if n := r.Serve(); n != turnBudget {
		t.Errorf("%d records of a member that is alone; want %d", n, turnBudget)
	}
	r.grants = nil
	r.post(1, 1)
	r.Serve()
	for _, g := range r.grants[:2] {
		if g.Left > q {
			t.Errorf("a grant of %d, with what is left of the one before", g.Left)
		}
	}
	if p := (&Grant{Left: 10, until: 5}).Part(3); p.Left != 3 || !p.Alone() {
		t.Errorf("a part is %+v", p)
	}
	if c := Cost(1000, 2, 3); c != 1000+2*recordCost+3*fpduCost {
		t.Errorf("a cost of %d", c)
	}
}

// Len returns the number of groups in the round.
func (r *rig) Len() int { return r.ready.n }

// TestStarved checks that a member that finds no slot is the first when there are some again, and that each time is
// counted once.
func TestStarved(t *testing.T) {
	r := newRig(t, []int{1000, 1000})
	r.keep = true
	for times := uint64(1); times < 4; times++ {
		r.free = 4
		r.post(0, 10)
		r.post(1, 10)
		for range 3 {
			r.Serve()
		}
		if r.free != 0 || r.Starved() != times {
			t.Fatalf("%d slots free, starved %d times; want %d", r.free, r.Starved(), times)
		}
		last := r.served[len(r.served)-1]
		r.served = nil
		r.free = 1000
		for r.Serve() > 0 {
		}
		if len(r.served) == 0 || r.served[0] != last || r.left[0]+r.left[1] != 0 {
			t.Errorf("member %d stopped; then %v were served", last, r.served)
		}
		for _, m := range r.members {
			for m.Slots() > 0 {
				r.Disown(m)
			}
		}
	}
}

// TestGroupShare checks that a group that holds its share of the slots is passed over, and continues when it has given
// some back.
func TestGroupShare(t *testing.T) {
	r := newRig(t, []int{100, 100}, []int{10000})
	r.keep, r.free = true, 100
	for range GroupShare * r.free / 2 {
		r.Own(r.members[0])
		r.Own(r.members[1])
	}
	r.post(0, 5)
	r.post(1, 5)
	r.post(2, 40) // the first group is passed over many times
	r.Serve()
	if r.left[0] != 5 || r.left[1] != 5 || r.left[2] != 0 {
		t.Errorf("%v are left; want those of the first group", r.left)
	}
	if r.Serve() != 0 || r.Starved() != 1 {
		t.Errorf("starved %d times; want once", r.Starved())
	}
	r.free = 1000
	if r.Serve() != 10 || r.Len() != 0 {
		t.Errorf("%v are left", r.left)
	}
}

// TestChangeGroup checks that a member that waits keeps its turn in another group, and that one without a group has
// none.
func TestChangeGroup(t *testing.T) {
	r := newRig(t, []int{1000}, []int{1000})
	m, g, to := r.members[0], r.members[0].Group(), r.members[1].Group()
	r.Own(m)
	r.post(0, 3)
	r.Join(m, to)
	if g.Slots() != 0 || to.Slots() != 1 || m.Group() != to || !m.Queued() || to.Len() != 1 || g.Len() != 0 {
		t.Errorf("%d and %d slots, queued %v", g.Slots(), to.Slots(), m.Queued())
	}
	if r.Serve() != 3 || m.Queued() || to.Queued() || g.Queued() {
		t.Errorf("%d records left", r.left[0])
	}
	r.post(0, 3)
	r.Leave(m)
	r.Leave(m)
	if r.Serve() != 0 || to.Slots() != 0 || m.Queued() {
		t.Errorf("without a group %d records are left", r.left[0])
	}
	r.Join(m, g)
	if r.Serve() != 0 || m.Queued() {
		t.Error("a member that did not wait is served")
	}
}
