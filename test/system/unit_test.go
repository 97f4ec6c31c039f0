package system

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// asUnit starts a program on h with the capabilities and the system calls that the unit allows.
func (h *host) asUnit(unit, program string, args ...string) *testenv.Process {
	h.t.Helper()
	all := append(testenv.Unit(h.t, "../../deploy/"+unit), testenv.Program(h.t, program))
	return testenv.Start(h.t, h.end.NS.Command(all[0], append(all[1:], args...)...))
}

// TestUnits checks that the daemon and the servers work with the capabilities and the system calls that their units allow.
func TestUnits(t *testing.T) {
	testenv.RequireRoot(t)
	for _, link := range []string{"packet", "xdp"} {
		t.Run(link, func(t *testing.T) {
			v := testenv.NewVeth(t, 1500)
			start := func(end *testenv.End) *host {
				h := &host{t: t, end: end, socket: filepath.Join(t.TempDir(), "iwarpd.sock")}
				args := append(daemonArgs(end, h.socket), "--link", link, "--transport", "both", "--queues", "0", "--cpus", "0",
					"--socket-group", "0", "--metrics", "unix:"+h.socket+".metrics", "--log-level", "warn")
				h.daemon = h.asUnit("iwarpd.service", "cmd/iwarpd", args...)
				testenv.Until(t, "the daemon has its socket", func() bool {
					_, err := os.Stat(h.socket)
					return err == nil || ended(h.daemon)
				})
				return h
			}
			a, b := start(&v.A), start(&v.B)
			addr, dir, there := b.end.Addr4.String(), t.TempDir(), t.TempDir()
			serve := func(unit string, args ...string) {
				t.Helper()
				b.asUnit("units/iwarpctl-"+unit, "cmd/iwarpctl", append([]string{"--socket", b.socket}, args...)...).Expect("ing ") // listening or serving
			}
			serve("serve.service", "serve", "--dir", there)
			serve("ping.service", "ping", "-s", "-P")
			serve("ping.service", "ping", "-s", "-P", "-p", "7184", "--transport", "socket")
			serve("perf.service", "perf", "--server")
			serve("nfs@.service", "nfs", "export", there, "--no-root-squash", "--key-file", filepath.Join(dir, "key"))

			file := filepath.Join(dir, "f")
			sum := randomFile(t, file, 3<<20)
			a.must("cp", "-p", "--resume", file, b.remote(""))
			checkFile(t, filepath.Join(there, "f"), sum)
			a.must("cp", b.remote("f"), filepath.Join(dir, "back"))
			checkFile(t, filepath.Join(dir, "back"), sum)
			a.must("ping", "-c", "-a", addr, "-C", "10", "-V")
			a.must("ping", "-c", "-a", addr, "-C", "10", "-V", "-p", "7184", "--transport", "socket")
			for _, op := range []string{"write", "read", "send"} {
				a.must("perf", op, "--client", addr, "--iterations", "100", "--qps", "3")
			}
			a.must("nfs", "put", file, addr+":/g")
			checkFile(t, filepath.Join(there, "g"), sum)
			a.must("nfs", "ls", addr+":/")
			a.must("status")
			for _, h := range []*host{a, b} {
				h.daemon.Signal(unix.SIGHUP)
				h.must("status")
				h.daemon.Signal(unix.SIGTERM)
				if code := h.daemon.Wait(limit); code != 0 || h.daemon.String() != "" {
					t.Errorf("exit code %d: %s", code, h.daemon)
				}
			}
		})
	}
}
