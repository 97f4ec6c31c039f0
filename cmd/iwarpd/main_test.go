package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/dataplane/xsk/hostcheck"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// asProgram makes the test binary run as iwarpd.
const asProgram = "TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// daemonProcess returns a daemon that is ready, the pipe of its log, and what it has logged.
func daemonProcess(t *testing.T) (cmd *exec.Cmd, log io.ReadCloser, said *bytes.Buffer) {
	t.Helper()
	cmd = program(t, "--transport", "socket", "--socket", filepath.Join(t.TempDir(), "iwarpd.sock"))
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said = new(bytes.Buffer)
	lines := bufio.NewReader(io.TeeReader(log, said))
	for !bytes.Contains(said.Bytes(), []byte("ready")) {
		if _, err := lines.ReadBytes('\n'); err != nil {
			t.Fatalf("%v: %s", err, said.Bytes())
		}
	}
	return cmd, log, said
}

// TestStopsWhileStarting checks that a signal ends a daemon whose start takes long, here because a name service does not
// answer, and that this is not an error.
func TestStopsWhileStarting(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	testenv.WriteFile(t, filepath.Join(dir, "getent"), []byte("#!/bin/sh\nread answer <"+fifo+"\n"), 0o700)
	cmd := program(t, "--transport", "socket", "--socket", filepath.Join(dir, "iwarpd.sock"), "--socket-group", "no-such-group")
	cmd.Env = append(cmd.Env, "PATH="+dir)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	asked, err := os.OpenFile(fifo, os.O_WRONLY, 0) // waits for getent
	if err != nil {
		t.Fatal(err)
	}
	defer asked.Close() // ends it
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := ends(t, cmd); err != nil {
		t.Error(err)
	}
}

// TestLogReaderEnds checks that a daemon whose log nobody reads any more keeps running and stops in order. systemd takes
// an end by SIGPIPE for a clean exit, after which the unit is not restarted.
func TestLogReaderEnds(t *testing.T) {
	cmd, log, _ := daemonProcess(t)
	log.Close()
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil { // it logs that it drains
		t.Error(err)
	}
}

// TestLogReaderStalls checks that a daemon whose log is full and not read any more stops in order.
func TestLogReaderStalls(t *testing.T) {
	cmd, log, _ := daemonProcess(t)
	defer log.Close()
	fill(t, log.(*os.File))
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := ends(t, cmd); err != nil { // it logs that it drains
		t.Error(err)
	}
}

// TestErrorReaderStalls checks that the last error waits for no reader either: systemd could not start the daemon again.
func TestErrorReaderStalls(t *testing.T) {
	for _, args := range [][]string{{"--colour"}, {"--colour", "--json"}} {
		cmd := program(t, args...)
		stderr, err := cmd.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		fill(t, stderr.(*os.File))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _ = ends(t, cmd); cmd.ProcessState.ExitCode() != exitConfig {
			t.Errorf("iwarpd %q: %v", args, cmd.ProcessState)
		}
	}
}

// fill fills the pipe of which r is the end to read from.
func fill(t *testing.T, r *os.File) {
	t.Helper()
	// A pipe of its own file description, so that only this end does not wait.
	w, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", r.Fd()), unix.O_WRONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(w)
	for junk := make([]byte, atOnce); err == nil; {
		_, err = unix.Write(w, junk)
	}
	if err != unix.EAGAIN {
		t.Fatal(err)
	}
}

// ends waits until a process ends, and kills it if it does not.
func ends(t *testing.T, cmd *exec.Cmd) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		t.Error("the daemon waits for the reader of its log")
		return <-done
	}
}

// TestCrash checks that a daemon that crashes, as by the SIGABRT of systemd's watchdog, ends by a signal. Exit code 2
// means a wrong configuration, after which the unit does not restart it.
func TestCrash(t *testing.T) {
	cmd, stderr, said := daemonProcess(t)
	if err := unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(unix.SIGABRT); err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(said, stderr)
	_ = cmd.Wait()
	if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != unix.SIGABRT {
		t.Errorf("%v; want it ended by SIGABRT", cmd.ProcessState)
	}
	if !bytes.Contains(said.Bytes(), []byte("goroutine ")) {
		t.Errorf("no stacks: %s", said.Bytes())
	}
}

