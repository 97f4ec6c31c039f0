package system

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/printable"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// internals matches Go's own terms.
var internals = regexp.MustCompile(`goroutine|panic|%!|0x[0-9a-f]{6}|strconv|netip|openat|errgroup|context deadline|i/o timeout|work request flushed`)

// oneLine checks an error message: one line from the program, holding want, without Go's terms or the names of its packages.
func oneLine(t *testing.T, out, name, want string) {
	t.Helper()
	out = strings.TrimSuffix(out, "\n")
	t.Log(out)
	if !strings.HasPrefix(out, name+": ") || strings.Contains(out, "\n") || !strings.Contains(out, want) {
		t.Errorf("message %q; want one line of %s with %q", out, name, want)
	}
	if text := strings.TrimPrefix(out, name+": "); internals.MatchString(text) || printable.Error(errors.New(text)) != text {
		t.Errorf("message %q shows how the program is made", out)
	}
}

// TestDaemonErrors checks that each mistake gives one line that says what to do and an exit code, and leaves nothing
// behind.
func TestDaemonErrors(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	bare := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "bare0"}, PeerName: "down0"}
	err := v.A.NS.Do(func() error {
		if err := netlink.LinkAdd(bare); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(bare); err != nil {
			return err
		}
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}
		port := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "port0"}, PeerName: "port1"}
		if err := errors.Join(netlink.LinkAdd(bridge), netlink.LinkAdd(port)); err != nil {
			return err
		}
		if err := netlink.LinkSetMaster(port, bridge); err != nil {
			return err
		}
		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, Mode: netlink.TUNTAP_MODE_TUN})
	})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	sock := filepath.Join(dir, "iwarpd.sock")
	plain := filepath.Join(dir, "plain")
	config := filepath.Join(dir, "c.yaml")
	for name, text := range map[string]string{plain: "", config: "intrface: x\n"} {
		testenv.WriteFile(t, name, []byte(text), 0o600)
	}
	bin := testenv.Program(t, "cmd/iwarpd")
	on := func(ifname, socket string, more ...string) []string {
		return append([]string{bin, "--interface", ifname, "--socket", socket}, more...)
	}
	setpriv, prlimit, unshare := testenv.RequireTool(t, "setpriv"), testenv.RequireTool(t, "prlimit"), testenv.RequireTool(t, "unshare")
	for _, tt := range []struct {
		name string
		args []string
		code int
		want string
	}{
		{"no interface given", []string{bin}, 2, "--interface"},
		{"no such interface", on("nope0", sock), 3, v.A.Name},
		{"loopback", on("lo", sock), 3, "loopback"},
		{"interface down", on("down0", sock), 3, "ip link set dev down0 up"},
		{"port of a bridge", on("port0", sock), 3, "serve br0"},
		{"one of two is not there", []string{bin, "--interfaces", v.A.Name + ",nope0", "--socket", sock}, 3, `no interface "nope0"`},
		{"no address", on("bare0", sock), 3, "ip address add"},
		{"no such queue", on(v.A.Name, sock, "--queues", "7"), 3, "no queue 7"},
		{"missing capability", append([]string{setpriv, "--bounding-set=-net_raw,-bpf,-sys_admin"}, on(v.A.Name, sock)...), 4, "CAP_NET_RAW, CAP_BPF"},
		{"missing PERFMON", append([]string{setpriv, "--bounding-set=-perfmon,-sys_admin"}, on(v.A.Name, sock)...), 4, "CAP_PERFMON"},
		{"no Ethernet", on("tun0", sock), 3, "no Ethernet frames"},
		{"no such CPU", on(v.A.Name, sock, "--cpus", "1023"), 2, "CPU 1023"},
		{"more CPUs than queues", on(v.A.Name, sock, "--cpus", "0,1"), 2, "2 CPUs for 1 queue:"},
		{"few descriptors", append([]string{prlimit, "--nofile=23"}, on(v.A.Name, sock)...), 2, "at most 23 open files"},
		{"few threads", append(fewThreads(t, 60), bin, "--transport", "socket", "--socket", sock), 2,
			"this process may have at most 60 threads, and needs "},
		{"no /proc", append([]string{unshare, "-m", "sh", "-c", `umount -l /proc && exec "$@"`, "sh"}, on(v.A.Name, sock)...), 1, "/proc/self/status cannot be read: no such file or directory: mount -t proc proc /proc"},
		{"little address space", append([]string{prlimit, "--as=2000000000"}, on(v.A.Name, sock)...), 2, "at most 1907 MiB of address space, and needs 4096: raise the limit with LimitAS=infinity in the unit, or ulimit -v unlimited"},
		{"little data", append([]string{prlimit, "--data=500000000"}, on(v.A.Name, sock)...), 2, "at most 476 MiB of data, and needs 1024: raise the limit with LimitDATA=infinity in the unit, or ulimit -d unlimited"},
		{"no /sys", append([]string{unshare, "-m", "sh", "-c", `umount -l /sys && exec "$@"`, "sh"}, on(v.A.Name, sock)...), 1, "/sys/class/net cannot be read: no such file or directory: mount -t sysfs sysfs /sys"},
		{"little locked memory", append([]string{setpriv, "--bounding-set=-ipc_lock,-sys_admin,-sys_resource", prlimit, "--memlock=65536"}, on(v.A.Name, sock, "--link", "xdp")...), 4, "LimitMEMLOCK= in the unit): setsockopt XDP_UMEM_REG failed: no buffer space available"},
		{"socket in no folder", on(v.A.Name, filepath.Join(dir, "no", "no", "s")), 2, "--socket"},
		{"socket not writable", on(v.A.Name, "/proc/iwarpd.sock"), 2, "--socket"},
		{"metrics in no folder", on(v.A.Name, sock, "--metrics", "unix:"+filepath.Join(dir, "no", "m")), 2, "--metrics"},
		{"socket is a file", on(v.A.Name, plain), 2, plain + ": exists and is not a socket: give another path with --socket"},
		{"socket below a file", on(v.A.Name, filepath.Join(plain, "s")), 2, filepath.Join(plain, "s") + ": not a directory: give another path with --socket"},
		{"socket is a folder", on(v.A.Name, dir), 2, dir + ": exists and is not a socket: give another path with --socket"},
		{"unknown key", on(v.A.Name, sock, "--config", config), 2, `did you mean "interface"?`},
		{"no such file", on(v.A.Name, sock, "--config", filepath.Join(dir, "none")), 2, "no such file"},
		{"unknown flag", on(v.A.Name, sock, "--color"), 2, "--color"},
		{"bad value", on(v.A.Name, sock, "--poll", "never"), 2, "adaptive, busy"},
		{"argument", on(v.A.Name, sock, "now"), 2, `"now"`},
		{"group", on(v.A.Name, sock, "--socket-group", "nosuchgroup"), 1, "nosuchgroup"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := testenv.Start(t, v.A.NS.Command(tt.args[0], tt.args[1:]...))
			if code := p.Wait(limit); code != tt.code {
				t.Errorf("exit code %d; want %d", code, tt.code)
			}
			oneLine(t, p.String(), "iwarpd", tt.want)
			holds(t, dir, "c.yaml", "plain")
			if (&host{t: t, end: &v.A}).steered() {
				t.Error("a steering program is attached")
			}
		})
	}
}

