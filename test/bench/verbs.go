package main

import (
	_ "embed" // the program that registers
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Unmodified programs on the filter libraries of client/verbs: perftest between the two
// daemons, and a program that registers memory. iwarpd-run starts them.

//go:embed verbs/register.c
var registerSource []byte

// Kinds of memory of the libraries, as in IWARPD_VERBS_MEMORY.
const (
	nearMemory = "near"
	farMemory  = "far"
)

// runVerbs measures programs with one kind of memory.
func runVerbs(m *matrix, memory string, tests []test) ([]result, error) {
	for _, tool := range []string{m.runner(), "ib_write_bw"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, fmt.Errorf("%w: no %s: run make verbs, or name its directory with -verbs; ib_write_bw is of Debian's perftest", errSkip, tool)
		}
	}
	return m.withDaemons(func(socketA, socketB string) ([]result, error) {
		rs := make([]result, len(tests))
		for i, t := range tests {
			var err error
			if kind, ok := strings.CutPrefix(t.Workload, "reg-"); ok {
				rs[i], err = m.register(kind, t.Size, "IWARPD_SOCKET="+socketA, "IWARPD_VERBS_MEMORY="+memory)
			} else {
				rs[i], err = m.perftest(t, memory, socketA, socketB)
			}
			if err != nil {
				rs[i].Err = err.Error()
			}
		}
		return rs, nil
	})
}

func (m *matrix) runner() string { return filepath.Join(m.opt.verbs, "iwarpd-run") }

// runTouch measures the first write to each page of new memory.
func runTouch(m *matrix, _ int, tests []test) ([]result, error) {
	rs := make([]result, len(tests))
	for i, t := range tests {
		var err error
		if rs[i], err = m.register("touch", t.Size); err != nil {
			return nil, err
		}
	}
	return rs, nil
}

// register runs verbs/register.c on side a.
func (m *matrix) register(kind string, size int, env ...string) (r result, err error) {
	exe, err := m.compile("register", registerSource, "-libverbs")
	if err != nil {
		return r, err
	}
	ms := strconv.Itoa(int(m.opt.window.Milliseconds()))
	out, err := m.on(&m.lab.a, []string{exe, kind, strconv.Itoa(size), ms}, env)
	if err != nil {
		return r, err
	}
	_, err = fmt.Sscan(out, &r.Value, &r.Mean)
	return r, err
}

// on runs a program with iwarpd-run on a side, and returns its output.
func (m *matrix) on(s *side, args, env []string) (string, error) {
	cmd := exec.Command(m.runner(), args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := s.output(cmd, m.limit(1))
	if err != nil {
		return "", fmt.Errorf("%s: %w", filepath.Base(args[0]), err)
	}
	return out, nil
}

// perftest runs a program of perftest between the daemons.
func (m *matrix) perftest(t test, memory, socketA, socketB string) (r result, err error) {
	program, column, count := "", 4, 20*m.opt.window.Milliseconds() // t_typical, which is the median
	switch t.Workload {
	case "write-bw":
		program, column, count = "ib_write_bw", 3, mib/int64(t.Size)*m.opt.window.Milliseconds() // BW average; for the window at 8 Gb/s
	case "write-ping-pong":
		program = "ib_write_lat"
	case "send-ping-pong":
		program = "ib_send_lat"
	}
	args := []string{program, "-R", "-F", "-s", strconv.Itoa(t.Size), "-n", strconv.FormatInt(max(count, 100), 10), "--report_gbits"}
	for range 10 {
		if r.Value, err = m.perftestOnce(args, column, memory, socketA, socketB); err == nil {
			return r, nil
		}
	}
	return r, err
}

// perftestOnce returns a column of the row that perftest prints.
func (m *matrix) perftestOnce(args []string, column int, memory, socketA, socketB string) (float64, error) {
	server := exec.Command(m.runner(), args...)
	server.Env = append(os.Environ(), "IWARPD_SOCKET="+socketB, "IWARPD_VERBS_MEMORY="+memory)
	if err := m.lab.b.start(server); err != nil {
		return 0, err
	}
	defer func() { _ = stop(server) }()
	time.Sleep(300 * time.Millisecond) // it does not print when it listens
	out, err := m.on(&m.lab.a, append(args, m.lab.b.addr.Addr().String()), []string{"IWARPD_SOCKET=" + socketA, "IWARPD_VERBS_MEMORY=" + memory})
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > column && f[0] == args[4] {
			return strconv.ParseFloat(f[column], 64)
		}
	}
	return 0, fmt.Errorf("%s printed no row: %s", args[0], lastLine(out))
}

// runPerf measures iwarpctl perf between the daemons.
func runPerf(m *matrix, _ int, tests []test) ([]result, error) {
	ctl := filepath.Join(m.opt.bin, "iwarpctl")
	return m.withDaemons(func(socketA, socketB string) ([]result, error) {
		server := exec.Command(ctl, "--socket", socketB, "perf", "write", "--server")
		if err := m.lab.b.start(server); err != nil {
			return nil, err
		}
		defer func() { _ = stop(server) }()
		rs := make([]result, len(tests))
		for i, t := range tests {
			var err error
			for range 20 { // until it listens
				if rs[i].Value, err = m.perf(ctl, socketA, t); err == nil {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			if err != nil {
				return nil, err
			}
		}
		return rs, nil
	})
}

func (m *matrix) perf(ctl, socket string, t test) (float64, error) {
	qps := 1
	if t.Workload == "write-bw-64qps" {
		qps = 64
	}
	client := exec.Command(ctl, "--json", "--socket", socket, "perf", "write", "--client", m.lab.b.addr.Addr().String(),
		"--mode", "bw", "--size", strconv.Itoa(t.Size), "--qps", strconv.Itoa(qps), "--duration", m.opt.window.String())
	out, err := m.lab.a.output(client, m.limit(1))
	if err != nil {
		return 0, fmt.Errorf("iwarpctl perf: %w", err)
	}
	var rows []struct {
		GbitPerSec float64 `json:"gbit_per_s"`
	}
	if err := json.Unmarshal([]byte(out), &rows); err != nil || len(rows) != 1 {
		return 0, errors.Join(errors.New("iwarpctl perf printed no row"), err)
	}
	return rows[0].GbitPerSec, nil
}
