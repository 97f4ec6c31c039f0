package upgrade

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const tree = "../.."

// release returns the revision whose clients must work with today's daemon: the newest release (CONTRIBUTING.md has the
// recipe) or, before the first one, the commit that CHANGELOG.md names.
func release(t *testing.T) string {
	t.Helper()
	if out, err := exec.Command("git", "-C", tree, "describe", "--tags", "--abbrev=0", "--match", "v[0-9]*").Output(); err == nil {
		return strings.TrimSpace(string(out))
	}
	b := testenv.ReadFile(t, tree+"/CHANGELOG.md")
	m := regexp.MustCompile(`(?m)^Clients of commit ([0-9a-f]{7,40}) and later`).FindSubmatch(b)
	if m == nil {
		t.Fatal("there is no release, and CHANGELOG.md names no commit")
	}
	return string(m[1])
}

// checkout unpacks a revision.
func checkout(t *testing.T, revision string) string {
	t.Helper()
	if err := exec.Command("git", "-C", tree, "cat-file", "-e", revision+"^{commit}").Run(); err != nil {
		if out, _ := exec.Command("git", "-C", tree, "rev-parse", "--is-shallow-repository").Output(); string(out) == "true\n" {
			t.Skipf("a shallow clone does not have %s: git fetch --unshallow", revision)
		}
		t.Fatalf("this clone does not have %s", revision)
	}
	dir := t.TempDir()
	archive := exec.Command("git", "-C", tree, "archive", "--format=tar", revision)
	unpack := exec.Command("tar", "-C", dir, "-xf", "-")
	var archiveErr, unpackErr bytes.Buffer
	archive.Stderr, unpack.Stderr = &archiveErr, &unpackErr
	pipe, err := archive.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	unpack.Stdin = pipe
	if err := unpack.Start(); err != nil {
		t.Fatal(err)
	}
	if err := archive.Run(); err != nil {
		t.Fatalf("git archive: %v %s", err, &archiveErr)
	}
	if err := unpack.Wait(); err != nil {
		t.Fatalf("tar: %v %s", err, &unpackErr)
	}
	return dir
}

// TestReleasedClients checks that clients of the last release, in Go and in C, work with today's daemon and programs.
func TestReleasedClients(t *testing.T) {
	testenv.RequireRoot(t)
	testenv.RequireTool(t, "git")
	revision := release(t)
	old := checkout(t, revision)
	build := exec.Command("go", "build", "-trimpath", "-o", filepath.Join(old, "iwarpctl"), "./cmd/iwarpctl")
	build.Dir = old
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("iwarpctl of %s: %v\n%s", revision, err, out)
	}
	oldC := filepath.Join(old, "out")
	if out, err := exec.Command("make", "-s", "-j2", "-C", filepath.Join(old, "client/c"), "O="+oldC, "CC=gcc", "VERSION=0").CombinedOutput(); err != nil {
		t.Fatalf("the C library of %s: %v\n%s", revision, err, out)
	}
	oldCtl, oldPing := filepath.Join(old, "iwarpctl"), filepath.Join(oldC, "ping")
	ctl, ping := testenv.Program(t, "cmd/iwarpctl"), buildC(t)

	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B)
	addr := b.end.Addr4.String()
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "f")
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	testenv.WriteFile(t, file, want, 0o600)
	must := func(h *host, program string, args ...string) string {
		t.Helper()
		out, err := h.end.NS.Command(program, args...).CombinedOutput()
		if err != nil {
			t.Errorf("%s %s: %v\n%s", program, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	for _, tt := range []struct{ name, server, client, ping string }{
		{"old servers", oldCtl, ctl, ping}, {"old clients", ctl, oldCtl, oldPing}, {"both old", oldCtl, oldCtl, oldPing},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, args := range [][]string{{"serve", "--dir", dir, "--listen", addr}, {"ping", "-s", "-P", "-a", addr}, {"perf", "write", "--server", "--listen", addr}} {
				p := testenv.Start(t, b.end.NS.Command(tt.server, append([]string{"--socket", b.socket}, args...)...))
				p.Expect("listening on")
			}
			name := strings.ReplaceAll(tt.name, " ", "-")
			must(a, tt.client, "--socket", a.socket, "cp", file, addr+":"+name)
			if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, want) {
				t.Errorf("the copy is another: %v", err)
			}
			must(a, tt.client, "--socket", a.socket, "ping", "-c", "-a", addr, "-C", "20", "-S", "60000", "-V")
			must(a, tt.ping, "-u", a.socket, "-c", "-a", addr, "-C", "20", "-S", "60000", "-V")
			for _, op := range []string{"write", "read", "send"} {
				must(a, tt.client, "--socket", a.socket, "perf", op, "--client", addr, "--iterations", "50", "--size", "4096")
			}
			if out := must(a, tt.client, "--socket", a.socket, "status"); !strings.Contains(out, "iwarpd") {
				t.Errorf("status: %s", out)
			}
		})
	}
}
