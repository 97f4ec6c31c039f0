package main

import (
	"context"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/iwarpd/iwarpd/ctrl/hostnet"
)

// unseenFrames is the least number of frames from which unseen concludes anything.
const unseenFrames = 4

// An unseen detects that a driver has lost the XDP program while the kernel still shows it as
// attached. All frames then go to the kernel.
type unseen struct {
	seen, came uint64 // frames that the program has seen, and that the interface has received

	// Since the program last saw a frame.
	missed  uint64 // frames received
	periods int    // periods in which frames were received
	told    bool   // lost has returned true
}

// lost takes both counts once a period and reports whether to give the driver its program
// again. Some drivers count frames late, so the frames of a single period prove nothing. If the
// program does not see frames afterwards, lost does not return true again.
func (u *unseen) lost(seen, came uint64) bool {
	moved, more := seen != u.seen, uint64(0)
	if came > u.came {
		more = came - u.came
	}
	u.seen, u.came = seen, came
	switch {
	case moved:
		u.missed, u.periods, u.told = 0, 0, false
	case more > 0:
		u.missed += more
		u.periods++
	}
	if u.told || u.missed < unseenFrames || u.periods < 2 {
		return false
	}
	u.told = true
	return true
}

// watchUnseen gives the driver of n its program again when the driver has lost it. It returns
// when ctx is done.
func (n *nic) watchUnseen(ctx context.Context, tick <-chan time.Time) {
	var u unseen
	for {
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
		c, err := n.steer.Counters()
		came, lerr := hostnet.Received(int(n.index.Load()))
		if err != nil || lerr != nil || !strings.HasPrefix(*n.mode.Load(), "native") || !u.lost(c.Seen(), came) {
			continue
		}
		log := n.log.With(zap.String("interface", n.name))
		if err := n.renew(); err != nil {
			log.Warn(refused, zap.Error(err))
			continue
		}
		log.Warn("the driver had lost the XDP program, so that frames went to the kernel instead of iwarpd: the program was given to it again")
	}
}

// renew gives the driver its program again.
func (n *nic) renew() error {
	if i := int(n.index.Load()); i != 0 {
		return n.steer.Renew(i)
	}
	return nil
}
