// Package upgrade replaces the daemon repeatedly, as the packages do, while clients in Go and C check what they
// transfer. `make upgrade-test` does so 50 times.
package upgrade

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const limit = time.Minute

// host is one end of the wire, with the daemon that is installed there.
type host struct {
	t      *testing.T
	end    *testenv.End
	dir    string
	socket string
	daemon *testenv.Process
}

func newHost(t *testing.T, end *testenv.End) *host {
	h := &host{t: t, end: end, dir: t.TempDir()}
	h.socket = filepath.Join(h.dir, "iwarpd.sock")
	h.install()
	h.start()
	return h
}

// install replaces the program as dpkg and rpm do: a new file takes the name of the running one.
func (h *host) install() {
	h.t.Helper()
	name := filepath.Join(h.dir, "iwarpd")
	testenv.WriteFile(h.t, name+".new", testenv.ReadFile(h.t, testenv.Program(h.t, "cmd/iwarpd")), 0o755)
	if err := os.Rename(name+".new", name); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) start() {
	h.t.Helper()
	h.daemon = testenv.Start(h.t, h.end.NS.Command(filepath.Join(h.dir, "iwarpd"), "--interface", h.end.Name, "--socket", h.socket, "--drain-timeout", "300ms"))
	h.daemon.Expect("ready")
}

// upgrade does what the scripts of the packages do through systemd: it stops the daemon by SIGTERM and starts the new
// program.
func (h *host) upgrade() {
	h.t.Helper()
	h.install()
	h.daemon.Signal(unix.SIGTERM)
	if code := h.daemon.Wait(limit); code != 0 {
		h.t.Fatalf("the daemon: exit code %d: %s", code, h.daemon)
	}
	h.start()
}

// A client prints one line for each connection, after one good round on it, and one line for each loss.
type client struct {
	name  string
	p     *testenv.Process
	lost  string // printed when a connection ended
	conns int    // connections seen
}

var connected = regexp.MustCompile(`connected to \S+, round (\d+)`)

