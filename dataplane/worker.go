package dataplane

import (
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/pkt"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/tcp"
	"github.com/iwarpd/iwarpd/verbs"
)

// Budgets bound the work of one turn, so that every part of it gets its share
// and timers stay on time.
const (
	rxBudget   = 64 // frames: the batch at which AF_XDP is fastest here
	pullBudget = 32 // work requests taken at once
	reapBudget = 256
)

// slotReserve is how many TX slots are kept for ACKs, retransmissions and
// connection set-up when records take all others.
const slotReserve = 64

// A worker owns one NIC queue: its frames, connections, timers and queue pairs.
// Only its own goroutine touches its fields, apart from cmds.
type worker struct {
	e    *Engine
	id   int
	link link.Link
	cpu  int
	mtu  int // of the link, as far as the slots hold it
	told int // MTU that listeners tell peers of: mtu, or what less the interface has come to
	tcp  tcp.Config
	cmds cmdQueue

	now       clock.Time
	timers    wheel
	flows     map[pkt.Flow]*conn
	recent    *conn // in flows, or nil: whose segment came last
	conns     map[ConnID]*conn
	moved     map[ConnID]*worker // connections that another queue has adopted
	listeners map[listenKey]*listener
	linger    []*conn // in TIME-WAIT, from lingerAt on, oldest first; some gone
	lingerAt  int
	clients   []*client
	nextConn  uint64

	dirty     []*conn // to be pumped at the end of the turn
	dirtyNext []*conn
	ready     round[*client] // have something to send
	house     client         // of connections that are no client's yet
	quantum   int
	composed  uint64     // records, ever
	starved   bool       // none since TX slots were short
	cqs       []CQ       // those that are Pending
	flushAt   clock.Time // when one of cqs must be flushed again

	rx        [rxBudget]link.Frame
	rxAt      int // of rx, those before rxEnd have not been looked at
	rxEnd     int
	hand      *link.Frame // of rx, while nobody keeps it; nil: none
	held      heldTable
	reclaimed clock.Time // when some of a connection's held frames were last taken back
	slots     []slotState
	done      [reapBudget]link.Slot
	ipid      uint16

	sctp    *sctpState // nil: none
	in      inbound    // scratch of the frame in hand
	out     tcp.Out
	parts   [verbs.MaxSGE][]byte // of the payload in hand
	wc      verbs.WC
	strays  strays
	whole   bool    // the frame in hand was reassembled
	handed  bool    // and another worker has handed it here
	current *conn   // whose client's memory is being touched
	taps    *[]*Tap // as they were at the start of the turn; nil: none

	stats Stats
	drive sync.Mutex   // held for a turn when an application may drive too
	app   atomic.Int64 // clock.Time of the application's last turn
}

// client is a ClientBinding as one worker sees it.
type client struct {
	b     *ClientBinding
	bells *shm.Doorbells
	conns []*conn // by doorbell bit

	queue  round[*conn] // its connections that have something to send
	queued bool         // in the worker's round
	credit int          // as that of a conn
	slots  int          // TX slots of its connections
}

func newWorker(e *Engine, id int, q Queue) (*worker, error) {
	w := &worker{
		e: e, id: id, link: q.Link, cpu: q.CPU, tcp: *e.cfg.TCP,
		flows: make(map[pkt.Flow]*conn), conns: make(map[ConnID]*conn), moved: make(map[ConnID]*worker),
		listeners: make(map[listenKey]*listener),
		slots:     make([]slotState, q.Link.Slots()),
	}
	// A slot holds the payload behind headroom, so that the largest segment of a
	// link whose packets nearly fill a slot is a few octets smaller.
	w.mtu = min(q.Link.MTU(), q.Link.SlotSize()-headroom+minHeaders)
	w.told = w.mtu
	w.quantum = max(minQuantum, w.mtu)
	w.held.init(q.Link.RxFrames() / 2)
	if w.tcp.MaxHeld == 0 {
		w.tcp.MaxHeld = len(w.held.frames)
	}
	w.now = w.e.cfg.Now()
	w.timers.init(w.now)
	if err := w.cmds.init(); err != nil {
		return nil, err
	}
	return w, nil
}

