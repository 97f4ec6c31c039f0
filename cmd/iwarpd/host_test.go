package main

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/ctrl/hostnet"
	"github.com/iwarpd/iwarpd/dataplane/xsk"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestLeftOut checks that with the suggested fix every frame arrives on a queue that is served.
func TestLeftOut(t *testing.T) {
	for _, tt := range []struct {
		queues []int
		have   int
		want   string // suffix of the message; "": no message
	}{
		{[]int{0}, 1, ""},
		{[]int{3, 1, 0, 2}, 4, ""},
		{[]int{1, 3}, 4, ": ethtool -X eth0 weight 0 1 0 1"},
		{[]int{3}, 4, ": ethtool -X eth0 weight 0 0 0 1"},
		{[]int{1, 0}, 4, ": ethtool -X eth0 weight 1 1 0 0, or ethtool -L eth0 combined 2"},
	} {
		got := leftOut("eth0", tt.queues, tt.have)
		if !strings.HasSuffix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%v of %d: %q; want it to end with %q", tt.queues, tt.have, got, tt.want)
		}
	}
}

func TestCheckFiles(t *testing.T) {
	for _, tt := range []struct {
		most   uint64
		queues int
		slots  int
		ok     bool
	}{
		{20, 1, 0, false}, {71, 1, 0, false}, {72, 1, 0, true}, {1024, 64, 0, true}, {512, 64, 0, false}, {unix.RLIM_INFINITY, 64, 0, true},
		{135, 1, 64, false}, {136, 1, 64, true},
	} {
		err := checkFiles(tt.most, tt.queues, tt.slots)
		if (err == nil) != tt.ok {
			t.Errorf("%d files, %d queues: %v", tt.most, tt.queues, err)
		}
		if err != nil && (!strings.Contains(err.Error(), "LimitNOFILE") || exitCode(err) != exitConfig) {
			t.Errorf("%v, exit code %d", err, exitCode(err))
		}
	}
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil || openFiles() != l.Cur {
		t.Errorf("%d files: %v, %v", openFiles(), l, err)
	}
}

func TestCheckThreads(t *testing.T) {
	cpus := uint64(min(runtime.GOMAXPROCS(0), 16))
	for most, ok := range map[uint64]bool{0: false, 64 + cpus: false, 65 + cpus: true, math.MaxUint64: true} {
		err := checkThreads(most, 1)
		told := err != nil && strings.Contains(err.Error(), "TasksMax") && exitCode(err) == exitConfig
		if (err == nil) != ok || told == ok {
			t.Errorf("%d threads: %v, exit code %d", most, err, exitCode(err))
		}
	}
}

// TestSocketDir checks that the users of the socket can reach it in a folder that the daemon makes, also where root's umask is strict.
func TestSocketDir(t *testing.T) {
	defer unix.Umask(unix.Umask(0o077))
	dir := filepath.Join(t.TempDir(), "iwarpd")
	undo, err := makeSocketDir(filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(dir); err != nil || st.Mode().Perm() != 0o755 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	undo()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}

// TestPlaces checks that a socket, a slot or metrics that cannot be where they should be give an error that says how to
// choose another place. systemd starts the daemon again after exit code 1, as for a file system that is full, and not after 2.
func TestPlaces(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	file, full := filepath.Join(dir, "file"), filepath.Join(dir, "full")
	testenv.WriteFile(t, file, nil, 0o600)
	testenv.Mkdir(t, full, 0o700)
	if err := unix.Mount("tmpfs", full, "tmpfs", 0, "nr_inodes=1"); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Unmount(full, 0) }()
	const slots, socket, metrics = `another "folder:" of slots`, "another path with --socket", "another place with --metrics"
	for _, tt := range []struct {
		key, place string
		code       int
		want       string
	}{
		{"slots", file, exitConfig, "not a directory: give " + slots},
		{"slots", filepath.Join(dir, "a", "b"), exitConfig, "make the folder, or give " + slots},
		{"slots", filepath.Join(full, "slots"), exitFailure, "make room there, or give " + slots},
		{"socket", filepath.Join(dir, "a", "b", "s"), exitConfig, "make the folder, or give " + socket},
		{"socket", filepath.Join(full, "s"), exitFailure, "make room there, or give " + socket},
		{"socket", filepath.Join(full, "a", "s"), exitFailure, "make room there, or give " + socket},
		{"metrics", file, exitConfig, "exists and is not a socket: give " + metrics},
		{"metrics", filepath.Join(full, "m"), exitFailure, "make room there, or give " + metrics},
	} {
		text := "transport: socket\nsocket: " + filepath.Join(dir, "sock") + "\n"
		switch tt.key {
		case "slots":
			text += "slots: {count: 1, folder: " + tt.place + "}\n"
		case "metrics":
			text += "metrics: unix:" + tt.place + "\n"
		case "socket":
			text = "transport: socket\nsocket: " + tt.place + "\n"
		}
		s := parsed(t, text)
		_, err := start(s)
		if err == nil || exitCode(err) != tt.code || !strings.HasSuffix(err.Error(), tt.want) {
			t.Errorf("%s %s: exit code %d: %v; want %d and %q", tt.key, tt.place, exitCode(err), err, tt.code, tt.want)
		}
	}
}

// TestLacks checks that an error of start blames neither the configuration nor the interface if this process or the
// host lacks something: the unit does not start again after a wrong configuration.
func TestLacks(t *testing.T) {
	for _, lack := range []error{unix.ENOMEM, unix.ENOBUFS, unix.ENFILE} {
		lack = os.NewSyscallError("socket", lack)
		for _, err := range []error{socketError(lack), metricsError(lack)} {
			if exitCode(err) != exitFailure || strings.Contains(err.Error(), "give another") {
				t.Errorf("exit code %d: %v", exitCode(err), err)
			}
		}
	}
	err := fewFiles(socketError(unix.EMFILE))
	if exitCode(err) != exitConfig || strings.Contains(err.Error(), "give another") {
		t.Errorf("exit code %d: %v", exitCode(err), err)
	}
	testenv.FewFiles(t, 0)
	_, err = findInterface("lo")
	if !errors.Is(err, unix.EMFILE) || strings.Contains(err.Error(), "no interface") {
		t.Errorf("without descriptors: %v", err)
	}
}

// TestGoneError checks that only an interface that does not exist has the exit code for that.
func TestGoneError(t *testing.T) {
	_, missing := hostnet.New("iwarpd-none")
	_, hidden := xsk.Queues("iwarpd-none")
	for _, tt := range []struct {
		err  error
		code int
	}{
		{missing, exitInterface}, {hidden, exitInterface},
		{fmt.Errorf("hostnet: open a netlink socket: %w", unix.ENOMEM), exitFailure},
	} {
		if err := goneError(tt.err); tt.err == nil || exitCode(err) != tt.code {
			t.Errorf("%v: exit code %d, want %d", err, exitCode(err), tt.code)
		}
	}
}
