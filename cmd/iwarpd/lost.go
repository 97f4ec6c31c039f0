package main

import (
	"context"
	"time"

	"go.uber.org/zap"
)

const (
	lostPeriod = 5 * time.Second // interval at which lost frames are counted
	lostQuiet  = 12              // counts, at least, between two warnings
)

// A framesLost is a cause of lost frames that only the administrator of the host can fix, and that
// is not reported elsewhere.
type framesLost struct {
	count func() (uint64, error) // number of frames lost so far
	what  string                 // the consequence, and how to fix it
}

// watch polls the count at each tick, and warns if it has increased. It returns when ctx is done.
func (l framesLost) watch(ctx context.Context, log *zap.Logger, ifname string, tick <-chan time.Time) {
	var told uint64
	for quiet := 0; ; quiet-- {
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
		n, err := l.count()
		if err != nil || n <= told || quiet > 0 {
			continue
		}
		log.Warn(l.what, zap.String("interface", ifname), zap.Uint64("frames", n-told))
		told, quiet = n, lostQuiet
	}
}

// losses are those that the daemon watches on n.
func (d *daemon) losses(n *nic) []framesLost {
	return []framesLost{
		{n.unserved, "connections are refused: their frames come by a queue of the interface that iwarpd does not serve; " +
			"restart iwarpd if the queues were made more since it started, or see --queues and ethtool -X"},
		{func() (uint64, error) { return d.misSummed(n.name), nil }, "frames are dropped: their checksums are wrong; where they come from a kernel's stack at the other end of a virtual " +
			"interface, which leaves checksums to the hardware, see partial-checksums; else the network card or the wire spoils them"},
	}
}

// unserved returns the number of frames for claimed endpoints that arrived on a queue without a
// worker. The kernel refuses their connections.
func (n *nic) unserved() (uint64, error) {
	c, err := n.steer.Counters()
	return c.NoSocket, err
}

// misSummed counts the frames with a wrong checksum that came by an interface.
func (d *daemon) misSummed(name string) (sum uint64) {
	workers, _ := d.engine.Stats()
	for i, w := range workers {
		if d.engine.WorkerDevice(i) == name {
			sum += w.RxChecksum
		}
	}
	return sum
}