func (w *worker) closeFDs() { w.cmds.alarm.Close() }

// newID may be called from any goroutine.
func (w *worker) newID() ConnID {
	return ConnID(uint64(w.id)<<48 | atomic.AddUint64(&w.nextConn, 1))
}

// post has the worker call f in its next turn.
func (w *worker) post(f func(*worker)) { w.cmds.push(f) }

func (w *worker) run() {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
	if w.cpu >= 0 {
		var set unix.CPUSet
		set.Set(w.cpu)
		// A worker that cannot be pinned works all the same.
		_ = unix.SchedSetaffinity(0, &set)
	}
	debug.SetPanicOnFault(true)
	for !w.e.stop.Load() {
		w.loop()
	}
}

// loop turns until the engine stops, or until touching a client's memory
// faults: then that client is ended and nobody else.
func (w *worker) loop() {
	defer w.survive()
	if w.e.cfg.Inline {
		w.fillIn()
		return
	}
	idle := clock.Time(0)
	for !w.e.stop.Load() {
		if w.turn() > 0 {
			idle = 0
			continue
		}
		if idle == 0 {
			idle = w.now
		}
		if w.e.cfg.Poll == Busy {
			continue // the CPU is the worker's own
		}
		if w.now.Sub(idle) < w.e.cfg.Spin {
			// Free when nobody else wants the core, and a hand-over to the
			// client when it shares ours.
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			continue
		}
		w.sleep(time.Hour)
		idle = 0
	}
}

// survive, deferred, recovers from a fault in a client's memory; any other panic goes on.
func (w *worker) survive() {
	if c := w.current; c != nil {
		if r := recover(); r != nil {
			w.fault(c, r)
		}
	}
}

// fillIn runs the worker while the application does not drive it. It holds drive
// through its turns and its sleep, since Wait uses the link too; an application
// that comes meanwhile wakes it, and then has the worker to itself for as long
// as it turns at least once a millisecond.
func (w *worker) fillIn() {
	for !w.e.stop.Load() {
		if w.e.cfg.Now().Sub(clock.Time(w.app.Load())) < time.Millisecond {
			unix.Nanosleep(&unix.Timespec{Nsec: int64(time.Millisecond)}, nil)
			continue
		}
		w.fillInTurn()
	}
}

func (w *worker) fillInTurn() {
	w.drive.Lock()
	defer w.drive.Unlock() // also when the turn faults
	if w.turn() == 0 {
		w.sleep(time.Hour)
	}
}

func (w *worker) inlineTurn() int {
	if !w.drive.TryLock() {
		w.app.Store(int64(w.e.cfg.Now()))
		if w.cmds.sleeping.CompareAndSwap(true, false) {
			w.cmds.alarm.Ring()
		}
		return 0
	}
	defer w.drive.Unlock()
	n := w.turn()
	w.app.Store(int64(w.now))
	return n
}

// sleep waits for work. It arms first and looks again, so that nothing rung or
// posted in between is lost.
func (w *worker) sleep(limit time.Duration) {
	w.arm(true)
	if w.turn() == 0 && !w.e.stop.Load() {
		w.stats.Sleeps++
		if w.link.Wait(w.untilTimer(limit), w.cmds.alarm.FD()) {
			w.cmds.alarm.Clear()
		}
	}
	w.arm(false)
}

// arm tells clients and commanders whether they must wake the worker.
func (w *worker) arm(sleeping bool) {
	w.cmds.sleeping.Store(sleeping)
	for _, cl := range w.clients {
		cl.bells.SetSleeping(sleeping)
	}
}

func (w *worker) untilTimer(limit time.Duration) time.Duration {
	if at := clock.Earliest(w.timers.next(), w.flushAt); at != 0 {
		limit = min(limit, max(0, at.Sub(w.e.cfg.Now())))
	}
	return limit
}

