package system

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestSCTP runs the applications over SCTP, where they behave the same, on daemons of their own.
func TestSCTP(t *testing.T) {
	for _, kind := range []string{"sctp", "sctp-udp", "sctp-draft"} {
		t.Run(kind, func(t *testing.T) {
			a, b := pair(t)
			dir, there := t.TempDir(), t.TempDir()
			file := filepath.Join(dir, "f")
			sum := randomFile(t, file, 3<<20+17)
			server := testenv.Start(t, b.command("serve", "--dir", there, "--listen", b.end.Addr4.String()+":7176", "--transport", kind))
			server.Expect("listening on")
			a.must("cp", file, b.remote("g"), "--transport", kind)
			checkFile(t, filepath.Join(there, "g"), sum)
			a.must("cp", b.remote("g"), filepath.Join(dir, "h"), "--transport", kind)
			checkFile(t, filepath.Join(dir, "h"), sum)

			ping := testenv.Start(t, b.command("ping", "-s", "-a", b.end.Addr4.String(), "--transport", kind))
			ping.Expect("listening on")
			if out := a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "20", "-S", "65000", "-V", "-v", "--transport", kind); strings.Count(out, "ping data: rdma-ping-") != 20 {
				t.Errorf("ping printed %q", tail(out, 3))
			}
			if code := ping.Wait(limit); code != 0 {
				t.Errorf("the ping server ended with %d", code)
			}
			perf := testenv.Start(t, b.command("perf", "write", "--server", "--listen", b.end.Addr4.String()+":7178", "--transport", kind))
			perf.Expect("listening on")
			out := a.must("perf", "write", "--client", b.end.Addr4.String()+":7178", "--size", "65536", "--iterations", "2000", "--mode", "bw", "--transport", kind)
			t.Log(tail(out, 3))
			// Many queue pairs, on one association: that of a single local port.
			run := testenv.Start(t, a.command("perf", "write", "--client", b.end.Addr4.String()+":7178", "--size", "4096", "--duration", "1m", "--mode", "bw", "--transport", kind, "--qps", "12", "--shared-association"))
			from := make(map[string]bool)
			testenv.Until(t, "12 queue pairs", func() bool {
				var qps []struct{ State, Local string }
				if err := json.Unmarshal([]byte(a.must("--json", "qp", "list")), &qps); err != nil {
					t.Fatal(err)
				}
				n := 0
				clear(from)
				for _, q := range qps {
					if q.State == "RTS" {
						n++
						from[q.Local] = true
					}
				}
				return n == 12
			})
			if len(from) != 1 {
				t.Errorf("associations from %v", from)
			}
			run.Signal(os.Interrupt)
			run.Wait(limit)
		})
	}
}

// TestSCTPBehindRouter uses a path whose MTU is smaller than that of the interface. Packets in flight when the first
// ICMP error arrives leave as IP fragments, and the daemon at the other end reassembles them.
func TestSCTPBehindRouter(t *testing.T) {
	w := testenv.NewWire(t, 1500)
	w.Route(t, 1500, 1300)
	a, b := newHost(t, &w.A), newHost(t, &w.B)
	for i, tc := range []struct{ kind, addr string }{
		{"sctp", w.B.Addr4.String()}, {"sctp", "[" + w.B.Addr6.String() + "]"}, {"sctp-udp", "[" + w.B.Addr6.String() + "]"},
	} {
		dir, there := t.TempDir(), t.TempDir()
		file, at := filepath.Join(dir, "f"), tc.addr+":"+strconv.Itoa(7176+i)
		sum := randomFile(t, file, 1<<20+17)
		server := testenv.Start(t, b.command("serve", "--dir", there, "--listen", at, "--transport", tc.kind))
		server.Expect("listening on")
		before := b.counter("fragments.packets")
		a.must("cp", file, at+"/g", "--transport", tc.kind)
		checkFile(t, filepath.Join(there, "g"), sum)
		n := b.counter("fragments.packets") - before
		if n == 0 {
			t.Errorf("%s to %s: no packet came in fragments", tc.kind, tc.addr)
		}
		t.Logf("%s to %s: %d packets came in fragments", tc.kind, tc.addr, n)
	}
}

// counter returns one counter of iwarpctl stats.
func (h *host) counter(name string) (n int) {
	h.t.Helper()
	for line := range strings.Lines(h.must("stats")) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == name {
			n, _ = strconv.Atoi(f[1])
		}
	}
	return n
}
