package tcp

import (
	"fmt"
	"strings"
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// window is the sender's congestion window. All sizes are in bytes.
type window struct {
	cwnd, ssthresh int
	mss            int
}

const infinite = 1 << 30 // ssthresh of a connection that has seen no congestion

// ackSample is the input of congestion control for one ACK.
type ackSample struct {
	now     clock.Time
	acked   int           // bytes newly acknowledged
	rtt     time.Duration // RTT measured with this ACK; 0: none
	srtt    time.Duration
	ece     bool
	round   bool // the first ACK of a round trip
	limited bool // the congestion window was fully used
}

// congestion is a congestion control algorithm. It grows the window while there is no loss and computes how far to reduce it after a loss.
// Loss recovery itself is elsewhere.
type congestion interface {
	// seen is called for every ACK of new data, in every state.
	seen(w *window, a *ackSample)
	// grow raises the window outside of fast recovery. It also runs slow start while the window is below ssthresh.
	grow(w *window, a *ackSample)
	// reduce returns the slow-start threshold after a congestion event: a
	// loss, or an ECN echo (ecn set).
	reduce(w *window, now clock.Time, flight int, ecn bool) int
	// undo reverts the last reduce.
	undo(w *window)
	// idle reports that the window has not been used since the last ACK.
	idle(now clock.Time)
}

// algorithms has the name of each CongestionControl and makes its state for a connection.
var algorithms = [...]struct {
	name  string
	state func() congestion
}{
	CUBIC:   {"cubic", func() congestion { return new(cubic) }},
	NewReno: {"newreno", func() congestion { return new(newReno) }},
	DCTCP:   {"dctcp", func() congestion { return &dctcp{alpha: 1} }},
}

// CongestionControls returns the names of all algorithms, in the order of the constants.
func CongestionControls() []string {
	names := make([]string, len(algorithms))
	for i, a := range algorithms {
		names[i] = a.name
	}
	return names
}

// ParseCongestionControl returns the algorithm that a name of CongestionControls is for.
func ParseCongestionControl(name string) (CongestionControl, error) {
	for i, a := range algorithms {
		if a.name == name {
			return CongestionControl(i), nil
		}
	}
	return 0, fmt.Errorf("must be one of %s", strings.Join(CongestionControls(), ", "))
}

func (a CongestionControl) String() string { return algorithms[a].name }

// slowStart grows the window by the bytes acknowledged, up to the threshold, and returns the bytes that remain for congestion avoidance
// (RFC 5681 3.1; an ACK may cover many segments, RFC 3465).
func (w *window) slowStart(acked int) int {
	if w.cwnd >= w.ssthresh {
		return acked
	}
	n := min(acked, w.ssthresh-w.cwnd)
	w.cwnd += n
	return acked - n
}
