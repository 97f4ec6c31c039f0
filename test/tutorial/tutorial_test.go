// Package tutorial runs what docs/programming.md tells a new user to write.
package tutorial

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const root = "../.."

func TestMain(m *testing.M) { testenv.Main(m) }

// source writes the page's block of that name into a file and returns its path.
func source(t *testing.T, page []byte, name string) string {
	t.Helper()
	m := regexp.MustCompile("(?ms)^```[a-z]+ " + regexp.QuoteMeta(name) + "\n(.*?)^```$").FindSubmatch(page)
	if m == nil {
		t.Fatalf("docs/programming.md has no block %s", name)
	}
	file := filepath.Join(t.TempDir(), name)
	testenv.WriteFile(t, file, m[1], 0o644)
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

// start starts a program that uses the daemon at socket.
func start(t *testing.T, cmd *exec.Cmd, socket string) *testenv.Process {
	t.Helper()
	cmd.Env = append(os.Environ(), "IWARPD_SOCKET="+socket)
	return testenv.Start(t, cmd)
}

func TestTutorial(t *testing.T) {
	testenv.RequireRoot(t)
	for _, tool := range []string{"gcc", "make", "protoc-c", "pkg-config"} {
		testenv.RequireTool(t, tool)
	}
	page := testenv.ReadFile(t, root+"/docs/programming.md")
	dir := t.TempDir()
	inGo, inC, lib := filepath.Join(dir, "board"), filepath.Join(dir, "board-c"), filepath.Join(dir, "libiwarpd")
	run(t, "go", "build", "-o", inGo, source(t, page, "board.go"))
	run(t, "make", "-s", "-j2", "-C", "client/c", "O="+lib)
	run(t, "cc", "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-Iclient/c", source(t, page, "board.c"), "-o", inC,
		"-L"+lib, "-liwarpd", "-Wl,-rpath,"+lib)
	run(t, "cc", "-std=c11", "-D_DEFAULT_SOURCE", "-Wall", "-Wextra", "-Werror", "-Iclient/c", "-c", source(t, page, "serve.c"), "-o", filepath.Join(dir, "serve.o"))
	iwarpd := testenv.Program(t, "cmd/iwarpd")

	v := testenv.NewVeth(t, 1500)
	sockets := [2]string{}
	for i, end := range []*testenv.End{&v.A, &v.B} {
		sockets[i] = filepath.Join(dir, fmt.Sprintf("%d.sock", i))
		start(t, end.NS.Command(iwarpd, "--interface", end.Name, "--socket", sockets[i]), sockets[i]).Expect("ready")
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
			server.Expect("serving " + addr)
			client := start(t, tt.client(), sockets[0])
			client.Expect(`read back "hello by RDMA"`)
			client.Succeed()
			server.Expect(`the client is done; it wrote "hello by RDMA"`)
			server.Succeed()
		})
	}
}
