package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

func (m *matrix) limit(tests int) time.Duration {
	return time.Duration(tests)*(3*(m.opt.warm+m.opt.window)+5*time.Second) + 10*time.Second
}

// compile returns the path of a C program, which it compiles when it is first called.
func (m *matrix) compile(name string, source []byte, library string) (string, error) {
	exe := filepath.Join(m.dir, name)
	if _, err := os.Stat(exe); err == nil {
		return exe, nil
	}
	if err := os.WriteFile(exe+".c", source, 0o644); err != nil {
		return "", err
	}
	if out, err := exec.Command("gcc", "-O2", "-Wall", "-o", exe, exe+".c", library).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return exe, nil
}

func runTCP(m *matrix, tests []test, gso bool) ([]result, error) {
	if err := m.lab.setOffloads(gso); err != nil {
		return nil, err
	}
	return m.lab.pairOf(
		job{Role: "tcp-server", Local: m.lab.b.addr.Addr().String()},
		job{Role: "tcp-client", Remote: m.lab.b.addr.Addr().String(), Tests: tests, Warm: m.opt.warm, Window: m.opt.window},
		m.limit(len(tests)), "GODEBUG=asyncpreemptoff=1") // preemption signals would interrupt system calls
}

// runLibfabric measures fi_pingpong with the kernel's offloads on, which is the default.
// fi_pingpong prints the mean of half the round trip.
func runLibfabric(m *matrix, _ int, tests []test) ([]result, error) {
	return m.libfabric("tcp", "msg", &m.lab.a, tests)
}

// libfabric runs fi_pingpong with a provider and a kind of endpoint. The server is on side b.
func (m *matrix) libfabric(provider, kind string, client *side, tests []test) ([]result, error) {
	if _, err := exec.LookPath("fi_pingpong"); err != nil {
		return nil, fmt.Errorf("%w: fi_pingpong is not installed (Debian: libfabric-bin)", errSkip)
	}
	if err := m.lab.setOffloads(true); err != nil {
		return nil, err
	}
	rs := make([]result, len(tests))
	for i, t := range tests {
		each := 20*time.Microsecond + time.Duration(t.Size/10) // approximate round trip
		rounds := max(100, int(m.opt.window/each))
		var err error
		for range 4 { // its two connections sometimes race with each other
			began := time.Now()
			if rs[i], err = fiPingPong(m.lab, provider, kind, client, t, rounds); err == nil || time.Since(began) > pingPongLimit {
				break
			}
			time.Sleep(200 * time.Millisecond)
		}
		if err != nil {
			rs[i].Err = err.Error()
		}
	}
	return rs, nil
}

// pingPongLimit bounds a run of fi_pingpong. A run that takes longer is not tried again.
const pingPongLimit = 15 * time.Second

func fiPingPong(l *lab, provider, kind string, on *side, t test, rounds int) (r result, err error) {
	args := []string{"-p", provider, "-e", kind, "-I", strconv.Itoa(rounds), "-S", strconv.Itoa(t.Size)}
	server := exec.Command("fi_pingpong", args...)
	if err := l.b.start(server); err != nil {
		return r, err
	}
	defer func() { _ = stop(server) }()
	time.Sleep(300 * time.Millisecond) // it does not print when it listens
	out, err := on.output(exec.Command("fi_pingpong", append(args, l.b.addr.Addr().String())...), pingPongLimit)
	if err != nil {
		return r, fmt.Errorf("fi_pingpong: %w", err)
	}
	// bytes  #sent  #ack  total  time  MB/sec  usec/xfer  Mxfers/sec
	f := strings.Fields(lastLine(out))
	if len(f) != 8 {
		return r, fmt.Errorf("fi_pingpong said %q", lastLine(out))
	}
	half, err := strconv.ParseFloat(f[6], 64)
	if err != nil || half <= 0 {
		return r, fmt.Errorf("fi_pingpong said %q", lastLine(out))
	}
	switch t.Workload {
	case "one-way":
		return result{Value: half, Mean: half}, nil
	case "stream":
		return result{Value: float64(t.Size) * 8 / half / 1e3}, nil // Gb/s
	}
	return result{Value: 2 * half, Mean: 2 * half}, nil
}