// program returns iwarpd as a program.
func program(t *testing.T, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

// TestFullOutput checks that each command fails whose results could not be written.
func TestFullOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range [][]string{{"--help"}, {"--version"}, {"--transport", "socket", "--check-config"}, {"doctor", "--help"}, {"doctor", "--transport", "socket"},
		{"doctor", "--transport", "socket", "--json"}, {"completion", "bash"}} {
		var said bytes.Buffer
		cmd := program(t, args...)
		cmd.Stdout, cmd.Stderr = full, &said
		_ = cmd.Run()
		if code := cmd.ProcessState.ExitCode(); code != exitFailure || !strings.Contains(said.String(), "no space left on device") {
			t.Errorf("iwarpd %q >/dev/full: exit code %d: %s", args, code, said.Bytes())
		}
	}
}

// TestErrorsAsJSON checks that with --json standard error has an object, whatever is wrong.
func TestErrorsAsJSON(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"doctor", "--config", "/nonexistent", "--json"}, exitConfig, "cannot read the configuration"},
		{[]string{"doctor", "--json=true", "x"}, exitConfig, `unexpected argument "x"`},
		{[]string{"completion", "tcsh", "--", "--json"}, exitConfig, `unexpected argument "tcsh"; see iwarpd completion --help`},
		{[]string{"completion", "bash", "x", "--", "--json"}, exitConfig, `unexpected argument "x"; see iwarpd completion bash --help`},
		{[]string{"help", "nosuch", "--", "--json"}, exitConfig, `unexpected argument "nosuch"; see iwarpd --help`},
		{[]string{"doctor", "--colour", "--json"}, exitConfig, "unknown flag: --colour"},
		{[]string{"--check-config=maybe", "--", "--json"}, exitConfig, `--check-config is "maybe": must be true or false; see iwarpd --help`},
		{[]string{"doctor", "--json", "--interface", "iwarpd-none"}, exitFailure, "iwarpd cannot work on"},
	} {
		var said bytes.Buffer
		cmd := program(t, tt.args...)
		cmd.Stderr = &said
		_ = cmd.Run()
		var got struct {
			Error string
			Code  int
		}
		if err := json.Unmarshal(said.Bytes(), &got); err != nil || got.Code != tt.code || cmd.ProcessState.ExitCode() != tt.code || !strings.Contains(got.Error, tt.text) {
			t.Errorf("iwarpd %q: exit code %d: %v: %s", tt.args, cmd.ProcessState.ExitCode(), err, said.Bytes())
		}
	}
}

// TestCompletions checks what a shell offers for the value of a flag: words, interfaces, or files where it takes one.
func TestCompletions(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"--crc", ""}, "required\noptional\noff\n:4\n"},
		{[]string{"--log-level", ""}, "debug\ninfo\nwarn\nerror\n:4\n"},
		{[]string{"--link", ""}, "auto\nxdp\npacket\n:4\n"},
		{[]string{"doctor", "--transport", ""}, "afxdp\nsocket\nboth\n:4\n"},
		{[]string{"--mtu", ""}, ":4\n"},    // no files
		{[]string{"--config", ""}, ":0\n"}, // files
	} {
		out, err := program(t, append([]string{"__complete"}, tt.args...)...).Output()
		if err != nil || string(out) != tt.want {
			t.Errorf("%q: %v, %q; want %q", tt.args, err, out, tt.want)
		}
	}
	names, err := hostcheck.Interfaces()
	if out, e := program(t, "__complete", "--interface", "").Output(); err != nil || e != nil || string(out) != strings.Join(append(names, ":4\n"), "\n") {
		t.Errorf("interfaces: %v, %v, %q; want %q", err, e, out, names)
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

// TestHelpWidth checks that the help fits a terminal of 80 columns.
func TestHelpWidth(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"doctor", "--help"}} {
		var out strings.Builder
		root := rootCommand()
		root.SetOut(&out)
		root.SetArgs(args)
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out.String()) {
			if len(line) > 81 {
				t.Errorf("%q: %s", args, line)
			}
		}
	}
}
