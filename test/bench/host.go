package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Connections within the host join two programs, each on a CPU of its own, by one daemon, which
// shares the CPU of the server. They are compared with a Unix socket and with libfabric's
// shared memory. memcpy measures one copy.

func init() { roles["memcpy"] = memcpy }

// runHost measures two programs on the daemon of side b.
func runHost(m *matrix, mtu int, tests []test) (rs []result, err error) {
	b := &m.lab.b
	d, socket, err := m.daemon(b)
	if err != nil {
		return nil, err
	}
	defer func() {
		if e := stop(d); e != nil && err == nil {
			err = fmt.Errorf("iwarpd: %w", e)
		}
	}()
	addr := b.addr.Addr().String()
	return m.lab.pairOf(
		job{Role: "iwarp-server", Socket: socket, Local: addr},
		job{Role: "iwarp-client", Socket: socket, Alone: true, Remote: addr, Tests: tests, Warm: m.opt.warm, Window: m.opt.window},
		m.limit(len(tests)), "GOMAXPROCS=3")
}

// runUnix measures a Unix socket, used like the TCP of runTCP.
func runUnix(m *matrix, mtu int, tests []test) ([]result, error) {
	path := filepath.Join(m.dir, "stream")
	defer os.Remove(path)
	return m.lab.pairOf(
		job{Role: "tcp-server", Local: path},
		job{Role: "tcp-client", Remote: path, Tests: tests, Warm: m.opt.warm, Window: m.opt.window},
		m.limit(len(tests)), "GODEBUG=asyncpreemptoff=1")
}

// runShm measures fi_pingpong over libfabric's shared memory. Its stream sends one message at a
// time.
func runShm(m *matrix, _ int, tests []test) ([]result, error) {
	client := m.lab.b
	client.cpu = m.lab.a.cpu // both programs spin
	return m.libfabric("shm", "rdm", &client, tests)
}

func runMemcpy(m *matrix, _ int, tests []test) ([]result, error) {
	p, err := m.lab.b.spawn(job{Role: "memcpy", Tests: tests, Warm: m.opt.warm, Window: m.opt.window}, m.limit(len(tests)))
	if err != nil {
		return nil, err
	}
	return p.results()
}

// memcpy copies one buffer to another in a loop.
func memcpy(j job, _ func()) ([]result, error) {
	quiet()
	rs := make([]result, len(j.Tests))
	for i, t := range j.Tests {
		src, dst := make([]byte, t.Size), make([]byte, t.Size)
		for k := range src {
			src[k] = byte(k)
		}
		var from time.Time
		n := 0
		for start := time.Now(); ; n++ {
			copy(dst, src)
			now := time.Now()
			if from.IsZero() {
				if now.Sub(start) >= j.Warm {
					from, n = now, -1
				}
			} else if took := now.Sub(from); took >= j.Window {
				rs[i].Value = float64(n+1) * float64(t.Size) * 8 / float64(took)
				break
			}
		}
	}
	return rs, nil
}
