package main

import (
	"context"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
)

// watchdog tells systemd that the daemon is alive, twice in each period that
// the unit sets (WatchdogSec), as long as alive says so. It returns when ctx is
// done, at once where no unit asks.
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
			log.Error("a worker does not turn: systemd's watchdog is not told that all is well")
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// turning reports whether every worker answers within a second.
func (d *daemon) turning() bool { return len(d.engine.Stats()) == d.engine.Workers() }
