package dataplane

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/dataplane/sched"
	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/term"
	"github.com/iwarpd/iwarpd/mpa"
	"github.com/iwarpd/iwarpd/shm"
	"github.com/iwarpd/iwarpd/verbs"
)

// CQ is a completion queue; shm.CQ implements it. Flush publishes the completions pushed by a
// worker and wakes the client if it waits, possibly later: if again is not 0, Flush must be
// called again at that time. Pending reports whether worker must call Flush.
type CQ interface {
	Push(worker int, wc *verbs.WC) bool // false: full
	Pending(worker int) bool
	Flush(worker int, now clock.Time) (again clock.Time)
}

// QPBinding is a queue pair with its rings, as passed to the worker of its connection.
type QPBinding struct {
	QP             *verbs.QP
	SendCQ, RecvCQ CQ
	Client         *ClientBinding
	Bit            int      // in the client's doorbell pages
	Far            FarQueue // that of QP, or nil
	// ReceiveWait is how long a Send may wait for its receive over TCP. If it is 0, a Send
	// without a receive ends the stream at once, as RFC 5041 section 7.1 requires.
	ReceiveWait time.Duration

	stream *stream       // owned by the worker it is attached to
	worker *worker       // which has, or had, the stream; its completions are in order only in the ring of one worker
	stored uint64        // Far.Stored when the worker last looked
	moved  atomic.Bool   // Far has moved data since the worker last looked
	left   atomic.Bool   // its program wants no completion and no data any more, see Leave
	id     atomic.Uint64 // connection passed to Attach
}

// FarQueue is the part of a far.Queue that the worker uses; verbs.FarQueue is that of the queue pair.
type FarQueue interface {
	// Notify makes the queue call f, from any goroutine, when it has moved data.
	Notify(f func())
	// Backlog returns the number of bytes that must still be stored.
	Backlog() int
	// Stored is that of verbs.FarQueue.
	Stored() (done, failed uint64)
	// Wait counts n more bytes that wait in the worker until earlier ones are stored, or fewer if n
	// is negative.
	Wait(n int)
	// Crowded reports whether the client has so many bytes to store, or that wait, that it should
	// receive no more.
	Crowded() bool
}

// ClientBinding is the part of a client that workers use: its doorbell pages and memory.
type ClientBinding struct {
	Doorbells []*shm.Doorbells // one per worker
	Memory    shm.Mapped       // where workers may fault
	Mover     Mover            // of the far memory of all its queue pairs, or nil
	// OnFault is called by the worker when an access to the client's memory has faulted. The
	// client must then be ended.
	OnFault func()
}

// A Mover moves data of a client's far memory.
type Mover interface {
	// Kick starts what the queue pairs have requested since the last Kick. It does not block.
	Kick()
}

// Attachment moves a connection from streaming mode to full operation.
type Attachment struct {
	QP     *QPBinding
	Params mpa.Params
	Reply  []byte // the last streaming-mode bytes to send: a responder's MPA reply
	// Fail, if set, terminates the stream with this Terminate as soon as full operation begins.
	// Some start-up failures are reported to the peer in this way (RFC 6581 section 9).
	Fail *term.Error
}

// Detach removes a queue pair from its worker and resets its connection, if any. When it
// returns, all posted work is flushed, all completions are published, and no worker uses the
// binding or its rings.
func (e *Engine) Detach(b *QPBinding) {
	e.awaitQP(b, func(w *worker, s *stream) { s.detach(w) })
	flushed := func(w *worker) { // serves as a fence too
		done := make(chan struct{})
		w.post(func(w *worker) {
			w.flushes.after(w, b, func(w *worker) {
				w.publishFor(b)
				close(done)
			})
		})
		await(e, done)
	}
	home := e.worker(ConnID(b.id.Load()))
	for _, w := range e.workers {
		if w != home {
			flushed(w)
		}
	}
	flushed(home) // last: others may just have made it flush the queue pair
}

// Leave closes the connection of a queue pair, if it has one, whose program may use its memory for something else then.
// Of what was posted no more is sent than the connection may compose in a turn. When Leave returns, no worker accesses
// memory for the queue pair, its completions are published, and after a Fence its CQs are not in use.
func (e *Engine) Leave(b *QPBinding) {
	b.left.Store(true) // before id is read: an Attach that comes later sees it
	e.awaitQP(b, func(w *worker, s *stream) {
		w.publishFor(b)
		s.lane.llp.pumpStream(w, s, &sched.Grant{Left: w.sched.Quantum()})
		s.forsake(w)
	})
}

// awaitQP makes the worker of a queue pair's stream, if it has one, call f, and waits until f has
// returned.
func (e *Engine) awaitQP(b *QPBinding, f func(w *worker, s *stream)) {
	if id := ConnID(b.id.Load()); id != 0 {
		e.awaitStream(id, func(w *worker, s *stream) {
			if s != nil && s.qp == b {
				f(w, s)
			}
		})
	}
}

// Fence returns after every worker has finished its current turn: then no worker uses memory
// that was unlinked before the call. It does not wake a worker that sleeps.
func (e *Engine) Fence() {
	for _, w := range e.workers {
		if w.cmds.pending.Load() == 0 && w.cmds.resting.Load() { // in this order: a command may have just been taken
			continue
		}
		done := make(chan struct{})
		w.post(func(*worker) { close(done) })
		await(e, done)
	}
}

// await returns what a worker sends to c, or errStopped if the engine stops without that.
func await[T any](e *Engine, c <-chan T) (v T, err error) {
	for !e.stop.Load() {
		select {
		case v = <-c:
			return v, nil
		case <-time.After(10 * time.Millisecond):
		}
	}
	e.wg.Wait()
	select {
	case v = <-c:
		return v, nil
	default:
		return v, errStopped
	}
}

// Bind makes the workers poll a client's doorbells, and registers the client's wake-ups.
func (e *Engine) Bind(cb *ClientBinding) error {
	for i, w := range e.workers {
		if err := w.cmds.alarm.Watch(cb.Doorbells[i].WakeFD()); err != nil {
			e.unwatch(cb, i)
			return fmt.Errorf("dataplane: wake-ups of a client: %w", err)
		}
	}
	for _, w := range e.workers {
		w.post(func(w *worker) { w.bind(cb) })
	}
	e.Fence()
	return nil
}

// unwatch removes the wake-ups of a client from the first n workers.
func (e *Engine) unwatch(cb *ClientBinding, n int) {
	for i, w := range e.workers[:n] {
		w.cmds.alarm.Unwatch(cb.Doorbells[i].WakeFD())
	}
}

// Unbind undoes Bind. When it returns, no worker uses the pages.
func (e *Engine) Unbind(cb *ClientBinding) {
	for _, w := range e.workers {
		w.post(func(w *worker) { w.unbind(cb) })
	}
	e.Fence()
	e.unwatch(cb, len(e.workers))
}
