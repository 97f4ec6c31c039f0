package dataplane

import (
	"time"

	"github.com/iwarpd/iwarpd/internal/clock"
)

// Soft-iWARP passes its socket to the queue pair only after it has sent its MPA reply. It does
// not notice an FPDU that arrives before that until another one follows. An initiator that has
// received nothing after its first FPDU therefore sends an empty RDMA Write, and repeats it a
// few times with increasing intervals.
const (
	probeAfter  = 30 * time.Millisecond
	probeFactor = 5 // factor between intervals
	maxProbes   = 3
)

type silenceProbe struct {
	n  int        // number sent; maxProbes if none is needed, as once an FPDU has arrived
	at clock.Time // time of the next probe, or 0
}

// watchSilence arms the next probe after an initiator has sent its first FPDUs.
func (c *tcpConn) watchSilence(now clock.Time) {
	n := &c.probe
	if n.at != 0 || n.n == maxProbes || !c.params.Initiator || c.tcp.SndNxt() == c.txStart {
		return
	}
	wait := probeAfter
	for range n.n {
		wait *= probeFactor
	}
	n.at = now.Add(wait)
}

func (c *tcpConn) probePeer(now clock.Time) {
	n := &c.probe
	if !n.at.Due(now) {
		return
	}
	n.at = 0
	if c.mode == modeFull {
		n.n++
		c.ddp.SendKeepAlive()
	}
}