// fewThreads returns the beginning of a command that runs as a user that may have n threads.
func fewThreads(t *testing.T, n int) []string {
	const caps = "-all,+dac_override" // to reach the files of the test
	return []string{
		testenv.RequireTool(t, "setpriv"), "--reuid=54321", "--regid=54321", "--clear-groups",
		"--bounding-set=" + caps, "--inh-caps=" + caps, "--ambient-caps=" + caps,
		testenv.RequireTool(t, "prlimit"), fmt.Sprintf("--nproc=%d", n),
	}
}

// TestFewThreads checks that a daemon with few threads serves more clients than it has threads. Go's runtime ends a
// process that cannot start a thread.
func TestFewThreads(t *testing.T) {
	testenv.RequireRoot(t)
	socket := filepath.Join(t.TempDir(), "iwarpd.sock")
	args := append(fewThreads(t, 100+runtime.NumCPU()),
		testenv.Program(t, "cmd/iwarpd"), "--transport", "socket", "--socket", socket)
	daemon := testenv.Start(t, exec.Command(args[0], args[1:]...))
	daemon.Expect("ready")
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	for i := range 250 {
		dev, err := iwarp.Open(ctx, socket)
		if err != nil {
			t.Fatalf("client %d: %v\n%s", i, err, daemon)
		}
		defer dev.Close()
		if _, err := dev.Admin().Status(ctx); err != nil {
			t.Fatalf("client %d: %v\n%s", i, err, daemon)
		}
	}
}

