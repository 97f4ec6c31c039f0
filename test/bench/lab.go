package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/safchain/ethtool"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A side is one end of the wire: a network namespace with one interface, and the CPU that its
// processes are pinned to.
type side struct {
	ns   string
	ifn  string
	addr netip.Prefix
	mac  net.HardwareAddr
	cpu  int // or anyCPU
	h    netns.NsHandle
}

const anyCPU = -1

// A lab is two namespaces joined by a veth pair with one queue each way.
type lab struct {
	a, b side
	lock *os.File
}

// newLab makes a lab. A lock ensures that the machine has one at a time.
func newLab() (*lab, error) {
	lock, err := os.Create(filepath.Join(os.TempDir(), "iwarpd-bench.lock"))
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, errors.New("another bench is running on this machine")
	}
	l := &lab{
		lock: lock,
		a:    side{ns: "iwarpd-bench-a", ifn: "iwb0", addr: netip.MustParsePrefix("10.98.0.1/24"), cpu: 0},
		b:    side{ns: "iwarpd-bench-b", ifn: "iwb1", addr: netip.MustParsePrefix("10.98.0.2/24"), cpu: 1 % runtime.NumCPU()},
	}
	l.Close() // remove what a killed run left
	for _, s := range []*side{&l.a, &l.b} {
		if err := s.create(); err != nil {
			l.Close()
			return nil, fmt.Errorf("namespace %s: %w", s.ns, err)
		}
	}
	if err := l.wire(); err != nil {
		l.Close()
		return nil, fmt.Errorf("veth: %w", err)
	}
	return l, nil
}

func (s *side) create() error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := netns.Get()
	if err != nil {
		return err
	}
	defer home.Close()
	if s.h, err = netns.NewNamed(s.ns); err == nil {
		err = setCongestionControl()
	}
	return errors.Join(err, netns.Set(home))
}

// setCongestionControl sets what the kernel's TCP uses in the namespace of the thread: CUBIC, the default of most hosts,
// or Reno, which is the same without losses, where the kernel does not allow a namespace CUBIC. Paced algorithms such as
// BBR are slower on such a wire.
func setCongestionControl() error {
	const file = "/proc/sys/net/ipv4/tcp_congestion_control"
	if os.WriteFile(file, []byte("cubic"), 0) == nil {
		return nil
	}
	return os.WriteFile(file, []byte("reno"), 0)
}

func (l *lab) wire() error {
	ha, err := netlink.NewHandleAt(l.a.h)
	if err != nil {
		return err
	}
	defer ha.Close()
	hb, err := netlink.NewHandleAt(l.b.h)
	if err != nil {
		return err
	}
	defer hb.Close()
	v := netlink.NewVeth(netlink.LinkAttrs{Name: l.a.ifn, NumRxQueues: 1, NumTxQueues: 1, MTU: 1500})
	v.PeerName, v.PeerNamespace = l.b.ifn, netlink.NsFd(int(l.b.h))
	v.PeerNumRxQueues, v.PeerNumTxQueues, v.PeerMTU = 1, 1, 1500
	if err := ha.LinkAdd(v); err != nil {
		return err
	}
	for _, e := range []struct {
		h *netlink.Handle
		s *side
	}{{ha, &l.a}, {hb, &l.b}} {
		link, err := e.h.LinkByName(e.s.ifn)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(e.s.addr.String())
		if err != nil {
			return err
		}
		e.s.mac = link.Attrs().HardwareAddr
		lo, err := e.h.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := errors.Join(e.h.AddrAdd(link, a), e.h.LinkSetUp(link), e.h.LinkSetUp(lo)); err != nil {
			return err
		}
	}
	return nil
}

// Close removes both namespaces, and the veth pair with them. The lock is released when the
// process ends.
func (l *lab) Close() {
	for _, s := range []*side{&l.a, &l.b} {
		if s.h > 0 {
			s.h.Close()
		}
		if err := netns.DeleteNamed(s.ns); err != nil && !errors.Is(err, os.ErrNotExist) {
			fmt.Fprintf(os.Stderr, "bench: namespace %s: %v\n", s.ns, err)
		}
	}
}

func (l *lab) setMTU(mtu int) error {
	for _, s := range []*side{&l.a, &l.b} {
		h, err := netlink.NewHandleAt(s.h)
		if err != nil {
			return err
		}
		link, err := h.LinkByName(s.ifn)
		if err == nil {
			err = h.LinkSetMTU(link, mtu)
		}
		h.Close()
		if err != nil {
			return fmt.Errorf("MTU %d on %s: %w", mtu, s.ifn, err)
		}
	}
	return nil
}

// offloads are the features that the "nogso" arms of the kernel turn off.
var offloads = []string{
	"tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation",
	"tx-generic-segmentation", "rx-gro", "tx-checksum-ip-generic", "tx-scatter-gather",
}

