package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
)

// A crowd is many connections between two programs and two daemons, on which nothing happens.
// It shows what a queue pair costs the daemons in memory and in CPU time.

func init() {
	roles["crowd-server"] = crowdServer
	roles["crowd-client"] = crowdClient
}

const (
	crowdDepth   = 16 // work requests of each queue
	crowdSetUp   = 3 * time.Minute
	crowdAtATime = 16 // connections being made
)

// crowd prints the costs of n queue pairs.
func (m *matrix) crowd(n int) (err error) {
	a, b := &m.lab.a, &m.lab.b
	daemons := map[*side]*exec.Cmd{}
	sockets := map[*side]string{}
	most := strconv.Itoa(n + 1)
	for _, s := range []*side{a, b} {
		d, socket, err := m.daemon(s, "--interface", s.ifn, "--max-qps", most, "--max-ports", most, "--max-rings", "8GiB")
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop(d)) }()
		daemons[s], sockets[s] = d, socket
	}
	before := map[*side]usage{}
	for s, d := range daemons {
		if before[s], err = usageOf(d.Process.Pid); err != nil {
			return err
		}
	}
	limit := 2*crowdSetUp + m.opt.window
	sp, err := b.spawn(job{Role: "crowd-server", Socket: sockets[b], Local: b.addr.Addr().String()}, limit)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sp.end(nil)) }()
	if err := sp.ready(); err != nil {
		return fmt.Errorf("crowd-server: %w", err)
	}
	began := time.Now()
	cp, err := a.spawn(job{Role: "crowd-client", Socket: sockets[a], Remote: b.addr.Addr().String(), Count: n}, limit)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cp.end(nil)) }()
	if err := cp.ready(); err != nil {
		return fmt.Errorf("crowd-client: %w", err)
	}
	fmt.Printf("%d queue pairs of %d work requests each were connected in %.1f s.\n", n, crowdDepth, time.Since(began).Seconds())
	time.Sleep(m.opt.window) // what follows from setting up
	for _, s := range []*side{a, b} {
		name := map[*side]string{a: "the client's daemon", b: "the server's daemon"}[s]
		first, err := usageOf(daemons[s].Process.Pid)
		if err != nil {
			return err
		}
		time.Sleep(m.opt.window)
		last, err := usageOf(daemons[s].Process.Pid)
		if err != nil {
			return err
		}
		fmt.Printf("%s: %.1f KiB of its own memory and %.1f KiB of shared memory for each queue pair; %.2f %% of a core while idle for %v\n", name,
			float64(last.anon-before[s].anon)/kib/float64(n), float64(last.shared-before[s].shared)/kib/float64(n),
			100*(last.cpu-first.cpu).Seconds()/m.opt.window.Seconds(), m.opt.window)
	}
	return nil
}

// usage is what a process uses: resident memory in bytes, and CPU time.
type usage struct {
	anon, shared int
	cpu          time.Duration
}

func usageOf(pid int) (u usage, err error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(line, ":")
		n, _ := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(v), " kB"))
		switch k {
		case "RssAnon":
			u.anon = n * kib
		case "RssShmem":
			u.shared = n * kib
		}
	}
	if b, err = os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err != nil {
		return u, err
	}
	_, rest, _ := bytes.Cut(b, []byte(") ")) // what precedes is the name
	f := strings.Fields(string(rest))
	if len(f) < 13 {
		return u, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(f))
	}
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	u.cpu = time.Duration(user+system) * (time.Second / 100) // USER_HZ
	return u, nil
}

// crowdEnd has the objects that all queue pairs of a program share.
type crowdEnd struct {
	d   *iwarp.Device
	cfg iwarp.QPConfig
}

func openCrowd(ctx context.Context, j job) (*crowdEnd, error) {
	d, err := iwarp.Open(ctx, j.Socket)
	if err != nil {
		return nil, err
	}
	c := &crowdEnd{d: d, cfg: iwarp.QPConfig{SendDepth: crowdDepth, RecvDepth: crowdDepth, MaxSGE: 1}}
	if c.cfg.PD, err = d.AllocPD(ctx); err == nil {
		c.cfg.SendCQ, err = d.CreateCQ(ctx, 1024)
	}
	c.cfg.RecvCQ = c.cfg.SendCQ
	return c, err
}

// crowdServer accepts connections until stdin ends.
func crowdServer(j job, ready func()) ([]result, error) {
	return acceptCrowd(j, iwarpPort, ready, func(*iwarp.QP) {})
}

// acceptCrowd accepts connections until stdin ends. It calls accepted, in a goroutine of its own, for
// each.
func acceptCrowd(j job, port int, ready func(), accepted func(*iwarp.QP)) ([]result, error) {
	ctx, cancel := whileStdinOpen()
	defer cancel()
	c, err := openCrowd(ctx, j)
	if err != nil {
		return nil, err
	}
	ln, err := c.d.Listen(ctx, net.JoinHostPort(j.Local, strconv.Itoa(port)), nil)
	if err != nil {
		return nil, err
	}
	ready()
	for {
		req, err := ln.Request(ctx)
		if ctx.Err() != nil {
			return []result{}, nil
		} else if err != nil {
			return nil, err
		}
		go func() {
			qp, err := c.d.CreateQP(ctx, c.cfg)
			if err != nil { // the client reports it
				_ = req.Reject(ctx, []byte(err.Error()))
				return
			}
			if _, err := req.Accept(ctx, qp, nil); err != nil {
				_ = qp.Close()
				return
			}
			accepted(qp)
		}()
	}
}

// crowdClient makes the connections, and keeps them until stdin ends.
func crowdClient(j job, ready func()) ([]result, error) {
	ctx, cancel := context.WithTimeout(context.Background(), crowdSetUp)
	defer cancel()
	c, err := openCrowd(ctx, j)
	if err != nil {
		return nil, err
	}
	errs := make([]error, crowdAtATime)
	var wg sync.WaitGroup
	for k := range errs {
		wg.Go(func() {
			for n := k; n < j.Count && errs[k] == nil; n += crowdAtATime {
				qp, err := c.d.CreateQP(ctx, c.cfg)
				if err == nil {
					_, err = qp.Connect(ctx, net.JoinHostPort(j.Remote, strconv.Itoa(iwarpPort)), nil)
				}
				errs[k] = err
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	ready()
	untilStdinEnds()
	return []result{}, nil
}
