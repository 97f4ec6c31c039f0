package verbs

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestRunMistakes checks what iwarpd-run says of a program that it cannot run, and its exit status, which is the shell's.
func TestRunMistakes(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	testenv.WriteFile(t, text, []byte("x"), 0o600)
	libraries := t.TempDir()
	for _, name := range []string{"libibverbs.so.1", "librdmacm.so.1"} {
		testenv.WriteFile(t, filepath.Join(libraries, name), nil, 0o600)
	}
	for _, tt := range []struct {
		program string
		dir     string
		code    int
		want    string
	}{
		{"iwarp-no-such-program", libraries, 127, "no such program: install it, or give its path"},
		{filepath.Join(dir, "none"), libraries, 127, "no such file: check the path"},
		{dir, libraries, 126, "is not a program"},
		{text, libraries, 126, "may not be executed: chmod +x it, or give the interpreter first"},
		{"true", libraries, 0, ""},
		{"true", dir, 126, "there is no libibverbs.so.1 in " + dir + ": install iwarpd-verbs, or correct IWARPD_VERBS_DIR"},
	} {
		checkMistake(t, tt.program, tt.dir, tt.code, tt.want)
	}
}

// checkMistake runs a program by iwarpd-run with the libraries in dir, and checks the exit status and what is said.
func checkMistake(t *testing.T, program, dir string, code int, want string) {
	t.Helper()
	cmd := exec.Command("sh", "../../client/verbs/iwarpd-run.in", program)
	checkRun(t, cmd, "IWARPD_SOCKET=/none", program, dir, code, want)
}

// checkRun does the same for a command that runs iwarpd-run, with a further variable.
func checkRun(t *testing.T, cmd *exec.Cmd, env, program, dir string, code int, want string) {
	t.Helper()
	cmd.Env = append(os.Environ(), "IWARPD_VERBS_DIR="+dir, env)
	out, err := cmd.CombinedOutput()
	got := 0
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		got = e.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if want != "" {
		want = "iwarpd-run: " + program + ": " + want + "\n"
	}
	if got != code || string(out) != want {
		t.Errorf("%s: exit status %d, %q; want %d, %q", program, got, out, code, want)
	}
}

// TestRunSetUserID checks that iwarpd-run says for which programs the loader ignores it, such as sudo.
func TestRunSetUserID(t *testing.T) {
	testenv.RequireRoot(t)
	program := filepath.Join(t.TempDir(), "program")
	nothing := testenv.ReadFile(t, "/bin/true")
	testenv.WriteFile(t, program, nothing, 0o755)
	if err := os.Chown(program, 65534, 65534); err != nil {
		t.Fatal(err)
	}
	testenv.Chmod(t, program, 0o755|os.ModeSetuid)
	checkMistake(t, program, plain.libraries(t), 0,
		"gets the rights of its owner, and so does not use iwarpd-run: put iwarpd-run after sudo")
}

// TestRunSocket checks that iwarpd-run says why a program will not find a default daemon.
func TestRunSocket(t *testing.T) {
	testenv.RequireRoot(t)
	run := t.TempDir()
	testenv.Chmod(t, filepath.Dir(run), 0o755)
	script := strings.ReplaceAll(string(testenv.ReadFile(t, "../../client/verbs/iwarpd-run.in")), "/run/", run+"/")
	for _, name := range []string{"libibverbs.so.1", "librdmacm.so.1"} {
		testenv.WriteFile(t, filepath.Join(run, name), nil, 0o644)
	}
	none := "no iwarpd at " + run + "/iwarpd/iwarpd.sock: start it, or name its socket with IWARPD_SOCKET"
	closed := "no permission to use " + run + "/iwarpd-eth1/iwarpd.sock: join the group that owns it, or run as root"
	for _, tt := range []struct {
		socket string // of a daemon that starts now, for root
		user   uint32
		env    string
		want   string
	}{
		{"", 0, "IWARPD_SOCKET=", none},
		{"", 0, "IWARPD_SOCKET=/none", ""}, // the libraries say it
		{"", 0, "IWARPD_VERBS=off", ""},
		{"iwarpd-eth1", 0, "IWARPD_SOCKET=", ""},
		{"", 65534, "IWARPD_SOCKET=", closed},
		{"iwarpd", 0, "IWARPD_SOCKET=", ""},
	} {
		if tt.socket != "" {
			testenv.Mkdir(t, filepath.Join(run, tt.socket), 0o755)
			name := filepath.Join(run, tt.socket, "iwarpd.sock")
			l, err := net.Listen("unix", name)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			testenv.Chmod(t, name, 0o660)
		}
		cmd := exec.Command("sh", "-c", script, "iwarpd-run", "true")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: tt.user, Gid: tt.user}}
		checkRun(t, cmd, tt.env, "true", run, 0, tt.want)
	}
}

