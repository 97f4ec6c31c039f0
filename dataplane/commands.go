package dataplane

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/iwarpd/iwarpd/shm"
)

// cmdQueue passes functions from any goroutine to a worker.
type cmdQueue struct {
	mu       sync.Mutex
	q        []func(*worker)
	batch    []func(*worker) // taken from q; the worker has called those before at
	at       int
	pending  atomic.Int32 // of both
	sleeping atomic.Bool
	resting  atomic.Bool // the worker waits for its link, and uses no memory of a client before another turn finds it
	alarm    *shm.Alarm  // alarm that wakes the worker
}

// cmdBudget is the number of commands per turn. A client that ends causes some for each of its
// queue pairs.
const cmdBudget = 16

func (q *cmdQueue) init() (err error) {
	if q.alarm, err = shm.NewAlarm(); err != nil {
		return fmt.Errorf("dataplane: %w", err)
	}
	return nil
}

func (q *cmdQueue) push(f func(*worker)) {
	q.mu.Lock()
	q.q = append(q.q, f)
	q.pending.Add(1)
	q.mu.Unlock()
	q.wake()
}

// wake wakes the worker if it sleeps.
func (q *cmdQueue) wake() {
	if q.sleeping.Load() {
		q.alarm.Ring()
	}
}

// drain calls at most cmdBudget of the queued functions, and none that they queue themselves.
// If one faults, those after it stay queued.
func (q *cmdQueue) drain(w *worker) int {
	n := 0
	for taken := false; n < cmdBudget; n++ {
		if q.at == len(q.batch) {
			if taken {
				break
			}
			taken = true
			if q.take() == 0 {
				break
			}
		}
		f := q.batch[q.at]
		q.batch[q.at] = nil // what it refers to may be released
		q.at++
		q.pending.Add(-1)
		f(w)
	}
	return n
}

// take makes the queued functions the next batch, and returns its length.
func (q *cmdQueue) take() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.q, q.batch, q.at = q.batch[:0], q.q, 0
	return len(q.batch)
}
