// Package sched shares what one worker sends among clients and their connections,
// by deficit round robin (Shreedhar and Varghese, 1995): first among the groups,
// one for each client, that have something to send, then among the members of each.
// A round is resumed where it stopped, for want of TX slots or because the turn is
// over, so that no place in it is better than another. What counts is cost, in
// bytes: those of the records, and a fixed amount for each record and each FPDU.
package sched

const (
	turnBudget = 90       // records composed in a turn: two super-frames at an MTU of 1500
	minQuantum = 16 << 10 // bytes of cost that a member, or group, may send in its turn of the round
	// aloneBonus is what a member may send in addition while no other waits: a
	// fifth of the time of large Writes at an MTU of 9000 is between two turns.
	aloneBonus = 12 * minQuantum

	// recordCost is the cost of a record in bytes: its headers, and a frame's share of the other work.
	recordCost = 128
	// fpduCost is the cost of an FPDU in bytes: a work request or message takes as long as about
	// so many bytes of payload.
	fpduCost = 512
)

// Cost returns the cost of records that have so many bytes and FPDUs together.
func Cost(bytes, records, fpdus int) int { return bytes + records*recordCost + fpdus*fpduCost }

// No member or group holds more TX slots than so many times those that are free: a
// single connection gets 8/9 of them, and n busy ones get equal parts of nearly all.
// Slots come back only when the peer acknowledges, and a peer may be slow to, or
// gone.
const (
	MemberShare = 8
	GroupShare  = 4
)

// Grant is what a member may send in its turn, and why it stopped.
type Grant struct {
	Left  int    // cost in bytes; the last record may exceed it
	until uint64 // limit of Scheduler.composed; 0: none
	Why   Stop
}

// Alone reports whether no other member was waiting.
func (g *Grant) Alone() bool { return g.until != 0 }

// Part returns a grant of left bytes that ends no later than g.
func (g *Grant) Part(left int) Grant { return Grant{Left: left, until: g.until} }

// Stop is why a member stopped sending.
type Stop uint8

// Reasons to stop.
const (
	Idle  Stop = iota // nothing to send, or the window is closed: an event follows when that changes
	Spent             // the grant is used up; the rest waits for the next turn
	Slots             // no TX slot is free
	Share             // too many slots of the member wait for acknowledgements, which will cause an event
)

// Member is a sender: a connection or an association. T is the type of its owner.
type Member[T any] struct {
	Owner  T
	group  *Group[T]
	queued bool // in its group's round
	credit int  // what it may still send before others, in bytes of cost
	slots  int  // TX slots not yet acknowledged by the peer
}

// Group returns the group of m.
func (m *Member[T]) Group() *Group[T] { return m.group }

// Queued reports whether m is waiting for its turn.
func (m *Member[T]) Queued() bool { return m.queued }

// Slots returns the number of TX slots of m that are not yet acknowledged.
func (m *Member[T]) Slots() int { return m.slots }

// Group holds the members of one client.
type Group[T any] struct {
	queue  round[*Member[T]] // members with something to send
	queued bool              // in the scheduler's round
	credit int               // like that of a member
	slots  int               // sum over its members
}

// Len returns the number of members waiting for their turn.
func (g *Group[T]) Len() int { return g.queue.n }

// Head returns the member whose turn is next, or nil.
func (g *Group[T]) Head() *Member[T] { return g.queue.head() }

// Queued reports whether the group is waiting for its turn.
func (g *Group[T]) Queued() bool { return g.queued }

// Slots returns the number of its members' TX slots that are not yet acknowledged.
func (g *Group[T]) Slots() int { return g.slots }

// Scheduler is the scheduler of one worker.
type Scheduler[T any] struct {
	ready    round[*Group[T]] // groups with something to send
	grant    Grant            // in use
	quantum  int
	free     func() int // returns the number of TX slots available to records
	send     func(T, *Grant) int
	composed uint64 // total number of records
	starved  bool   // TX slots ran out, and nothing has been composed since
	times    uint64 // number of times that happened
}

// Init sets the least cost of what a frame of the link carries, which is the minimum of the quantum: with less, a
// frame would not be full where several members send. free returns the number of TX slots
// available to records. send makes a member send what its grant allows, and returns the amount.
func (s *Scheduler[T]) Init(frame int, free func() int, send func(T, *Grant) int) {
	s.quantum, s.free, s.send = max(minQuantum, frame), free, send
}

// Quantum returns the cost in bytes that a member may send per turn.
func (s *Scheduler[T]) Quantum() int { return s.quantum }

// Starved returns how many times sending stopped because all TX slots were waiting for
// acknowledgements.
func (s *Scheduler[T]) Starved() uint64 { return s.times }

// Join makes m a member of g. m keeps its slots and its place in the round.
func (s *Scheduler[T]) Join(m *Member[T], g *Group[T]) {
	queued := m.queued
	s.Leave(m)
	m.group = g
	g.slots += m.slots
	if queued {
		s.Enqueue(m)
	}
}

// Leave removes m from its group, if any, and from the round.
func (s *Scheduler[T]) Leave(m *Member[T]) {
	s.Remove(m)
	if m.group != nil {
		m.group.slots -= m.slots
		m.group = nil
	}
}

// Enqueue adds m to the round of its group.
func (s *Scheduler[T]) Enqueue(m *Member[T]) {
	if m.queued {
		return
	}
	m.queued = true
	g := m.group
	g.queue.push(m)
	if !g.queued {
		g.queued = true
		s.ready.push(g)
	}
}

