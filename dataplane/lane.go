package dataplane

import (
	"slices"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/dataplane/wheel"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/sctp/session"
	"github.com/iwarpd/iwarpd/shm"
)

// llp is DDP's lower layer protocol (RFC 5041 section 2): a tcpConn or an assoc. Its
// worker passes itself, since the lane may move to another one while it is dialed.
type llp interface {
	// begin takes what the transport reports, and the slots that were acknowledged,
	// before any are given out. What has something to send enters the round.
	begin(w *worker) int
	// pump composes what the window and g let out, nothing if g is nil, and sends what
	// is due. It returns how much it did.
	pump(w *worker, g *sched.Grant) int
	// timeout is called when next is due.
	timeout(w *worker)
	next() clock.Time
	// setHop sets the next hop to remote, an address of the peer.
	setHop(w *worker, remote [16]byte, hop *Hop)
	// streams returns the DDP streams; a stream of one of the methods below is among
	// them.
	streams() []*stream
	info(ci *ConnInfo)

	// attach takes s to full operation, and answer answers the peer's request for it.
	attach(w *worker, s *stream, a Attachment)
	answer(w *worker, s *stream, set session.Setup, a Attachment)
	// disconnect ends s in order, after what was posted.
	disconnect(w *worker, s *stream)
	// closeStream ends s in order, now; abortStream cuts it. The queue pair is in ERROR.
	closeStream(w *worker, s *stream)
	abortStream(w *worker, s *stream)
	// fault is called when a client's memory faulted under one of the streams.
	fault(w *worker)
}

// lane is what the scheduler, the timer wheel and the dirty list know. There is one for
// each TCP connection and each SCTP association.
type lane struct {
	llp      llp
	key      handoff.Key
	member   sched.Member[*lane]
	timer    wheel.Timer[*lane]
	deadline clock.Time // that of llp.next which timer is armed for
	pumped   uint64     // the last turn in which it was
	dirty    bool       // in worker.dirty
	gone     bool       // in no table any more
}

// client is a ClientBinding as one worker sees it.
type client struct {
	b       *ClientBinding
	bells   *shm.Doorbells
	streams []*stream // by doorbell bit
	group   sched.Group[*lane]
}

// enter puts a new lane, whose key and llp are set, in the tables.
func (w *worker) enter(l *lane) {
	l.timer.Owner, l.member.Owner = l, l
	w.sched.Join(&l.member, &w.house)
	w.lanes[l.key] = l
	w.e.dir.Put(l.key, w)
}

// moveTo moves a lane that is being dialed to worker to, and calls f there.
func (w *worker) moveTo(to *worker, l *lane, f func(to *worker)) {
	w.e.dialing.Remove(l.key, w)
	w.timers.Stop(&l.timer)
	w.unmark(l)
	w.sched.Leave(&l.member)
	w.e.dir.Move(l.key, w, to) // what comes before it is there is lost, not answered
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

// round is what the end of a worker's turn goes through.
type round struct {
	dirty     []*lane // to be pumped
	dirtyNext []*lane // the memory of that list for the next turn
	sched     sched.Scheduler[*lane]
	house     sched.Group[*lane] // lanes that belong to no client yet
}

// mark puts l on the list of lanes to be pumped.
func (w *worker) mark(l *lane) {
	if !l.dirty {
		l.dirty = true
		w.dirty = append(w.dirty, l)
	}
}

// unmark takes l off that list, and out of the round.
func (w *worker) unmark(l *lane) {
	if l.dirty {
		l.dirty = false
		w.dirty = slices.DeleteFunc(w.dirty, func(d *lane) bool { return d == l })
	}
	w.sched.Remove(&l.member)
}

// enqueue enters l in the round of its client.
func (w *worker) enqueue(l *lane) { w.sched.Enqueue(&l.member) }

// may reports whether l may compose one more record. If not, g knows why.
func (w *worker) may(l *lane, g *sched.Grant) bool { return w.sched.May(&l.member, g) }

// pump moves the marked lanes forward, and the round of those that have something to
// send.
func (w *worker) pump() int {
	n := 0
	work := w.dirty
	w.dirty = w.dirtyNext[:0]
	for _, l := range work {
		l.dirty = false
		if !l.gone {
			n += l.llp.begin(w)
		}
	}
	n += w.sched.Serve()
	for _, l := range work {
		if l.pumped != w.stats.Turns {
			n += w.pumpLane(l, nil) // it has ACKs to send, or something again
		}
	}
	w.dirtyNext = work[:0]
	return n
}

// pumpLane moves a lane forward and arms its timer.
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
		return // the wheel is early by up to a tick
	}
	l.deadline = 0
	w.stats.Timeouts++
	l.llp.timeout(w)
}

// drop takes a lane that has ended out of the tables.
func (w *worker) drop(l *lane) {
	l.gone = true
	l.member.End()
	w.timers.Stop(&l.timer)
	w.e.dialing.Remove(l.key, w)
	if w.lanes[l.key] == l {
		delete(w.lanes, l.key)
	}
}

// hopMTU is the MTU of the first hop; 0 is that of the link. To say it again would make
// a connection forget what it has found out about the path.
type hopMTU int

// set reports whether mtu is another one than before.
func (h *hopMTU) set(w *worker, mtu int) bool {
	old := int(*h)
	if old == 0 {
		old = w.mtu
	}
	*h = hopMTU(mtu)
	return mtu != old
}

// mtuOf returns the MTU of a way that begins with hop.
func (w *worker) mtuOf(hop *Hop) int {
	if hop.MTU != 0 {
		return min(w.mtu, hop.MTU)
	}
	return w.mtu
}

// deadlineAfter returns the time d from now, 0 if there is no limit.
func (w *worker) deadlineAfter(d time.Duration) clock.Time {
	if d <= 0 {
		return 0
	}
	return w.now.Add(d)
}
