// Package wheel implements a hierarchical timing wheel, for timers that are often armed, moved
// and stopped, but rarely expire.
package wheel

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// Wheel has three levels of 256 slots, of 128 µs, 32.8 ms and 8.4 s. Arming and stopping cost a
// few stores. A timer expires up to a tick late, and never early. Moving its deadline to a later
// time costs nothing: it expires at the earlier one, which has no effect in the cores, and is armed
// again. T is the type of the owner of a timer.
type Wheel[T any] struct {
	tick   uint64 // the last expired tick
	levels [wheelLevels][wheelSlots]Timer[T]
	n      [wheelLevels]int // timers per level
	count  int              // total number of timers
	fire   func(T)
}

const (
	wheelLevels = 3
	wheelSlots  = 256

	// tickLen is the length of a tick, the resolution of a Wheel.
	tickLen = 128 * time.Microsecond
)

// Timer is a node of a slot's list; the slots are list heads. The zero Timer is not
// armed.
type Timer[T any] struct {
	Owner      T
	next, prev *Timer[T]
	at         clock.Time
	level      uint8
}

// Init empties the wheel and starts it at now. fire is called with the owner of each timer
// that expires.
func (w *Wheel[T]) Init(now clock.Time, fire func(T)) {
	w.fire = fire
	w.tick = uint64(now) / uint64(tickLen)
	for l := range w.levels {
		for s := range w.levels[l] {
			h := &w.levels[l][s]
			h.next, h.prev = h, h
		}
	}
}

// Armed reports whether t is in a wheel.
func (t *Timer[T]) Armed() bool { return t.next != nil }

// Arm sets t to expire at or soon after at. A timer that is already armed for
// an earlier time stays as it is.
func (w *Wheel[T]) Arm(t *Timer[T], at clock.Time) {
	if t.Armed() {
		if t.at <= at {
			return
		}
		w.Stop(t)
	}
	t.at = at
	w.insert(t, w.tick+1)
}

// Stop disarms t if it is armed.
func (w *Wheel[T]) Stop(t *Timer[T]) {
	if t.Armed() {
		w.unlink(t)
	}
}

func (w *Wheel[T]) unlink(t *Timer[T]) {
	t.prev.next, t.next.prev = t.next, t.prev
	t.next, t.prev = nil, nil
	w.n[t.level]--
	w.count--
}

// insert adds t to the slot of its tick; first is the earliest tick that has not expired.
func (w *Wheel[T]) insert(t *Timer[T], first uint64) {
	// Round up: a timer never fires before its time.
	tick := max(first, (uint64(t.at)+uint64(tickLen)-1)/uint64(tickLen))
	var h *Timer[T]
	t.level = 0
	switch d := tick - first; {
	case d < wheelSlots:
		h = &w.levels[0][tick%wheelSlots]
	case d < wheelSlots*wheelSlots:
		t.level = 1
		h = &w.levels[1][tick/wheelSlots%wheelSlots]
	default:
		// The time is beyond the last level: use its last slot and insert the timer again
		// later.
		tick = first + min(d, wheelSlots*wheelSlots*wheelSlots-1)
		t.level = 2
		h = &w.levels[2][tick/(wheelSlots*wheelSlots)%wheelSlots]
	}
	t.next, t.prev = h, h.prev
	h.prev.next, h.prev = t, t
	w.n[t.level]++
	w.count++
}

// Expire fires all timers due at now, and returns their number.
func (w *Wheel[T]) Expire(now clock.Time) int {
	end := uint64(now) / uint64(tickLen)
	fired := 0
	for w.tick < end {
		if w.count == 0 {
			w.tick = end
			break
		}
		// Skip empty levels up to their next cascade.
		if w.n[0] == 0 {
			skip := uint64(wheelSlots)
			if w.n[1] == 0 {
				skip *= wheelSlots
			}
			if to := w.tick/skip*skip + skip - 1; to > w.tick {
				w.tick = min(to, end)
				continue
			}
		}
		w.tick++
		if w.tick%wheelSlots == 0 {
			if w.tick%(wheelSlots*wheelSlots) == 0 {
				w.cascade(&w.levels[2][w.tick/(wheelSlots*wheelSlots)%wheelSlots])
			}
			w.cascade(&w.levels[1][w.tick/wheelSlots%wheelSlots])
		}
		h := &w.levels[0][w.tick%wheelSlots]
		for h.next != h {
			t := h.next
			w.unlink(t)
			fired++
			w.fire(t.Owner)
		}
	}
	return fired
}

// cascade distributes the timers of a slot to the lower levels. The current tick has not
// expired yet, so timers of that tick are inserted there.
func (w *Wheel[T]) cascade(h *Timer[T]) {
	for h.next != h { // none is inserted here again: the last slot of a level is the one before the current one
		t := h.next
		w.unlink(t)
		w.insert(t, w.tick)
	}
}

// Next returns a time no later than the next expiry, or 0 if nothing is armed. It counts a slot
// of an upper level from its start.
func (w *Wheel[T]) Next() clock.Time {
	if w.count == 0 {
		return 0
	}
	var first clock.Time
	step := uint64(1)
	for l := range w.levels {
		base := w.tick / step
		for i := uint64(1); i <= wheelSlots; i++ {
			s := &w.levels[l][(base+i)%wheelSlots]
			if s.next != s {
				first = clock.Earliest(first, clock.Time((base+i)*step*uint64(tickLen)))
				break
			}
		}
		step *= wheelSlots
	}
	return first
}

// Len returns the number of armed timers.
func (w *Wheel[T]) Len() int { return w.count }
