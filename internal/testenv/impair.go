package testenv

import (
	"bufio"
	"bytes"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Impair runs test/impair with the given arguments to forward frames between the halves of the wire
// until the test ends. The returned function stops it earlier and returns what the program printed
// after its ready line.
func (w *Wire) Impair(t testing.TB, args ...string) (stop func() string) {
	t.Helper()
	cmd := w.Mid.Command(Program(t, "test/impair"), append([]string{"-a", w.MidA, "-b", w.MidB}, args...)...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("testenv: start impair: %v", err)
	}
	out := bufio.NewReader(pipe)
	line, err := out.ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "impair: ready ") {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		t.Fatalf("testenv: impair: %q %v\n%s", line, err, stderr.String())
	}
	t.Log(strings.TrimSpace(line))
	var once sync.Once
	var rest string
	stop = func() string {
		once.Do(func() {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			kill := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
			defer kill.Stop()
			var b bytes.Buffer
			_, _ = b.ReadFrom(out)
			if err := cmd.Wait(); err != nil {
				t.Errorf("testenv: impair: %v\n%s", err, stderr.String())
			}
			rest = b.String()
		})
		return rest
	}
	t.Cleanup(func() { stop() })
	return stop
}
