package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"
)

// A job is the task of a child process. The same program is the parent and each child: `bench
// child JOB`, where JOB is JSON.
type job struct {
	Role      string        `json:"role"`
	Local     string        `json:"local,omitempty"`  // IP address of this side
	Remote    string        `json:"remote,omitempty"` // IP address of the other
	RemoteMAC string        `json:"remote_mac,omitempty"`
	If        string        `json:"if,omitempty"`
	MTU       int           `json:"mtu,omitempty"`
	Socket    string        `json:"socket,omitempty"` // of the daemon; empty: engine in this process
	Inline    bool          `json:"inline,omitempty"` // the application drives the engine in its process
	Alone     bool          `json:"alone,omitempty"`  // the daemon runs on another CPU
	SCTP      bool          `json:"sctp,omitempty"`
	Tests     []test        `json:"tests,omitempty"`
	Warm      time.Duration `json:"warm,omitempty"`
	Window    time.Duration `json:"window,omitempty"`
	Count     int           `json:"count,omitempty"` // connections
}

// A test is one workload at one message size.
type test struct {
	Workload string `json:"workload"`
	Size     int    `json:"size"`
}

func (t test) String() string { return t.Workload + "/" + sizeName(t.Size) }

// A result is what a child measured in one test. Rates have only a Value; latencies have all
// fields.
type result struct {
	Value float64 `json:"value"` // Gb/s, M/s, or the median in us
	Mean  float64 `json:"mean,omitempty"`
	P99   float64 `json:"p99,omitempty"`
	P999  float64 `json:"p999,omitempty"`
	CPU   float64 `json:"cpu,omitempty"` // of bulk, in seconds per GiB over all CPUs: both sides, the kernel and all other work
	Note  string  `json:"note,omitempty"`
	Err   string  `json:"err,omitempty"`

	Client map[string]uint64 `json:"client,omitempty"` // how the counters of its engine have changed
	Server map[string]uint64 `json:"server,omitempty"`
}

// roles are the children's main functions. A server calls ready when it can be reached, and
// returns when stdin ends.
var roles = map[string]func(j job, ready func()) ([]result, error){
	"tcp-server": tcpServer,
	"tcp-client": tcpClient,
}

const readyLine = "ready"

// childMain runs a role. A server prints "ready", and every child prints its results as a line
// of JSON.
func childMain(arg string) error {
	var j job
	if err := json.Unmarshal([]byte(arg), &j); err != nil {
		return err
	}
	f := roles[j.Role]
	if f == nil {
		return fmt.Errorf("no role %q", j.Role)
	}
	rs, err := f(j, func() { fmt.Println(readyLine) })
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(rs)
}

// untilStdinEnds waits until the parent closes the child's stdin.
func untilStdinEnds() { _, _ = io.Copy(io.Discard, os.Stdin) }

// whileStdinOpen returns a context that ends when the parent closes the child's stdin.
func whileStdinOpen() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		untilStdinEnds()
		cancel()
	}()
	return ctx, cancel
}

// A proc is a running child.
type proc struct {
	cmd    *exec.Cmd
	in     io.Closer
	out    *bufio.Reader
	errors bytes.Buffer
	killer *time.Timer
}

// spawn starts a child on a side. The child is killed after limit.
func (s *side) spawn(j job, limit time.Duration, env ...string) (*proc, error) {
	arg, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &proc{cmd: exec.Command(exe, "child", string(arg))}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = &p.errors
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	if err := s.start(p.cmd); err != nil {
		return nil, err
	}
	p.killer = time.AfterFunc(limit, func() { _ = p.cmd.Process.Kill() })
	return p, nil
}

// ready waits until a server reports that it can be reached.
func (p *proc) ready() error {
	line, err := p.out.ReadString('\n')
	if err != nil || strings.TrimSpace(line) != readyLine {
		return p.end(fmt.Errorf("did not become ready"))
	}
	return nil
}

// results reads the child's results and waits for its end.
func (p *proc) results() ([]result, error) {
	var rs []result
	err := json.NewDecoder(p.out).Decode(&rs)
	return rs, p.end(err)
}

// finish lets a server go, and returns what it measured.
func (p *proc) finish() ([]result, error) {
	_ = p.in.Close()
	return p.results()
}

// end closes the child's stdin and waits for its end. After an error it kills the child. The
// last line of the child's stderr replaces err.
func (p *proc) end(err error) error {
	_ = p.in.Close()
	if err != nil {
		_ = p.cmd.Process.Kill()
	}
	_, _ = io.Copy(io.Discard, p.out)
	werr := p.cmd.Wait()
	p.killer.Stop()
	if err == nil && werr == nil {
		return nil
	}
	if t := lastLine(p.errors.String()); t != "" {
		return errors.New(t)
	}
	return errors.Join(err, werr)
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// pairOf runs a server on b and a client on a, and returns what the client
// measured, with the counters of the server.
func (l *lab) pairOf(server, client job, limit time.Duration, env ...string) ([]result, error) {
	sp, err := l.b.spawn(server, limit, env...)
	if err != nil {
		return nil, err
	}
	if err := sp.ready(); err != nil {
		return nil, fmt.Errorf("%s: %w", server.Role, err)
	}
	cp, err := l.a.spawn(client, limit, env...)
	if err != nil {
		return nil, errors.Join(err, sp.end(nil))
	}
	rs, err := cp.results()
	if err != nil {
		err = fmt.Errorf("%s: %w", client.Role, err)
	}
	served, serr := sp.finish()
	if serr != nil && err == nil {
		err = fmt.Errorf("%s: %w", server.Role, serr)
	}
	for i := range min(len(rs), len(served)) {
		rs[i].Server = served[i].Server
	}
	return rs, err
}
