package tcp

import (
	"math"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// Constants of RFC 9438 section 5.
const (
	cubicC     = 0.4
	cubicBeta  = 0.7
	cubicAlpha = 3 * (1 - cubicBeta) / (1 + cubicBeta)
)

// cubic is the CUBIC algorithm of RFC 9438. Its windows are in bytes, because the size of a segment may change.
type cubic struct {
	cubicState
	saved cubicState // state before the last reduction
	last  clock.Time // time of the last ACK of new data
	hystart
}

type cubicState struct {
	wMax, k, wEst, cwndPrior float64
	frac                     float64    // fraction of a byte not yet added to the window
	epoch                    clock.Time // start of this congestion avoidance phase; 0: not started
}

func (c *cubic) seen(w *window, a *ackSample) {
	c.hystart.seen(w, a)
	if !a.limited {
		c.skip(a.now)
	}
	c.last = a.now
}

// skip removes the time since the last ACK from the epoch, so that the window does not grow for time in which it was not fully used (RFC
// 9438 4.2.3 and 5.8).
func (c *cubic) skip(now clock.Time) {
	if c.epoch != 0 {
		c.epoch = c.epoch.Add(now.Sub(max(c.last, c.epoch)))
	}
}

func (c *cubic) grow(w *window, a *ackSample) {
	n := a.acked
	if w.cwnd < w.ssthresh {
		n = c.hystart.grow(w, a)
		if c.epoch == 0 { // after a time-out: K will be 0 (RFC 9438 4.8)
			c.wMax = 0
		}
		c.wEst = float64(w.cwnd) // an epoch is running: the window was lowered since
		if n <= 0 {
			return
		}
	}
	mss, cwnd, acked := float64(w.mss), float64(w.cwnd), float64(n)
	if c.epoch == 0 {
		c.epoch = a.now
		c.frac = 0
		if cwnd < c.wMax {
			c.k = math.Cbrt((c.wMax - cwnd) / (cubicC * mss))
		} else {
			c.k = 0
			c.wMax = cwnd
		}
		c.wEst = cwnd
	}
	t := a.now.Sub(c.epoch).Seconds()
	alpha := cubicAlpha
	if c.wEst >= c.cwndPrior {
		alpha = 1 // RFC 9438 4.3
	}
	c.wEst += alpha * mss * acked / cwnd
	if now := c.at(t, mss); now < c.wEst {
		c.set(w, math.Max(cwnd, c.wEst))
		return
	}
	target := min(max(c.at(t+a.srtt.Seconds(), mss), cwnd), 1.5*cwnd)
	c.set(w, cwnd+(target-cwnd)/cwnd*acked)
}

// at is W_cubic(t), RFC 9438 (1), for segments of mss bytes.
func (c *cubic) at(t, mss float64) float64 {
	d := t - c.k
	return cubicC*mss*d*d*d + c.wMax
}

// set sets the window to n bytes and keeps the fraction of a byte.
func (c *cubic) set(w *window, n float64) {
	v := n - float64(w.cwnd) + c.frac
	whole := math.Floor(v)
	c.frac = v - whole
	w.cwnd += int(min(whole, infinite))
}

func (c *cubic) reduce(w *window, _ clock.Time, _ int, _ bool) int {
	c.saved = c.cubicState
	cwnd := float64(w.cwnd)
	c.cwndPrior = cwnd
	if cwnd < c.wMax {
		c.wMax = cwnd * (1 + cubicBeta) / 2 // fast convergence, RFC 9438 4.7
	} else {
		c.wMax = cwnd
	}
	c.epoch = 0
	c.hystart.end()
	// Reduce from the window, not from the flight size, which may be small only because the application rarely sends. RFC 9438 4.6 allows
	// this if the window is validated: it does not grow unless fully used, and is lowered after idle time.
	return max(int(float64(w.cwnd)*cubicBeta), 2*w.mss)
}

func (c *cubic) undo(*window) { c.cubicState = c.saved }

func (c *cubic) idle(now clock.Time) {
	c.skip(now)
	c.last = now
}
