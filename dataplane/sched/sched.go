// Package sched shares what one worker sends among clients and their connections,
// by deficit round robin (Shreedhar and Varghese, 1995): first among the groups,
// one for each client, that have something to send, then among the members of each.
// A round is resumed where it stopped, for want of TX slots or because the turn is
// over, so that no place in it is better than another. What counts is cost, in
// bytes: those of the records, and a fixed amount for each record and each FPDU.
package sched

const (
	turnBudget = 64       // records composed in a turn: as many as frames are received
	minQuantum = 16 << 10 // bytes of cost that a member, or group, may send in its turn of the round
	// A member that no other waits behind gets so many turns at once: a fifth of
	// the time of large Writes at an MTU of 9000 is between two turns.
	aloneQuanta = 8

	// RecordCost is that of a record's headers, and a frame's share of everything else.
	RecordCost = 128
	// FPDUCost is that of an FPDU: a work request or message costs about as much as so
	// many bytes more.
	FPDUCost = 512
)

// No member or group holds more TX slots than so many times those that are free: a
// single connection gets 8/9 of them, and n busy ones get equal parts of nearly all.
// Slots come back only when the peer acknowledges, and a peer may be slow to, or
// gone.
const (
	MemberShare = 8
	GroupShare  = 4
)

// Grant is what a member may send in its turn of the round, and why it stopped.
type Grant struct {
	Left  int    // cost, in bytes; the last record may overdraw it
	until uint64 // what Scheduler.composed may come to; 0: anything
	Why   Stop
}

// Part returns a grant of left bytes that ends with g at the latest.
func (g *Grant) Part(left int) Grant { return Grant{Left: left, until: g.until} }

// Stop is why a member stopped sending.
type Stop uint8

// The reasons.
const (
	Idle  Stop = iota // nothing to send, or the window is closed: an event follows when that changes
	Spent             // the rest has its turn after the others
	Slots             // no TX slot is free
	Share             // too many slots wait for the peer, which brings an event
)

// Member is a sender with a place of its own: a connection or an association. T is
// what owns it.
type Member[T any] struct {
	Owner  T
	group  *Group[T]
	queued bool // in the group's round
	gone   bool
	credit int // what it may still send before others, in bytes of cost
	slots  int // TX slots that wait for the peer's acknowledgement
}

// Group returns that of m.
func (m *Member[T]) Group() *Group[T] { return m.group }

// Queued reports whether m waits for its turn.
func (m *Member[T]) Queued() bool { return m.queued }

// Slots returns how many TX slots of m wait for the peer's acknowledgement.
func (m *Member[T]) Slots() int { return m.slots }

// Group is the members of one client.
type Group[T any] struct {
	queue  round[*Member[T]] // those that have something to send
	queued bool              // in the scheduler's round
	credit int               // as that of a member
	slots  int               // of its members
}

// Len returns how many members of the group wait for their turn.
func (g *Group[T]) Len() int { return g.queue.n }

// Head returns the member whose turn is next, or nil.
func (g *Group[T]) Head() *Member[T] { return g.queue.head() }

// Queued reports whether the group waits for its turn.
func (g *Group[T]) Queued() bool { return g.queued }

// Slots returns how many TX slots of its members wait for acknowledgement.
func (g *Group[T]) Slots() int { return g.slots }

// Scheduler is the round of one worker.
type Scheduler[T any] struct {
	ready    round[*Group[T]] // have something to send
	grant    Grant            // in use
	quantum  int
	free     func() int // TX slots that records may take
	send     func(T, *Grant) int
	composed uint64 // records, ever
	starved  bool   // none since TX slots were short
	times    uint64 // that it starved
}

// Init sets the MTU, of which the quantum is at least one. free returns how many TX slots
// records may take; send makes a member send what its grant lets it, and returns how much
// that was.
func (s *Scheduler[T]) Init(mtu int, free func() int, send func(T, *Grant) int) {
	s.quantum, s.free, s.send = max(minQuantum, mtu), free, send
}