// Remove removes m from the round.
func (s *Scheduler[T]) Remove(m *Member[T]) {
	if m.queued {
		m.queued = false
		m.group.queue.remove(m)
	}
}

// Serve continues the round until the turn's budget or the slots are used up. It returns the
// amount sent.
func (s *Scheduler[T]) Serve() int {
	work, passed := 0, 0
	until := s.composed + turnBudget
	for s.ready.n > 0 && s.composed < until {
		free := s.free()
		if free <= 0 {
			s.Starve()
			break
		}
		g := s.ready.head()
		if g.queue.n == 0 {
			s.retire(g)
			continue
		}
		if g.slots >= GroupShare*free {
			if passed++; passed > s.ready.n {
				s.Starve()
				break // wait for acknowledgements
			}
			s.ready.push(s.ready.pop())
			continue
		}
		passed = 0
		if !s.affords(&g.credit) {
			s.ready.push(s.ready.pop())
			continue
		}
		m := g.queue.pop()
		if !s.affords(&m.credit) {
			g.queue.push(m)
			continue
		}
		work += s.serve(m, g, until)
		if g.queue.n == 0 {
			s.retire(g)
		} else if g.credit <= 0 {
			s.ready.push(s.ready.pop())
		}
	}
	return work
}

// affords begins a turn of the member or group with that credit, and reports whether it may send.
// Otherwise it still repays what it sent beyond its grant.
func (s *Scheduler[T]) affords(credit *int) bool {
	if *credit <= 0 {
		*credit += s.quantum
	}
	return *credit > 0
}

// retire removes g, the first group of the round, which has nothing more to send. It keeps no credit.
func (s *Scheduler[T]) retire(g *Group[T]) {
	s.ready.pop()
	g.queued = false
	g.credit = min(g.credit, 0)
}

// serve makes m, which was the first of g, send what its credit allows, and returns the amount. If m
// has more to send, it waits for its next turn. until is the turn's limit of s.composed.
func (s *Scheduler[T]) serve(m *Member[T], g *Group[T], until uint64) int {
	m.queued = false
	alone := g.queue.n == 0 && s.ready.n == 1
	if alone {
		m.credit += aloneBonus
		g.credit += aloneBonus
	}
	gr := &s.grant
	*gr = Grant{Left: m.credit}
	if alone {
		gr.until = until
	}
	work := s.send(m.Owner, gr)
	g.credit -= m.credit - gr.Left
	m.credit = gr.Left
	if alone { // the grant was larger because no others were waiting
		m.credit, g.credit = min(m.credit, s.quantum), min(g.credit, s.quantum)
	}
	switch gr.Why {
	case Spent:
		m.queued = true
		g.queue.push(m)
	case Slots:
		m.queued = true
		g.queue.pushFront(m)
	default:
		m.credit = min(m.credit, 0)
	}
	return work
}

// Starve records that a sender with open windows and something to send stopped because no TX
// slot was free.
func (s *Scheduler[T]) Starve() {
	if !s.starved {
		s.starved = true
		s.times++
	}
}

// May reports whether m may compose another record. If not, g.Why has the reason.
func (s *Scheduler[T]) May(m *Member[T], g *Grant) bool {
	free := s.free()
	switch {
	case g.Left <= 0 || g.until != 0 && s.composed >= g.until:
		g.Why = Spent
	case free <= 0:
		g.Why = Slots
	case m.slots >= MemberShare*free:
		g.Why = Share
	default:
		return true
	}
	return false
}

// Most returns how many records of the given cost in bytes m may compose one after the other. It is at least 1 if May reports true.
func (s *Scheduler[T]) Most(m *Member[T], g *Grant, cost int) int {
	free := s.free()
	n := min((g.Left+cost-1)/cost, free, (MemberShare*free-m.slots+MemberShare)/(MemberShare+1))
	if g.until != 0 {
		n = int(min(int64(n), int64(g.until)-int64(s.composed)))
	}
	return n
}

// Own counts a slot with a record of m, until Disown.
func (s *Scheduler[T]) Own(m *Member[T]) {
	m.slots++
	m.group.slots++
	s.composed++
	s.starved = false
}

// Compose notes that n records were composed without a slot.
func (s *Scheduler[T]) Compose(n int) {
	s.composed += uint64(n)
	s.starved = false
}

// Disown counts a slot of m that was acknowledged.
func (s *Scheduler[T]) Disown(m *Member[T]) {
	m.slots--
	m.group.slots--
}

// A round is a FIFO queue. It allocates only to grow.
type round[T comparable] struct {
	q     []T // ring buffer; its length is a power of two
	first int
	n     int
}

func (r *round[T]) at(i int) *T { return &r.q[(r.first+i)&(len(r.q)-1)] }

// head returns the first element, or the zero value.
func (r *round[T]) head() (v T) {
	if r.n > 0 {
		v = *r.at(0)
	}
	return v
}

func (r *round[T]) push(v T) {
	r.grow()
	*r.at(r.n) = v
	r.n++
}

func (r *round[T]) pushFront(v T) {
	r.grow()
	r.first--
	*r.at(0) = v
	r.n++
}

func (r *round[T]) grow() {
	if r.n < len(r.q) {
		return
	}
	q := make([]T, max(8, 2*len(r.q)))
	for i := range r.n {
		q[i] = *r.at(i)
	}
	r.q, r.first = q, 0
}

// pop removes the first element; there must be one.
func (r *round[T]) pop() T {
	p := r.at(0)
	v := *p
	*p = *new(T)
	r.first++
	r.n--
	return v
}

func (r *round[T]) remove(v T) {
	for range r.n {
		if u := r.pop(); u != v {
			r.push(u)
		}
	}
}
