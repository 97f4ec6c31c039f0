package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/iwarpd/iwarpd/app/perf"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

type perfFlags struct {
	server         bool
	client, listen string
	mode           string
	sizes          sizesValue
	depth, count   int
	qps            int
	duration       time.Duration
	interval       time.Duration
	all            bool
	bidirectional  bool
}

func (c *command) perf() *cobra.Command {
	f := perfFlags{sizes: sizesValue{list: []int{64, 65536}}}
	cmd := &cobra.Command{
		Use:   "perf (--server | (write|read|send) --client ADDR[:PORT]) [flags]",
		Short: "Measure bandwidth, message rate and latency",
		Long: "perf measures one operation against another host's perf --server, which serves\n" +
			"all three. Bandwidth keeps --depth operations outstanding; latency has one. The\n" +
			"latency of a Read is one-sided. The latency of a Send, or of a Write followed by\n" +
			"a Send, is the time of a whole round trip. --bidirectional adds as many queue\n" +
			"pairs in the other direction: they Read while the others Write, or the reverse.",
		Example: "  iwarpctl perf --server\n" +
			"  iwarpctl perf write --client 10.0.0.1 --size 64,64K,1M\n" +
			"  iwarpctl perf read --client 10.0.0.1 --mode lat --size 64 --iterations 100000 --json\n" +
			"  iwarpctl perf write --client 10.0.0.1 --transport sctp --qps 16 --shared-association",
		ValidArgs: []string{"write", "read", "send"},
		Args:      usageArgs(cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs)),
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.all {
				if cmd.Flags().Changed("size") {
					return usageError{errors.New("perf: give either --all or --size")}
				}
				f.sizes.list = allSizes()
			}
			if f.server == (f.client != "") {
				return usageError{errors.New("perf: give either --server or --client ADDR")}
			}
			if err := checkSide(cmd, f.server); err != nil {
				return err
			}
			switch {
			case !f.server && len(args) == 0:
				return usageError{errors.New("perf: what to measure is missing: write it as perf write, perf read or perf send")}
			case f.qps < 1:
				return usageError{fmt.Errorf("perf: %d queue pairs: must be from 1 to %d", f.qps, perf.MaxQPs)}
			case f.count < 0:
				return usageError{fmt.Errorf("perf: --iterations %d: must not be negative", f.count)}
			case f.interval != 0 && f.interval < leastInterval:
				return usageError{fmt.Errorf("perf: --interval %v: must be 0, or at least %v", f.interval, leastInterval)}
			case cmd.Flags().Changed("duration") && f.duration < leastDuration:
				return usageError{fmt.Errorf("perf: --duration %v: must be at least %v", f.duration, leastDuration)}
			}
			if f.server {
				return c.perfServer(cmd.Context(), &f)
			}
			op, err := perf.ParseOp(args[0])
			if err != nil {
				return usageError{fmt.Errorf("perf: %w", err)}
			}
			return c.perfClient(cmd.Context(), &f, op)
		},
	}
	fl := cmd.Flags()
	fl.BoolVar(&f.server, "server", false, "run as the server, for every operation, until interrupted")
	fl.StringVar(&f.client, "client", "", "run as a client of the server at ADDR[:PORT]")
	fl.StringVar(&f.listen, "listen", fmt.Sprintf(":%d", perf.DefaultPort), "server: address to listen on, ADDR:PORT or :PORT")
	fl.StringVar(&f.mode, "mode", "both", "client: bw, lat or both")
	completes(cmd, "mode", "bw", "lat", "both")
	fl.Var(&f.sizes, "size", "client: bytes of each message, such as 64K; several with commas, or by several --size")
	fl.BoolVarP(&f.all, "all", "a", false, "client: all powers of two from 2 bytes to 8 MiB as sizes")
	fl.BoolVarP(&f.bidirectional, "bidirectional", "b", false, "client: measure write and read bandwidth in both directions at once")
	fl.DurationVar(&f.interval, "interval", 0, "client: interval at which to print progress while measuring, such as 1s; 0: do not")
	fl.IntVar(&f.depth, "depth", 32, "client: outstanding operations in bw")
	fl.IntVar(&f.qps, "qps", 1, "client: number of concurrent queue pairs, each with a connection")
	fl.IntVar(&f.count, "iterations", 0, "client: number of operations of each queue pair; 0: as many as fit in the duration")
	fl.DurationVar(&f.duration, "duration", 0, "client: time to measure each size (default 2s without --iterations, 500ms with --all)")
	return cmd
}

// leastDuration is the minimum of --duration: a shorter one may end before the first operation.
const leastDuration = time.Millisecond

