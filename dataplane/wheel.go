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
	count  int
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
	w.insert(t)
	w.count++
}

func (w *wheel) stop(t *timer) {
	if !t.armed() {
		return
	}
	t.unlink()
	w.count--
}

func (t *timer) unlink() {
	t.prev.next, t.next.prev = t.next, t.prev
	t.next, t.prev = nil, nil
}

func (w *wheel) insert(t *timer) {
	// Round up: a timer never fires before its time.
	tick := (uint64(t.at) + uint64(wheelTick) - 1) / uint64(wheelTick)
	if tick <= w.tick {
		tick = w.tick + 1
	}
	d := tick - w.tick
	var h *timer
	switch {
	case d < wheelSlots:
		h = &w.levels[0][tick%wheelSlots]
	case d < wheelSlots*wheelSlots:
		h = &w.levels[1][tick/wheelSlots%wheelSlots]
	default:
		d = min(d, wheelSlots*wheelSlots*(wheelSlots-1))
		h = &w.levels[2][(w.tick+d)/(wheelSlots*wheelSlots)%wheelSlots]
	}
	t.next, t.prev = h, h.prev
	h.prev.next, h.prev = t, t
}

// expire calls fire for each timer due at now.
func (w *wheel) expire(now clock.Time, fire func(*conn)) int {
	end := uint64(now) / uint64(wheelTick)
	if w.count == 0 {
		w.tick = max(w.tick, end)
		return 0
	}
	n := 0
	for w.tick < end {
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
			t.unlink()
			w.count--
			n++
			fire(t.conn)
		}
		if w.count == 0 {
			w.tick = end
		}
	}
	return n
}

// cascade spreads a slot of an upper level over the levels below. The current
// tick has not been expired yet, so that is where its own timers go.
func (w *wheel) cascade(h *timer) {
	first := h.next
	if first == h {
		return
	}
	h.prev.next = nil
	h.next, h.prev = h, h
	w.tick-- // a timer due at the tick being expired belongs in its slot
	for t := first; t != nil; {
		next := t.next
		w.insert(t)
		t = next
	}
	w.tick++
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
