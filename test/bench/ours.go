package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
)

const (
	iwarpPort  = 7192
	regionSize = spreadDepth * mib // size of the region that is read and written; most workloads use only its start
	writeDepth = 256               // outstanding small Writes
	signalEach = 64
	// spreadDepth is the number of outstanding operations of the workloads that spread. Each
	// has its own part of the region, as calls of NFS do.
	spreadDepth = nfsDepth
)

func init() {
	roles["iwarp-server"] = iwarpServer
	roles["iwarp-client"] = iwarpClient
}

// runDaemon measures two daemons with an application each. All four processes run on the two
// pinned CPUs.
func runDaemon(m *matrix, mtu int, tests []test) ([]result, error) { return m.daemons(tests, false) }

// runDaemonSCTP is runDaemon over SCTP.
func runDaemonSCTP(m *matrix, mtu int, tests []test) ([]result, error) { return m.daemons(tests, true) }

// runDaemonSocket is runDaemon over the kernel's TCP sockets.
func runDaemonSocket(m *matrix, mtu int, tests []test) ([]result, error) {
	return m.daemons(tests, false, "--transport", "socket")
}

func (m *matrix) daemons(tests []test, sctp bool, flags ...string) ([]result, error) {
	return m.withDaemons(func(socketA, socketB string) ([]result, error) { return m.iwarp(tests, socketA, socketB, false, sctp) }, flags...)
}

// withDaemons starts a daemon on each side and calls run with their sockets. Without flags each
// daemon serves the interface of its side.
func (m *matrix) withDaemons(run func(socketA, socketB string) ([]result, error), flags ...string) (rs []result, err error) {
	if err := m.lab.setOffloads(true); err != nil {
		return nil, err
	}
	sockets := map[*side]string{}
	for _, s := range []*side{&m.lab.a, &m.lab.b} {
		d, socket, err := m.daemon(s, flags...)
		if err != nil {
			return nil, err
		}
		defer func() {
			if e := stop(d); e != nil && err == nil {
				err = fmt.Errorf("iwarpd: %w", e)
			}
		}()
		sockets[s] = socket
	}
	return run(sockets[&m.lab.a], sockets[&m.lab.b])
}

// runInProcess measures the engine inside the two applications. The client's polling drives its
// engine, and so does the server's if it answers messages. Otherwise the server sleeps, and its
// engine runs on its own thread.
func runInProcess(m *matrix, mtu int, tests []test) ([]result, error) {
	if err := m.lab.setOffloads(true); err != nil {
		return nil, err
	}
	rs := make([]result, len(tests))
	for _, inline := range []bool{false, true} {
		var some []test
		var at []int
		for i, t := range tests {
			if (t.Workload == "send-lat") == inline {
				some, at = append(some, t), append(at, i)
			}
		}
		if len(some) == 0 {
			continue
		}
		got, err := m.iwarp(some, "", "", inline, false)
		for i, k := range at {
			if err != nil {
				rs[k].Err = err.Error()
			} else {
				rs[k] = got[i]
			}
		}
	}
	return rs, nil
}

func (m *matrix) iwarp(tests []test, socketA, socketB string, inline, sctp bool) ([]result, error) {
	a, b := &m.lab.a, &m.lab.b
	return m.lab.pairOf(
		job{Role: "iwarp-server", If: b.ifn, Socket: socketB, Local: b.addr.Addr().String(), Inline: inline, SCTP: sctp},
		job{Role: "iwarp-client", If: a.ifn, Socket: socketA, Remote: b.addr.Addr().String(), Inline: true, SCTP: sctp, Tests: tests, Warm: m.opt.warm, Window: m.opt.window},
		m.limit(len(tests)), "GOMAXPROCS=3")
}

// daemon starts iwarpd on a side and waits until it serves.
func (m *matrix) daemon(s *side, flags ...string) (*exec.Cmd, string, error) {
	if len(flags) == 0 {
		flags = []string{"--interface", s.ifn}
	}
	socket := filepath.Join(m.dir, s.ifn+".sock")
	log, err := os.Create(filepath.Join(m.dir, s.ifn+".log"))
	if err != nil {
		return nil, "", err
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(m.opt.bin, "iwarpd"), append(flags, "--socket", socket, "--log-level", "warn")...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := s.start(cmd); err != nil {
		return nil, "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for {
		if dev, err := iwarp.Open(ctx, socket); err == nil {
			return cmd, socket, dev.Close()
		}
		if ctx.Err() != nil || cmd.Process.Signal(unix.Signal(0)) != nil {
			err := stop(cmd)
			b, _ := os.ReadFile(log.Name())
			return nil, "", fmt.Errorf("iwarpd does not start: %v: %s", err, lastLine(string(b)))
		}
		time.Sleep(20 * time.Millisecond)
	}
}
