package dataplane

// A worker shares what it sends by deficit round robin (Shreedhar and Varghese,
// 1995): first among the clients that have something to send, then among the
// connections of each. A round is resumed where it stopped, for want of TX slots
// or because the turn is over, so that no place in it is better than another.
// What counts is cost, in octets: those of the records, and a fixed amount for
// each record and each FPDU.
const (
	turnBudget = 64       // records composed in a turn: as many as frames are received
	minQuantum = 16 << 10 // octets of cost that a connection, or client, may send in its turn of the round
	// A connection that nobody waits behind gets so many turns at once: a fifth of
	// the time of large Writes at an MTU of 9000 is between two turns.
	aloneQuanta = 8

	recordCost = 128 // headers, and a frame's share of everything else
	fpduCost   = 512 // a work request or message costs about as much as so many octets more
)

// No one holds more TX slots than so many times those that are free: a single
// connection gets 8/9 of them, and n busy ones get equal parts of nearly all.
// Slots come back only when the peer acknowledges, and a peer may be slow to, or
// gone.
const (
	connShare   = 8
	clientShare = 4
)

// A grant is what a connection may send in its turn of the round, and why it
// stopped.
type grant struct {
	left  int    // cost, in octets; the last record may overdraw it
	until uint64 // what worker.composed may come to; 0: anything
	why   stopped
}

type stopped uint8

const (
	stopIdle  stopped = iota // nothing to send, or the window is closed: an event follows when that changes
	stopSpent                // the rest has its turn behind the others
	stopSlots                // no TX slot is free
	stopShare                // too many slots wait for the peer, which brings an event
)

// A round is a queue of those that wait for their turn. Once it has had room for
// as many it allocates nothing.
type round[T comparable] struct {
	q     []T // as a ring; its length is a power of two
	first int
	n     int
}

func (r *round[T]) at(i int) *T { return &r.q[(r.first+i)&(len(r.q)-1)] }

// head returns the first, the zero value of none.
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

// enqueue enters c in the round of its client.
func (w *worker) enqueue(c *conn) {
	if c.queued {
		return
	}
	c.queued = true
	cl := c.client
	cl.queue.push(c)
	if !cl.queued {
		cl.queued = true
		w.ready.push(cl)
	}
}

// serve goes on with the round until the turn is over, or the slots are used up.
// It returns how much it has done.
func (w *worker) serve() int {
	work, passed := 0, 0
	until := w.composed + turnBudget
	for w.ready.n > 0 && w.composed < until {
		free := w.freeSlots()
		if free <= 0 {
			w.starves()
			break
		}
		cl := w.ready.head()
		if cl.queue.n == 0 {
			w.ready.pop()
			cl.queued = false
			continue
		}
		if cl.slots >= clientShare*free {
			if passed++; passed > w.ready.n {
				w.starves()
				break // peers have to acknowledge first
			}
			w.ready.push(w.ready.pop())
			continue
		}
		passed = 0
		if cl.credit <= 0 {
			if cl.credit += w.quantum; cl.credit <= 0 {
				w.ready.push(w.ready.pop())
				continue
			}
		}
		c := cl.queue.pop()
		if c.credit <= 0 {
			if c.credit += w.quantum; c.credit <= 0 {
				cl.queue.push(c)
				continue
			}
		}
		c.queued = false
		alone := cl.queue.n == 0 && w.ready.n == 1
		if alone {
			c.credit += aloneQuanta * w.quantum
			cl.credit += aloneQuanta * w.quantum
		}
		g := grant{left: c.credit}
		if alone {
			g.until = until
		}
		work += w.pumpConn(c, &g)
		cl.credit -= c.credit - g.left
		c.credit = g.left
		if alone { // not for the time when others have come
			c.credit, cl.credit = min(c.credit, w.quantum), min(cl.credit, w.quantum)
		}
		switch {
		case c.gone:
		case g.why == stopSpent:
			c.queued = true
			cl.queue.push(c)
		case g.why == stopSlots:
			c.queued = true
			cl.queue.pushFront(c)
		default:
			c.credit = min(c.credit, 0)
		}
		if cl.queue.n == 0 {
			w.ready.pop()
			cl.queued = false
			cl.credit = min(cl.credit, 0)
		} else if cl.credit <= 0 {
			w.ready.push(w.ready.pop())
		}
	}
	return work
}

// starves notes that what has windows and something to send stops for want of TX
// slots, which wait for the peers' acknowledgements.
func (w *worker) starves() {
	if !w.starved {
		w.starved = true
		w.stats.TxStarved++
	}
}

// freeSlots returns how many TX slots records may take. The rest is for ACKs,
// retransmissions and connection set-up.
func (w *worker) freeSlots() int { return w.link.FreeSlots() - slotReserve + 1 }

// may reports whether c may compose one more record. If not, g knows why.
func (w *worker) may(c *conn, g *grant) bool {
	free := w.freeSlots()
	switch {
	case g.left <= 0 || g.until != 0 && w.composed >= g.until:
		g.why = stopSpent
	case free <= 0:
		g.why = stopSlots
	case c.slots >= connShare*free:
		g.why = stopShare
	default:
		return true
	}
	return false
}

// own notes that c has one slot more, until disown.
func (w *worker) own(c *conn) {
	c.slots++
	c.client.slots++
	w.composed++
	w.starved = false
}

// join makes c one of cl's connections. It takes its slots along.
func (c *conn) join(cl *client) {
	if c.client != nil {
		c.client.slots -= c.slots
	}
	c.client = cl
	cl.slots += c.slots
}