// TestRunHelp checks that the help of iwarpd-run fails where it cannot be written.
func TestRunHelp(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	help := func() *exec.Cmd { return exec.Command("sh", "../../client/verbs/iwarpd-run.in", "--help") }
	if out, err := help().Output(); err != nil || strings.Count(string(out), "IWARPD_VERBS") != 5 {
		t.Errorf("%v: %s", err, out)
	}
	cmd := help()
	cmd.Stdout = full
	if err := cmd.Run(); err == nil {
		t.Error("it succeeds if the output is full")
	}
}

// TestSettings checks that a program says once which of its variables it ignores and why, and nothing about those it does not.
func TestSettings(t *testing.T) {
	a, _ := newHosts(t, plain)
	dir := t.TempDir()
	for _, tt := range []struct{ env, want string }{
		{"IWARPD_VERBS=on", ""},
		{"IWARPD_VERBS=", ""},
		{"IWARPD_VERBS=false", "IWARPD_VERBS=false is ignored: it must be on or off"},
		{"IWARPD_VERBS_MEMORY=near", ""},
		{"IWARPD_VERBS_MEMORY=foo", "IWARPD_VERBS_MEMORY=foo is ignored: it must be auto, near or far"},
		{"IWARPD_VERBS_TRANSPORT=roce", ""},
		{"IWARPD_VERBS_TRANSPORT=RoCE", "IWARPD_VERBS_TRANSPORT=RoCE is ignored: it must be iwarp or roce"},
		{"IWARPD_VERBS_RECEIVE_WAIT=60000", ""},
		{"IWARPD_VERBS_RECEIVE_WAIT=60001", "IWARPD_VERBS_RECEIVE_WAIT=60001 is ignored: it must be a number of milliseconds up to 60000"},
		{"IWARPD_VERBS_RECEIVE_WAIT=1s", "IWARPD_VERBS_RECEIVE_WAIT=1s is ignored: it must be a number of milliseconds up to 60000"},
		{"IWARPD_VERBS_RECEIVE_WAIT=-1", "IWARPD_VERBS_RECEIVE_WAIT=-1 is ignored: it must be a number of milliseconds up to 60000"},
		{"IWARPD_VERBS_LOG=" + filepath.Join(dir, "log"), ""},
		{"IWARPD_VERBS_LOG=" + dir, "IWARPD_VERBS_LOG=" + dir + ": the log cannot be written: Is a directory; give a file that can, or 1 for standard error"},
		{"IWARPD_VERBS_MEMROY=far", "IWARPD_VERBS_MEMROY=far is ignored: there is no variable IWARPD_VERBS_MEMROY; see iwarpd-run(1)"},
		{"IWARPD_SOCKET=" + dir + "/none", "IWARPD_SOCKET: " + dir + "/none: No such file or directory: is iwarpd running?"},
		{"IWARPD_SOCKET=" + a.socket + "," + dir + "/none", "IWARPD_SOCKET: " + dir + "/none: No such file or directory: is iwarpd running?"},
		{"IWARPD_SOCKET=,", "IWARPD_SOCKET=, is ignored: it must be sockets of daemons, with commas between them"},
	} {
		p := a.start(t, "rping -c -a "+a.end.Addr4.String()+" -C 1", tt.env) // refused at once
		p.Wait(time.Minute)
		var lines []string
		for line := range strings.Lines(p.String()) {
			if _, text, ok := strings.Cut(strings.TrimSpace(line), "]: "); ok && strings.HasPrefix(line, "iwarpd-verbs[") {
				lines = append(lines, text)
			}
		}
		if got := strings.Join(lines, "\n"); got != tt.want {
			t.Errorf("%s: the program says %q, want %q:\n%s", tt.env, got, tt.want, p)
		}
	}
}
