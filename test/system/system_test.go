// Package system tests iwarpd and iwarpctl as a user runs them, in two network namespaces, including failures.
package system

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// limit bounds the time of anything that should be quick.
const limit = 2 * time.Minute

func TestMain(m *testing.M) { testenv.Main(m) }

// tail returns the last n lines of s.
func tail(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// host is one end of a wire with a daemon on it.
type host struct {
	t      *testing.T
	end    *testenv.End
	socket string
	daemon *testenv.Process
}

// daemonArgs returns the arguments of every daemon in the tests. A daemon that is stopped during a copy does not wait
// for its end.
func daemonArgs(end *testenv.End, socket string) []string {
	return []string{"--interface", end.Name, "--socket", socket, "--drain-timeout", "200ms"}
}

func newHost(t *testing.T, end *testenv.End, args ...string) *host {
	t.Helper()
	h := &host{t: t, end: end, socket: filepath.Join(t.TempDir(), "iwarpd.sock")}
	h.start(args...)
	return h
}

func (h *host) start(args ...string) {
	h.t.Helper()
	h.daemon = testenv.Start(h.t, h.end.NS.Command(testenv.Program(h.t, "cmd/iwarpd"), append(daemonArgs(h.end, h.socket), args...)...))
	h.daemon.Expect("ready")
}

// command is iwarpctl on that host.
func (h *host) command(args ...string) *exec.Cmd {
	return h.end.NS.Command(testenv.Program(h.t, "cmd/iwarpctl"), append([]string{"--socket", h.socket}, args...)...)
}

// ctl runs iwarpctl to its end.
func (h *host) ctl(args ...string) (code int, out string) {
	h.t.Helper()
	p := testenv.Start(h.t, h.command(args...))
	code = p.Wait(2 * limit)
	return code, p.String()
}

// must runs iwarpctl, which must succeed.
func (h *host) must(args ...string) string {
	h.t.Helper()
	code, out := h.ctl(args...)
	if code != 0 {
		h.t.Fatalf("iwarpctl %s: exit code %d: %s", strings.Join(args, " "), code, out)
	}
	return out
}

// serve runs iwarpctl serve on dir.
func (h *host) serve(dir string) *testenv.Process {
	h.t.Helper()
	p := testenv.Start(h.t, h.command("serve", "--dir", dir, "--listen", h.end.Addr4.String()+":7176"))
	p.Expect("listening on")
	return p
}

func (h *host) remote(name string) string { return h.end.Addr4.String() + ":7176/" + name }

// steered reports whether a steering program is attached to the interface, at XDP or at tc
// ingress.
func (h *host) steered() (attached bool) {
	h.t.Helper()
	err := h.end.NS.Do(func() error {
		l, err := netlink.LinkByName(h.end.Name)
		if err != nil {
			return err
		}
		x := l.Attrs().Xdp
		at, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: ebpf.AttachTCXIngress})
		attached = x != nil && x.Attached || err == nil && len(at.Programs) > 0
		return nil // a kernel without tcx
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return attached
}

func pair(t *testing.T, args ...string) (a, b *host) {
	t.Helper()
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	return newHost(t, &v.A, args...), newHost(t, &v.B, args...)
}

// links runs a test with the daemons' default link, which is a packet socket on veth, and with AF_XDP.
func links(t *testing.T, f func(t *testing.T, link string)) {
	for _, link := range []string{"auto", "xdp"} {
		t.Run(link, func(t *testing.T) { f(t, "--link="+link) })
	}
}

// randomFile creates a file of n random bytes and returns its checksum.
func randomFile(t *testing.T, name string, n int) [32]byte {
	t.Helper()
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{7}).Read(b)
	testenv.WriteFile(t, name, b, 0o600)
	return sha256.Sum256(b)
}

