package dataplane

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// A wheel is a hierarchical timing wheel: three levels of 256 slots, of 128 µs,
// 32.8 ms and 8.4 s. Arming and stopping cost a few stores. A timer is armed
// for no later than its connection needs it; one that fires too early is a
// no-op in the cores and is armed again, so a deadline that moves later costs
// nothing.
type wheel struct {
	tick   uint64 // the last tick that was expired
	levels [wheelLevels][wheelSlots]timer
	n      [wheelLevels]int // timers on each level
	count  int              // on all
}

const (
	wheelLevels = 3
	wheelSlots  = 256
	wheelTick   = 128 * time.Microsecond
)

// timer is a node of a slot's list; the slots are list heads.
type timer struct {
	next, prev *timer
	at         clock.Time
	level      uint8
	conn       *conn
}

func (w *wheel) init(now clock.Time) {
	w.tick = uint64(now) / uint64(wheelTick)
	for l := range w.levels {
		for s := range w.levels[l] {
			h := &w.levels[l][s]
			h.next, h.prev = h, h
		}
	}
}

func (t *timer) armed() bool { return t.next != nil }

// arm sets t to expire at or soon after at. A timer that is already armed for
// an earlier time stays as it is.
func (w *wheel) arm(t *timer, at clock.Time) {
	if t.armed() {
		if t.at <= at {
			return
		}
		w.stop(t)
	}
	t.at = at
	w.insert(t, w.tick+1)
}

func (w *wheel) stop(t *timer) {
	if !t.armed() {
		return
	}
	w.unlink(t)
}

func (w *wheel) unlink(t *timer) {
	t.prev.next, t.next.prev = t.next, t.prev
	t.next, t.prev = nil, nil
	w.n[t.level]--
	w.count--
}

// insert puts t in the slot of its tick; first is the earliest tick that has
// not been expired.
func (w *wheel) insert(t *timer, first uint64) {
	// Round up: a timer never fires before its time.
	tick := max(first, (uint64(t.at)+uint64(wheelTick)-1)/uint64(wheelTick))
	var h *timer
	t.level = 0
	switch d := tick - first; {
	case d < wheelSlots:
		h = &w.levels[0][tick%wheelSlots]
	case d < wheelSlots*wheelSlots:
		t.level = 1
		h = &w.levels[1][tick/wheelSlots%wheelSlots]
	default:
		// Beyond the last level: as far as that goes, and from there again.
		tick = first + min(d, wheelSlots*wheelSlots*wheelSlots-1)
		t.level = 2
		h = &w.levels[2][tick/(wheelSlots*wheelSlots)%wheelSlots]
	}
	t.next, t.prev = h, h.prev
	h.prev.next, h.prev = t, t
	w.n[t.level]++
	w.count++
}

// expire calls fire for each timer due at now.
func (w *wheel) expire(now clock.Time, fire func(*conn)) int {
	end := uint64(now) / uint64(wheelTick)
	fired := 0
	for w.tick < end {
		if w.count == 0 {
			w.tick = end
			break
		}
		// Empty levels are passed in one step, to just before their next cascade.
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
			fire(t.conn)
		}
	}
	return fired
}

// cascade spreads a slot of an upper level over the levels below. The current
// tick has not been expired yet, so that is where its own timers go.
func (w *wheel) cascade(h *timer) {
	for last := h.prev; h.next != h; {
		t := h.next
		w.unlink(t)
		w.insert(t, w.tick)
		if t == last {
			break // what lies beyond the wheel may have come back to this slot
		}
	}
}

// next returns a time no later than the next expiry, zero if nothing is armed.
// A slot of an upper level counts from its start.
func (w *wheel) next() clock.Time {
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
				first = clock.Earliest(first, clock.Time((base+i)*step*uint64(wheelTick)))
				break
			}
		}
		step *= wheelSlots
	}
	return first
}
