package system

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestPeerRules: a daemon denies peers by the rules of its file, both as they connect and as its
// users connect to them, says so, and follows a reload.
func TestPeerRules(t *testing.T) {
	p := newPlain(t)
	file := filepath.Join(p.dir, "rules.yaml")
	rules := func(peers string) {
		t.Helper()
		text := "allow:\n  - accept-from: " + peers + "\n    connect-to: " + peers + "\n"
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	rules("192.0.2.0/24")
	free, strict := p.host("free"), p.host("strict", "--config", file)
	try := func(from, to *plainHost) (int, string) {
		t.Helper()
		server := to.serve("ping", "-s", "-P", "-a", "127.0.0.1", "-p", freePort(t, "127.0.0.1"))
		defer server.Signal(syscall.SIGTERM)
		_, port, _ := net.SplitHostPort(server.at)
		return from.ctl("ping", "-c", "-a", "127.0.0.1", "-p", port, "-C", "3")
	}
	if code, out := try(free, strict); code == 0 {
		t.Errorf("a denied peer connected: %s", out)
	}
	strict.daemon.Expect("a peer may not connect")
	const why = "may not connect to 127.0.0.1: not in connect-to of rule 1 of allow in "
	if code, out := try(strict, free); code == 0 || !strings.Contains(out, why+file) {
		t.Errorf("a denied connect: exit code %d: %s", code, out)
	}
	rules("[192.0.2.0/24, 127.0.0.0/8]")
	strict.daemon.Signal(syscall.SIGHUP)
	strict.daemon.Expect("reloaded")
	for _, w := range [][2]*plainHost{{free, strict}, {strict, free}} {
		if code, out := try(w[0], w[1]); code != 0 {
			t.Errorf("after the reload: exit code %d: %s", code, out)
		}
	}
}