// longFile creates a file of zeros that takes seconds to copy, so that a test can act during the copy even on a busy
// machine.
func longFile(t *testing.T, name string) {
	t.Helper()
	testenv.WriteFile(t, name, nil, 0o600)
	if err := os.Truncate(name, 1<<30); err != nil {
		t.Fatal(err)
	}
}

// copying starts a long copy from a to b, into the directory there.
func copying(t *testing.T, a, b *host) (cp, serve *testenv.Process, there string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "f")
	there = t.TempDir()
	longFile(t, file)
	serve = b.serve(there)
	cp = testenv.Start(t, a.command("cp", file, b.remote("g")))
	testenv.Until(t, "the copy begins", func() bool { e, _ := os.ReadDir(there); return len(e) > 0 })
	return cp, serve, there
}

// ended reports whether p has exited.
func ended(p *testenv.Process) bool {
	select {
	case <-p.Done:
		return true
	default:
		return false
	}
}

// stop stops p by SIGSTOP, and reports false if p has exited before.
func stop(t *testing.T, p *testenv.Process) bool {
	t.Helper()
	_ = p.Cmd.Process.Signal(unix.SIGSTOP) // p may have exited
	testenv.Until(t, "the process stops", func() bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.Cmd.Process.Pid))
		return ended(p) || strings.Contains(string(b), ") T ")
	})
	return !ended(p)
}

func checkFile(t *testing.T, name string, want [32]byte) {
	t.Helper()
	b := testenv.ReadFile(t, name)
	if sha256.Sum256(b) != want {
		t.Errorf("%s is not what was sent (%d bytes)", name, len(b))
	}
}

// holds fails the test if dir contains anything other than names.
func holds(t *testing.T, dir string, names ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if fmt.Sprint(got) != fmt.Sprint(names) {
		t.Errorf("%s holds %q; want %q", dir, got, names)
	}
}

func TestCopyPingPerf(t *testing.T) { links(t, copyPingPerf) }

func copyPingPerf(t *testing.T, link string) {
	a, b := pair(t, link)
	dir, there := t.TempDir(), t.TempDir()
	file := filepath.Join(dir, "f")
	sum := randomFile(t, file, 5<<20+17)
	b.serve(there)
	if out := a.must("cp", "--checksum", "sha256", file, b.remote("g")); !strings.Contains(out, fmt.Sprintf("%x", sum)) || !strings.Contains(out, "RDMA Write") {
		t.Errorf("cp printed %q", out)
	}
	checkFile(t, filepath.Join(there, "g"), sum)
	if out := a.must("cp", b.remote("g"), filepath.Join(dir, "h")); !strings.Contains(out, "RDMA Read") {
		t.Errorf("cp printed %q", out)
	}
	checkFile(t, filepath.Join(dir, "h"), sum)

	ping := testenv.Start(t, b.command("ping", "-s", "-a", b.end.Addr4.String()))
	ping.Expect("listening on")
	if out := a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "20", "-S", "65000", "-V", "-v"); strings.Count(out, "ping data: rdma-ping-") != 20 {
		t.Errorf("ping printed %q", tail(out, 3))
	}
	if code := ping.Wait(limit); code != 0 {
		t.Errorf("ping -s: exit code %d", code)
	}

	testenv.Start(t, b.command("perf", "--server")).Expect("listening on")
	var results []struct {
		Op, Mode   string
		Operations int64
	}
	for _, op := range []string{"write", "read", "send"} {
		out := a.must("--json", "perf", op, "--client", b.end.Addr4.String(), "--size", "64,100000", "--iterations", "100")
		if err := json.Unmarshal([]byte(out), &results); err != nil || len(results) != 4 || results[0].Op != op || results[3].Operations != 100 {
			t.Errorf("perf %s: %+v, %v: %s", op, results, err, out)
		}
	}
	for _, args := range [][]string{{"status"}, {"qp", "list"}, {"mr", "list"}, {"listen", "list"}, {"client", "list"}, {"stats"}} {
		var v any
		out := b.must(append([]string{"--json"}, args...)...)
		if err := json.Unmarshal([]byte(out), &v); err != nil {
			t.Errorf("%v --json: %v: %s", args, err, out)
		}
		if out := b.must(args...); strings.TrimSpace(out) == "" {
			t.Errorf("%v prints nothing", args)
		}
	}
}