// turn is one pass over all that may have work. It returns how much it found.
func (w *worker) turn() int {
	w.stats.Turns++
	w.now = w.e.cfg.Now()
	w.taps = w.e.taps.Load()
	n := w.pollRx()
	if w.cmds.pending.Load() != 0 {
		n += w.cmds.drain(w)
	}
	if w.strays.pending.Load() {
		n += w.pollStrays()
	}
	n += w.pollBells()
	n += w.timers.expire(w.now, w.onTimer)
	n += w.pump()
	w.link.Flush()
	n += w.reap()
	w.publish()
	return n + len(w.dirty) // who is marked has work for the next turn
}

// pollBells marks the connections whose clients rang. A bell beyond those of the
// connections here is nobody's.
func (w *worker) pollBells() int {
	n := 0
	for _, cl := range w.clients {
		for i := range (len(cl.conns) + 63) / 64 {
			for v := cl.bells.Take(i); v != 0; v &= v - 1 {
				bit := i*64 + trailingZeros(v)
				n++
				if bit < len(cl.conns) && cl.conns[bit] != nil {
					w.mark(cl.conns[bit])
				}
			}
		}
	}
	return n
}

// mark puts c on the list of connections to be pumped.
func (w *worker) mark(c *conn) {
	if !c.dirty {
		c.dirty = true
		w.dirty = append(w.dirty, c)
	}
}

// unmark takes c off that list, and out of the round.
func (w *worker) unmark(c *conn) {
	if c.dirty {
		c.dirty = false
		w.dirty = slices.DeleteFunc(w.dirty, func(d *conn) bool { return d == c })
	}
	if c.queued {
		c.queued = false
		c.client.queue.remove(c)
	}
}

// pump moves the marked connections forward, and the round of those that have
// something to send.
func (w *worker) pump() int {
	n := 0
	work := w.dirty
	w.dirty = w.dirtyNext[:0]
	for _, c := range work {
		c.dirty = false
		n += w.begin(c)
	}
	n += w.serve()
	for _, c := range work {
		if c.as != nil {
			c = &c.as.carrier
		}
		if c.pumped != w.stats.Turns {
			n += w.pumpConn(c, nil) // it has ACKs to send, or something again
		}
	}
	w.dirtyNext = work[:0]
	return n
}

func (w *worker) onTimer(c *conn) {
	if c.gone {
		return
	}
	if c.as != nil {
		w.sctpTimer(c)
		return
	}
	if c.deadline.Due(w.now) {
		c.deadline = 0
		w.stats.Timeouts++
		c.connectTimeout(w)
		c.nudge(w.now)
		w.halfOver(c)
		before := c.tcp.TimeoutsInARow()
		c.tcp.HandleTimeout(w.now)
		if n := c.tcp.TimeoutsInARow(); n > before && n >= doubtful {
			w.e.doubt(c.id, c.flow)
		}
	}
	w.mark(c)
}

// doubtful is how many time-outs in a row put the next hop in doubt.
const doubtful = 2

// reap takes back the slots that the kernel has finished with.
func (w *worker) reap() int {
	total := 0
	for {
		n := w.link.Reap(w.done[:])
		for _, s := range w.done[:n] {
			st := &w.slots[s]
			st.posted--
			if st.posted == 0 && !st.owned {
				w.link.Free(s)
			}
		}
		total += n
		if n < len(w.done) {
			return total
		}
	}
}

// publish makes this turn's completions visible.
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

func (w *worker) bind(cb *ClientBinding) {
	w.clients = append(w.clients, &client{b: cb, bells: cb.Doorbells[w.id]})
	cb.Doorbells[w.id].SetSleeping(w.cmds.sleeping.Load())
}

func (w *worker) unbind(cb *ClientBinding) {
	for i, cl := range w.clients {
		if cl.b != cb {
			continue
		}
		for _, c := range cl.conns {
			if c != nil {
				w.detach(c)
			}
		}
		w.clients = append(w.clients[:i], w.clients[i+1:]...)
		return
	}
}

func (w *worker) client(cb *ClientBinding) *client {
	for _, cl := range w.clients {
		if cl.b == cb {
			return cl
		}
	}
	return nil
}

