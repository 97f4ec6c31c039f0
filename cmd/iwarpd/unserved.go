package main

import (
	"context"
	"time"

	"go.uber.org/zap"
)

// How often unserved is asked, and after how many times it may warn anew.
const (
	unservedPeriod = 5 * time.Second
	unservedQuiet  = 12
)

// watchUnserved looks at each tick at count, the frames for claimed endpoints that
// came by a queue that nobody serves, and warns when there are more: the kernel refuses
// those connections, and nothing else would tell why. It returns when ctx is done.
func watchUnserved(ctx context.Context, log *zap.Logger, ifname string, tick <-chan time.Time, count func() (uint64, error)) {
	var told uint64
	for quiet := 0; ; quiet-- {
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
		n, err := count()
		if err != nil || n <= told || quiet > 0 {
			continue
		}
		log.Warn("connections are refused: their frames come by a queue of the interface that iwarpd does not serve; "+
			"restart iwarpd if the queues were made more since it started, or see --queues and ethtool -X",
			zap.String("interface", ifname), zap.Uint64("frames", n-told))
		told, quiet = n, unservedQuiet
	}
}

// unserved is what watchUnserved asks for.
func (d *daemon) unserved() (uint64, error) {
	c, err := d.steer.Counters()
	return c.NoSocket, err
}
