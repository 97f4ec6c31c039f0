package tcp

import "time"

// Constants of HyStart++ (RFC 9406 section 4.3).
const (
	hystartMinThresh  = 4 * time.Millisecond
	hystartMaxThresh  = 16 * time.Millisecond
	hystartDivisor    = 8
	hystartSamples    = 8
	hystartGrowth     = 4 // divisor of growth in conservative slow start
	hystartRounds     = 5
	hystartMinWindow  = 16 // segments; smaller windows do not fill a path's buffer
	hystartUnmeasured = time.Duration(1<<63 - 1)
)

// hystart ends the first slow start before the window exceeds the buffers of the path (RFC 9406).
type hystart struct {
	last, curr time.Duration // smallest round-trip time of the previous round and of this one
	base       time.Duration
	samples    int
	rounds     int // rounds of conservative slow start so far
	phase      hystartPhase
}

type hystartPhase uint8

const (
	hystartNew          hystartPhase = iota // before the first ACK
	hystartSlow                             // standard slow start
	hystartConservative                     // conservative slow start: CSS
	hystartDone
)

func (h *hystart) seen(w *window, a *ackSample) {
	if h.phase == hystartDone || w.cwnd >= w.ssthresh {
		return
	}
	if a.round || h.phase == hystartNew {
		h.last = h.curr
		if h.phase == hystartNew {
			h.last, h.phase = hystartUnmeasured, hystartSlow
		}
		h.curr = hystartUnmeasured
		h.samples = 0
		if h.phase == hystartConservative {
			h.rounds++
			if h.rounds >= hystartRounds {
				w.ssthresh = w.cwnd
				h.end()
				return
			}
		}
	}
	if a.rtt == 0 {
		return
	}
	h.curr = min(h.curr, a.rtt)
	h.samples++
	if h.samples < hystartSamples || h.curr == hystartUnmeasured || h.last == hystartUnmeasured {
		return
	}
	switch {
	case h.phase == hystartConservative:
		if h.curr < h.base {
			h.phase = hystartSlow // the RTT increase was spurious
		}
	case w.cwnd >= hystartMinWindow*w.mss:
		if h.curr >= h.last+min(max(h.last/hystartDivisor, hystartMinThresh), hystartMaxThresh) {
			h.base, h.phase, h.rounds = h.curr, hystartConservative, 0
		}
	}
}

// grow is slow start. It returns the bytes that remain for congestion avoidance.
func (h *hystart) grow(w *window, a *ackSample) int {
	if h.phase == hystartConservative {
		w.slowStart(a.acked / hystartGrowth)
		return 0
	}
	return w.slowStart(a.acked)
}

func (h *hystart) end() { h.phase = hystartDone }
