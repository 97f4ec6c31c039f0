package main

import (
	"fmt"
	"slices"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl"
)

// hangup handles SIGHUP: it reads the settings again, and opens the sockets again whose files are gone.
func (d *daemon) hangup() {
	notify(d.log, reloading())
	s, err := d.read()
	if err == nil {
		d.reload(s)
	} else {
		d.log.Error("not reloaded: the settings stay as they were", zap.Error(err))
	}
	status := d.server.NotReloaded(err)
	if status != "" {
		status = "not reloaded: " + status
	}
	d.relisten()
	notify(d.log, sd.SdNotifyReady+"\nSTATUS="+status) // systemd ignores a message that is longer than 4096 bytes
}

// relisten opens the sockets again whose files are gone.
func (d *daemon) relisten() {
	if len(d.server.Lost()) > 0 {
		_, _ = makeSocketDir(d.s.Socket) // otherwise Relisten fails
	}
	made, err := d.server.Relisten()
	if err != nil {
		d.log.Error("the file of a socket is gone", zap.Error(socketError(err)))
	}
	if lost := d.lostMetrics(); lost != nil {
		if next, err := listenMetrics(d.s.Metrics); err != nil {
			d.log.Error("the file of a socket is gone", zap.Error(metricsError(err)))
		} else {
			made = append(made, lost...)
			d.metrics.Close()
			d.metrics = next
			d.scrapes()
		}
	}
	if len(made) > 0 {
		d.log.Info("sockets whose files were gone are there again", zap.Strings("sockets", made))
	}
}

// warnLost warns when the files of sockets are gone, if they were there before. It returns which are.
func (d *daemon) warnLost(before []string) []string {
	lost := append(d.server.Lost(), d.lostMetrics()...)
	if len(lost) > 0 && !slices.Equal(lost, before) {
		d.log.Warn("the file of a socket is gone or is another program's: no program can connect until SIGHUP makes it again",
			zap.Strings("sockets", lost))
	}
	return lost
}

// lostMetrics returns the socket of the metrics if its file is gone.
func (d *daemon) lostMetrics() []string {
	if l, ok := d.metrics.(*ctrl.UnixListener); ok && l.Lost() {
		return []string{l.Addr().String()}
	}
	return nil
}

// reloading returns the first notification that systemd expects (Type=notify-reload).
func reloading() string {
	var now unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return sd.SdNotifyReloading
	}
	return fmt.Sprintf("%s\nMONOTONIC_USEC=%d", sd.SdNotifyReloading, now.Nano()/1000)
}

// reload applies the settings of s that can change while the daemon runs, and logs those that
// cannot.
func (d *daemon) reload(s *settings) (changed, kept []string) {
	now := *d.s
	now.values = make(map[string]string, len(keys))
	for _, k := range keys {
		is, want := d.s.values[k.name], s.values[k.name]
		now.values[k.name] = is
		switch {
		case is == want:
		case !slices.Contains(reloadable, k.name):
			kept = append(kept, k.name)
		default:
			changed = append(changed, k.name)
			now.values[k.name] = want
			_ = k.set(&now, want) // cannot fail: load has validated it
		}
	}
	if !sameRules(now.Allow, s.Allow) {
		changed = append(changed, allowKey)
		now.Allow = s.Allow
	}
	if !sameRules([]ctrl.Rule{now.Slots.Rule}, []ctrl.Rule{s.Slots.Rule}) {
		changed = append(changed, slotsKey)
		now.Slots.Rule = s.Slots.Rule
	}
	if now.Slots.Folder != s.Slots.Folder || now.Slots.Count != s.Slots.Count {
		kept = append(kept, slotsKey)
	}
	if len(changed) > 0 {
		d.s = &now
		d.level.SetLevel(now.LogLevel)
		d.server.Reload(ctrlConfig(&now))
	}
	d.log.Info("reloaded", zap.Strings("changed", changed))
	if len(kept) > 0 {
		d.log.Warn("these settings change only when the daemon is restarted", zap.Strings("keys", kept))
	}
	return changed, kept
}
