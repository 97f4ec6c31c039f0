package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/app/perf"
)

// The names are fixed, so that a run finds what a crashed one left.
const netnsDir = "/run/netns"

var sides = []*side{
	{name: "a", ns: "iwarpd-demo-a", dev: "iwdemo0", addr: netip.MustParsePrefix("10.96.0.1/24")},
	{name: "b", ns: "iwarpd-demo-b", dev: "iwdemo1", addr: netip.MustParsePrefix("10.96.0.2/24")},
}

// side is one of the two hosts.
type side struct {
	name, ns, dev string
	addr          netip.Prefix
	cpu           int // of its worker, or -1: not pinned

	handle netns.NsHandle
	daemon *process
	socket string
}

// noPermission is iwarpd's exit code for a missing capability.
const noPermission = 4

// process is a child that the demo ends.
type process struct {
	cmd  *exec.Cmd
	out  *watched
	done chan struct{} // closed when err is set
	err  error
}

// watched collects the output of a child, and tells when a text appears.
type watched struct {
	mu    sync.Mutex
	text  bytes.Buffer
	wants string
	seen  chan struct{}
}

func (w *watched) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	had := w.wants != "" && strings.Contains(w.text.String(), w.wants)
	w.text.Write(b)
	if w.wants != "" && !had && strings.Contains(w.text.String(), w.wants) {
		close(w.seen)
	}
	return len(b), nil
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.text.String()
}

// tail is the last line of what the child wrote.
func (w *watched) tail() string {
	lines := strings.Split(strings.TrimSpace(w.String()), "\n")
	return lines[len(lines)-1]
}

func runNamespaces(ctx context.Context, o *options, r *report) (err error) {
	home, err := netns.Get()
	if err != nil {
		return err
	}
	defer home.Close()
	if err := removeNamespaces(); err != nil { // of a run that crashed
		return fmt.Errorf("remove the namespaces of an earlier run: %w", err)
	}
	defer func() {
		for _, s := range sides {
			s.daemon.kill()
		}
		err = errors.Join(err, netns.Set(home), removeNamespaces())
	}()
	if err := makeNamespaces(home, o.mtu); err != nil {
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EOPNOTSUPP) {
			err = fmt.Errorf("%w: %w", errUnable, err)
		}
		return fmt.Errorf("make two namespaces joined by veth: %w", err)
	}
	r.where = fmt.Sprintf("Two namespaces joined by veth, MTU %d, an iwarpd in each", o.mtu)
	r.cpus = place(sides)
	for _, s := range sides {
		if err := s.startDaemon(ctx, home, o); err != nil {
			return err
		}
	}
	if err := use(ctx, home, o, r, sides); err != nil {
		return err
	}
	for _, s := range sides {
		if err := s.stopDaemon(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// runSockets does the job between two daemons on loopback, over kernel sockets.
func runSockets(ctx context.Context, o *options, r *report) error {
	sides := []*side{{name: "a", addr: netip.MustParsePrefix("127.0.0.1/8")}, {name: "b", addr: netip.MustParsePrefix("127.0.0.2/8")}}
	defer func() {
		for _, s := range sides {
			s.daemon.kill()
		}
	}()
	r.where = "Two iwarpd on 127.0.0.1 and 127.0.0.2, over the kernel's TCP (kernel sockets)"
	r.cpus = place(sides)
	for _, s := range sides {
		if err := s.startDaemon(ctx, 0, o); err != nil {
			return err
		}
	}
	if err := use(ctx, 0, o, r, sides); err != nil {
		return err
	}
	for _, s := range sides {
		if err := s.stopDaemon(ctx, r); err != nil {
			return err
		}
	}
	return nil
}

// place gives the workers of two sides a CPU each if there are just two. A measurement has a third thread that polls, its
// client. Where the kernel puts it decides how long a Read takes, so use pins it to the CPU of b's worker, where it delays a
// Read the least (docs/performance.md). place returns a line about that, or "".
func place(sides []*side) string {
	var may unix.CPUSet
	if err := unix.SchedGetaffinity(0, &may); err != nil || may.Count() != 2 {
		for _, s := range sides {
			s.cpu = -1
		}
		return ""
	}
	cpu := 0
	for _, s := range sides {
		for !may.IsSet(cpu) {
			cpu++
		}
		s.cpu = cpu
		cpu++
	}
	return fmt.Sprintf("Two CPUs for three threads that poll: the worker of a on CPU %d, that of b, ping and perf on CPU %d", sides[0].cpu, sides[1].cpu)
}

// pin makes the calling thread, and the processes that it starts, run on the CPU until undo is called.
func pin(cpu int) (undo func(), err error) {
	var before, one unix.CPUSet
	one.Set(cpu)
	if err := errors.Join(unix.SchedGetaffinity(0, &before), unix.SchedSetaffinity(0, &one)); err != nil {
		return nil, err
	}
	return func() { _ = unix.SchedSetaffinity(0, &before) }, nil
}

// makeNamespaces makes both, and the veth pair between them.
func makeNamespaces(home netns.NsHandle, mtu int) error {
	for _, s := range sides {
		h, err := netns.NewNamed(s.ns) // and enters it
		if err != nil {
			return err
		}
		s.handle = h
		if lo, err := netlink.LinkByName("lo"); err == nil {
			if err := netlink.LinkSetUp(lo); err != nil {
				return err
			}
		}
	}
	defer func() { _ = netns.Set(home) }()
	a, b := sides[0], sides[1]
	if err := netns.Set(a.handle); err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = a.dev, mtu
	err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: b.dev, PeerNamespace: netlink.NsFd(b.handle)})
	if err != nil {
		return err
	}
	for _, s := range sides {
		if err := netns.Set(s.handle); err != nil {
			return err
		}
		dev, err := netlink.LinkByName(s.dev)
		if err != nil {
			return err
		}
		addr := &netlink.Addr{IPNet: &net.IPNet{IP: s.addr.Addr().AsSlice(), Mask: net.CIDRMask(s.addr.Bits(), 32)}}
		if err := errors.Join(netlink.LinkSetMTU(dev, mtu), netlink.AddrAdd(dev, addr), netlink.LinkSetUp(dev)); err != nil {
			return err
		}
	}
	return nil
}

