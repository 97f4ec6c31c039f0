package dataplane

import (
	"sync"

	"github.com/iwarpd/iwarpd/dataplane/link"
	"github.com/iwarpd/iwarpd/internal/pkt"
)

// A stray is a frame that came on another queue than the one whose worker owns its
// connection. ICMP errors do, since a NIC spreads them by other fields; those
// of a whole connection do once RSS was configured anew, and on virtual interfaces,
// which have no RSS: there the queue of the sender decides. A copy goes to the owner.
// That is slow beside what the queues are for, but nothing is lost by it.

// maxStrays bounds the strays on their way to a worker.
const maxStrays = 1024

// ownerKey is what owners are found by.
type ownerKey struct {
	flow pkt.Flow
	sctp bool
}

// owners tells whose worker's a connection or association is. With one worker it
// is empty.
type owners struct {
	mu sync.RWMutex
	of map[ownerKey]*worker
}

func (w *worker) claim(flow pkt.Flow, sctp bool) {
	if len(w.e.workers) < 2 {
		return
	}
	o := &w.e.owners
	o.mu.Lock()
	if o.of == nil {
		o.of = make(map[ownerKey]*worker)
	}
	o.of[ownerKey{flow, sctp}] = w
	o.mu.Unlock()
}

func (w *worker) unclaim(flow pkt.Flow, sctp bool) {
	if len(w.e.workers) < 2 {
		return
	}
	o := &w.e.owners
	o.mu.Lock()
	if k := (ownerKey{flow, sctp}); o.of[k] == w { // not another's, who adopted it
		delete(o.of, k)
	}
	o.mu.Unlock()
}

// owned reports whether any worker owns something.
func (o *owners) owned() bool {
	o.mu.RLock()
	defer o.mu.RUnlock()
	return len(o.of) > 0
}

// stray hands f, which is no connection's of this worker, to the worker that owns
// its flow. It reports whether another one does.
func (w *worker) stray(flow pkt.Flow, sctp bool, f *link.Frame) bool {
	if w.foreign || len(w.e.workers) < 2 {
		return false
	}
	w.e.owners.mu.RLock()
	owner := w.e.owners.of[ownerKey{flow, sctp}]
	w.e.owners.mu.RUnlock()
	if owner == nil || owner == w {
		return false
	}
	w.stats.RxStrays++
	if owner.strays.Add(1) > maxStrays {
		owner.strays.Add(-1)
		w.stats.RxStraysLost++
		return true
	}
	b := make([]byte, 0, f.Len())
	for i := range f.N {
		b = append(b, f.Pieces[i]...)
	}
	owner.post(func(o *worker) { o.takeStray(b) })
	return true
}

// takeStray takes a frame that came on another queue.
func (w *worker) takeStray(b []byte) {
	w.strays.Add(-1)
	w.foreign = true
	defer func() { w.foreign = false }() // also where the turn faults
	f := link.Frame{N: 1}
	f.Pieces[0] = b
	w.frame(&f)
}
