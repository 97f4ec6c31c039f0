// Package tutorial runs what docs/programming.md tells a new user to write.
package tutorial

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const root = "../.."

// limit only guards against a hang.
const limit = 2 * time.Minute

// source writes the page's block of that name into a file and returns its path.
func source(t *testing.T, page []byte, name string) string {
	t.Helper()
	m := regexp.MustCompile("(?ms)^```[a-z]+ " + regexp.QuoteMeta(name) + "\n(.*?)^```$").FindSubmatch(page)
	if m == nil {
		t.Fatalf("docs/programming.md has no block %s", name)
	}
	file := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(file, m[1], 0o644); err != nil {
		t.Fatal(err)
	}
	return file
}

func run(t *testing.T, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd, err, out)
	}
}

// A program runs until the test ends, or by itself.
type program struct {
	t   *testing.T
	cmd *exec.Cmd
	out *bufio.Reader
	all strings.Builder
}

func start(t *testing.T, cmd *exec.Cmd, socket string) *program {
	t.Helper()
	p := &program{t: t, cmd: cmd}
	cmd.Env = append(os.Environ(), "IWARPD_SOCKET="+socket)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = cmd.Stdout
	p.out = bufio.NewReader(out)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	killer := time.AfterFunc(limit, func() { _ = cmd.Process.Kill() })
	t.Cleanup(func() {
		killer.Stop()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return p
}

// expect reads until a line has text.
func (p *program) expect(text string) {
	p.t.Helper()
	for {
		line, err := p.out.ReadString('\n')
		p.all.WriteString(line)
		if strings.Contains(line, text) {
			return
		}
		if err != nil {
			_ = p.cmd.Wait()
			p.t.Fatalf("%v: no %q: %v\n%s", p.cmd, text, err, &p.all)
		}
	}
}

// succeed waits for its end.
func (p *program) succeed() {
	p.t.Helper()
	_, _ = io.Copy(&p.all, p.out)
	if err := p.cmd.Wait(); err != nil {
		p.t.Fatalf("%v: %v\n%s", p.cmd, err, &p.all)
	}
}

func TestTutorial(t *testing.T) {
	testenv.RequireRoot(t)
	for _, tool := range []string{"gcc", "make", "protoc-c", "pkg-config"} {
		testenv.RequireTool(t, tool)
	}
	page, err := os.ReadFile(root + "/docs/programming.md")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	inGo, inC, lib := filepath.Join(dir, "board"), filepath.Join(dir, "board-c"), filepath.Join(dir, "libiwarpd")
	run(t, "go", "build", "-o", inGo, source(t, page, "board.go"))
	run(t, "make", "-s", "-j2", "-C", "client/c", "O="+lib)
	run(t, "cc", "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-Iclient/c", source(t, page, "board.c"), "-o", inC,
		"-L"+lib, "-liwarpd", "-Wl,-rpath,"+lib)
	iwarpd := testenv.Build(t, "cmd/iwarpd")

	v := testenv.NewVeth(t, 1500)
	sockets := [2]string{}
	for i, end := range []*testenv.End{&v.A, &v.B} {
		sockets[i] = filepath.Join(dir, fmt.Sprintf("%d.sock", i))
		start(t, end.NS.Command(iwarpd, "--interface", end.Name, "--socket", sockets[i]), sockets[i]).expect("ready")
	}
	addr := v.B.Addr4.String() + ":7300"
	for _, tt := range []struct {
		name   string
		client func() *exec.Cmd
	}{
		{"Go", func() *exec.Cmd { return exec.Command(inGo, "write", addr, "hello by RDMA") }},
		{"C", func() *exec.Cmd { return exec.Command(inC, addr, "hello by RDMA") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := start(t, exec.Command(inGo, "serve", addr), sockets[1])
			server.expect("serving " + addr)
			client := start(t, tt.client(), sockets[0])
			client.expect(`read back "hello by RDMA"`)
			client.succeed()
			server.expect(`the client is done; it wrote "hello by RDMA"`)
			server.succeed()
		})
	}
}
