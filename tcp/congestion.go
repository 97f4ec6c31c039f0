package tcp

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// window is the sender's congestion window. All sizes are in octets.
type window struct {
	cwnd, ssthresh int
	mss            int
}

const infinite = 1 << 30 // ssthresh of a connection that has seen no congestion

// ackSample is what an ACK tells congestion control.
type ackSample struct {
	now     clock.Time
	acked   int           // octets newly acknowledged
	rtt     time.Duration // of this ACK; 0: not measured
	srtt    time.Duration
	ece     bool
	flight  int  // octets in flight before the ACK
	round   bool // the first ACK of a round trip
	limited bool // the congestion window was in full use
}

// congestion is a congestion control algorithm. Loss recovery is not its affair:
// it grows the window while there is none, and says how far to lower it.
type congestion interface {
	// seen is told of every ACK of new data, whatever the state.
	seen(w *window, a *ackSample)
	// grow raises the window outside of fast recovery; slow start is the
	// caller's only in that ssthresh says when it ends.
	grow(w *window, a *ackSample)
	// reduce returns the slow-start threshold after a congestion event: a
	// loss, or an ECN echo (ecn set).
	reduce(w *window, now clock.Time, flight int, ecn bool) int
	// undo takes back the last reduce.
	undo(w *window)
	// idle notes that the window was not in use for d.
	idle(now clock.Time, d time.Duration)
}

func newCongestion(a CongestionControl) congestion {
	switch a {
	case NewReno:
		return new(newReno)
	case DCTCP:
		return newDCTCP()
	}
	return new(cubic)
}

// slowStart grows the window by what was acknowledged, up to the threshold, and
// returns the octets that are left for congestion avoidance (RFC 5681 3.1; an
// ACK may cover many segments, RFC 3465).
func (w *window) slowStart(acked int) int {
	if w.cwnd >= w.ssthresh {
		return acked
	}
	n := min(acked, w.ssthresh-w.cwnd)
	w.cwnd += n
	return acked - n
}