// TestQueuePairs inspects a connection as an administrator and ends it.
func TestQueuePairs(t *testing.T) {
	a, b := pair(t)
	testenv.Start(t, b.command("ping", "-s", "-P", "-a", b.end.Addr4.String())).Expect("listening on")
	ping := testenv.Start(t, a.command("ping", "-c", "-a", b.end.Addr4.String(), "-v"))
	ping.Expect("rdma-ping-3")
	var qps []struct {
		QP         uint32
		State      string
		Remote     string
		Negotiated struct{ Ird, Ord int }
	}
	out := a.must("--json", "qp", "list")
	if err := json.Unmarshal([]byte(out), &qps); err != nil || len(qps) != 1 {
		t.Fatalf("qp list: %v: %s", err, out)
	}
	if q := qps[0]; q.State != "RTS" || q.Remote != b.end.Addr4.String()+":7174" || q.Negotiated.Ird != 1 || q.Negotiated.Ord != 1 {
		t.Errorf("qp list: %+v", q)
	}
	num := fmt.Sprint(qps[0].QP)
	if out := a.must("qp", "show", num); !strings.Contains(out, "tcp.segs_out") {
		t.Errorf("qp show: %s", out)
	}
	if code, out := a.ctl("qp", "show", "4000000"); code != 1 || !strings.Contains(out, "no queue pair 4000000") {
		t.Errorf("qp show of none: exit code %d, %s", code, out)
	}
	a.must("disconnect", num, "--abort")
	if code := ping.Wait(limit); code != 4 {
		t.Errorf("ping: exit code %d; want 4", code)
	}
	a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "3", "-V") // the server continues
}

// TestTerminate sends SIGTERM during a transfer: the exit code must be 0 and nothing may be left.
func TestTerminate(t *testing.T) {
	a, b := pair(t)
	cp, serve, there := copying(t, a, b)

	b.daemon.Signal(unix.SIGTERM)
	if code := b.daemon.Wait(limit); code != 0 {
		t.Errorf("iwarpd: exit code %d after SIGTERM", code)
	}
	if b.steered() {
		t.Error("a program is still attached")
	}
	if _, err := os.Stat(b.socket); err == nil {
		t.Error("the socket file is still there")
	}
	if code := cp.Wait(limit); code != 4 {
		t.Errorf("cp: exit code %d; want 4: %s", code, cp)
	}
	serve.Expect("is gone: waiting for the next one")
	holds(t, there)
	b.start()
	b.must("status")
	servesAgain(t, a, b)
}

// servesAgain waits until the server on b has found its new daemon and accepts a file.
func servesAgain(t *testing.T, a, b *host) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "again")
	testenv.WriteFile(t, file, []byte("again"), 0o600)
	testenv.Until(t, "the server is there again", func() bool {
		code, _ := a.ctl("cp", file, b.end.Addr4.String()+":7176/again")
		return code == 0
	})
}

// TestKillDaemon kills a daemon: the other side must report it, the kernel gets its interface back, and a new daemon
// can start at once.
func TestKillDaemon(t *testing.T) {
	t.Parallel()
	a, b := pair(t, "--keep-alive", "1s") // the copy may be waiting for a message when the peer dies
	cp, serve, there := copying(t, a, b)

	b.daemon.Signal(unix.SIGKILL)
	b.daemon.Wait(limit)
	serve.Expect("is gone: waiting for the next one")
	testenv.Until(t, "the program is gone", func() bool { return !b.steered() })
	b.start()
	if code := cp.Wait(2 * limit); code != 4 {
		t.Errorf("cp: exit code %d; want 4: %s", code, cp)
	}
	holds(t, there)
	servesAgain(t, a, b)
}

