package dataplane

import (
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// driver synchronizes worker 0 with an application that drives it.
type driver struct {
	mu   sync.Mutex    // held during a turn
	last atomic.Int64  // when the application last called Turn, or 0 after Rest
	rest chan struct{} // has a value after Rest
}

// Turn runs one turn of worker 0 in the calling goroutine and returns the amount of work done.
// The engine must have been created with Inline. It returns 0 if the engine's own goroutine is
// in a turn.
func (e *Engine) Turn() int {
	w := e.workers[0]
	if !w.driver.mu.TryLock() {
		w.driver.last.Store(int64(w.e.cfg.Now()))
		if w.cmds.sleeping.CompareAndSwap(true, false) {
			w.cmds.alarm.Ring()
		}
		return 0
	}
	n, yield := w.drivenTurn()
	if yield {
		runtime.Gosched()
	}
	return n
}

// drivenTurn runs a turn of the application, which has locked driver.mu, and unlocks it. It also returns whether to
// yield.
func (w *worker) drivenTurn() (n int, yield bool) {
	defer w.driver.mu.Unlock() // even if the turn faults
	n = w.turn()
	w.driver.last.Store(int64(w.now))
	return n, n == 0 && w.slice.ends(w.now)
}

// Rest makes the engine's own goroutine take over at once, without waiting whether the application
// calls Turn again. It is for an application that is about to sleep. The engine must have been
// created with Inline.
func (e *Engine) Rest() {
	d := &e.workers[0].driver
	d.last.Store(0)
	select {
	case d.rest <- struct{}{}:
	default:
	}
}

// fillIn runs the worker while the application does not drive it. It holds driver.mu during
// its turns and its sleep, since Wait uses the link too. An application that calls Turn wakes it.
// From then on the application drives the worker alone, until it calls Rest, or has not called Turn
// for a millisecond when fillIn looks. The longer it drives, the more rarely fillIn looks.
//
// fillIn has no thread of its own, and waits for a timer of Go's. While a goroutine sleeps in a
// system call and another one computes, the monitor of Go's scheduler looks every 20 us whether to
// start a thread for others, and each time interrupts the application if there is no other CPU.
func (w *worker) fillIn() {
	d := &w.driver
	look := time.NewTimer(0)
	defer look.Stop()
	for wait := lookLeast; !w.e.stop.Load(); {
		if w.e.cfg.Now().Sub(clock.Time(d.last.Load())) >= lookLeast {
			w.fillInTurn()
			wait = lookLeast
			continue
		}
		look.Reset(wait)
		select {
		case <-look.C:
			wait = min(2*wait, lookMost)
		case <-d.rest:
		}
	}
}

// lookLeast is how long after a Turn of the application the worker may run by itself, and lookMost is the longest time
// between two checks of that. A check costs up to 75 us in a virtual machine.
const (
	lookLeast = time.Millisecond
	lookMost  = 32 * time.Millisecond
)

func (w *worker) fillInTurn() {
	w.driver.mu.Lock()
	defer w.driver.mu.Unlock() // even if the turn faults
	if w.turn() == 0 {
		w.sleep()
	}
}
