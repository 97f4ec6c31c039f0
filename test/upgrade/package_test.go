package upgrade

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// A machine is a host with systemd, on which dpkg installs packages. Its systemd is process 1 of new namespaces, and its
// root file system is a copy-on-write view of this host's: nothing of this host changes.
type machine struct {
	t     *testing.T
	init  int      // process ID of its systemd on this host
	debs  []string // paths on the machine of packages to install in turn
	turns int
}

// boot boots a machine, installs the first of the packages and starts the daemon.
func boot(t *testing.T, end *testenv.End, debs []string) *machine {
	t.Helper()
	m := &machine{t: t}
	for _, deb := range debs {
		m.debs = append(m.debs, "/srv/"+filepath.Base(deb))
	}
	group := "iwarpd-" + end.NS.Name
	join := ""
	for _, c := range []string{"systemd", "devices"} {
		dir := filepath.Join("/sys/fs/cgroup", c, group)
		if err := os.Mkdir(dir, 0o755); err != nil {
			testenv.Skip(t, "needs the cgroup hierarchies of version 1: %v", err)
		}
		t.Cleanup(func() { removeGroup(t, dir) })
		join += "echo 0 >" + dir + "/cgroup.procs; "
	}
	// Not by ip netns exec, which hides /sys/fs/cgroup.
	args := []string{"-c", join + `exec nsenter --net="/run/netns/$0" unshare --mount --uts --ipc --pid --cgroup --fork --kill-child --propagation private testdata/boot "$@"`,
		end.NS.Name, t.TempDir(), group}
	cmd := exec.Command("sh", append(args, debs...)...)
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL} // a test that times out must not leave the machine
	p := testenv.Start(t, cmd)
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", p.Cmd.Process.Pid)
	m.await("systemd is up", func() bool {
		b, _ := os.ReadFile(children)
		m.init, _ = strconv.Atoi(strings.TrimSpace(string(b)))
		if m.init == 0 {
			return false
		}
		state, _ := m.command("systemctl", "is-active", "basic.target").Output()
		return string(state) == "active\n"
	})
	m.upgrade() // installs the first one
	m.run("mkdir", "-p", "/etc/systemd/system/iwarpd.service.d")
	m.run("sh", "-c", `printf "[Service]\nEnvironment=IWARPD_INTERFACE=$1 IWARPD_DRAIN_TIMEOUT=300ms\n" >/etc/systemd/system/iwarpd.service.d/test.conf`, "sh", end.Name)
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "start", "iwarpd")
	return m
}

// removeGroup removes a cgroup and those in it, as soon as their processes have ended.
func removeGroup(t *testing.T, dir string) {
	t.Helper()
	for deadline := time.Now().Add(limit); ; time.Sleep(20 * time.Millisecond) {
		_ = exec.Command("find", dir, "-depth", "-type", "d", "-exec", "rmdir", "{}", ";").Run()
		if _, err := os.Stat(dir); err != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("the cgroup %s still has processes", dir)
			return
		}
	}
}

// command returns a command that runs on the machine.
func (m *machine) command(name string, args ...string) *exec.Cmd {
	return exec.Command("nsenter", append([]string{"-t", strconv.Itoa(m.init), "-a", name}, args...)...)
}

// run runs a command on the machine, which must succeed, and returns its output.
func (m *machine) run(name string, args ...string) string {
	m.t.Helper()
	out, err := m.command(name, args...).CombinedOutput()
	if err != nil {
		m.t.Fatalf("%s %s: %v\n%s\n%s", name, strings.Join(args, " "), err, out, m.journal())
	}
	return string(out)
}

func (m *machine) await(what string, done func() bool) {
	m.t.Helper()
	for deadline := time.Now().Add(limit); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			m.t.Fatalf("within a minute not: %s\n%s", what, m.journal())
		}
	}
}

// journal returns the messages of the daemon.
func (m *machine) journal() string {
	out, _ := m.command("journalctl", "--no-pager", "-o", "cat", "-u", "iwarpd").CombinedOutput()
	return string(out)
}

