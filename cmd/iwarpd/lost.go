package main

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// How often a framesLost is asked, and after how many times it may warn anew.
const (
	lostPeriod = 5 * time.Second
	lostQuiet  = 12
)

// A framesLost is a way to lose frames that is the host's to mend, and that nothing
// else would tell of.
type framesLost struct {
	count func() (uint64, error) // how many there have been
	what  string                 // what follows, and how to mend it
}

// watch looks at each tick at the count, and warns when there are more. It returns
// when ctx is done.
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

// losses are those that the daemon watches.
func (d *daemon) losses() []framesLost {
	if d.steer == nil {
		return nil
	}
	return []framesLost{
		{d.unserved, "connections are refused: their frames come by a queue of the interface that iwarpd does not serve; " +
			"restart iwarpd if the queues were made more since it started, or see --queues and ethtool -X"},
		{d.misSummed, "frames are dropped: their checksums are wrong; where they come from a kernel's stack at the other end of a virtual " +
			"interface, which leaves checksums to the hardware, see partial-checksums; else the network card or the wire spoils them"},
	}
}

// unserved counts the frames for claimed endpoints that came by a queue that nobody
// serves. The kernel refuses those connections.
func (d *daemon) unserved() (uint64, error) {
	c, err := d.steer.Counters()
	return c.NoSocket, err
}

// misSummed counts the frames with a wrong checksum.
func (d *daemon) misSummed() (n uint64, _ error) {
	for _, w := range d.engine.Stats() {
		n += w.RxChecksum
	}
	return n, nil
}
