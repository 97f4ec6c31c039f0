package main

import (
	"context"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
)

// watchdog notifies systemd twice per period of the unit's WatchdogSec while alive returns true. It
// returns when ctx is done, or at once if the unit has no watchdog.
func watchdog(ctx context.Context, log *zap.Logger, alive func() bool) {
	period, err := sd.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("systemd's watchdog cannot be served", zap.Error(err))
	}
	if period <= 0 {
		return
	}
	tick := time.NewTicker(period / 2)
	defer tick.Stop()
	for {
		if alive() {
			notify(log, sd.SdNotifyWatchdog)
		} else {
			log.Error("a worker is stuck: systemd's watchdog is not notified")
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// turning reports whether every worker answers within a second.
func (d *daemon) turning() bool {
	_, silent := d.engine.Stats()
	return len(silent) == 0
}
