package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/iwarpd/iwarpd/app/filecopy"
	"github.com/iwarpd/iwarpd/app/perf"
	"github.com/iwarpd/iwarpd/app/rping"
	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/dataplane/link"
)

// runProcess does the job over embedded engines that a pipe joins.
func runProcess(ctx context.Context, o *options, r *report) (err error) {
	// As many frames as AF_XDP has: a whole TCP window fits in them.
	a, b, err := embed.Pair(embed.PairConfig{Pipe: link.PipeConfig{Slots: 4096}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, a.Close(), b.Close()) }()
	r.where = "Two hosts in one process, joined by a pipe (no AF_XDP)"
	there := filepath.Join(o.dir, "there")
	if err := os.Mkdir(there, 0o755); err != nil {
		return err
	}
	if err := useProcess(ctx, o, r, a, b, there); err != nil {
		return err
	}
	for _, n := range []struct {
		name string
		node *embed.Node
	}{{"a", a}, {"b", b}} {
		h := host{name: n.name}
		for _, c := range n.node.Server().Counters() {
			switch c.Name {
			case "engine.tx_frames":
				h.tx = c.Value
			case "engine.rx_frames":
				h.rx = c.Value
			case "engine.tx_retransmits":
				h.retransmissions = c.Value
			}
		}
		r.hosts = append(r.hosts, h)
	}
	return nil
}

func useProcess(ctx context.Context, o *options, r *report, a, b *embed.Node, there string) error {
	ctx, cancel := context.WithCancel(ctx)
	at := func(port int) string { return net.JoinHostPort(b.Addr().String(), strconv.Itoa(port)) }
	running := make(chan error, 3)
	servers := 0
	defer func() { // all servers end before the engines do
		cancel()
		for range servers {
			<-running
		}
	}()
	serve := func(f func() error) {
		servers++
		go func() { running <- f() }()
	}
	listen := func(port int, cfg *iwarp.Config) (*iwarp.Listener, error) {
		return b.Device().Listen(ctx, at(port), cfg)
	}

	store, err := filecopy.OpenStore(there)
	if err != nil {
		return err
	}
	defer store.Close()
	files, err := listen(7176, filecopy.Config())
	if err != nil {
		return err
	}
	serve(func() error { return (&filecopy.Server{Store: store, MaxClients: 4}).Serve(ctx, files) })
	pings, err := listen(rping.DefaultPort, rping.Config())
	if err != nil {
		return err
	}
	serve(func() error {
		conn, err := pings.Accept(ctx)
		if err != nil {
			return err
		}
		_, err = rping.ServeConn(ctx, conn, rping.Options{})
		return err
	})
	measured, err := listen(perf.DefaultPort, nil)
	if err != nil {
		return err
	}
	serve(func() error { return perf.Serve(ctx, b.Device(), measured, nil) })

	client, err := filecopy.Dial(ctx, a.Device(), at(7176), filecopy.Config())
	if err != nil {
		return err
	}
	defer client.Close()
	fmt.Printf("Copying it from a to b by RDMA Write\n")
	src, err := os.Open(r.file)
	if err != nil {
		return err
	}
	defer src.Close()
	began := time.Now()
	if _, err := client.Put(ctx, src, r.size, filecopy.Attrs{}, "copy.tar"); err != nil {
		return err
	}
	r.put = time.Since(began)
	if err := r.compare(filepath.Join(there, "copy.tar"), "the copy at b"); err != nil {
		return err
	}
	fmt.Printf("Copying it back from b to a by RDMA Read\n")
	home, err := filecopy.OpenStore(o.dir)
	if err != nil {
		return err
	}
	defer home.Close()
	began = time.Now()
	if _, err := client.Get(ctx, "copy.tar", home, "back.tar"); err != nil {
		return err
	}
	r.get = time.Since(began)
	if err := r.compare(filepath.Join(o.dir, "back.tar"), "the copy that came back"); err != nil {
		return err
	}

	fmt.Printf("Pinging and measuring\n")
	h := perf.NewHistogram()
	rep, err := rping.Ping(ctx, a.Device(), at(rping.DefaultPort), rping.Config(), 4096, rping.Options{Count: 100, Validate: true, Round: h.Add})
	if err != nil {
		return err
	}
	r.rounds, r.rtt = rep.Rounds, h.Percentiles()
	for _, p := range []perf.Params{
		{Op: perf.Write, Mode: perf.Bandwidth, Size: 1 << 20, Depth: 32}, {Op: perf.Read, Mode: perf.Bandwidth, Size: 1 << 20, Depth: 32},
		{Op: perf.Write, Mode: perf.Bandwidth, Size: 64, Depth: 256},
		{Op: perf.Read, Mode: perf.Latency, Size: 64, Depth: 1}, {Op: perf.Send, Mode: perf.Latency, Size: 64, Depth: 1},
	} {
		p.Duration = time.Second
		res, err := perf.Client(ctx, a.Device(), at(perf.DefaultPort), p, nil)
		if err != nil {
			return fmt.Errorf("perf %v: %w", p.Op, err)
		}
		r.perf = append(r.perf, res)
	}
	return nil
}