// TestAlternativeName checks that the daemon and doctor refuse an alternative name of an interface, which sysfs and
// ethtool do not know, and name the one to serve.
func TestAlternativeName(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	ip(t, &v.A, "link property add dev "+v.A.Name+" altname enp1s0np0-of-the-cluster")
	refused(t, &v.A, "enp1s0np0-of-the-cluster", "an alternative name of "+v.A.Name+": serve "+v.A.Name)
}

// TestDuplicateAddress checks that the daemon and doctor refuse an interface whose only address the kernel does not
// use, since another host has it, and say so.
func TestDuplicateAddress(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	ip(t, &v.A, "link add own0 type veth peer name own1")
	detect := "for i in all own1; do echo 1 >/proc/sys/net/ipv6/conf/$i/accept_dad; done"
	if out, err := v.A.NS.Command("sh", "-c", detect).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ip(t, &v.A, "link set own0 up")
	ip(t, &v.A, "addr add fd98::1/64 dev own0 nodad")
	ip(t, &v.A, "addr add fd98::1/64 dev own1")
	ip(t, &v.A, "link set own1 up")
	refused(t, &v.A, "own1", "fd98::1")
	testenv.Until(t, "the address is found to be a duplicate", func() bool {
		out, err := v.A.NS.Command("ip", "addr", "show", "dev", "own1", "dadfailed").Output()
		return err == nil && strings.Contains(string(out), "fd98::1")
	})
	refused(t, &v.A, "own1", "another host has fd98::1")
}

func TestSecondDaemon(t *testing.T) {
	t.Parallel()
	a, _ := pair(t)
	other := filepath.Join(t.TempDir(), "other.sock")
	p := testenv.Start(t, a.end.NS.Command(testenv.Program(t, "cmd/iwarpd"), daemonArgs(a.end, other)...))
	if code := p.Wait(limit); code != 5 {
		t.Errorf("exit code %d; want 5", code)
	}
	oneLine(t, p.String(), "iwarpd", "another iwarpd")
	if _, err := os.Stat(other); err == nil {
		t.Error("the second daemon left its socket")
	}
	p = testenv.Start(t, a.end.NS.Command(testenv.Program(t, "cmd/iwarpd"), "doctor", "--interface", a.end.Name))
	if code := p.Wait(limit); code != 0 || !strings.Contains(p.String(), "iwarpd serves the interface; mode taken: ") {
		t.Errorf("doctor of an interface that is served: exit code %d: %s", code, p)
	}

	p = testenv.Start(t, a.end.NS.Command(testenv.Program(t, "cmd/iwarpd"), daemonArgs(a.end, a.socket)...))
	if code := p.Wait(limit); code != 5 {
		t.Errorf("a second daemon on the same socket: exit code %d; want 5", code)
	}
	oneLine(t, p.String(), "iwarpd", a.socket)
	if !a.steered() {
		t.Error("the first daemon lost its steering program")
	}
	a.must("status")
}

// TestStaleSocket checks that the socket file of a dead daemon does not prevent a start.
func TestStaleSocket(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a := newHost(t, &v.A)
	a.daemon.Signal(unix.SIGKILL)
	a.daemon.Wait(limit)
	if _, err := os.Stat(a.socket); err != nil {
		t.Fatal("no stale socket to test with")
	}
	a.start()
	a.must("status")
}

