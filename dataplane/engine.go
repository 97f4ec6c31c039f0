// Package dataplane connects the protocol cores to the network and to clients. A worker for
// each NIC queue polls the link, the clients' doorbells and its timers, and owns its frames,
// connections and queue pairs. The control plane sends a worker commands through its command
// queue, and receives events.
package dataplane

import (
	"crypto/rand"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/dataplane/handoff"
)

// ConnID identifies a connection for the life of the engine. Its upper 16 bits are the number
// of the worker that created it.
type ConnID uint64

// Worker returns the worker that created id. IDs of one worker increase.
func (id ConnID) Worker() int { return int(id >> 48) }

// ListenerID identifies a listener.
type ListenerID uint64

// Errors of the engine's calls.
var (
	ErrTimeout = errors.New("dataplane: connect timed out")
	// ErrCQOverrun is the error of a connection whose completion queue overflowed.
	ErrCQOverrun = errors.New("dataplane: completion queue overrun")
	errStopped   = errors.New("dataplane: the engine has stopped")
)

// Engine owns the workers, one per queue of each device.
type Engine struct {
	cfg      Config
	resolver Resolver
	workers  []*worker
	devices  []*device
	secret   [16]byte // for ISS and SYN cookies
	nextID   atomic.Uint64

	events eventQueue
	dir    *handoff.Directory[*worker] // nil if there is only one worker

	taps  atomic.Pointer[[]*Tap] // nil: none
	tapMu sync.Mutex             // serializes changes of taps

	dialing    handoff.Dialing[*worker]
	hopLookups atomic.Int32                          // pending lookups of recheckHop and findHops
	accepted   atomic.Int32                          // pending lookups of acceptedHop and findHop
	hostless   atomic.Pointer[map[[16]byte]struct{}] // see learnHostless
	changes    atomic.Int32                          // changes of hops that are not yet processed, including those of the rehop in progress

	invalidations atomic.Uint64 // marks of turns

	stop    atomic.Bool
	wg      sync.WaitGroup
	evDone  chan struct{}
	started bool
}

// New returns an engine for queues. Start starts it.
func New(cfg Config, queues []Queue, res Resolver) (*Engine, error) {
	if len(queues) == 0 {
		return nil, errors.New("dataplane: no queue")
	}
	e := &Engine{cfg: cfg.fill(), resolver: res, evDone: make(chan struct{})}
	_, _ = rand.Read(e.secret[:]) // never fails
	e.events.init()
	if len(queues) > 1 {
		e.dir = handoff.NewDirectory[*worker]()
	}
	for i, q := range queues {
		w, err := newWorker(e, i, q)
		if err != nil {
			for _, w := range e.workers {
				w.closeFDs()
			}
			return nil, err
		}
		w.forwarding.init(len(queues))
		e.workers = append(e.workers, w)
		w.dev.workers = append(w.dev.workers, w)
	}
	return e, nil
}

// Start starts the workers and the event goroutine.
func (e *Engine) Start() {
	e.started = true
	go func() {
		defer close(e.evDone)
		e.events.run(e.cfg.OnEvent)
	}()
	for _, w := range e.workers {
		e.wg.Go(w.run)
	}
	for _, d := range e.devices {
		d.frags.start()
	}
	if e.resolver != nil {
		e.learnHostless()
		e.resolver.Watch(e.hopsChanged)
	}
}

// Stop stops the workers. Peers are not notified; the caller must close the links.
func (e *Engine) Stop() {
	if e.stop.Swap(true) {
		return
	}
	for _, w := range e.workers {
		w.cmds.alarm.Ring()
	}
	for _, d := range e.devices {
		d.frags.stop()
	}
	e.wg.Wait()
	e.events.close()
	if e.started {
		<-e.evDone
	}
	for _, w := range e.workers {
		w.closeFDs()
	}
}

// Workers returns the number of workers.
func (e *Engine) Workers() int { return len(e.workers) }

func (e *Engine) worker(id ConnID) *worker {
	i := id.Worker()
	if i >= len(e.workers) {
		i = 0
	}
	return e.workers[i]
}

// elsewhere reports whether a worker other than w owns k.
func (e *Engine) elsewhere(k handoff.Key, w *worker) bool {
	owner := e.dir.Find(&k)
	return owner != nil && owner != w
}

// maxAdopting is how many commands may wait for a worker before dialedBy drops frames for it: any
// host may send any number of them.
const maxAdopting = 1024

// dialedBy returns the worker of w's device, other than w, that dials k, or nil. full is set if that has too much to
// do, so that the frame is to be dropped.
func (e *Engine) dialedBy(k handoff.Key, w *worker) (owner *worker, full bool) {
	owner = e.dialing.Find(k)
	switch {
	case owner == nil || owner == w || owner.dev != w.dev:
		return nil, false
	case owner.cmds.pending.Load() >= maxAdopting:
		w.stats.RxWrongQueueDropped++
		return nil, true
	}
	return owner, false
}

// onStream makes the owner of a stream call f once, with nil if the stream no longer exists.
func (e *Engine) onStream(id ConnID, f func(w *worker, s *stream)) {
	e.worker(id).post(func(w *worker) { w.withStream(id, f) })
}

// awaitStream is onStream, and waits until f has returned.
func (e *Engine) awaitStream(id ConnID, f func(w *worker, s *stream)) {
	done := make(chan struct{})
	e.onStream(id, func(w *worker, s *stream) {
		defer close(done) // f may fault
		f(w, s)
	})
	await(e, done)
}
