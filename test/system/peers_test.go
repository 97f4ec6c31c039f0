package system

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestPeerRules checks that a daemon denies peers by the rules of its file, whether they connect
// or its users connect to them, that it reports this, and that it follows a reload.
func TestPeerRules(t *testing.T) {
	p := newPlain(t)
	file := filepath.Join(p.dir, "rules.yaml")
	rules := func(peers string) {
		t.Helper()
		text := "allow:\n  - accept-from: " + peers + "\n    connect-to: " + peers + "\n"
		testenv.WriteFile(t, file, []byte(text), 0o644)
	}
	rules("192.0.2.0/24")
	free, strict := p.host("free"), p.host("strict", "--config", file)
	if code, out := ping(t, free, strict); code == 0 {
		t.Errorf("a denied peer connected: %s", out)
	}
	strict.daemon.Expect("a peer may not connect")
	const why = "may not connect to 127.0.0.1: not in connect-to of rule 1 of allow in "
	if code, out := ping(t, strict, free); code == 0 || !strings.Contains(out, why+file) {
		t.Errorf("a denied connect: exit code %d: %s", code, out)
	}
	rules("[192.0.2.0/24, 127.0.0.0/8]")
	strict.daemon.Signal(syscall.SIGHUP)
	strict.daemon.Expect("reloaded")
	for _, w := range [][2]*plainHost{{free, strict}, {strict, free}} {
		if code, out := ping(t, w[0], w[1]); code != 0 {
			t.Errorf("after the reload: exit code %d: %s", code, out)
		}
	}
}

// ping pings a server on to from the other host.
func ping(t *testing.T, from, to *plainHost) (int, string) {
	t.Helper()
	server := to.serve("ping", "-s", "-P", "-a", "127.0.0.1", "-p", port(t, "127.0.0.1"))
	defer server.Signal(syscall.SIGTERM)
	_, port, _ := net.SplitHostPort(server.at)
	return from.ctl("ping", "-c", "-a", "127.0.0.1", "-p", port, "-C", "3")
}

// TestPeerSet checks that a daemon denies peers that are not in the nftables set of its file, in both
// directions, and follows the set.
func TestPeerSet(t *testing.T) {
	testenv.RequireRoot(t)
	if _, err := exec.LookPath("nft"); err != nil {
		testenv.Skip(t, "needs nft: apt-get install nftables")
	}
	table := fmt.Sprintf("inet iwarpd_test_%d", os.Getpid()) // without chains: it changes no traffic
	nft := func(command string) {
		t.Helper()
		if out, err := exec.Command("nft", command).CombinedOutput(); err != nil {
			t.Errorf("nft %s: %v: %s", command, err, out)
		}
	}
	p := newPlain(t)
	p.caps = []uintptr{unix.CAP_NET_ADMIN}
	free, strict := p.host("free"), p.host("strict", "--allow-set", table+" peers")
	strict.daemon.Expect("the nftables set does not exist, so it allows no peer")
	if code, out := ping(t, free, strict); code == 0 {
		t.Errorf("a denied peer connected: %s", out)
	}
	const why = "may not connect to 127.0.0.1: not in the nftables set "
	if code, out := ping(t, strict, free); code == 0 || !strings.Contains(out, why+table+" peers, which allow-set names") {
		t.Errorf("a denied connect: exit code %d: %s", code, out)
	}
	nft("add table " + table + "; add set " + table + " peers { type ipv4_addr; flags interval; elements = { 127.0.0.0/8 }; }")
	t.Cleanup(func() { nft("delete table " + table) })
	strict.daemon.Expect("following the nftables set")
	for _, w := range [][2]*plainHost{{free, strict}, {strict, free}} {
		if code, out := ping(t, w[0], w[1]); code != 0 {
			t.Errorf("with the set: exit code %d: %s", code, out)
		}
	}
}
