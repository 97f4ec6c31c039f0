package dataplane

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// idling chooses the pause of an adaptive worker after a turn without work. The zero value is that of a worker whose
// last turn had work.
type idling struct {
	since clock.Time // when the first turn without work began, or 0
}

// pause is what a worker does before its next turn.
type pause uint8

const (
	noPause pause = iota
	// yieldPause lets another thread have the CPU. That costs nothing but a system call if there is none.
	yieldPause
	sleepPause
)

// next returns what to do after a turn, at now, without work, if idle turns are followed by sleep after spin. It first
// yields if a client on the same CPU may have something new to see. A client that has not polls, and yields the CPU
// again: two context switches, during which the worker would not see the frame that it awaits, and a client on another
// CPU would wait longer. So without news it yields only after half of spin if it awaits an answer from its peer, and
// not while a client may respond to a completion.
func (i *idling) next(now clock.Time, spin time.Duration, awaits bool, r *response) pause {
	if i.since == 0 {
		i.since = now
	}
	responds := now < r.until
	switch idle := now.Sub(i.since); {
	case idle >= spin && !responds:
		return sleepPause
	case responds && r.near, !r.news && (awaits && idle < spin/2 || responds):
		return noPause
	}
	r.news = false
	return yieldPause
}

// response says what clients may respond to.
type response struct {
	until clock.Time // a client may respond to the last completion until then
	near  bool       // over a connection within the host, where even one system call would be a large part of the round trip
	news  bool       // since its last yield the worker has done more than to send what a client had posted
}

// replyTime is how long after the begin of a turn with a completion its client typically posts again,
// if it runs on another CPU. Yielding this one again and again meanwhile would take longer.
const replyTime = 3 * time.Microsecond

// timeslice decides when a goroutine that runs turns yields to Go's scheduler. The zero value is one that has ended.
//
// Go's monitor looks every 10 ms for a goroutine that has run since its last look, and preempts it by a signal. With the
// switches of threads that follow, this delays a turn by about 40 us. To yield before, after a turn without work, takes 3 to 8 us.
type timeslice struct{ since clock.Time }

// ends reports whether to yield at now, and if so begins the next timeslice.
func (t *timeslice) ends(now clock.Time) bool {
	if now.Sub(t.since) < timesliceLength {
		return false
	}
	t.since = now
	return true
}

// timesliceLength is less than the 10 ms of Go's monitor, since turns with work may delay the end.
const timesliceLength = 8 * time.Millisecond