// TestNoGroup checks the error of a user who is not in the socket's group.
func TestNoGroup(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a := newHost(t, &v.A)
	for dir := filepath.Dir(a.socket); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		testenv.Chmod(t, dir, 0o755)
	}
	p := testenv.Start(t, newPlain(t).command("iwarpctl", "--socket", a.socket, "status"))
	if code := p.Wait(limit); code != 3 {
		t.Errorf("exit code %d; want 3", code)
	}
	oneLine(t, p.String(), "iwarpctl", "no permission to use "+a.socket+": join the group that owns it")
}

// TestUnreadableSource checks the error of a copy of a file that the user may not read.
func TestUnreadableSource(t *testing.T) {
	p := newPlain(t)
	file := filepath.Join(p.dir, "secret")
	testenv.WriteFile(t, file, nil, 0)
	run := testenv.Start(t, p.command("iwarpctl", "cp", file, "10.0.0.1:"))
	if code := run.Wait(limit); code != 5 {
		t.Errorf("exit code %d; want 5", code)
	}
	oneLine(t, run.String(), "iwarpctl", file+": permission denied: copy as a user who may read it")
}

// TestLinkDown checks the error of a copy during which the link of the peer, or of this host, goes down.
func TestLinkDown(t *testing.T) {
	for _, which := range []string{"own", "peer"} {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			testenv.RequireRoot(t)
			w := testenv.NewBridged(t, 1500)
			a, b := newHost(t, &w.A, "--tcp-r2", "1s"), newHost(t, &w.B, "--tcp-r2", "1s")
			cp, _, _ := copying(t, a, b)
			h := map[string]*host{"own": a, "peer": b}[which]
			h.end.NS.IP(t, "link", "set", "dev", h.end.Name, "down")
			h.daemon.Expect("the link is down")
			if code := cp.Wait(limit); code != 4 {
				t.Errorf("exit code %d; want 4", code)
			}
			// TCP times out, or cp does if everything it had sent was acknowledged.
			oneLine(t, cp.String(), "iwarpctl", "is that host up, ")
		})
	}
}

func TestNotify(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cmd := v.A.NS.Command(testenv.Program(t, "cmd/iwarpd"), daemonArgs(&v.A, filepath.Join(t.TempDir(), "s"))...)
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+path)
	p := testenv.Start(t, cmd)
	heard := func(want string) {
		t.Helper()
		b := make([]byte, 100)
		if err := l.SetReadDeadline(time.Now().Add(limit)); err != nil {
			t.Fatal(err)
		}
		n, err := l.Read(b)
		if err != nil || string(b[:n]) != want {
			t.Fatalf("systemd would hear %q, %v; want %q", b[:n], err, want)
		}
	}
	heard("READY=1")
	p.Signal(unix.SIGTERM)
	heard("STOPPING=1")
	if code := p.Wait(limit); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

func TestClientErrors(t *testing.T) {
	a, b := pair(t)
	dir, there := t.TempDir(), t.TempDir()
	file := filepath.Join(dir, "f")
	randomFile(t, file, 1<<20)
	if err := unix.Mount("tmpfs", there, "tmpfs", 0, "size=256k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(there, 0) })
	b.serve(there)
	bAddr := b.end.Addr4.String()
	for _, tt := range []struct {
		name string
		on   *host
		args []string
		code int
		want string
	}{
		{"folder without -r", a, []string{"cp", dir, bAddr + ":"}, 5, "is a folder: copy it with cp -r"},
		{"remote folder without -r", a, []string{"cp", "-P", "7176", bAddr + ":lost", dir}, 5, "no such file"},
		{"several to a file there", a, []string{"cp", file, os.Args[0], bAddr + ":nothing"}, 5, "is not a folder there"},
		{"port closed", a, []string{"cp", "-P", "7199", file, bAddr + ":"}, 4, "refused"},
		{"perf without server", a, []string{"perf", "write", "--client", bAddr, "--size", "64K"}, 4, "refused"},
		{"disk full there", a, []string{"cp", file, b.remote("g")}, 5, "disk full"},
		{"out of the folder", a, []string{"cp", b.remote("../f"), dir}, 2, ".."},
		{"no such file there", a, []string{"cp", b.remote("none"), dir}, 5, "no such file"},
		{"port taken", b, []string{"serve", "--dir", there, "--listen", bAddr + ":7176"}, 1, "7176"},
		{"address not ours", b, []string{"ping", "-s", "-a", "192.0.2.1"}, 2, "192.0.2.1"},
		{"source not ours", a, []string{"ping", "-c", "-a", bAddr, "-I", "192.0.2.1"}, 2, "192.0.2.1"},
		{"nobody listens", a, []string{"ping", "-c", "-a", bAddr, "-p", "9"}, 4, "refused"},
		{"its own address", b, []string{"ping", "-c", "-a", bAddr}, 4, "nothing listens on that port"},
		{"its own IPv6 address", b, []string{"ping", "-c", "-a", b.end.Addr6.String()}, 4, "nothing listens on that port"},
		{"another protocol", a, []string{"perf", "write", "--client", bAddr + ":7176"}, 4, "perf protocol"},
		{"copy to itself unknown", a, []string{"cp", file, bAddr + ":9/x"}, 4, "refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			code, out := tt.on.ctl(tt.args...)
			if code != tt.code {
				t.Errorf("exit code %d; want %d", code, tt.code)
			}
			oneLine(t, out, "iwarpctl", tt.want)
			if n := strings.Count(out, bAddr); n > 2 || strings.Contains(out, "iwarp: ") {
				t.Errorf("the address %d times, or the library's name: %s", n, out)
			}
			holds(t, there)
			holds(t, dir, "f")
		})
	}
}