// next waits for the next connection, and for progress on it.
func (c *client) next(t *testing.T, upgrade string) {
	t.Helper()
	deadline := time.After(limit)
	for {
		m := connected.FindAllStringSubmatch(c.p.String(), -1)
		if len(m) > c.conns+1 {
			t.Fatalf("%s: %s connected %d times", upgrade, c.name, len(m)-c.conns)
		}
		if len(m) > c.conns {
			c.conns++
			return
		}
		select {
		case <-c.p.Done:
			t.Fatalf("%s: %s ended:\n%s", upgrade, c.name, c.p)
		case <-deadline:
			t.Fatalf("%s: %s did not connect again:\n%s", upgrade, c.name, c.p)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// held returns how many descriptors a process has open, and its resident memory in KiB.
func held(t *testing.T, p *testenv.Process) (fds, rss int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/", p.Cmd.Process.Pid)
	l, err := os.ReadDir(dir + "fd")
	if err != nil {
		t.Fatal(err)
	}
	b := testenv.ReadFile(t, dir+"status")
	m := regexp.MustCompile(`RssAnon:\s+(\d+) kB`).FindSubmatch(b)
	if m == nil {
		t.Fatalf("no RssAnon in %s", b)
	}
	rss, _ = strconv.Atoi(string(m[1]))
	return len(l), rss
}

// buildC builds the example of the C library.
func buildC(t *testing.T) string {
	t.Helper()
	for _, tool := range []string{"gcc", "make", "protoc-c", "pkg-config"} {
		testenv.RequireTool(t, tool)
	}
	dir := testenv.Dir(t)
	if out, err := exec.Command("make", "-s", "-j2", "-C", "../../client/c", "O="+dir, "CC=gcc").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return filepath.Join(dir, "ping")
}

// A side is an end of the wire whose daemon can be replaced.
type side struct {
	upgrade func()
	socket  string
}

// TestUpgrades checks the programs of upgrades with daemons that the test starts itself.
func TestUpgrades(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B)
	upgrades(t, v, [2]side{{a.upgrade, a.socket}, {b.upgrade, b.socket}})
	for _, h := range []*host{a, b} {
		if out := h.daemon.String(); strings.Contains(out, "\tERROR\t") || strings.Contains(out, "panic") {
			t.Errorf("the daemon: %s", out)
		}
	}
}

// upgrades checks that clients and servers reconnect when their own daemon or the peer's is replaced, without a
// crash, a wrong byte or anything left behind, and that they print one line for each loss.
func upgrades(t *testing.T, v *testenv.Veth, sides [2]side) {
	t.Helper()
	rounds := testenv.Count(t, "UPGRADES", 3)
	ping, reconnect, ctl := buildC(t), testenv.Program(t, "client/examples/reconnect"), testenv.Program(t, "cmd/iwarpctl")
	a, b, addr := sides[0], sides[1], v.B.Addr4.String()
	servers := []*testenv.Process{
		testenv.Start(t, v.B.NS.Command(reconnect, "-socket", b.socket, "-listen", addr+":7190")),
		testenv.Start(t, v.B.NS.Command(ctl, "--socket", b.socket, "ping", "-s", "-P", "-a", addr)),
	}
	for _, s := range servers {
		s.Expect("listening on")
	}
	clients := []*client{
		{name: "the Go client", lost: "again", p: testenv.Start(t, v.A.NS.Command(reconnect, "-socket", a.socket, "-dial", addr+":7190"))},
		{name: "the C client", lost: "ping: ", p: testenv.Start(t, v.A.NS.Command(ping, "-u", a.socket, "-c", "-r", "-V", "-S", "60000", "-C", "2000000000", "-a", addr))},
	}
	processes := append([]*testenv.Process{clients[0].p, clients[1].p}, servers...)
	names := []string{clients[0].name, clients[1].name, "the Go server", "iwarpctl ping -s"}
	for _, c := range clients {
		c.next(t, "at first")
	}
	type use struct{ fds, rss int }
	before := make([]use, len(processes))
	for i := range rounds {
		name := fmt.Sprintf("upgrade %d of host %c", i+1, 'a'+i%2)
		sides[i%2].upgrade()
		for _, c := range clients {
			c.next(t, name)
		}
		if i == min(rounds-1, 3) { // both daemons were replaced, and pools have filled
			for j, p := range processes {
				before[j].fds, before[j].rss = held(t, p)
			}
		}
	}
	for i, p := range processes {
		fds, rss := held(t, p)
		t.Logf("%s: %d descriptors (%d), %d KiB of memory (%d)", names[i], fds, before[i].fds, rss, before[i].rss)
		if fds > before[i].fds+2 {
			t.Errorf("%s has %d descriptors open, had %d", names[i], fds, before[i].fds)
		}
		if rss > before[i].rss+16<<10 {
			t.Errorf("%s has %d KiB of memory, had %d", names[i], rss, before[i].rss)
		}
	}
	for _, c := range clients {
		var losses int
		for line := range strings.Lines(c.p.String()) {
			if !connected.MatchString(line) && strings.Contains(line, c.lost) {
				losses++
			}
		}
		if n := strings.Count(c.p.String(), "\n"); losses != rounds || n != 2*rounds+1 {
			t.Errorf("%s printed %d lines about %d upgrades, %d in all:\n%s", c.name, losses, rounds, n, c.p)
		} else {
			t.Logf("%s printed one line about each of %d upgrades; its last ones:\n%s", c.name, rounds, lastLines(c.p.String(), 4))
		}
	}
}

// lastLines returns the last n lines of s.
func lastLines(s string, n int) string {
	l := strings.SplitAfter(strings.TrimSpace(s), "\n")
	return strings.Join(l[max(0, len(l)-n):], "")
}
