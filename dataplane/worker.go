package dataplane

import (
	"container/list"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/dataplane/wheel"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/histogram"
	"github.com/iwarpd/iwarpd/internal/spin"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// Budgets bound the work of a turn, so that each part gets its share and timers stay on time.
const (
	rxBudget   = 64 // frames; the fastest batch size for AF_XDP
	pullBudget = 32 // work requests per batch
	reapBudget = 256
)

// queueOf holds properties of a worker's queue that its link does not have.
type queueOf struct {
	dev     *device
	partial bool // see Queue
	cpu     int
}

// A worker owns one NIC queue: its frames, connections, timers and queue pairs. Only its own
// goroutine accesses its fields, except cmds, driver and those that are atomic.
type worker struct {
	e    *Engine
	id   int
	link link.Link
	queueOf
	mtu       int // MTU of the link, limited by the size of slots
	announced int // MTU that listeners announce: mtu, or that of the interface if it is lower
	tcp       tcp.Config
	cmds      cmdQueue

	now    clock.Time
	timers wheel.Wheel[*lane]
	laneTable
	streams   map[ConnID]*stream
	moved     map[ConnID]*worker // dialed streams that another queue has adopted
	listeners listeners
	timeWait  list.List // of *tcpConn, in the order in which their peers have sent their last segment
	clients   []*client
	nextConn  atomic.Uint64

	round
	ending
	completed

	received
	rx         rxBurst
	forwarding forwarding
	held       heldTable
	txPath
	sctp  *sctpState // nil until SCTP is used
	socks *Sockets   // the link if it uses kernel sockets, or nil
	scratch
	touched
	taps *[]*Tap // taps at the start of the turn, or nil

	stats    Stats
	answered atomic.Pointer[Stats] // result of the last Engine.Stats
	times    times
	driver   driver
	slice    timeslice
}

// ending is the work for queue pairs and clients that have ended.
type ending struct {
	flushes flushing
	failing failing
}

// completed holds the CQs with new completions.
type completed struct {
	cqs      []CQ       // CQs that are Pending
	flushAt  clock.Time // when one of cqs must be flushed again
	response response
}

// times holds measured durations; see Stats.
type times struct {
	rtts, completions histogram.Histogram
}

// scratch is memory reused by each call.
type scratch struct {
	wc          verbs.WC
	fpdu, early mpa.FPDU
	joined      []byte // several pieces of a payload within the host, joined
}

func newWorker(e *Engine, id int, q Queue) (*worker, error) {
	w := &worker{
		e: e, id: id, queueOf: queueOf{dev: e.addDevice(q.Device), cpu: q.CPU}, tcp: *e.cfg.TCP,
		laneTable: laneTable{lanes: make(map[handoff.Key]*lane)}, streams: make(map[ConnID]*stream), moved: make(map[ConnID]*worker),
		listeners: make(listeners), driver: driver{rest: make(chan struct{}, 1)},
	}
	w.tcp.RTT = &w.times.rtts
	w.began.Store(resting)
	w.socks, _ = q.Link.(*Sockets)
	setLink(w, q)
	w.now = w.e.cfg.Now()
	w.timers.Init(w.now, w.onTimer)
	if err := w.cmds.init(); err != nil {
		return nil, err
	}
	return w, nil
}

func (w *worker) closeFDs() { w.cmds.alarm.Close() }

// newID may be called from any goroutine.
func (w *worker) newID() ConnID {
	return ConnID(uint64(w.id)<<48 | w.nextConn.Add(1))
}

// post makes the worker call f in its next turn.
func (w *worker) post(f func(*worker)) { w.cmds.push(f) }

func (w *worker) run() {
	debug.SetPanicOnFault(true)
	if !w.e.cfg.Inline {
		w.pin()
	}
	var others spin.Contention
	for !w.e.stop.Load() {
		w.loop(&others)
	}
}

// pin gives the worker a thread, on its CPU if it has one.
func (w *worker) pin() {
	runtime.LockOSThread() // never unlocked: the thread exits with the goroutine
	if w.cpu >= 0 {
		var set unix.CPUSet
		set.Set(w.cpu)
		// A failure to pin the worker is harmless.
		_ = unix.SchedSetaffinity(0, &set)
	}
}

// loop runs turns until the engine stops, or until an access to client memory faults, which
// ends that client only.
func (w *worker) loop(others *spin.Contention) {
	defer w.survive()
	if w.e.cfg.Inline {
		w.fillIn()
		return
	}
	var idle idling
	limit := spin.Limit{Least: w.e.cfg.Spin}
	for !w.e.stop.Load() {
		switch {
		case w.turn() > 0:
			idle = idling{}
			if w.waits {
				w.waits = false
				spin.Yield() // the other worker may need this CPU
			}
			continue
		case w.slice.ends(w.now):
			runtime.Gosched()
			continue
		case w.e.cfg.Poll == Busy: // the worker has its own CPU
			continue
		}
		next := idle.next(w.now, limit.Now(), w.awaits(), &w.response)
		if next == yieldPause && others.At(w.now) {
			next = sleepPause
		}
		switch next {
		case yieldPause:
			spin.Yield()
			now := w.e.cfg.Now()
			others.Yielded(now.Sub(w.now), now)
		case sleepPause:
			from := w.e.cfg.Now()
			w.sleep()
			limit.Slept(w.e.cfg.Now().Sub(from))
			idle = idling{}
		}
	}
}

// awaits reports whether peers have not acknowledged everything that the worker has sent. An answer
// probably comes with the acknowledgement.
func (w *worker) awaits() bool { return w.link.FreeSlots() < w.link.Slots() }

// sleep waits for work. It arms the wake-ups and then checks for work again, so that bells and
// commands in between are not missed.
func (w *worker) sleep() {
	w.arm(true)
	if w.turn() == 0 && !w.e.stop.Load() {
		w.stats.Sleeps++
		w.cmds.resting.Store(len(w.cqs) == 0)
		alarmed := w.link.Wait(w.untilTimer(), w.cmds.alarm.FD())
		w.cmds.resting.Store(false)
		if alarmed {
			w.cmds.alarm.Clear()
		}
	}
	w.arm(false)
}

// arm sets whether clients and callers of post must wake the worker.
func (w *worker) arm(sleeping bool) {
	w.cmds.sleeping.Store(sleeping)
	for _, cl := range w.clients {
		cl.bells.SetSleeping(sleeping)
	}
}

// untilTimer returns the time until something is due, an hour at most.
func (w *worker) untilTimer() time.Duration {
	at := clock.Earliest(w.timers.Next(), w.flushAt)
	if at == 0 {
		return time.Hour
	}
	return min(time.Hour, max(0, at.Sub(w.e.cfg.Now())))
}

// turn polls every source of work once and returns the amount of work done.
func (w *worker) turn() int {
	w.stats.Turns++
	w.began.Store(w.e.invalidations.Load())
	w.now = w.e.cfg.Now()
	w.taps = w.e.taps.Load()
	n := w.flushes.poll(w)
	n += w.failing.poll(w)
	n += w.catchUp()
	n += w.pollRx()
	if w.socks != nil {
		n += w.socks.serve(w)
	}
	if w.cmds.pending.Load() != 0 {
		n += w.cmds.drain(w)
	}
	if w.forwarding.pending.Load() {
		n += w.pollForwarded()
	}
	if n > 0 {
		w.response.news = true
	}
	n += w.pollBells()
	n += w.timers.Expire(w.now)
	n += w.pump()
	w.link.Flush()
	n += w.reap()
	w.publish()
	w.kickMovers()
	if w.socks != nil {
		n += len(w.socks.ready)
	}
	w.began.Store(resting)
	return n + len(w.dirty) + len(w.flushes.of) + len(w.failing) + len(w.late) // marked lanes have work in the next turn
}

// publish publishes this turn's completions.
func (w *worker) publish() {
	kept := w.cqs[:0]
	w.flushAt = 0
	for _, cq := range w.cqs {
		if at := cq.Flush(w.id, w.now); at != 0 {
			w.flushAt = clock.Earliest(w.flushAt, at)
			kept = append(kept, cq)
		}
	}
	clear(w.cqs[len(kept):])
	w.cqs = kept
}

// publishFor publishes the completions of b before an event that the client expects after them.
func (w *worker) publishFor(b *QPBinding) {
	for _, cq := range [...]CQ{b.SendCQ, b.RecvCQ} {
		if cq != nil && cq.Pending(w.id) {
			cq.Flush(w.id, w.now) // publish does so again if the wake-up is delayed
		}
	}
}