// Quantum returns what a member may send in its turn of the round, in bytes of cost.
func (s *Scheduler[T]) Quantum() int { return s.quantum }

// Starved returns how often sending stopped because all TX slots waited for peers'
// acknowledgements.
func (s *Scheduler[T]) Starved() uint64 { return s.times }

// Join makes m a member of g. It takes its slots along, and its place in a round.
func (s *Scheduler[T]) Join(m *Member[T], g *Group[T]) {
	queued := m.queued
	s.Leave(m)
	m.group = g
	g.slots += m.slots
	if queued {
		s.Enqueue(m)
	}
}

// Leave takes m out of its group, if it has one, and out of the round.
func (s *Scheduler[T]) Leave(m *Member[T]) {
	s.Remove(m)
	if m.group != nil {
		m.group.slots -= m.slots
		m.group = nil
	}
}

// Enqueue gives m a place in the round of its group.
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

// Remove takes m out of the round.
func (s *Scheduler[T]) Remove(m *Member[T]) {
	if m.queued {
		m.queued = false
		m.group.queue.remove(m)
	}
}

// End notes that m has ended: it gets no further turn.
func (m *Member[T]) End() { m.gone = true }

// Serve goes on with the round until the turn is over, or the slots are used up. It
// returns how much was sent.
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
			s.ready.pop()
			g.queued = false
			continue
		}
		if g.slots >= GroupShare*free {
			if passed++; passed > s.ready.n {
				s.Starve()
				break // peers have to acknowledge first
			}
			s.ready.push(s.ready.pop())
			continue
		}
		passed = 0
		if g.credit <= 0 {
			if g.credit += s.quantum; g.credit <= 0 {
				s.ready.push(s.ready.pop())
				continue
			}
		}
		m := g.queue.pop()
		if m.credit <= 0 {
			if m.credit += s.quantum; m.credit <= 0 {
				g.queue.push(m)
				continue
			}
		}
		m.queued = false
		alone := g.queue.n == 0 && s.ready.n == 1
		if alone {
			m.credit += aloneQuanta * s.quantum
			g.credit += aloneQuanta * s.quantum
		}
		gr := &s.grant
		*gr = Grant{Left: m.credit}
		if alone {
			gr.until = until
		}
		work += s.send(m.Owner, gr)
		g.credit -= m.credit - gr.Left
		m.credit = gr.Left
		if alone { // not for the time when others have come
			m.credit, g.credit = min(m.credit, s.quantum), min(g.credit, s.quantum)
		}
		switch {
		case m.gone:
		case gr.Why == Spent:
			m.queued = true
			g.queue.push(m)
		case gr.Why == Slots:
			m.queued = true
			g.queue.pushFront(m)
		default:
			m.credit = min(m.credit, 0)
		}
		if g.queue.n == 0 {
			s.ready.pop()
			g.queued = false
			g.credit = min(g.credit, 0)
		} else if g.credit <= 0 {
			s.ready.push(s.ready.pop())
		}
	}
	return work
}

// Starve notes that what has windows and something to send stops for want of TX
// slots, which wait for the peers' acknowledgements.
func (s *Scheduler[T]) Starve() {
	if !s.starved {
		s.starved = true
		s.times++
	}
}

// May reports whether m may compose one more record. If not, g.Why says why.
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

// Own notes that m has composed a record, in one slot more, until Disown.
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

// Disown notes that the peer of m has acknowledged a slot.
func (s *Scheduler[T]) Disown(m *Member[T]) {
	m.slots--
	m.group.slots--
}

// A round is a queue of those that wait for their turn. Once it has had room for
// as many it allocates nothing.
type round[T comparable] struct {
	q     []T // as a ring; its length is a power of two
	first int
	n     int
}

func (r *round[T]) at(i int) *T { return &r.q[(r.first+i)&(len(r.q)-1)] }

// head returns the first, the zero value if there is none.
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

// pop takes the first out; there must be one.
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
