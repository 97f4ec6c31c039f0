package tcp

import (
	"github.com/iwarpd/iwarpd/internal/clock"
)

const dctcpGain = 1.0 / 16 // g, RFC 8257 4.2

// dctcp scales the window by the fraction of bytes that met congestion (RFC 8257 section 3.3).
type dctcp struct {
	newReno
	alpha         float64
	acked, marked int // bytes acknowledged, and those with an ECN echo, in this window
}

func (d *dctcp) seen(_ *window, a *ackSample) {
	if a.round && d.acked > 0 {
		m := float64(d.marked) / float64(d.acked)
		d.alpha += dctcpGain * (m - d.alpha)
		d.acked, d.marked = 0, 0
	}
	d.acked += a.acked
	if a.ece {
		d.marked += a.acked
	}
}

func (d *dctcp) reduce(w *window, now clock.Time, flight int, ecn bool) int {
	if !ecn {
		return d.newReno.reduce(w, now, flight, false)
	}
	d.newReno.acked = 0
	return max(int(float64(w.cwnd)*(1-d.alpha/2)), 2*w.mss)
}
