package dataplane

import (
	"iter"
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/dataplane/wheel"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// lane is the state that the scheduler, the timer wheel and the dirty list use. There is one
// per TCP connection and SCTP association.
type lane struct {
	llp      llp
	key      handoff.Key
	member   sched.Member[*lane]
	timer    wheel.Timer[*lane]
	deadline clock.Time // value of llp.next for which timer is armed
	pumped   uint64     // last turn in which it was pumped
	dirty    bool       // in worker.dirty
	gone     bool       // removed from all tables
}

// laneTable holds the lanes of a worker by key.
type laneTable struct {
	lanes  map[handoff.Key]*lane // associations are listed also under the further addresses of their peers
	recent *tcpConn              // most recently used TCP connection in lanes, or nil
}

// lookup returns the TCP connection of flow f, or nil. It tries the most recent one first, since
// segments arrive in bursts.
func (t *laneTable) lookup(f *pkt.Flow) *tcpConn {
	if c := t.recent; c != nil && c.key.Flow == *f {
		return c
	}
	if l := t.lanes[handoff.Key{Flow: *f}]; l != nil {
		t.recent = l.llp.(*tcpConn)
		return t.recent
	}
	return nil
}

// assocOf returns the association of k, or nil.
func (t *laneTable) assocOf(k handoff.Key) *assoc {
	if l := t.lanes[k]; l != nil {
		return l.llp.(*assoc)
	}
	return nil
}

// assocs yields the associations.
func (t *laneTable) assocs() iter.Seq[*assoc] {
	return func(yield func(*assoc) bool) {
		for k, l := range t.lanes {
			if k.Proto == pkt.ProtoSCTP && k.Tag == 0 && !yield(l.llp.(*assoc)) {
				return
			}
		}
	}
}

// enter adds a new lane, whose key and llp are set, to the tables.
func (w *worker) enter(l *lane) {
	l.timer.Owner, l.member.Owner = l, l
	w.sched.Join(&l.member, &w.clientless)
	w.lanes[l.key] = l
	if w.socks == nil || l.key.Host { // no frame is of a kernel socket
		w.e.dir.Put(l.key, w)
	}
}

// moveTo moves a lane that is being dialed to worker to, and calls f there.
func (w *worker) moveTo(to *worker, l *lane, f func(to *worker)) {
	w.e.dialing.Remove(l.key, w)
	w.timers.Stop(&l.timer)
	w.unmark(l)
	w.sched.Leave(&l.member)
	w.e.dir.Move(l.key, w, to) // until then segments for it are dropped, not answered
	delete(w.lanes, l.key)
	for _, s := range l.llp.streams() {
		delete(w.streams, s.id)
		w.moved[s.id] = to
	}
	to.post(func(to *worker) {
		l.deadline, l.pumped = 0, 0
		to.enter(l)
		for _, s := range l.llp.streams() {
			to.streams[s.id] = s
		}
		f(to)
		to.mark(l)
	})
}

// round holds the work for the end of a worker's turn.
type round struct {
	dirty      []*lane // to be pumped
	pumping    []*lane // those that were, during pump
	dirtyNext  []*lane // spare slice for the next turn
	sched      sched.Scheduler[*lane]
	clientless sched.Group[*lane] // lanes without a client
}

// mark adds l to the lanes to be pumped.
func (r *round) mark(l *lane) {
	if !l.dirty {
		l.dirty = true
		r.dirty = append(r.dirty, l)
	}
}

// markLast moves l, if it is marked, after the other marked lanes.
func (r *round) markLast(l *lane) {
	for i := len(r.dirty) - 1; l.dirty && i >= 0; i-- {
		if r.dirty[i] == l {
			r.dirty = append(slices.Delete(r.dirty, i, i+1), l)
			return
		}
	}
}

// unmark removes l from the marked lanes and from the round.
func (r *round) unmark(l *lane) {
	if l.dirty {
		l.dirty = false
		r.dirty = slices.DeleteFunc(r.dirty, func(d *lane) bool { return d == l })
	}
	r.sched.Remove(&l.member)
}

// pump pumps the marked lanes, and then the round of lanes with something to send.
func (w *worker) pump() int {
	n := 0
	work := w.dirty
	w.dirty, w.pumping = w.dirtyNext[:0], work
	for _, l := range work {
		l.dirty = false
	}
	for _, l := range work {
		if !l.gone {
			n += l.llp.begin(w)
		}
	}
	n += w.sched.Serve()
	for _, l := range work {
		if l.pumped != w.stats.Turns {
			n += w.pumpLane(l, nil) // it has ACKs to send, or can send again
		}
	}
	clear(work) // a long turn must not keep lanes that have ended
	w.pumping, w.dirtyNext = nil, work[:0]
	return n
}

// pumpLane pumps a lane and arms its timer.
func (w *worker) pumpLane(l *lane, g *sched.Grant) int {
	if l.gone {
		return 0
	}
	l.pumped = w.stats.Turns
	n := l.llp.pump(w, g)
	if l.gone {
		return n
	}
	if at := l.llp.next(); at != l.deadline || at != 0 && !l.timer.Armed() {
		l.deadline = at
		if at != 0 {
			w.timers.Arm(&l.timer, at)
		}
	}
	return n
}

func (w *worker) onTimer(l *lane) {
	if l.gone {
		return
	}
	w.mark(l)
	if !l.deadline.Due(w.now) {
		return // it has moved to a later time since the timer was armed
	}
	l.deadline = 0
	w.stats.Timeouts++
	l.llp.timeout(w)
}

// drop removes a lane that has ended from the tables.
func (w *worker) drop(l *lane) {
	l.gone = true
	w.timers.Stop(&l.timer)
	w.e.dialing.Remove(l.key, w)
	if w.lanes[l.key] == l {
		delete(w.lanes, l.key)
	}
}

// mtuOf returns the MTU of a path that starts with hop.
func (w *worker) mtuOf(hop *Hop) int {
	if hop.MTU != 0 {
		return min(w.mtu, hop.MTU)
	}
	return w.mtu
}

// deadlineAfter returns the time d from now, or 0 if there is no limit.
func (w *worker) deadlineAfter(d time.Duration) clock.Time {
	if d <= 0 {
		return 0
	}
	return w.now.Add(d)
}