// TestExportAlone checks that an export by a root that can act for no other user is no fault of a file.
func TestExportAlone(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	export := exec.Command(testenv.RequireTool(t, "setpriv"), "--bounding-set=-setuid",
		testenv.Program(t, "cmd/iwarpctl"), "nfs", "export", dir, "--key-file", filepath.Join(t.TempDir(), "key"))
	out, _ := export.CombinedOutput()
	if code := export.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit code %d", code)
	}
	oneLine(t, string(out), "iwarpctl", "root cannot act for other users here")
	holds(t, dir)
}

// TestCopyHabits checks what people do with scp: directories, several files, preserved names and attributes, and
// resuming after an interruption.
func TestCopyHabits(t *testing.T) {
	a, b := pair(t)
	dir, there := t.TempDir(), t.TempDir()
	serve := b.serve(there)
	host := b.end.Addr4.String() + ":"
	tree := filepath.Join(dir, "tree")
	testenv.Mkdir(t, filepath.Join(tree, "empty"), 0o755)
	one, two := filepath.Join(tree, "one"), filepath.Join(tree, "empty", "two")
	sum1, sum2 := randomFile(t, one, 3<<20), randomFile(t, two, 17)
	at := time.Unix(1e9, 0)
	for _, p := range []string{one, tree} {
		if err := os.Chtimes(p, at, at); err != nil {
			t.Fatal(err)
		}
	}
	a.must("cp", one, two, host)
	checkFile(t, filepath.Join(there, "one"), sum1)
	checkFile(t, filepath.Join(there, "two"), sum2)
	a.must("cp", "-rp", tree, host)
	a.must("cp", one, host+"tree/empty") // a directory, though the path has no slash
	checkFile(t, filepath.Join(there, "tree", "empty", "one"), sum1)
	back := t.TempDir()
	if out := a.must("cp", "-rp", host+"tree", back); !strings.Contains(out, "3 files") || !strings.Contains(out, "busy here") {
		t.Errorf("cp -r printed %s", out)
	}
	checkFile(t, filepath.Join(back, "tree", "empty", "two"), sum2)
	for _, p := range []string{filepath.Join(there, "tree"), filepath.Join(back, "tree"), filepath.Join(back, "tree", "one")} {
		if info, err := os.Stat(p); err != nil || !info.ModTime().Equal(at) {
			t.Errorf("%s: %v, %v", p, info, err)
		}
	}

	// Into the source itself.
	if code, out := a.ctl("cp", "-r", filepath.Join(there, "tree"), host+"tree/empty"); code != 5 || !strings.Contains(out, "tree/empty/tree") {
		t.Errorf("cp -r into its source: %d, %s", code, out)
	}
	copied := filepath.Join(there, "tree", "empty", "tree", "empty")
	checkFile(t, filepath.Join(copied, "two"), sum2)
	if _, err := os.Stat(filepath.Join(copied, "tree")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the copy copied itself: %v", err)
	}
	if code, out := a.ctl("cp", "-r", host+"tree", copied); code != 5 || !strings.Contains(out, "tree/empty/tree/empty/tree") {
		t.Errorf("cp -r of what contains the target: %d, %s", code, out)
	}

	long := filepath.Join(dir, "long")
	testenv.WriteFile(t, long, nil, 0o600)
	if err := os.Truncate(long, 256<<20); err != nil {
		t.Fatal(err)
	}
	part := func() int64 {
		l, _ := filepath.Glob(filepath.Join(there, ".iwcp-part-*"))
		if len(l) != 1 {
			return 0
		}
		info, err := os.Stat(l[0])
		if err != nil {
			return 0
		}
		return info.Size()
	}
	for part() == 0 { // the copy may end before it is killed
		cp := testenv.Start(t, a.command("cp", "--resume", long, host))
		testenv.Until(t, "a part of the file", func() bool { return ended(cp) || part() > 1<<20 })
		_ = cp.Cmd.Process.Kill()
		cp.Wait(limit)
		serve.Expect("long")
	}
	if out := a.must("cp", "--resume", long, host); !strings.Contains(out, "resumed at") {
		t.Errorf("cp --resume printed %s", out)
	}
	holds(t, there, "long", "one", "tree", "two")
}