// removeNamespaces ends what runs in the demo's namespaces and removes them;
// the veth pair goes with them.
func removeNamespaces() error {
	var errs []error
	for _, s := range sides {
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(netnsDir, s.ns), &st); err != nil {
			continue // not there
		}
		killInside(st.Ino)
		errs = append(errs, netns.DeleteNamed(s.ns))
		if s.handle > 0 {
			s.handle.Close()
			s.handle = 0
		}
	}
	return errors.Join(errs...)
}

// killInside ends the processes of a network namespace that is ours alone.
func killInside(inode uint64) {
	procs, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, p := range procs {
		var st unix.Stat_t
		pid, err := strconv.Atoi(strings.Split(p, "/")[2])
		if err != nil || pid == os.Getpid() || unix.Stat(p, &st) != nil || st.Ino != inode {
			continue
		}
		_ = unix.Kill(pid, unix.SIGKILL)
	}
}

// start runs a command in the namespace of s. Whatever becomes of the demo, the
// command ends with it.
func (s *side) start(ctx context.Context, home netns.NsHandle, wants string, env []string, name string, args ...string) (*process, error) {
	if s.handle > 0 {
		if err := netns.Set(s.handle); err != nil {
			return nil, err
		}
		defer func() { _ = netns.Set(home) }()
	}
	p := &process{out: &watched{wants: wants, seen: make(chan struct{})}, done: make(chan struct{})}
	p.cmd = exec.Command(name, args...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.out
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL, Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	if wants == "" {
		return p, nil
	}
	limit := time.NewTimer(20 * time.Second)
	defer limit.Stop()
	var why error
	select {
	case <-p.out.seen:
		return p, nil
	case <-p.done:
		why = fmt.Errorf("%s: %w", filepath.Base(name), p.failure())
		if p.cmd.ProcessState.ExitCode() == noPermission {
			why = fmt.Errorf("%w: %w", errUnable, why)
		}
	case <-ctx.Done():
		why = ctx.Err()
	case <-limit.C:
		why = fmt.Errorf("%s is not ready after 20 s: %s", filepath.Base(name), p.out.tail())
	}
	p.kill()
	return nil, why
}

// failure is what a child that has ended says of it.
func (p *process) failure() error {
	if p.err == nil {
		return fmt.Errorf("it ended: %s", p.out.tail())
	}
	return fmt.Errorf("%w: %s", p.err, p.out.tail())
}

func (p *process) kill() {
	if p != nil {
		_ = p.cmd.Process.Kill()
		<-p.done
	}
}

// stop asks the child to end and waits for it.
func (p *process) stop() error {
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-p.done:
		return p.err
	case <-time.After(15 * time.Second):
		p.kill()
		return errors.New("it did not end 15 s after SIGTERM")
	}
}

