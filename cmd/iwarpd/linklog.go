package main

import (
	"context"
	"sync/atomic"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane/link"
)

// watchLink logs changes of the interface dev, whose name in the settings is ifname, that affect
// connections: its link goes down or up, or its name, its MTU or the routes over it change. It stores
// the state of the link in state, and calls renew when the driver may have lost the XDP program. mtu is
// the largest packet that iwarpd's links are for. watchLink returns when ctx is done.
func watchLink(
	ctx context.Context, log *zap.Logger, ifname string, dev *hostnet.Device,
	state *atomic.Pointer[hostnet.LinkState], mtu *atomic.Int32, renew func() error,
) {
	log = log.With(zap.String("interface", ifname))
	changed := func(before, now hostnet.LinkState) {
		state.Store(&now)
		switch {
		case before.Up && !now.Up:
			log.Warn("the link is down: no frames are received or sent until it is up again")
		case !before.Up && now.Up:
			log.Info("the link is up")
		}
		if before.Name != now.Name && now.Name != ifname {
			log.Warn("the interface was renamed: iwarpd keeps using it, but needs the new name at its next start", zap.String("name", now.Name))
		}
		if before.MTU != now.MTU {
			fields := []zap.Field{zap.Int("mtu", now.MTU), zap.Int("before", before.MTU)}
			if link.MTUOn(now.MTU) > int(mtu.Load()) {
				fields = append(fields, zap.String("note", "a larger MTU than at the daemon's start needs a restart, or the key mtu"))
			}
			log.Info("the MTU of the interface changed", fields...)
		}
		// A change of the carrier is no reason: some drivers lose the carrier for a moment when
		// they get a program.
		if before.MTU != now.MTU || before.Enabled != now.Enabled {
			if err := renew(); err != nil {
				log.Warn(refused, zap.Error(err))
			}
		}
	}
	routes := func(changes int) { log.Info("routes over the interface changed", zap.Int("changes", changes)) }
	defer state.Store(nil)
	dev.FollowLink(ctx, changed, routes)
}

// refused is logged when the driver of an interface does not accept the program again.
const refused = "the driver did not take the XDP program again: frames may go to the kernel instead of iwarpd until iwarpd is restarted"