// allSizes returns the sizes of --all.
func allSizes() (l []int) {
	for n := 2; n <= 8<<20; n *= 2 {
		l = append(l, n)
	}
	return l
}

// plan returns the measurements that the flags request.
func (f *perfFlags) plan(op perf.Op) ([]perf.Params, error) {
	modes := []perf.Mode{perf.Bandwidth, perf.Latency}
	if f.mode != "both" {
		m, err := perf.ParseMode(f.mode)
		if err != nil {
			return nil, fmt.Errorf("%w, or both", err)
		}
		modes = []perf.Mode{m}
	}
	duration := f.duration
	if duration == 0 && f.count == 0 {
		duration = 2 * time.Second
		if f.all {
			duration = 500 * time.Millisecond
		}
	}
	if f.bidirectional && f.mode == "both" {
		modes = []perf.Mode{perf.Bandwidth}
	}
	var out []perf.Params
	for _, m := range modes {
		for _, size := range f.sizes.list {
			p := perf.Params{Op: op, Mode: m, Size: size, Depth: f.depth, Count: f.count, Duration: duration, QPs: f.qps, Bidirectional: f.bidirectional}
			if err := p.Check(); err != nil {
				return nil, err
			}
			out = append(out, p)
		}
	}
	return out, nil
}

func (c *command) perfClient(ctx context.Context, f *perfFlags, op perf.Op) error {
	plan, err := f.plan(op)
	if err != nil {
		return usageError{fmt.Errorf("perf: %w", err)}
	}
	addr, err := resolve(ctx, f.client, perf.DefaultPort)
	if err != nil {
		return err
	}
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	var results []*perf.Result
	for _, p := range plan {
		stop := c.perfLines(&p, f.interval)
		r, failed := perf.Client(ctx, dev, addr, p, c.over(&iwarp.Config{}))
		stop()
		if failed != nil {
			err = peerFailed("perf "+op.String(), addr, failed)
			break
		}
		results = append(results, r)
	}
	switch {
	case len(results) == 0:
	case c.json:
		err = errors.Join(c.print(results), err)
	default:
		c.perfTable(results)
	}
	return err
}

// perfLines prints the progress of p in each interval until stop is called.
func (c *command) perfLines(p *perf.Params, interval time.Duration) (stop func()) {
	if interval <= 0 {
		return func() {}
	}
	p.Done = new(atomic.Int64)
	ops, size, name := p.Done, p.Size, p.Op.String()
	tick, quit, ended := time.NewTicker(interval), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		began := time.Now()
		last, before := began, int64(0)
		for {
			select {
			case <-quit:
				return
			case now := <-tick.C:
				n, s := ops.Load(), now.Sub(last).Seconds()
				rate := float64(n-before) / s
				fmt.Fprintf(c.err, "%6.1f s  %s %s: %.3f Gbit/s, %.0f ops/s\n", now.Sub(began).Seconds(), name, printable.Count(size, "byte"), rate*float64(size)*8/1e9, rate)
				last, before = now, n
			}
		}
	}()
	return func() {
		tick.Stop()
		close(quit)
		<-ended
	}
}

func (c *command) perfTable(results []*perf.Result) {
	header := []string{"op", "mode", "size", "qps", "depth", "ops", "Gbit/s", "ops/s", "p50 us", "p99", "p99.9", "max"}
	var rows [][]any
	for _, r := range results {
		row := []any{r.Op, r.Mode, r.Size, r.QPs, r.Depth, r.Operations, fmt.Sprintf("%.3f", r.GbitPerSec), fmt.Sprintf("%.0f", r.OpsPerSec)}
		if p := r.Latency; p != nil {
			row = append(row, micros(p.P50), micros(p.P99), micros(p.P999), micros(p.Max))
		} else {
			row = append(row, "-", "-", "-", "-")
		}
		rows = append(rows, row)
	}
	printTable(c.out, header, rows)
}

// micros formats microseconds, with a decimal where it tells something.
func micros(us float64) string {
	if us >= 100 {
		return fmt.Sprintf("%.0f", us)
	}
	return fmt.Sprintf("%.1f", us)
}

func (c *command) perfServer(ctx context.Context, f *perfFlags) error {
	addr, err := listenAddr(f.listen, perf.DefaultPort)
	if err != nil {
		return err
	}
	return c.serveAt(ctx, addr, &iwarp.Config{}, true, func(dev *iwarp.Device, l *iwarp.Listener) error {
		return perf.Serve(ctx, dev, l, func(peer netip.AddrPort, err error) {
			if err != nil && ctx.Err() == nil {
				c.report(fmt.Errorf("perf: client %s: %w", peer, err), exitCode(ctx, peerFailed("perf", peer.String(), err)))
			}
		})
	})
}
