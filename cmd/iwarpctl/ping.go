package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"

	"github.com/spf13/cobra"

	"github.com/iwarpd/iwarpd/app/perf"
	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
)

type pingFlags struct {
	server, client, persistent bool
	verbose, validate          bool
	addr, source               string
	port, count                int
	size                       sizeValue
}

func (c *command) ping() *cobra.Command {
	f := pingFlags{size: rping.DefaultSize}
	cmd := &cobra.Command{
		Use:   "ping (-s | -c) -a ADDR [flags]",
		Short: "RDMA ping; the other side may be rping of librdmacm-utils",
		Long: "ping uses the protocol and the flags of rping. In each round the server reads\n" +
			"the client's data by RDMA Read and writes it back by RDMA Write.\n\n" +
			"The server exits after one client, or with -P serves clients until interrupted.\n" +
			"It takes -C, -S and -V as rping does: the client decides about them.",
		Example: "  iwarpctl ping -s -a 10.0.0.1\n" +
			"  iwarpctl ping -c -a 10.0.0.1 -C 100 -S 65000 -V\n" +
			"  rping -c -a 10.0.0.1 -C 100 -V            # on any host with an RDMA device",
		Args: usageArgs(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case f.server == f.client:
				return usageError{errors.New("ping: give either -s (server) or -c (client)")}
			case f.size < rping.MinSize || f.size > rping.MaxSize:
				return usageError{fmt.Errorf("ping: size %d: must be from %d to %d", f.size, rping.MinSize, rping.MaxSize)}
			case f.count < 0:
				return usageError{fmt.Errorf("ping: count %d: must be 0 (no end) or more", f.count)}
			case f.client && f.addr == "":
				return usageError{errors.New("ping: missing server address: use -a ADDR")}
			}
			if err := checkSide(cmd, f.server); err != nil {
				return err
			}
			if f.server {
				return c.pingServer(cmd.Context(), &f)
			}
			return c.pingClient(cmd.Context(), &f)
		},
	}
	fl := cmd.Flags()
	fl.BoolVarP(&f.server, "server", "s", false, "run as the server")
	fl.BoolVarP(&f.client, "client", "c", false, "run as the client")
	fl.BoolVarP(&f.persistent, "persistent", "P", false, "server: serve clients until interrupted")
	fl.StringVarP(&f.addr, "address", "a", "", "address to connect to, or for the server to listen on (default: all)")
	fl.StringVarP(&f.source, "source", "I", "", "client: source address")
	completesBy(cmd, "source", c.fromDaemon(addresses))
	fl.IntVarP(&f.port, "port", "p", rping.DefaultPort, "port of the server")
	fl.IntVarP(&f.count, "count", "C", 0, "number of rounds; 0: until interrupted")
	fl.VarP(&f.size, "size", "S", "bytes of ping data, such as 32K")
	fl.BoolVarP(&f.verbose, "verbose", "v", false, "print the ping data")
	fl.BoolVarP(&f.validate, "validate", "V", false, "verify the returned data")
	return cmd
}

// pingData returns where to print the ping data, which may be any bytes of the other side, or nil.
func (c *command) pingData(f *pingFlags) io.Writer {
	if !f.verbose {
		return nil
	}
	if c.json {
		return printable.Writer{W: c.err}
	}
	return printable.Writer{W: c.out}
}

// pingResult is the JSON form of one connection's outcome.
type pingResult struct {
	Peer   string            `json:"peer"`
	Rounds int               `json:"rounds"`
	Size   int               `json:"size,omitempty"`
	Bytes  int64             `json:"bytes"`
	RTT    *perf.Percentiles `json:"rtt_us,omitempty"`
}

func (c *command) pingClient(ctx context.Context, f *pingFlags) error {
	addr, err := resolve(ctx, f.addr, f.port)
	if err != nil {
		return err
	}
	cfg := c.over(rping.Config())
	if f.source != "" {
		src, err := netip.ParseAddr(f.source)
		if err != nil {
			return usageError{fmt.Errorf("ping: source %q is not an IP address", f.source)}
		}
		cfg.LocalAddr = netip.AddrPortFrom(src, 0)
	}
	dev, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer dev.Close()
	h := perf.NewHistogram()
	o := rping.Options{Count: f.count, Validate: f.validate, Print: c.pingData(f), Round: h.Add}
	rep, err := rping.Ping(ctx, dev, addr, cfg, int(f.size), o)
	if err != nil {
		err = pingFailed(addr, err)
	}
	if rep.Rounds == 0 {
		return err
	}
	if ctx.Err() != nil && f.count == 0 {
		err = nil // the normal way to stop
	}
	return errors.Join(c.pingDone(pingResult{addr, rep.Rounds, int(f.size), rep.Bytes, h.Percentiles()}), err)
}

func pingFailed(peer string, err error) error {
	if errors.Is(err, rping.ErrMismatch) {
		return fmt.Errorf("ping %s: %w", peer, err)
	}
	return peerFailed("ping", peer, err)
}

func (c *command) pingDone(r pingResult) error {
	if c.json {
		return c.print(r)
	}
	line := fmt.Sprintf("%s with %s, %s", printable.Count(r.Rounds, "round"), r.Peer, printable.Count(r.Bytes, "byte"))
	if p := r.RTT; p != nil {
		line += fmt.Sprintf("; round min/p50/p99/max %.1f/%.1f/%.1f/%.1f us", p.Min, p.P50, p.P99, p.Max)
	}
	fmt.Fprintln(c.out, line) // in one write: clients of one server end at the same time
	return nil
}

func (c *command) pingServer(ctx context.Context, f *pingFlags) error {
	addr, err := listenAddr(f.addr, f.port)
	if err != nil {
		return err
	}
	return c.serveAt(ctx, addr, rping.Config(), f.persistent, func(_ *iwarp.Device, l *iwarp.Listener) error {
		var wg sync.WaitGroup
		defer wg.Wait()
		for {
			conn, err := l.Accept(ctx)
			if err != nil {
				if f.persistent && ctx.Err() != nil {
					return nil
				}
				err = fmt.Errorf("accept on %s: %w", addr, err)
				if lost(err) {
					err = peerError{err}
				}
				if !f.persistent || errors.Is(err, iwarp.ErrClosed) || errors.Is(err, iwarp.ErrDaemonGone) {
					return err
				}
				c.report(err, exitCode(ctx, err)) // only that connection ends
				continue
			}
			if !f.persistent {
				return c.pingServe(ctx, conn, f)
			}
			wg.Go(func() {
				if err := c.pingServe(ctx, conn, f); err != nil && ctx.Err() == nil {
					c.report(err, exitCode(ctx, err))
				}
			})
		}
	})
}

func (c *command) pingServe(ctx context.Context, conn *iwarp.Conn, f *pingFlags) error {
	peer := conn.Info().Remote.String()
	rep, err := rping.ServeConn(ctx, conn, rping.Options{Print: c.pingData(f)})
	if err != nil {
		return pingFailed(peer, err)
	}
	return c.pingDone(pingResult{Peer: peer, Rounds: rep.Rounds, Bytes: rep.Bytes})
}
