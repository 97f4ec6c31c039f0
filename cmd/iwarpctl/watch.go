package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
)

// every calls f at once and then at each interval, count times, or until ctx is done if count is 0.
// The end of ctx is not an error.
func every(ctx context.Context, interval time.Duration, count int, f func(time.Time) error) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for n := 1; ; n++ {
		if err := f(time.Now()); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if n == count {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// leastInterval is the minimum of --interval, so that samples mean something and do not load the daemon.
const leastInterval = 100 * time.Millisecond

// checkLooks validates --interval and --count.
func checkLooks(interval time.Duration, count int) error {
	if interval < leastInterval {
		return usageError{fmt.Errorf("--interval %v: must be at least %v", interval, leastInterval)}
	}
	if count < 0 {
		return usageError{fmt.Errorf("--count %d: must not be negative", count)}
	}
	return nil
}

func (c *command) stats() *cobra.Command {
	var all, watch bool
	var interval time.Duration
	var count int
	cmd := &cobra.Command{
		Use: "stats", Short: "Show the counters of the daemon",
		Long: "Show the counters of the daemon. With --watch, show those that change, and their\n" +
			"rates, at each interval until interrupted; with --json print one object per\n" +
			"line.\n\n" +
			"docs/metrics.md, in packages /usr/share/doc/iwarpd/metrics.md, describes the\n" +
			"counters.",
		Example: "  iwarpctl stats\n  iwarpctl stats --watch --interval 5s\n  iwarpctl stats --json | jq '.[\"engine.rx_frames\"]'",
		Args:    usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if watch {
				return c.watchStats(cmd.Context(), interval, count, all)
			}
			if cmd.Flags().Changed("interval") || cmd.Flags().Changed("count") {
				return usageError{errors.New("stats: --interval and --count require --watch")}
			}
			return query(c, (*iwarp.Admin).Stats, func(cs []*ctrlpb.Counter) error {
				if c.json {
					return c.print(plain(&ctrlpb.StatsReply{Counters: cs})["counters"])
				}
				if !all {
					cs = slices.DeleteFunc(cs, func(k *ctrlpb.Counter) bool { return k.Value == 0 })
				}
				c.counters("", cs)
				return nil
			})(cmd, nil)
		},
	}
	cmd.Flags().BoolVar(&all, "all", false, "include counters that are zero or do not change (--json always does)")
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "keep running and show changes")
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "interval between samples with --watch")
	cmd.Flags().IntVarP(&count, "count", "n", 0, "number of samples with --watch; 0: until interrupted")
	return cmd
}

// watchStats prints the counters that changed in each interval.
func (c *command) watchStats(ctx context.Context, interval time.Duration, count int, all bool) error {
	if err := checkLooks(interval, count); err != nil {
		return err
	}
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	var last map[string]uint64
	var lastAt time.Time
	return every(ctx, interval, count, func(now time.Time) error {
		cs, err := dev.Admin().Stats(ctx)
		if err != nil {
			return err
		}
		have := make(map[string]uint64, len(cs))
		for _, k := range cs {
			have[k.Name] = k.Value
		}
		if c.json {
			err = encoder(c.out).Encode(map[string]any{"time": now.Format(time.RFC3339Nano), "counters": have})
		} else {
			fmt.Fprintln(c.out, now.Format(time.TimeOnly))
			for _, k := range cs {
				if line, changed := statLine(k.Name, last, have, now.Sub(lastAt)); changed || all {
					fmt.Fprintln(c.out, line)
				}
			}
		}
		last, lastAt = have, now
		return err
	})
}

// statLine formats a counter: its value and, from the second sample on, its rate.
func statLine(name string, last, have map[string]uint64, took time.Duration) (line string, changed bool) {
	v, was := have[name], last[name]
	if last == nil {
		return fmt.Sprintf("  %-34s %14d", name, v), v != 0
	}
	// The rate of a gauge may be negative.
	rate := (float64(v) - float64(was)) / max(took.Seconds(), 1e-9)
	return fmt.Sprintf("  %-34s %14d %14.1f/s", name, v, rate), v != was
}
