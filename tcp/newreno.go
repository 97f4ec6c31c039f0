package tcp

import "github.com/iwarpd/iwarpd/internal/clock"

// newReno is the congestion control of RFC 5681.
type newReno struct {
	acked int // bytes acknowledged toward the next increase, RFC 5681 (3) by counting
	hystart
}

func (r *newReno) seen(w *window, a *ackSample) { r.hystart.seen(w, a) }

func (r *newReno) grow(w *window, a *ackSample) {
	n := r.hystart.grow(w, a)
	if n <= 0 {
		return
	}
	r.acked += n
	if r.acked >= w.cwnd {
		r.acked -= w.cwnd
		w.cwnd += w.mss
		r.acked = min(r.acked, w.cwnd)
	}
}

func (r *newReno) reduce(w *window, _ clock.Time, flight int, _ bool) int {
	r.acked = 0
	r.hystart.end()
	return max(flight/2, 2*w.mss) // RFC 5681 (4)
}

func (*newReno) undo(*window) {}

func (*newReno) idle(clock.Time) {}