// TestSilentPeer checks that an idle connection to a silent peer is ended by keep-alive.
func TestSilentPeer(t *testing.T) {
	t.Parallel()
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B, "--keep-alive", "1s")
	server := testenv.Start(t, b.command("ping", "-s", "-a", b.end.Addr4.String()))
	server.Expect("listening on")
	ping := testenv.Start(t, a.command("ping", "-c", "-a", b.end.Addr4.String(), "-v"))
	ping.Expect("rdma-ping-3")
	ping.Signal(unix.SIGSTOP)
	var before uint64
	testenv.Until(t, "the connection is idle", func() bool {
		var qps []struct{ TCP map[string]uint64 }
		if err := json.Unmarshal([]byte(b.must("--json", "qp", "list")), &qps); err != nil || len(qps) != 1 {
			t.Fatalf("qp list: %+v, %v", qps, err)
		}
		last := before
		before = qps[0].TCP["segs_in"]
		return before == last && qps[0].TCP["in_flight"] == 0
	})
	// A daemon stopped by SIGSTOP keeps its socket and program but answers nothing.
	a.daemon.Signal(unix.SIGSTOP)
	if code := server.Wait(limit); code != 4 {
		t.Errorf("ping -s: exit code %d; want 4: %s", code, server)
	}
}

// TestKillClient kills a client during a transfer: the peer is notified, the daemon frees its resources, and another
// client's transfer continues.
func TestKillClient(t *testing.T) {
	a, b := pair(t)
	dir, there := t.TempDir(), t.TempDir()
	file := filepath.Join(dir, "f")
	sum := randomFile(t, file, 100<<20)
	serve := b.serve(there)
	other := testenv.Start(t, a.command("cp", file, b.remote("other")))
	testenv.Until(t, "the first copy begins", func() bool { e, _ := os.ReadDir(there); return len(e) == 1 })
	long := filepath.Join(dir, "long")
	longFile(t, long)
	victim := testenv.Start(t, a.command("cp", long, b.remote("victim")))
	testenv.Until(t, "the second copy begins", func() bool { e, _ := os.ReadDir(there); return len(e) > 1 })
	victim.Signal(unix.SIGKILL)
	victim.Wait(limit)
	serve.Expect(`put "victim": `)
	if code := other.Wait(2 * limit); code != 0 {
		t.Errorf("the other copy: exit code %d: %s", code, other)
	}
	checkFile(t, filepath.Join(there, "other"), sum)
	holds(t, there, "other")
	testenv.Until(t, "the daemon frees all", func() bool {
		var s struct{ Clients, Qps, Mrs, Cqs int }
		if err := json.Unmarshal([]byte(a.must("--json", "status")), &s); err != nil {
			t.Fatal(err)
		}
		return s.Clients == 0 && s.Qps == 0 && s.Mrs == 0 && s.Cqs == 0
	})
}

// TestImpairedWire copies over a wire with loss, reordering and delay.
func TestImpairedWire(t *testing.T) {
	t.Parallel()
	testenv.RequireRoot(t)
	w := testenv.NewWire(t, 1500)
	w.Impair(t, "-both", "loss=0.01,reorder=0.02,delay=10ms", "-seed", fmt.Sprint(testenv.Seed(t)))
	a, b := newHost(t, &w.A), newHost(t, &w.B)
	dir, there := t.TempDir(), t.TempDir()
	file := filepath.Join(dir, "f")
	sum := randomFile(t, file, 4<<20)
	b.serve(there)
	a.must("cp", file, b.remote("g"))
	checkFile(t, filepath.Join(there, "g"), sum)
	a.must("cp", b.remote("g"), filepath.Join(dir, "h"))
	checkFile(t, filepath.Join(dir, "h"), sum)
}
