package testenv

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// shared holds the directory that Dir returns, "" until it is created.
var shared struct {
	mu  sync.Mutex
	dir string
}

// Dir returns a directory shared by all tests of a binary. Its TestMain must call Main.
func Dir(t testing.TB) string {
	t.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.dir == "" {
		dir, err := os.MkdirTemp("", "iwarpd-test")
		if err != nil {
			t.Fatal(err)
		}
		shared.dir = dir
	}
	return shared.dir
}

// Program compiles a package of this module with the flags of a release, unless that is done already, into Dir, and returns the
// program's path. With PROGRAMS in the environment it returns the program of that folder instead, for machines without the
// compiler.
func Program(t testing.TB, pkg string) string {
	t.Helper()
	if dir := os.Getenv("PROGRAMS"); dir != "" {
		return filepath.Join(dir, filepath.Base(pkg))
	}
	bin := filepath.Join(Dir(t), filepath.Base(pkg))
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if _, err := os.Stat(bin); err == nil {
		return bin
	}
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "github.com/iwarpd/iwarpd/"+pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("testenv: build %s: %v\n%s", pkg, err, out)
	}
	return bin
}

// Main runs the tests, removes Dir, and exits.
func Main(m *testing.M) {
	code := m.Run()
	if shared.dir != "" {
		_ = os.RemoveAll(shared.dir)
	}
	os.Exit(code)
}

// Process is a running program.
type Process struct {
	Cmd  *exec.Cmd
	Done <-chan struct{} // closed when the process has exited

	t   testing.TB
	out output // standard output and error
}

// Start starts cmd. The process is killed when the test ends; if the test failed, the last lines of
// its output are logged.
func Start(t testing.TB, cmd *exec.Cmd) *Process {
	t.Helper()
	done := make(chan struct{})
	p := &Process{Cmd: cmd, Done: done, t: t, out: output{grew: make(chan struct{})}}
	cmd.Stdout, cmd.Stderr = &p.out, &p.out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = cmd.Wait()
		close(done)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		if t.Failed() {
			t.Logf("%s:\n%s", p.name(), p.tail())
		}
	})
	return p
}

func (p *Process) name() string { return strings.Join(p.Cmd.Args, " ") }

// tail returns the last lines of the output.
func (p *Process) tail() string {
	lines := strings.Split(strings.TrimSpace(p.String()), "\n")
	return strings.Join(lines[max(0, len(lines)-30):], "\n")
}

// String returns the output so far.
func (p *Process) String() string {
	p.out.mu.Lock()
	defer p.out.mu.Unlock()
	return p.out.buf.String()
}

// Expect waits until the process has printed text.
func (p *Process) Expect(text string) {
	p.t.Helper()
	deadline := time.After(2 * patience)
	for {
		p.out.mu.Lock()
		found, grew := strings.Contains(p.out.buf.String(), text), p.out.grew
		p.out.mu.Unlock()
		if found {
			return
		}
		select {
		case <-grew:
		case <-p.Done:
			if !strings.Contains(p.String(), text) {
				p.t.Fatalf("%s ended without %q:\n%s", p.name(), text, p.tail())
			}
			return
		case <-deadline:
			p.t.Fatalf("%s: no %q within %v:\n%s", p.name(), text, 2*patience, p.tail())
		}
	}
}

// Wait waits up to limit for the process to exit, and returns the exit code.
func (p *Process) Wait(limit time.Duration) int {
	p.t.Helper()
	select {
	case <-p.Done:
	case <-time.After(limit):
		p.t.Fatalf("%s did not end within %v:\n%s", p.name(), limit, p.tail())
	}
	return p.Cmd.ProcessState.ExitCode()
}

// Succeed waits for the process to exit, and fails the test unless the exit code is 0.
func (p *Process) Succeed() {
	p.t.Helper()
	if code := p.Wait(2 * patience); code != 0 {
		p.t.Fatalf("%s: %v:\n%s", p.name(), p.Cmd.ProcessState, p.tail())
	}
}

// Signal sends the process a signal.
func (p *Process) Signal(s os.Signal) {
	p.t.Helper()
	if err := p.Cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// output collects what a process prints.
type output struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	grew chan struct{}
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.buf.Write(b)
	close(o.grew)
	o.grew = make(chan struct{})
	return len(b), nil
}