// TestPortOfTheKernel checks that a port used by a kernel socket is refused, and that one used by a client is refused
// to the kernel.
func TestPortOfTheKernel(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a := newHost(t, &v.A)
	err := v.A.NS.Do(func() error {
		l, err := net.Listen("tcp", net.JoinHostPort(v.A.Addr4.String(), "7999"))
		if err != nil {
			return err
		}
		t.Cleanup(func() { l.Close() })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	code, out := a.ctl("ping", "-s", "-a", v.A.Addr4.String(), "-p", "7999")
	if code != 1 {
		t.Errorf("exit code %d; want 1", code)
	}
	oneLine(t, out, "iwarpctl", "7999")
}

// TestIdle checks that an idle daemon sleeps: that its threads wake up seldom, however slow the machine is, and that
// none spins.
func TestIdle(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a := newHost(t, &v.A)
	// The first windows may include the end of the start-up and the kernels' neighbor discovery.
	const window = 2 * time.Second
	const mostCPU, mostSleeps = window / 10, 100 * int(window/time.Second)
	var used time.Duration
	var sleeps int
	for range 10 {
		cpu, slept := cpuTime(t, a.daemon.Cmd), voluntarySwitches(t, a.daemon.Cmd)
		<-time.After(window)
		used, sleeps = cpuTime(t, a.daemon.Cmd)-cpu, voluntarySwitches(t, a.daemon.Cmd)-slept
		t.Logf("%v of CPU, %d sleeps", used, sleeps)
		if used <= mostCPU && sleeps <= mostSleeps {
			return
		}
	}
	t.Errorf("an idle daemon used %v of CPU in %v and went to sleep %d times; at most %v and %d", used, window, sleeps, mostCPU, mostSleeps)
}

// voluntarySwitches returns how often the threads of a process have gone to sleep.
func voluntarySwitches(t *testing.T, cmd *exec.Cmd) (sum int) {
	t.Helper()
	files, err := filepath.Glob("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/task/*/status")
	if err != nil || len(files) == 0 {
		t.Fatalf("no threads of the daemon: %v", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		_, after, _ := strings.Cut(string(b), "\nvoluntary_ctxt_switches:")
		var n int
		if _, err := fmt.Sscan(after, &n); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		sum += n
	}
	return sum
}

// cpuTime returns the CPU time of a process: utime and stime of proc(5).
func cpuTime(t *testing.T, cmd *exec.Cmd) time.Duration {
	t.Helper()
	b := testenv.ReadFile(t, "/proc/"+strconv.Itoa(cmd.Process.Pid)+"/stat")
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	var sum int
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return time.Duration(sum) * time.Second / 100 // USER_HZ
}