// setOffloads turns segmentation, receive merging and checksum offload on or
// off at both ends.
func (l *lab) setOffloads(on bool) error {
	for _, s := range []*side{&l.a, &l.b} {
		err := s.do(func() error {
			e, err := ethtool.NewEthtool()
			if err != nil {
				return err
			}
			defer e.Close()
			have, err := e.FeatureNames(s.ifn)
			if err != nil {
				return err
			}
			want := map[string]bool{}
			for _, f := range offloads {
				if _, ok := have[f]; ok {
					want[f] = on
				}
			}
			return e.Change(s.ifn, want)
		})
		if err != nil {
			return fmt.Errorf("offloads of %s: %w", s.ifn, err)
		}
	}
	return nil
}

// do runs f on a thread inside the namespace and pinned to the side's CPU, so that a process
// started by f inherits both.
func (s *side) do(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		var all, one unix.CPUSet
		home, err := netns.Get()
		if err == nil {
			err = unix.SchedGetaffinity(0, &all)
		}
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer home.Close()
		if one = all; s.cpu != anyCPU {
			one.Zero()
			one.Set(s.cpu)
		}
		err = errors.Join(netns.Set(s.h), unix.SchedSetaffinity(0, &one))
		if err == nil {
			err = f()
		}
		// Unlock the thread only if its state is restored. A child that set a parent-death
		// signal dies with its thread.
		if errors.Join(netns.Set(home), unix.SchedSetaffinity(0, &all)) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// start starts cmd inside the namespace, pinned. It is killed when this process ends.
func (s *side) start(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true, Pdeathsig: unix.SIGKILL}
	return s.do(cmd.Start)
}

// output runs cmd on the side, for at most limit, and returns what it printed. An error has the last line
// that it printed.
func (s *side) output(cmd *exec.Cmd, limit time.Duration) (string, error) {
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := s.start(cmd); err != nil {
		return "", err
	}
	kill := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	defer kill.Stop()
	if err := cmd.Wait(); err != nil {
		return "", fmt.Errorf("%w: %s", err, lastLine(errs.String()+out.String()))
	}
	return out.String(), nil
}

// stop interrupts a process, and kills it if it does not end.
func stop(cmd *exec.Cmd) error {
	if cmd.Process == nil {
		return nil
	}
	_ = cmd.Process.Signal(unix.SIGTERM)
	t := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
	defer t.Stop()
	return cmd.Wait()
}

// waitIdle waits until the whole machine has been at least 94 % idle for 150 ms, and returns
// false if it was not within limit.
func waitIdle(limit time.Duration) bool {
	for end := time.Now().Add(limit); ; {
		t0, i0 := cpuTimes()
		time.Sleep(150 * time.Millisecond)
		t1, i1 := cpuTimes()
		if t1 > t0 && float64(i1-i0) >= 0.94*float64(t1-t0) {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// cpuTimes returns the sum of all ticks in the first line of /proc/stat, and the idle ones.
func cpuTimes() (total, idle uint64) {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0, 0
	}
	line, _, _ := strings.Cut(string(b), "\n")
	for i, f := range strings.Fields(line)[1:] {
		v, _ := strconv.ParseUint(f, 10, 64)
		if i < 8 { // user time already includes guest time
			total += v
		}
		if i == 3 || i == 4 {
			idle += v
		}
	}
	return total, idle
}

// box describes the machine, with the two costs that explain most differences between machines.
func box() string {
	model, kernel := "unknown CPU", "unknown"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(b)) {
			if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
				model = strings.TrimSpace(v)
				break
			}
		}
	}
	if b, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		kernel = strings.TrimSpace(string(b))
	}
	const n = 20000
	t := time.Now()
	for range n {
		_, _, _ = unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0)
	}
	return fmt.Sprintf("%d CPUs, %s, Linux %s, %s; system call %d ns, waking a thread on another CPU %.1f us",
		runtime.NumCPU(), model, kernel, runtime.Version(), time.Since(t).Nanoseconds()/n, wakeCost())
}

// wakeCost returns half the round trip between two threads that sleep in reads of an eventfd on
// two CPUs, in microseconds.
func wakeCost() float64 {
	var fd [2]int
	for i := range fd {
		f, err := unix.Eventfd(0, 0)
		if err != nil {
			return 0
		}
		defer unix.Close(f)
		fd[i] = f
	}
	const n = 2000
	pin := func(cpu int) {
		runtime.LockOSThread() // never unlocked, so the thread ends with its goroutine
		var set unix.CPUSet
		set.Set(cpu % runtime.NumCPU())
		_ = unix.SchedSetaffinity(0, &set)
	}
	one := []byte{1, 0, 0, 0, 0, 0, 0, 0}
	echo := make(chan struct{})
	go func() {
		defer close(echo)
		pin(1)
		var b [8]byte
		for range n {
			_, _ = unix.Read(fd[0], b[:])
			_, _ = unix.Write(fd[1], one)
		}
	}()
	took := make(chan time.Duration)
	go func() {
		pin(0)
		var b [8]byte
		t := time.Now()
		for range n {
			_, _ = unix.Write(fd[0], one)
			_, _ = unix.Read(fd[1], b[:])
		}
		took <- time.Since(t)
	}()
	<-echo
	return float64((<-took).Nanoseconds()) / n / 2 / 1000
}