func (s *side) startDaemon(ctx context.Context, home netns.NsHandle, o *options) (err error) {
	dir, err := filepath.Abs(o.dir)
	if err != nil {
		return err
	}
	s.socket = filepath.Join(dir, s.name+".sock")
	args := []string{"--socket", s.socket, "--log-format", "json"}
	if s.dev == "" {
		args = append(args, "--transport", "socket")
	} else {
		args = append(args, "--interface", s.dev)
	}
	if s.cpu >= 0 {
		args = append(args, "--cpus", strconv.Itoa(s.cpu))
	}
	s.daemon, err = s.start(ctx, home, `"ready"`, nil, filepath.Join(o.bin, "iwarpd"), args...)
	return err
}

// stopDaemon ends the daemon, takes its counters from its last words, and sees
// that it left nothing.
func (s *side) stopDaemon(ctx context.Context, r *report) error {
	if err := s.daemon.stop(); err != nil {
		return fmt.Errorf("iwarpd %s after SIGTERM: %w: %s", s.name, err, s.daemon.out.tail())
	}
	h := host{name: s.name}
	for line := range strings.SplitSeq(s.daemon.out.String(), "\n") {
		var l struct {
			Msg     string
			Link    string
			Steered uint64 `json:"frames-steered"`
			Passed  uint64 `json:"frames-passed"`
			Rx      uint64 `json:"rx-frames"`
			Tx      uint64 `json:"tx-frames"`
			Again   uint64 `json:"retransmissions"`
		}
		if json.Unmarshal([]byte(line), &l) != nil {
			continue
		}
		switch l.Msg {
		case "ready":
			h.xdp = l.Link
		case "traffic":
			h.steered, h.passed, h.tx, h.rx, h.retransmissions = l.Steered, l.Passed, l.Tx, l.Rx, l.Again
		}
	}
	if h.steered == 0 && s.dev != "" {
		return fmt.Errorf("iwarpd %s: XDP steered no frame: %s", s.name, s.daemon.out.tail())
	}
	r.hosts = append(r.hosts, h)
	if _, err := os.Stat(s.socket); err == nil {
		return fmt.Errorf("iwarpd %s left its socket behind", s.name)
	}
	if s.dev == "" {
		return ctx.Err()
	}
	in, err := netlink.NewHandleAt(s.handle)
	if err != nil {
		return err
	}
	defer in.Close()
	dev, err := in.LinkByName(s.dev)
	if err != nil {
		return err
	}
	if x := dev.Attrs().Xdp; x != nil && x.Attached {
		return fmt.Errorf("iwarpd %s left its XDP program on %s", s.name, s.dev)
	}
	return ctx.Err()
}

