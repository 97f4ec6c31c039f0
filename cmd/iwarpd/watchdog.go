package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
)

// watchPeriod is the period of the watchdog if the unit has none.
const watchPeriod = 15 * time.Second

// watchdog calls stuck, which names what does not answer, twice per period of the unit's WatchdogSec until ctx is done.
// It logs each change of the answer, and notifies the unit's watchdog while all answers.
func watchdog(ctx context.Context, log *zap.Logger, stuck func() string) {
	period, err := sd.SdWatchdogEnabled(false)
	if err != nil {
		log.Warn("systemd's watchdog cannot be served", zap.Error(err))
	}
	systemd := period > 0 // which expects no notification otherwise
	if !systemd {
		period = watchPeriod
	}
	tick := time.NewTicker(period / 2)
	defer tick.Stop()
	before := ""
	for {
		what := stuck()
		switch {
		case what == "":
			if systemd {
				notify(log, sd.SdNotifyWatchdog)
			}
			if before != "" {
				log.Warn("all parts of the daemon run again", zap.String("was-stuck", before))
			}
		case what != before:
			log.Error("a part of the daemon is stuck", zap.String("part", what))
		}
		before = what
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// stuck returns the workers that do not answer within a second, and the control plane if it has not answered since the
// previous call; "" if all do.
func (d *daemon) stuck() string {
	late := d.controls != nil // it has not answered since the last check
	if !late {
		controls := make(chan struct{})
		go func() {
			d.server.Status()
			close(controls)
		}()
		d.controls = controls
	}
	silent := d.engine.Silent()
	var all []string
	for _, w := range silent {
		all = append(all, fmt.Sprintf("worker %d of %s", w, d.engine.WorkerDevice(w)))
	}
	select {
	case <-d.controls:
		d.controls = nil
	case <-time.After(time.Second):
		if late {
			all = append(all, "the control plane")
		}
	}
	return strings.Join(all, ", ")
}
