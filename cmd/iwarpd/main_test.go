package main

import (
	"bufio"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// asProgram makes the test binary run as iwarpd.
const asProgram = "TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// TestCrash checks that a daemon that crashes, as by the SIGABRT of systemd's watchdog, ends by a signal. Exit code 2
// means a wrong configuration, after which the unit does not restart it.
func TestCrash(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "--transport", "socket", "--socket", filepath.Join(t.TempDir(), "iwarpd.sock"))
	cmd.Env = append(os.Environ(), asProgram+"=1")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	lines := bufio.NewReader(io.TeeReader(stderr, &said))
	for !bytes.Contains(said.Bytes(), []byte("ready")) {
		if _, err := lines.ReadBytes('\n'); err != nil {
			t.Fatalf("%v: %s", err, said.Bytes())
		}
	}
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(unix.SIGABRT); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, lines) // into said
	_ = cmd.Wait()
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != unix.SIGABRT {
		t.Errorf("%v; want it ended by SIGABRT", cmd.ProcessState)
	}
	if !bytes.Contains(said.Bytes(), []byte("goroutine ")) {
		t.Errorf("no stacks: %s", said.Bytes())
	}
}

// TestAddThreads checks that Go runs a thread more for each worker, unless GOMAXPROCS says how many.
func TestAddThreads(t *testing.T) {
	n := runtime.GOMAXPROCS(0)
	defer runtime.GOMAXPROCS(n)
	t.Setenv("GOMAXPROCS", "")
	addThreads(3)
	if got := runtime.GOMAXPROCS(0); got != n+3 {
		t.Errorf("with three workers Go runs %d threads; want %d", got, n+3)
	}
	t.Setenv("GOMAXPROCS", strconv.Itoa(n+3))
	addThreads(5)
	if got := runtime.GOMAXPROCS(0); got != n+3 {
		t.Errorf("GOMAXPROCS is overridden: %d threads; want %d", got, n+3)
	}
}