// ctl runs iwarpctl to its end and returns what it printed.
func (s *side) ctl(ctx context.Context, home netns.NsHandle, o *options, args ...string) (string, error) {
	p, err := s.start(ctx, home, "", nil, filepath.Join(o.bin, "iwarpctl"), append([]string{"--socket", s.socket}, args...)...)
	if err != nil {
		return "", err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return "", errors.Join(p.stop(), ctx.Err())
	}
	if p.err != nil {
		return "", fmt.Errorf("iwarpctl %s: %w", strings.Join(args, " "), p.failure())
	}
	return p.out.String(), nil
}

// use copies, pings and measures.
func use(ctx context.Context, home netns.NsHandle, o *options, r *report, sides []*side) error {
	a, b := sides[0], sides[1]
	there := filepath.Join(o.dir, "there")
	if err := os.Mkdir(there, 0o755); err != nil {
		return err
	}
	bAddr := b.addr.Addr().String()
	for _, args := range [][]string{
		{"serve", "--dir", there, "--listen", bAddr + ":7176"}, {"ping", "-s", "-P", "-a", bAddr}, {"perf", "--server", "--listen", bAddr + ":7175"},
	} {
		p, err := b.start(ctx, home, "listening on", nil, filepath.Join(o.bin, "iwarpctl"), append([]string{"--socket", b.socket}, args...)...)
		if err != nil {
			return fmt.Errorf("iwarpctl %s: %w", args[0], err)
		}
		defer func() { _ = p.stop() }()
	}

	fmt.Printf("Copying it from a to b by RDMA Write\n")
	remote := bAddr + ":7176/copy.tar"
	if err := copyFile(ctx, home, o, &r.put, a, r.file, remote); err != nil {
		return err
	}
	if err := r.compare(filepath.Join(there, "copy.tar"), "the copy at b"); err != nil {
		return err
	}
	fmt.Printf("Copying it back from b to a by RDMA Read\n")
	back := filepath.Join(o.dir, "back.tar")
	if err := copyFile(ctx, home, o, &r.get, a, remote, back); err != nil {
		return err
	}
	if err := r.compare(back, "the copy that came back"); err != nil {
		return err
	}

	fmt.Printf("Pinging and measuring\n")
	if b.cpu >= 0 {
		undo, err := pin(b.cpu)
		if err != nil {
			return err
		}
		defer undo()
	}
	var ping struct {
		Rounds int
		RTT    *perf.Percentiles `json:"rtt_us"`
	}
	if err := ctlJSON(ctx, home, o, a, &ping, "ping", "-c", "-a", bAddr, "-C", "100", "-S", "4096", "-V"); err != nil {
		return err
	}
	r.rounds, r.rtt = ping.Rounds, ping.RTT
	for _, args := range [][]string{
		{"write", "--mode", "bw", "--size", "1048576"}, {"read", "--mode", "bw", "--size", "1048576"},
		{"write", "--mode", "bw", "--size", "64", "--depth", "256"}, {"read", "--mode", "lat", "--size", "64"}, {"send", "--mode", "lat", "--size", "64"},
	} {
		var res []*perf.Result
		args = append([]string{"perf"}, append(args, "--client", bAddr, "--duration", "1s")...)
		if err := ctlJSON(ctx, home, o, a, &res, args...); err != nil {
			return err
		}
		r.perf = append(r.perf, res...)
	}
	return nil
}

func ctlJSON(ctx context.Context, home netns.NsHandle, o *options, s *side, v any, args ...string) error {
	out, err := s.ctl(ctx, home, o, append([]string{"--json"}, args...)...)
	if err != nil {
		return err
	}
	if err := json.NewDecoder(strings.NewReader(out)).Decode(v); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("iwarpctl %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func copyFile(ctx context.Context, home netns.NsHandle, o *options, took *time.Duration, s *side, from, to string) error {
	var res struct{ Seconds float64 }
	if err := ctlJSON(ctx, home, o, s, &res, "cp", from, to); err != nil {
		return err
	}
	*took = time.Duration(res.Seconds * float64(time.Second))
	return nil
}