// fault ends the client in whose memory the worker faulted. What the turn had
// in hand is lost with its connection, its frames are given back, and the next turn
// goes on with those behind them.
func (w *worker) fault(c *conn, reason any) {
	w.current = nil
	if w.hand != nil {
		w.link.Release(w.hand)
		w.hand = nil
	}
	if b := w.held.hand; b != tcp.NoBuf {
		w.held.hand = tcp.NoBuf
		w.freeHeld(c, b)
	}
	w.strayFault()
	w.stats.Faults++
	b := c.qp
	w.dropQP(c)
	if c.as != nil {
		w.faultSCTP(c.as)
	}
	w.abort(c, fmt.Errorf("dataplane: fault in client memory: %v", reason))
	if b != nil && b.Client != nil && b.Client.OnFault != nil {
		b.Client.OnFault()
	}
	// Marks that were being worked on when the turn ended.
	for _, c := range w.dirty {
		c.dirty = false
	}
	w.dirty, w.dirtyNext = nil, nil
	for _, c := range w.conns {
		c.dirty = false
		w.mark(c)
	}
	if w.sctp != nil {
		for _, as := range w.sctp.assocs { // some have no session, as now that of c
			as.carrier.dirty = false
			w.mark(&as.carrier)
		}
	}
}

// cmdQueue carries functions to a worker from any goroutine.
type cmdQueue struct {
	mu       sync.Mutex
	q, spare []func(*worker)
	pending  atomic.Int32
	sleeping atomic.Bool
	alarm    *shm.Alarm // on which the worker sleeps
}

func (q *cmdQueue) init() (err error) {
	if q.alarm, err = shm.NewAlarm(); err != nil {
		return fmt.Errorf("dataplane: %w", err)
	}
	return nil
}

func (q *cmdQueue) push(f func(*worker)) {
	q.mu.Lock()
	q.q = append(q.q, f)
	q.pending.Store(int32(len(q.q)))
	q.mu.Unlock()
	if q.sleeping.Load() {
		q.alarm.Ring()
	}
}

// drain calls what was pushed. If a function faults, those behind it stay.
func (q *cmdQueue) drain(w *worker) int {
	q.mu.Lock()
	batch := q.q
	q.q, q.spare = q.spare[:0], nil
	q.pending.Store(0)
	q.mu.Unlock()
	n := 0
	defer func() {
		if n < len(batch) {
			q.mu.Lock()
			q.q = append(slices.Clone(batch[n:]), q.q...)
			q.pending.Store(int32(len(q.q)))
			q.mu.Unlock()
		}
		clear(batch)
		q.spare = batch
	}()
	for n < len(batch) {
		n++
		batch[n-1](w)
	}
	return n
}

// listenKey finds a listener; the zero address stands for every address.
type listenKey struct {
	addr [16]byte
	port uint16
}

type listener struct {
	id     ListenerID
	l      *tcp.Listener
	stream bool // its connections are byte streams for a while
}

func keyOf(local netip.AddrPort) listenKey {
	k := listenKey{port: local.Port()}
	if !local.Addr().IsUnspecified() {
		k.addr = local.Addr().As16()
	}
	return k
}

func (w *worker) listen(id ListenerID, r *ListenRequest) error {
	if r.SCTP != nil {
		return w.listenSCTP(id, r.Local, *r.SCTP)
	}
	k := keyOf(r.Local)
	if w.listeners[k] != nil {
		return fmt.Errorf("dataplane: already listening on %v", r.Local)
	}
	w.listeners[k] = &listener{id: id, l: tcp.NewListener(&w.tcp, r.Backlog, w.e.secret, w.told), stream: r.Stream}
	return nil
}

// offerMTU says that the MTU of the interface is now mtu.
func (w *worker) offerMTU(mtu int) {
	w.told = min(w.mtu, mtu)
	for _, l := range w.listeners {
		l.l.SetMTU(w.told)
	}
}

func (w *worker) unlisten(id ListenerID) {
	w.unlistenSCTP(id)
	for k, l := range w.listeners {
		if l.id == id {
			delete(w.listeners, k)
		}
	}
}

func (w *worker) listenerFor(f *pkt.Flow) *listener {
	if l := w.listeners[listenKey{f.Local, f.LocalPort}]; l != nil {
		return l
	}
	return w.listeners[listenKey{port: f.LocalPort}]
}
