// Package packages tests the Debian packages in a fresh Debian root, with the
// daemon started as its unit starts it. `make packages-check` runs it.
package packages

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const limit = 60 * time.Second

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// newRoot makes a Debian root with the packages installed.
func newRoot(t *testing.T, packages string) string {
	t.Helper()
	testenv.RequireRoot(t)
	testenv.RequireTool(t, "debootstrap")
	root := filepath.Join(t.TempDir(), "root")
	run(t, "debootstrap", "--variant=minbase", "--include=libprotobuf-c1,libibverbs1,librdmacm1,systemd", "bookworm", root, "http://deb.debian.org/debian")
	debs, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil || len(debs) != 5 {
		t.Fatalf("%s holds %q, %v; want five packages: make packages", packages, debs, err)
	}
	install := []string{root, "dpkg", "-i"}
	for _, deb := range debs {
		if strings.Contains(filepath.Base(deb), "-dev_") {
			continue // depends on a compiler and its packages
		}
		run(t, "cp", deb, filepath.Join(root, "tmp"))
		install = append(install, "/tmp/"+filepath.Base(deb))
	}
	run(t, "chroot", install...)
	return root
}

// service is the daemon, run in the root as the unit runs it.
type service struct {
	t      *testing.T
	end    *testenv.End
	root   string
	cmd    *exec.Cmd
	notify *net.UnixConn
	exited chan error
}

// capabilities reads the unit's AmbientCapabilities.
func capabilities(t *testing.T, unit string) []string {
	t.Helper()
	text := testenv.ReadFile(t, unit)
	for line := range strings.Lines(string(text)) {
		if caps, ok := strings.CutPrefix(strings.TrimSpace(line), "AmbientCapabilities="); ok {
			return strings.Fields(caps)
		}
	}
	t.Fatalf("%s gives no capabilities", unit)
	return nil
}

func (s *service) start() {
	s.t.Helper()
	caps := "-all"
	for _, c := range capabilities(s.t, filepath.Join(s.root, "usr/lib/systemd/system/iwarpd.service")) {
		caps += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	script := `set -e
mount -t proc proc "$1/proc"
mount -t sysfs sys "$1/sys"
exec chroot "$1" setpriv --reuid iwarpd --regid iwarpd --init-groups --no-new-privs \
	--bounding-set "$2" --inh-caps "$2" --ambient-caps "$2" /usr/sbin/iwarpd --config /etc/iwarpd/iwarpd.yaml`
	s.cmd = s.end.NS.Command("unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", s.root, caps)
	s.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET=/run/notify", "WATCHDOG_USEC=1000000", "IWARPD_INTERFACE="+s.end.Name,
		"IWARPD_METRICS=unix:/run/iwarpd/metrics.sock")
	s.cmd.Stdout, s.cmd.Stderr = os.Stderr, os.Stderr
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.exited = make(chan error, 1)
	go func() { s.exited <- s.cmd.Wait() }()
	s.t.Cleanup(func() { _ = s.cmd.Process.Kill() })
}

// told waits until the daemon tells systemd that.
func (s *service) told(want string) {
	s.t.Helper()
	_ = s.notify.SetReadDeadline(time.Now().Add(limit))
	b := make([]byte, 256)
	for {
		n, err := s.notify.Read(b)
		if err != nil {
			s.t.Fatalf("the daemon does not report %s: %v", want, err)
		}
		if string(b[:n]) == want {
			return
		}
	}
}

func (s *service) ended() error {
	s.t.Helper()
	select {
	case err := <-s.exited:
		return err
	case <-time.After(limit):
		s.t.Fatal("the daemon does not end")
		return nil
	}
}

// ctl runs iwarpctl in the root, as that user and group.
func (s *service) ctl(user, group string, args ...string) (string, error) {
	all := append([]string{s.root, "setpriv", "--reuid", user, "--regid", group, "--clear-groups", "iwarpctl"}, args...)
	out, err := exec.Command("chroot", all...).CombinedOutput()
	return string(out), err
}

// runtimeDirectory makes what RuntimeDirectory= of the unit, or tmpfiles.d, does.
func (s *service) runtimeDirectory() {
	s.t.Helper()
	run(s.t, "chroot", s.root, "install", "-d", "-m", "755", "-o", "iwarpd", "-g", "iwarpd", "/run/iwarpd")
}

