package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// Churn is a pair of programs that connects, registers memory and disconnects without end, by
// the daemons of another pair that measures its latency.

func init() {
	roles["churn-server"] = churnServer
	roles["churn-client"] = churnClient
}

// churnPort is the port of the server of the churn.
const churnPort = iwarpPort + 1

// churn prints the latency of Reads in turn without and with churn, and the garbage collections
// of the daemons meanwhile.
func (m *matrix) churn() (err error) {
	if err := m.lab.setOffloads(true); err != nil {
		return err
	}
	a, b := &m.lab.a, &m.lab.b
	sockets, metrics := map[*side]string{}, map[*side]string{}
	for _, s := range []*side{a, b} {
		metrics[s] = filepath.Join(m.dir, s.ifn+".metrics")
		var d *exec.Cmd
		if d, sockets[s], err = m.daemon(s, "--interface", s.ifn, "--metrics", "unix:"+metrics[s]); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop(d)) }()
	}
	var ratios [3][]float64 // p50, p99, p99.9
	for round := range m.opt.rounds {
		var quiet, busy result
		order := []*result{&quiet, &busy}
		if round%2 == 1 {
			order[0], order[1] = order[1], order[0]
		}
		for _, r := range order {
			var cycles [2]int
			for i, s := range []*side{a, b} {
				if cycles[i], err = collections(metrics[s]); err != nil {
					return err
				}
			}
			name, note := "quiet", ""
			measure := func() error {
				rs, err := m.iwarp([]test{{"read-lat", 64}}, sockets[a], sockets[b], false, false)
				if err == nil && rs[0].Err != "" {
					err = errors.New(rs[0].Err)
				}
				if err == nil {
					*r = rs[0]
				}
				return err
			}
			if r == &quiet {
				err = measure()
			} else {
				var n int
				name = "churn"
				n, err = m.churning(sockets[a], sockets[b], measure)
				note = fmt.Sprintf("; %d connections", n)
			}
			if err != nil {
				return err
			}
			for i, s := range []*side{a, b} {
				n, err := collections(metrics[s])
				if err != nil {
					return err
				}
				cycles[i] = n - cycles[i]
			}
			fmt.Printf("round %d of %d, %s: p50 %s, p99 %s, p99.9 %s us; garbage collections: client's daemon %d, server's daemon %d%s\n",
				round+1, m.opt.rounds, name, short(r.Value), short(r.P99), short(r.P999), cycles[0], cycles[1], note)
		}
		for i, v := range []float64{busy.Value / quiet.Value, busy.P99 / quiet.P99, busy.P999 / quiet.P999} {
			ratios[i] = append(ratios[i], v)
		}
	}
	fmt.Printf("with churn, as a multiple of quiet (min / median / max): p50 %v, p99 %v, p99.9 %v\n", spreadOf(ratios[0]), spreadOf(ratios[1]), spreadOf(ratios[2]))
	return nil
}

// churning calls f during churn, and returns the number of connections made meanwhile.
func (m *matrix) churning(socketA, socketB string, f func() error) (n int, err error) {
	a, b := &m.lab.a, &m.lab.b
	addr := b.addr.Addr().String()
	sp, err := b.spawn(job{Role: "churn-server", Socket: socketB, Local: addr}, m.limit(1))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, sp.end(nil)) }()
	if err := sp.ready(); err != nil {
		return 0, fmt.Errorf("churn-server: %w", err)
	}
	cp, err := a.spawn(job{Role: "churn-client", Socket: socketA, Remote: addr}, m.limit(1))
	if err != nil {
		return 0, err
	}
	if err := cp.ready(); err != nil {
		return 0, fmt.Errorf("churn-client: %w", err)
	}
	err = f()
	rs, cerr := cp.finish()
	if cerr == nil {
		n = int(rs[0].Value)
	}
	return n, errors.Join(err, cerr)
}

// collections returns how many garbage collections a daemon has finished. path is the socket of
// its metrics.
func collections(path string) (int, error) {
	c := http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}},
		Timeout: 10 * time.Second,
	}
	resp, err := c.Get("http://iwarpd/metrics")
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	for s := bufio.NewScanner(resp.Body); s.Scan(); {
		if n, ok := strings.CutPrefix(s.Text(), "go_gc_duration_seconds_count "); ok {
			return strconv.Atoi(n)
		}
	}
	return 0, errors.New("the daemon has no metric go_gc_duration_seconds")
}

// yieldCPU makes all threads of this process, the only one of its group, give way to the measured
// programs: the daemons' work for them is measured, not the CPU time that they take from others.
func yieldCPU() error { return unix.Setpriority(unix.PRIO_PGRP, 0, 19) }

// churnServer accepts connections until stdin ends, and destroys each when it has ended.
func churnServer(j job, ready func()) ([]result, error) {
	if err := yieldCPU(); err != nil {
		return nil, err
	}
	return acceptCrowd(j, churnPort, ready, func(qp *iwarp.QP) {
		<-qp.Done()
		_ = qp.Close()
	})
}

// churnClient makes and ends connections until stdin ends, each with a new region of 1 MiB.
func churnClient(j job, ready func()) ([]result, error) {
	ctx, cancel := whileStdinOpen()
	defer cancel()
	if err := yieldCPU(); err != nil {
		return nil, err
	}
	c, err := openCrowd(ctx, j)
	if err != nil {
		return nil, err
	}
	ready()
	n := 0
	for ; ctx.Err() == nil; n++ {
		if err := c.once(net.JoinHostPort(j.Remote, strconv.Itoa(churnPort))); err != nil {
			return nil, err
		}
	}
	return []result{{Value: float64(n)}}, nil
}

// once registers memory, connects to addr, disconnects, and frees everything.
func (c *crowdEnd) once(addr string) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	mr, err := c.cfg.PD.Alloc(ctx, mib, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, mr.Close()) }()
	qp, err := c.d.CreateQP(ctx, c.cfg)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, qp.Close()) }()
	if _, err = qp.Connect(ctx, addr, nil); err != nil {
		return err
	}
	if err = qp.Disconnect(ctx); err != nil {
		return err
	}
	select {
	case <-qp.Done():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