// upgrade installs the next package. Its scripts restart a running daemon by systemctl.
func (m *machine) upgrade() {
	m.t.Helper()
	before := m.pid()
	deb := m.debs[m.turns%len(m.debs)]
	m.turns++
	m.run("dpkg", "--no-triggers", "--force-confold", "-i", deb)
	if before == 0 {
		return
	}
	if now := m.pid(); now == before || now == 0 {
		m.t.Errorf("upgrade %d: the daemon's process was %d, is %d", m.turns, before, now)
	}
	if want, got := m.run("dpkg-deb", "-f", deb, "Version"), m.run("iwarpctl", "status"); !strings.Contains(got, strings.TrimSpace(want)) {
		m.t.Errorf("upgrade %d: the daemon is not of version %s: %s", m.turns, want, got)
	}
}

// pid returns the process ID of the daemon on the machine; 0: it does not run.
func (m *machine) pid() int {
	out, _ := m.command("systemctl", "show", "-P", "MainPID", "iwarpd").Output()
	n, _ := strconv.Atoi(strings.TrimSpace(string(out)))
	return n
}

// path returns the path on this host of a file on the machine.
func (m *machine) path(name string) string { return fmt.Sprintf("/proc/%d/root%s", m.init, name) }

// twoVersions returns the package of iwarpd in dir, and the same with a daemon of another version.
func twoVersions(t *testing.T, dir string) []string {
	t.Helper()
	debs, err := filepath.Glob(filepath.Join(dir, "iwarpd_*.deb"))
	if err != nil || len(debs) != 1 {
		t.Fatalf("%s has %q, %v; want one package: make packages", dir, debs, err)
	}
	const version = "99.0.0"
	stage, other := filepath.Join(t.TempDir(), "stage"), filepath.Join(t.TempDir(), "iwarpd_"+version+".deb")
	for _, args := range [][]string{
		{"dpkg-deb", "-R", debs[0], stage},
		{"sed", "-i", "s/^Version: .*/Version: " + version + "/", filepath.Join(stage, "DEBIAN/control")},
		{"env", "CGO_ENABLED=0", "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=" + version, "-o", filepath.Join(stage, "usr/sbin"), "../../cmd/iwarpd"},
		{"dpkg-deb", "-b", "-Znone", stage, other},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	return []string{debs[0], other}
}

// TestPackageUpgrades is TestUpgrades with machines on which systemd runs the daemon, and dpkg installs two versions of the
// package in turn.
func TestPackageUpgrades(t *testing.T) {
	packages := os.Getenv("PACKAGES_DIR")
	if packages == "" {
		t.Skip("PACKAGES_DIR is not set: make upgrade-test does")
	}
	testenv.RequireRoot(t)
	for _, tool := range []string{"dpkg-deb", "nsenter", "unshare"} {
		testenv.RequireTool(t, tool)
	}
	debs := twoVersions(t, packages)
	v := testenv.NewVeth(t, 1500)
	a, b := boot(t, &v.A, debs), boot(t, &v.B, debs)
	const socket = "/run/iwarpd/iwarpd.sock"
	upgrades(t, v, [2]side{{a.upgrade, a.path(socket)}, {b.upgrade, b.path(socket)}})
	for _, m := range []*machine{a, b} {
		if _, err := os.Stat("/dev/userfaultfd"); err == nil { // PrivateDevices of the unit must not hide it
			m.run("nsenter", "-t", strconv.Itoa(m.pid()), "-m", "test", "-c", "/dev/userfaultfd")
		}
		if n := m.run("systemctl", "show", "-P", "NRestarts", "iwarpd"); n != "0\n" {
			t.Errorf("systemd restarted the daemon %s times after a crash:\n%s", n, m.journal())
		}
		if out := m.run("journalctl", "-q", "--no-pager", "-o", "cat", "-p", "err", "_SYSTEMD_UNIT=iwarpd.service"); out != "" {
			t.Errorf("the daemon logged errors: %s", out)
		}
	}
}