// scrape asks for the metrics as Prometheus does.
func scrape(t *testing.T, socket string) string {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	r, err := c.Get("http://iwarpd/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// TestDevices checks that the packaged daemon may open /dev/userfaultfd, and no other device
// that could do harm.
func TestDevices(t *testing.T) {
	for file, lines := range map[string][]string{
		"../../deploy/iwarpd.service":       {"PrivateDevices=yes", "BindPaths=-/dev/userfaultfd", "DeviceAllow=/dev/userfaultfd rw", "User=iwarpd"},
		"../../deploy/iwarpd.rules":         {`KERNEL=="userfaultfd", SUBSYSTEM=="misc", OWNER="iwarpd", GROUP="root", MODE="0600"`},
		"../../deploy/packages/iwarpd.yaml": {"  - {src: deploy/iwarpd.rules, dst: /usr/lib/udev/rules.d/60-iwarpd.rules}"},
		"../../deploy/packages/postinstall": {"\tudevadm trigger --action=change --subsystem-match=misc --sysname-match=userfaultfd || true"},
	} {
		text := testenv.ReadFile(t, file)
		have := strings.Split(string(text), "\n")
		for _, line := range lines {
			if !slices.Contains(have, line) {
				t.Errorf("%s has no line %q", file, line)
			}
		}
		for _, line := range have {
			if strings.HasPrefix(line, "DeviceAllow=") && !slices.Contains(lines, line) {
				t.Errorf("%s: %s", file, line)
			}
		}
	}
}

// TestRPMProvides checks that the .rpm package of the library provides what rpmbuild makes packages of programs ask for
// that link with it: its name, and each version of its symbols. nfpm does not find them out.
func TestRPMProvides(t *testing.T) {
	versions := testenv.ReadFile(t, "../../client/c/iwarpd.map")
	text := testenv.ReadFile(t, "../../deploy/packages/libiwarpd.yaml")
	_, provides, _ := strings.Cut(string(text), "\n    provides: ")
	want := []string{"libiwarpd.so.0()(64bit)"}
	for _, m := range regexp.MustCompile(`(?m)^(\S+) *\{`).FindAllStringSubmatch(string(versions), -1) {
		want = append(want, "libiwarpd.so.0("+m[1]+")(64bit)")
	}
	if len(want) < 2 {
		t.Fatal("iwarpd.map has no version")
	}
	for _, w := range want {
		if !strings.Contains(provides, strconv.Quote(w)) {
			t.Errorf("the package does not provide %s", w)
		}
	}
}

// TestLintian checks that lintian finds no error and no warning in the packages.
func TestLintian(t *testing.T) {
	packages := os.Getenv("PACKAGES_DIR")
	if packages == "" {
		t.Skip("PACKAGES_DIR is not set: make packages-check does")
	}
	testenv.RequireTool(t, "lintian")
	debs, err := filepath.Glob(filepath.Join(packages, "*.deb"))
	if err != nil || len(debs) == 0 {
		t.Fatalf("no packages in %s: %v", packages, err)
	}
	run(t, "lintian", append([]string{"--allow-root", "--fail-on", "error,warning"}, debs...)...)
}

// checkDefault checks that the package iwarpd-verbs-default makes programs use the libraries of iwarpd until it is removed.
func checkDefault(t *testing.T, root string) {
	t.Helper()
	used := func() bool {
		first, _, _ := strings.Cut(run(t, "chroot", root, "sh", "-c", "ldconfig -p | grep libibverbs.so.1"), "\n")
		return strings.HasSuffix(first, "/usr/lib/iwarpd/libibverbs.so.1")
	}
	if !used() {
		t.Error("iwarpd-verbs-default does not make programs use the libraries of iwarpd")
	}
	run(t, "chroot", root, "dpkg", "-r", "iwarpd-verbs-default")
	if used() {
		t.Error("programs use the libraries of iwarpd without iwarpd-verbs-default")
	}
}

func TestDebian(t *testing.T) {
	packages := os.Getenv("PACKAGES_DIR")
	if packages == "" {
		t.Skip("PACKAGES_DIR is not set: make packages-check does")
	}
	root := newRoot(t, packages)
	for _, f := range []string{
		"usr/lib/sysusers.d/iwarpd.conf", "usr/lib/tmpfiles.d/iwarpd.conf", "etc/iwarpd/iwarpd.yaml", "usr/share/man/man8/iwarpd.8.gz", "usr/share/man/man5/iwarpd.yaml.5.gz",
		"usr/share/man/man1/iwarpctl.1.gz", "usr/share/bash-completion/completions/iwarpctl", "usr/share/bash-completion/completions/iwarpd",
		"usr/share/doc/iwarpd/service.md", "usr/lib/x86_64-linux-gnu/libiwarpd.so.0",
	} {
		if _, err := os.Stat(filepath.Join(root, f)); err != nil {
			t.Error(err)
		}
	}
	run(t, "chroot", root, "getent", "passwd", "iwarpd")
	checkDefault(t, root)
	const unit, perInterface = "/usr/lib/systemd/system/iwarpd.service", "/usr/lib/systemd/system/iwarpd@.service"
	units := []string{unit, perInterface}
	for _, name := range []string{"ping.service", "perf.service", "serve.service", "nfs@.service"} {
		units = append(units, "/usr/lib/systemd/system/iwarpctl-"+name)
	}
	for _, u := range units {
		if out := run(t, "chroot", root, "systemd-analyze", "verify", "--man=no", u); out != "" {
			t.Errorf("systemd-analyze verify %s: %s", u, out)
		}
	}
	text, err := os.ReadFile(filepath.Join(root, perInterface))
	for _, want := range []string{"IWARPD_INTERFACE=%i IWARPD_SOCKET=/run/iwarpd-%i/iwarpd.sock\n", "\nRuntimeDirectory=iwarpd-%i\n", "\nExecStart=/usr/sbin/iwarpd --config"} {
		if err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s lacks %q: %v\n%s", perInterface, want, err, text)
		}
	}
	if out, err := exec.Command("chroot", root, "iwarpd", "--config", "/etc/iwarpd/iwarpd.yaml").CombinedOutput(); err == nil || !strings.Contains(string(out), "no interface: name one") {
		t.Errorf("a daemon of the packaged configuration: %v\n%s", err, out)
	}
	run(t, "chroot", root, "systemd-analyze", "security", "--offline=true", "--threshold=23", unit) // docs/service.md states the score

	socket := filepath.Join(root, "run/notify")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	testenv.Chmod(t, socket, 0o666)
	run(t, "sed", "-i", "s/^slots: {}$/slots: {count: 2}/", filepath.Join(root, "etc/iwarpd/iwarpd.yaml"))
	run(t, "install", "-d", filepath.Join(root, "run/iwarpd-eth1")) // of iwarpd@eth1
	s := &service{t: t, end: &testenv.NewVeth(t, 1500).A, root: root, notify: notify}
	s.runtimeDirectory()
	s.start()
	s.told("READY=1")
	s.told("WATCHDOG=1")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.cmd.Process.Pid))
	if err != nil || !strings.Contains(string(status), "NoNewPrivs:\t1") || strings.Contains(string(status), "Uid:\t0") {
		t.Errorf("the daemon runs as root, or not as started: %v\n%s", err, status)
	}
	for _, tt := range []struct {
		user, group string
		ok          bool
	}{{"root", "root", true}, {"nobody", "iwarpd", true}, {"nobody", "nogroup", false}} {
		if out, err := s.ctl(tt.user, tt.group, "status"); (err == nil) != tt.ok {
			t.Errorf("iwarpctl status as %s:%s: %v: %s", tt.user, tt.group, err, out)
		}
	}

	if text := scrape(t, filepath.Join(root, "run/iwarpd/metrics.sock")); !strings.Contains(text, "\niwarpd_engine_turns_total ") {
		t.Errorf("metrics:\n%s", text)
	}
	mounts := fmt.Sprintf("--mount=/proc/%d/ns/mnt", s.cmd.Process.Pid) // the daemon's, with /proc and /sys
	if out, err := s.end.NS.Command("nsenter", mounts, "chroot", root, "iwarpd", "doctor", "--interface", s.end.Name).CombinedOutput(); err != nil ||
		!strings.Contains(string(out), "iwarpd serves the interface; mode taken: packet ring") { // link: auto takes packet sockets on veth
		t.Errorf("iwarpd doctor: %v\n%s", err, out)
	}

	// kill -9: the next one starts all the same.
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = s.ended()
	s.runtimeDirectory()
	s.start()
	s.told("READY=1")
	if out, err := s.ctl("root", "root", "status"); err != nil {
		t.Errorf("iwarpctl status after kill -9: %v: %s", err, out)
	}

	if err := s.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.told("STOPPING=1")
	if err := s.ended(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if left := run(t, "find", filepath.Join(root, "run/iwarpd"), "!", "-type", "d"); left != "" {
		t.Errorf("left behind: %s", left)
	}
	if _, err := os.Stat(filepath.Join(root, "run/iwarpd/slots/1")); err != nil { // a container may have it mounted
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(root, "run/iwarpd")); err != nil {
		t.Error(err)
	}
	// An export makes a key, whether a daemon runs or not.
	if out, err := s.ctl("root", "root", "nfs", "export", "/srv"); err == nil || !strings.Contains(out, "no iwarpd at") {
		t.Errorf("iwarpctl nfs export without a daemon: %v: %s", err, out)
	}
	if _, err := os.Stat(filepath.Join(root, "var/lib/iwarpd/nfs.key")); err != nil {
		t.Error(err)
	}
	if n, err := strconv.Atoi(strings.TrimSpace(run(t, "chroot", root, "sh", "-c", "dpkg -r iwarpd >/dev/null && ls /usr/sbin | grep -c iwarpd || true"))); err != nil || n != 0 {
		t.Errorf("dpkg -r leaves the daemon: %d, %v", n, err)
	}
	run(t, "chroot", root, "dpkg", "-P", "iwarpd")
	for _, f := range []string{"run/iwarpd", "run/iwarpd-eth1", "etc/iwarpd", "etc/systemd/system/multi-user.target.wants/iwarpd.service", "usr/share/doc/iwarpd", "var/lib/iwarpd"} {
		if _, err := os.Lstat(filepath.Join(root, f)); err == nil {
			t.Errorf("dpkg -P leaves /%s", f)
		}
	}
}
