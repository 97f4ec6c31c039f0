// Package verbs tests the filter libraries of client/verbs: programs of the
// distribution, unmodified, on daemons in two network namespaces.
package verbs

import (
	"debug/elf"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/ctrl/ctrlpb"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

const source = "../../client/verbs"

func TestMain(m *testing.M) { testenv.Main(m) }

// results collects the results of the rows.
var results report

// A variant is a way to compile the libraries.
type variant struct {
	name, cflags string

	objects *variant // whose objects it links with ldflags, or nil
	ldflags string

	once sync.Once
	dir  string
	err  error
}

// Most of the time that gcc takes for the sanitizers, it optimizes what they add.
var (
	plain     = &variant{name: "plain", cflags: "-O2 -g"}
	sanitized = &variant{name: "sanitized", cflags: "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"}
	threaded  = &variant{name: "threaded", cflags: "-O0 -g1 " + races}
)

const races = "-fsanitize=thread"

// requireSources skips a test where the libraries cannot be compiled.
func requireSources(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"gcc", "make", "protoc-c", "pkg-config"} {
		testenv.RequireTool(t, tool)
	}
	for _, header := range []string{"/usr/include/infiniband/verbs.h", "/usr/include/rdma/rdma_cma.h", "/usr/include/protobuf-c/protobuf-c.h"} {
		if _, err := os.Stat(header); err != nil {
			testenv.Skip(t, "needs %s", header)
		}
	}
}

// libraries builds the libraries and returns their folder.
func (v *variant) libraries(t *testing.T) string {
	t.Helper()
	requireSources(t)
	v.once.Do(func() {
		v.dir = filepath.Join(testenv.Dir(t), v.name)
		args := []string{"-s", "-j2", "-C", source, "O=" + v.dir, "VERBSDIR=" + v.dir, "CC=gcc", "CFLAGS=" + v.cflags}
		if v.objects != nil {
			if out, err := exec.Command("cp", "-a", v.objects.libraries(t), v.dir).CombinedOutput(); err != nil {
				v.err = fmt.Errorf("cp: %w\n%s", err, out)
				return
			}
			args = append(args, "LDFLAGS="+v.ldflags, "--new-file=Makefile") // which all that is linked depends on
		}
		if out, err := exec.Command("make", args...).CombinedOutput(); err != nil {
			v.err = fmt.Errorf("make: %w\n%s", err, out)
		}
	})
	if v.err != nil {
		t.Fatal(v.err)
	}
	return v.dir
}

// host is one end of a wire with a daemon on it.
type host struct {
	end    *testenv.End
	dir    string // of the libraries
	socket string
	daemon *testenv.Process
	dev    *iwarp.Device // for queries
	keep   []int         // processes that endAll does not end: the daemon and those that were there before
}

func newHosts(t *testing.T, libs *variant) (a, b *host) {
	t.Helper()
	libs.libraries(t)
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	return newHost(t, libs, &v.A), newHost(t, libs, &v.B)
}

// newHost starts a daemon on an end of a wire, and also on the interfaces of others, which are
// in the same namespace.
func newHost(t *testing.T, libs *variant, end *testenv.End, others ...*testenv.End) *host {
	t.Helper()
	names := []string{end.Name}
	for _, o := range others {
		names = append(names, o.Name)
	}
	h := &host{end: end, dir: libs.libraries(t), socket: filepath.Join(t.TempDir(), "iwarpd.sock")}
	h.launch(t, names...)
	var err error
	if h.dev, err = iwarp.Open(t.Context(), h.socket); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.dev.Close() })
	h.keep = h.pids(t)
	return h
}

// launch starts the daemon on interfaces.
func (h *host) launch(t *testing.T, names ...string) {
	t.Helper()
	h.daemon = testenv.Start(t, h.end.NS.Command(testenv.Program(t, "cmd/iwarpd"), "--interfaces", strings.Join(names, ","), "--socket", h.socket))
	h.daemon.Expect("ready")
}

// start runs a program of the distribution by iwarpd-run.
func (h *host) start(t *testing.T, command string, env ...string) *testenv.Process {
	t.Helper()
	args := strings.Fields(command)
	testenv.RequireTool(t, args[0])
	cmd := h.end.NS.Command(filepath.Join(h.dir, "iwarpd-run"), args...)
	// The programs' messages are compared with English ones. fio writes its state to where it is.
	cmd.Env = append(os.Environ(), append([]string{"IWARPD_SOCKET=" + h.socket, "LC_ALL=C"}, env...)...)
	cmd.Dir = t.TempDir()
	// A child that outlives its parent, as qperf's and fio's may, ends with the namespace.
	cmd.WaitDelay = time.Second
	return testenv.Start(t, cmd)
}

// pid returns the variable that names the daemon's process to a program.
func (h *host) pid() string { return fmt.Sprintf("DAEMON=%d", h.daemon.Cmd.Process.Pid) }

// pids returns the processes on the host.
func (h *host) pids(t *testing.T) (pids []int) {
	t.Helper()
	out, err := exec.Command("ip", "netns", "pids", h.end.NS.Name).Output()
	if err != nil {
		t.Fatal(err)
	}
	for f := range strings.FieldsSeq(string(out)) {
		if pid, err := strconv.Atoi(f); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// endAll ends the programs that were started on the host after the daemon.
func (h *host) endAll(t *testing.T) {
	t.Helper()
	for _, pid := range h.pids(t) {
		if !slices.Contains(h.keep, pid) {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
	testenv.Until(t, "no listener is left", func() bool { return h.status(t).Listens == 0 })
}

// status returns the daemon's counts of objects.
func (h *host) status(t *testing.T) *ctrlpb.StatusReply {
	t.Helper()
	s, err := h.dev.Admin().Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// listening reports whether the server p of r takes connections, or has ended.
func (h *host) listening(t *testing.T, r row, p *testenv.Process) bool {
	t.Helper()
	select {
	case <-p.Done:
		return true
	default:
	}
	if r.port == 0 {
		return h.status(t).Listens > 0
	}
	for _, table := range []string{"tcp", "tcp6"} {
		b := testenv.ReadFile(t, fmt.Sprintf("/proc/%d/net/%s", h.daemon.Cmd.Process.Pid, table))
		for line := range strings.Lines(string(b)) {
			f := strings.Fields(line)
			if len(f) > 3 && f[3] == "0A" && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", r.port)) {
				return true
			}
		}
	}
	return false
}

// command replaces the placeholders of a row's command for the server b. ADDR and IFACE are b's
// address and interface, and @NAME is a program or script of testdata.
func command(t *testing.T, s string, b *host) string {
	t.Helper()
	s = strings.NewReplacer("ADDR", b.end.Addr4.String(), "IFACE", b.end.Name).Replace(s)
	words := strings.Fields(s)
	for i, w := range words {
		if name, ok := strings.CutPrefix(w, "@"); ok {
			words[i] = ours(t, name)
		}
	}
	return strings.Join(words, " ")
}

// ours returns the path of a script of testdata, or of a program of testdata, which it
// compiles.
func ours(t *testing.T, name string) string {
	t.Helper()
	if found, _ := filepath.Glob(filepath.Join("testdata", name+".c*")); found != nil {
		return compile(t, name)
	}
	path, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// serve starts the server of r on b, and returns when the server accepts connections.
func serve(t *testing.T, r row, b *host) *testenv.Process {
	t.Helper()
	server := b.start(t, command(t, r.server, b), strings.Fields(r.env)...)
	if r.ready != "" {
		server.Expect(r.ready)
	} else {
		testenv.Until(t, "the server listens", func() bool { return b.listening(t, r, server) })
	}
	return server
}

// run runs a row and returns the exit code of the client, and what it printed.
func run(t *testing.T, r row, a, b *host) (code int, out string) {
	t.Helper()
	var server *testenv.Process
	if r.server != "" {
		server = serve(t, r, b)
	}
	client := a.start(t, command(t, r.client, b), strings.Fields(r.env)...)
	code = client.Wait(2 * time.Minute)
	if code == 0 && server != nil && !r.stays {
		server.Succeed()
	}
	a.endAll(t)
	b.endAll(t)
	return code, client.String()
}

// refusedBetween reports whether a client was refused because it was faster than its server, here as on any RDMA device. perftest's server
// stops listening between its two connections; its client then crashes, as it tries again with an id that it has freed. qperf's server
// names its port before it listens there.
func refusedBetween(r row, out string) bool {
	switch r.group {
	case "perftest":
		return strings.Contains(out, "RDMA_CM_EVENT_REJECTED; error: -111") || strings.Contains(out, "ERRNO: Connection refused") // the kernel's librdmacm
	case "qperf":
		return strings.Contains(out, "unexpected event from RDMA CM: Event rejected")
	}
	return false
}

// check runs a row. If it does not end as the table says, check reports why to t and returns
// the reason.
func check(t *testing.T, r row, a, b *host) (why string) {
	t.Helper()
	for _, p := range r.needs {
		testenv.RequireTool(t, p)
	}
	if r.server == "" {
		a = b
	}
	code, out := run(t, r, a, b)
	for try := 0; try < 10 && code != 0 && refusedBetween(r, out); try++ {
		code, out = run(t, r, a, b)
	}
	switch {
	case r.fails == "" && code != 0:
		why = fmt.Sprintf("%s: exit code %d\n%s", r.client, code, out)
	case r.fails != "" && code == 0:
		why = fmt.Sprintf("%s: works, though the table says that it does not: %s", r.client, r.fails)
	}
	if why != "" {
		t.Error(why)
	}
	return why
}

// chosen returns all rows with VERBS=full, and else one of n of those that are not long.
func chosen(n int) []row {
	if os.Getenv("VERBS") == "full" {
		return rows()
	}
	var some []row
	i := 0
	for _, r := range rows() {
		if r.long {
			continue
		}
		if i%n == 0 {
			some = append(some, r)
		}
		i++
	}
	return some
}

// TestPrograms runs the table; VERBS=full all of it.
func TestPrograms(t *testing.T) {
	a, b := newHosts(t, plain)
	for _, r := range chosen(1) {
		t.Run(r.group+"/"+r.name, func(t *testing.T) {
			why := unfinished
			defer func() { results.add(t, r, "between daemons", r.fails, why) }()
			why = check(t, r, a, b)
		})
	}
}

const farEnv = "IWARPD_VERBS_MEMORY=far"

// TestFar is TestPrograms with memory that the daemons do not map but copy.
func TestFar(t *testing.T) {
	a, b := newHosts(t, plain)
	for _, r := range chosen(4) {
		r.env = strings.TrimSpace(r.env + " " + farEnv)
		t.Run(r.group+"/"+r.name, func(t *testing.T) { check(t, r, a, b) })
	}
}

// Programs see the device, and none with IWARPD_VERBS=off.
func TestDevices(t *testing.T) {
	a, b := newHosts(t, plain)
	p := a.start(t, "ibv_devinfo -v")
	p.Succeed()
	address := "::ffff:" + a.end.Addr4.String()
	for _, want := range []string{"iWARP (1)", "PORT_ACTIVE (4)", "1X (1)", "10.0 Gbps (8)", address} {
		if !strings.Contains(p.String(), want) {
			t.Errorf("ibv_devinfo has no %q:\n%s", want, p)
		}
	}
	for _, tt := range []struct{ link, port string }{{"down", "PORT_DOWN (1)"}, {"up", "PORT_ACTIVE (4)"}} {
		b.end.NS.IP(t, "link", "set", b.end.Name, tt.link) // the other end of the wire
		if p := a.start(t, "ibv_devinfo"); p.Wait(time.Minute) != 0 || !strings.Contains(p.String(), tt.port) {
			t.Errorf("the link is %s, and ibv_devinfo has no %q:\n%s", tt.link, tt.port, p)
		}
	}
	if p := a.start(t, "ibv_devices", "IWARPD_VERBS=off"); p.Wait(time.Minute) != 0 || strings.Contains(p.String(), "iwarpd0") {
		t.Errorf("with IWARPD_VERBS=off:\n%s", p)
	}
}

// TestStay checks that the libraries stay loaded after dlclose, since their thread keeps running.
func TestStay(t *testing.T) {
	for _, name := range []string{"libibverbs.so.1", "librdmacm.so.1"} {
		f, err := elf.Open(filepath.Join(plain.libraries(t), name))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		flags, err := f.DynValue(elf.DT_FLAGS_1)
		if err != nil {
			t.Fatal(err)
		}
		if len(flags) != 1 || elf.DynFlag1(flags[0])&elf.DF_1_NODELETE == 0 {
			t.Errorf("%s may be unloaded: DT_FLAGS_1 is %#x", name, flags)
		}
	}
}

// libraries are those that programs of testdata use on top of libibverbs.
var libraries = map[string]struct{ pkg, header, option string }{
	"gloo": {"libgloo-dev", "/usr/include/gloo/context.h", "-lgloo"},
	"rpma": {"librpma-dev", "/usr/include/librpma.h", "-lrpma"},
}

// compile compiles a program of testdata, in C or C++, against the distribution's headers, with further options of the compiler, unless
// that is done already.
func compile(t *testing.T, name string, options ...string) string {
	t.Helper()
	program := filepath.Join(testenv.Dir(t), fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(strings.Join(options, " ")))), name)
	if _, err := os.Stat(program); err == nil {
		return program
	}
	testenv.Mkdir(t, filepath.Dir(program), 0o755)
	compiler, source := "gcc", "testdata/"+name+".c"
	args := []string{"-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-I../../client/verbs", "-I../../client/c", "-rdynamic"}
	if _, err := os.Stat(source); err != nil {
		compiler, source, args = "g++", source+"c", []string{"-std=c++14", "-O1", "-g"}
	}
	args = append(args, "-o", program, source, "-lrdmacm", "-libverbs", "-lpthread")
	if l, ok := libraries[name]; ok {
		if _, err := os.Stat(l.header); err != nil {
			testenv.Skip(t, "needs %s: %v", l.pkg, err)
		}
		args = append(args, l.option)
	}
	if out, err := exec.Command(compiler, append(args, options...)...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", compiler, err, out)
	}
	return program
}

// TestScarce checks that each function that lacks memory, a descriptor or anything else fails with an error and succeeds when it is
// called again, that one for which the kernel lacks buffers waits for them, and that no object is left then.
func TestScarce(t *testing.T) {
	program := compile(t, "scarce")
	_, b := newHosts(t, &variant{name: "scarce", cflags: plain.cflags, objects: plain, ldflags: testenv.Wrapping(t, "testdata/scarce.c")})
	b.start(t, program+" "+b.end.Addr4.String()).Expect("made all")
	testenv.Until(t, "no object is left but the protection domain of librdmacm", func() bool {
		s := b.status(t)
		return s.Mrs+s.Mws+s.Cqs+s.Qps+s.Listens+s.Conns == 0 && s.Pds == 1
	})
}

// TestAnswer checks which completions of Writes the library holds back until the peer's answer has come.
func TestAnswer(t *testing.T) {
	if out, err := exec.Command(compile(t, "answer")).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestForkDuringScan checks that a fork waits for another thread that looks for devices, and that the child can look for them then.
func TestForkDuringScan(t *testing.T) {
	run := exec.Command(filepath.Join(plain.libraries(t), "iwarpd-run"), compile(t, "fork"), filepath.Join(t.TempDir(), "silent.sock"))
	if out, err := run.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestAppear checks that the list of devices has room for what it holds though another thread finds one while it is made.
func TestAppear(t *testing.T) {
	a, b := newHosts(t, plain)
	link := filepath.Join(t.TempDir(), "link")
	a.start(t, compile(t, "appear")+" "+b.socket+" "+link, "IWARPD_SOCKET="+a.socket+","+link).Succeed()
}

// TestDaemonized checks that a program may open a device before it becomes a daemon, and that its descriptors stay as they are.
func TestDaemonized(t *testing.T) {
	a, _ := newHosts(t, plain)
	for _, env := range []string{"IWARPD_VERBS_LOG=1", farEnv} {
		a.start(t, compile(t, "daemon"), env).Succeed()
	}
}

// A mode is what testdata/memory.c does, and a part of what the library must log then.
type mode struct {
	name, log string
}

var modes = []mode{
	{"kinds", "must be near memory, because they are for atomics"}, {"changes", ""}, {"forks", ""}, {"writers", ""}, {"many", ""}, {"sparse", ""}, {"kept", ""}, {"flush", ""},
	{"limit-as", "stay shared with the daemon: Cannot allocate memory"},
	{"limit-data", "stay shared with the daemon: Cannot allocate memory"},
	{"limit-fsize", "are far memory: File too large"},
	{"limit-memlock", ""},
	{"limit-nofile", "Too many open files"},
	{"execs", ""},
	{"no-userfaultfd", ""},
	{"without-eperm", "no userfaultfd: Operation not permitted"},
	{"without-enosys", "no userfaultfd: Function not implemented"},
	{"heap", ""},
	{"no-query", ""},
	{"guarded", ""},
	{"collected", ""},
	{"older", ""},
	{"stacks", ""},
	{"closed", ""},
	{"renumbered", ""},
	{"unmarked", ""},
	{"unmarked-closed", ""},
}

// memory runs a mode of the program and then finds that the daemon has no region left.
func (h *host) memory(t *testing.T, program string, m mode) {
	t.Helper()
	p := h.start(t, program+" "+m.name, "IWARPD_VERBS_LOG=1")
	p.Succeed()
	if !strings.Contains(p.String(), m.log) {
		t.Errorf("%s: the log has no %q:\n%s", m.name, m.log, p)
	}
	testenv.Until(t, "no region is left", func() bool { return h.status(t).Mrs == 0 })
}

// TestMemory registers memory of all kinds, while other threads write to it and
// while it is forked, freed and enlarged, and under limits; and flushes a queue pair without a connection.
func TestMemory(t *testing.T) {
	a, _ := newHosts(t, plain)
	program := compile(t, "memory")
	for _, m := range append(modes, mode{"undumpable", ""}) {
		t.Run(m.name, func(t *testing.T) { a.memory(t, program, m) })
	}
}

// TestThreadLocal checks that a program may have large thread-local variables, and register them.
func TestThreadLocal(t *testing.T) {
	a, _ := newHosts(t, plain)
	a.start(t, compile(t, "tls")).Succeed()
}

// TestStress checks that no store is lost while threads register, map and fork at once.
func TestStress(t *testing.T) { stress(t, plain) }

func TestSanitizedStress(t *testing.T) { stress(t, sanitized) }

func stress(t *testing.T, v *variant) {
	a, _ := newHosts(t, v)
	a.start(t, fmt.Sprintf("%s %d 5", v.program(t, "stress"), testenv.Seed(t))).Succeed()
}

// TestSanitizedObjects checks that threads may make, use and end connections, and the objects that these need, in any order.
func TestSanitizedObjects(t *testing.T) {
	for _, v := range []*variant{sanitized, threaded} {
		t.Run(v.name, func(t *testing.T) {
			a, _ := newHosts(t, v)
			a.start(t, fmt.Sprintf("%s %d 3 %s", v.program(t, "objects"), testenv.Seed(t), a.end.Addr4)).Succeed()
		})
	}
}

// TestOrphaned checks that the daemon notices that a program has ended, though a child of it has not.
func TestOrphaned(t *testing.T) {
	a, _ := newHosts(t, plain)
	a.start(t, compile(t, "memory")+" orphaned").Succeed()
	testenv.Until(t, "no region is left", func() bool { return a.status(t).Mrs == 0 })
	if len(a.pids(t)) == len(a.keep) {
		t.Error("the child has ended too")
	}
	a.endAll(t)
}

// TestList checks that the list of regions says which memory is far.
func TestList(t *testing.T) {
	a, _ := newHosts(t, plain)
	p := a.start(t, compile(t, "memory")+" hold")
	p.Expect("registered")
	out, err := exec.Command(testenv.Program(t, "cmd/iwarpctl"), "--socket", a.socket, "mr", "list").CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, want := range []string{"1.0 MiB +mapped", "100 B +far"} {
		if !regexp.MustCompile(want).Match(out) {
			t.Errorf("iwarpctl mr list has no %q:\n%s", want, out)
		}
	}
	a.endAll(t)
}

// TestTransfer sends and receives out of and into memory of every kind.
func TestTransfer(t *testing.T) {
	a, b := newHosts(t, plain)
	const pages = "/proc/sys/vm/nr_hugepages"
	was, err := os.ReadFile(pages)
	if err == nil {
		var n int
		_, _ = fmt.Sscan(string(was), &n)
		err = os.WriteFile(pages, fmt.Append(nil, n+8), 0) // more, so that those of other programs stay
	}
	if err != nil {
		testenv.Skip(t, "huge pages: %v", err)
	}
	t.Cleanup(func() { _ = os.WriteFile(pages, was, 0) })
	program := compile(t, "transfer")
	r := row{server: program, client: program + " ADDR"}
	t.Run("auto", func(t *testing.T) { check(t, r, a, b) })
	r.env = farEnv
	t.Run("far", func(t *testing.T) { check(t, r, a, b) })
	t.Run("far on one host", func(t *testing.T) { check(t, r, b, b) })
}

// TestUnprivileged is TestMemory for a user who may open the socket and no more. The
// daemon opens /dev/userfaultfd for him: without it system calls of the mode writers fail.
func TestUnprivileged(t *testing.T) {
	a, _ := newHosts(t, plain)
	testenv.RequireTool(t, "setpriv")
	program := compile(t, "memory")
	for _, path := range []string{a.socket, program, filepath.Join(a.dir, "iwarpd-run")} {
		for dir := filepath.Dir(path); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
			testenv.Chmod(t, dir, 0o755)
		}
	}
	testenv.Chmod(t, a.socket, 0o666)
	program = "setpriv --reuid 65534 --regid 65534 --clear-groups " + program
	for _, m := range append(modes, mode{"undumpable", "/proc/self/mem: Permission denied"}) {
		if m.name == "many" || m.name == "heap" || m.name == "collected" {
			continue // long, and nothing in them is up to the user
		}
		t.Run(m.name, func(t *testing.T) { a.memory(t, program, m) })
	}
	const scope = "/proc/sys/kernel/yama/ptrace_scope"
	was, err := os.ReadFile(scope)
	if err != nil {
		t.Logf("ptrace_scope: %v", err)
		return
	}
	t.Cleanup(func() { _ = os.WriteFile(scope, was, 0) })
	for _, level := range []string{"0", "1", "2"} { // 3 stays until the next boot
		t.Run("ptrace_scope "+level, func(t *testing.T) {
			if err := os.WriteFile(scope, []byte(level), 0); err != nil {
				t.Skip(err)
			}
			a.memory(t, program, modes[0])
		})
	}
}

// program returns the command of a program of testdata on these libraries. One that is not compiled with the sanitizers of gcc, as the
// libraries are, needs their library from the start.
func (v *variant) program(t *testing.T, name string) string {
	t.Helper()
	switch v {
	case sanitized:
		return preload(t) + compile(t, name)
	case threaded:
		return "setarch --addr-no-randomize " + compile(t, name, races)
	}
	return compile(t, name)
}

// preload returns what runs a program on the sanitized libraries.
func preload(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("gcc", "-print-file-name=libasan.so").Output()
	if err != nil {
		t.Fatal(err)
	}
	return "setarch --addr-no-randomize env LD_PRELOAD=" + strings.TrimSpace(string(out)) + " ASAN_OPTIONS=detect_leaks=0 "
}

// TestIdentifiers checks uses of connections, queue pairs and completion queues that the programs of the table seldom
// make.
func TestIdentifiers(t *testing.T) { identifiers(t, plain) }

func TestSanitizedIdentifiers(t *testing.T) { identifiers(t, sanitized) }

func identifiers(t *testing.T, v *variant) {
	a, b := newHosts(t, v)
	program := v.program(t, "cm")
	run := func(t *testing.T, mode string, env ...string) *testenv.Process {
		t.Helper()
		return b.start(t, program+" "+mode+" "+b.end.Addr4.String(), append(env, "IWARPD_VERBS_LOG=1")...)
	}
	// The first queue pair of each daemon has the number 1.
	t.Run("devices", func(t *testing.T) { run(t, "devices", "IWARPD_SOCKET="+a.socket+","+b.socket).Succeed() })
	t.Run("foreign", func(t *testing.T) { run(t, "foreign", "IWARPD_SOCKET="+a.socket+","+b.socket).Succeed() })
	for _, mode := range strings.Fields(`
		rtr cqs requests migrate twice backlog single unacceptable states nowhere datagrams halves whole exact extended resized
		written forsaken failed unconnected rereg synchronous acknowledged unnamed fatal transitions source unbound taken moved
		canceled queues_made forked gathered last numbered ordered overtaken left reset held invalidated all stated destroyed
		reused yielded armed gids unsupported probed domains excessive roomy greeting inherited remembered agreed crowded
		permitted exited abandoned trespassed bequeathed blocked immediate parted occupied forbidden starved lent relent ported said
		solicited manual owed based retried divided named
		optional misdirected answered besieged unreturned reported orphaned descended`) {
		t.Run(mode, func(t *testing.T) { run(t, mode).Succeed() })
	}
	t.Run("remembered by an older daemon", func(t *testing.T) {
		p := run(t, "remembered", "IWARPD_SOCKET="+older(t, b))
		p.Succeed()
		if want := "the peer may do all that memory regions allow"; !strings.Contains(p.String(), want) {
			t.Errorf("the log has no %q:\n%s", want, p)
		}
	})
	for _, mode := range []string{"limits", "left"} {
		t.Run(mode+" far", func(t *testing.T) { run(t, mode, farEnv).Succeed() })
	}
	// The loopback addresses are those of the host's devices, as in the kernel's rdma_cm.
	for _, address := range []string{"127.0.0.1", "0.0.0.0"} {
		for _, mode := range []string{"twice", "synchronous"} {
			t.Run(mode+" at "+address, func(t *testing.T) { b.start(t, program+" "+mode+" "+address).Succeed() })
		}
	}
	for _, mode := range []string{"outlived", "silent", "opened"} {
		t.Run(mode, func(t *testing.T) {
			b.start(t, program+" "+mode+" "+a.end.Addr4.String(), "IWARPD_SOCKET="+b.socket+","+a.socket, a.pid(), "IWARPD_VERBS_LOG=1").Succeed()
		})
	}
	t.Run("withdrawn", func(t *testing.T) { run(t, "withdrawn", b.pid()).Succeed() })
	t.Run("sought", func(t *testing.T) {
		run(t, "sought", "IWARPD_SOCKET="+b.socket+","+a.socket, a.pid()).Succeed()
	})
	t.Run("removed", func(t *testing.T) {
		a.start(t, program+" removed "+a.end.Addr4.String(), a.pid(), "IWARPD_VERBS_LOG=1").Succeed()
	})
	t.Run("addressed", func(t *testing.T) {
		b.end.NS.IP(t, "address", "add", "10.0.0.1/32", "dev", b.end.Name) // lower than the first one, so its queue pair connects
		run(t, "addressed").Succeed()
	})
	t.Run("gids of more addresses than a device has", func(t *testing.T) {
		for i := range 70 {
			b.end.NS.IP(t, "address", "add", fmt.Sprintf("198.51.100.%d/32", 1+i), "dev", b.end.Name)
		}
		run(t, "gids").Succeed()
	})
	t.Run("dropped", func(t *testing.T) {
		p := run(t, "dropped")
		p.Expect("dropped\n")
		b.daemon.Signal(syscall.SIGKILL)
		p.Succeed()
	})
}

// TestSanitizedThreads makes threads use the same objects, with the sanitizer that finds data races.
func TestSanitizedThreads(t *testing.T) {
	_, b := newHosts(t, threaded)
	program := threaded.program(t, "cm")
	for _, mode := range []string{"cqs", "held", "acknowledged", "abandoned"} {
		t.Run(mode, func(t *testing.T) { b.start(t, program+" "+mode+" "+b.end.Addr4.String()).Succeed() })
	}
}

// TestRestart checks that a program uses a daemon again that has restarted, while another one kept running.
func TestRestart(t *testing.T) {
	a, b := newHosts(t, plain)
	p := b.start(t, compile(t, "cm")+" restarted "+a.end.Addr4.String(), "IWARPD_SOCKET="+b.socket+","+a.socket, "IWARPD_VERBS_LOG=1")
	p.Expect("listening\n")
	p.Signal(syscall.SIGSTOP) // until another program has one of its ports
	a.daemon.Signal(syscall.SIGKILL)
	<-a.daemon.Done
	a.launch(t, a.end.Name)
	d, err := iwarp.Open(t.Context(), a.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := d.Listen(t.Context(), ":7179", nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Signal(syscall.SIGCONT)
	p.Expect("rdma_listen: ")
	l.Close()
	p.Succeed()
}

// listens reports whether the daemon has one listener.
func (h *host) listens(t *testing.T) bool {
	d, err := iwarp.Open(t.Context(), h.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s, err := d.Admin().Status(t.Context())
	return err == nil && s.Listens == 1
}

// TestReopened checks that a listener on every address keeps nothing open of daemons that have ended.
func TestReopened(t *testing.T) {
	_, b := newHosts(t, plain)
	p := b.start(t, "rping -s")
	testenv.Until(t, "the server listens", func() bool { return b.listens(t) })
	files := func() int {
		all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.Cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
	before := files()
	for range 3 {
		b.daemon.Signal(syscall.SIGKILL)
		<-b.daemon.Done
		b.launch(t, b.end.Name)
		testenv.Until(t, "the server listens again", func() bool { return b.listens(t) })
	}
	want := fmt.Sprintf("the server has as many files open as before, %d", before)
	testenv.Until(t, want, func() bool { return files() == before })
}

// TestBound checks that a server can listen on every address while no daemon runs, and does so when one is there again.
func TestBound(t *testing.T) {
	_, b := newHosts(t, plain)
	p := b.start(t, compile(t, "cm")+" bound "+b.end.Addr4.String())
	p.Expect("bound\n")
	b.daemon.Signal(syscall.SIGKILL)
	<-b.daemon.Done
	p.Signal(syscall.SIGUSR1)
	p.Expect("listening\n")
	b.launch(t, b.end.Name)
	testenv.Until(t, "the server listens", func() bool { return b.listens(t) })
	p.Signal(syscall.SIGUSR1)
	p.Succeed()
}

// TestStarting checks that a daemon that takes connections, but does not answer yet, does not keep a program from using another one.
func TestStarting(t *testing.T) {
	a, b := newHosts(t, plain)
	p := b.start(t, compile(t, "cm")+" starting "+b.end.Addr4.String(), "IWARPD_SOCKET="+b.socket+","+a.socket)
	p.Expect("listening\n")
	a.daemon.Signal(syscall.SIGKILL)
	<-a.daemon.Done
	if err := os.Remove(a.socket); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: a.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := l.Accept() // the program looks whether the daemon is there again
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	p.Signal(syscall.SIGUSR1)
	p.Succeed()
}

// TestElsewhere checks that a program uses a daemon that restarts on another interface.
func TestElsewhere(t *testing.T) {
	a, b := newHosts(t, plain)
	p := b.start(t, compile(t, "cm")+" elsewhere "+a.end.Addr4.String(), "IWARPD_SOCKET="+b.socket+","+a.socket)
	p.Expect("listening\n")
	a.daemon.Signal(syscall.SIGKILL)
	<-a.daemon.Done
	p.Expect("gone\n")
	for _, c := range []string{"link add other type veth peer name others", "address add 198.51.100.1/24 dev other", "link set other up", "link set others up"} {
		a.end.NS.IP(t, strings.Fields(c)...)
	}
	a.launch(t, "other")
	p.Succeed()
}

// TestContainer runs programs in network namespaces without any interface: the addresses are those of the daemons.
func TestContainer(t *testing.T) {
	a, b := newHosts(t, plain)
	testenv.RequireTool(t, "unshare")
	addr := a.end.Addr4.String()
	server := a.start(t, "unshare --net rping -s -v -C 3 -a "+addr)
	testenv.Until(t, "the server listens", func() bool { return a.status(t).Listens == 1 })
	b.start(t, "unshare --net rping -c -v -V -C 3 -a "+addr).Succeed()
	server.Succeed()
}

// TestLater checks that a program uses a daemon that starts after it, for new listeners and for that which it has.
func TestLater(t *testing.T) {
	for mode, begun := range map[string]string{"later": "listened\n", "followed": "listening\n"} {
		t.Run(mode, func(t *testing.T) {
			a, b := newHosts(t, plain)
			a.daemon.Signal(syscall.SIGKILL)
			<-a.daemon.Done
			p := b.start(t, compile(t, "cm")+" "+mode+" "+a.end.Addr4.String(), "IWARPD_SOCKET="+b.socket+","+a.socket)
			p.Expect(begun)
			a.launch(t, a.end.Name)
			p.Succeed()
		})
	}
}

// TestSanitizedPrograms runs programs on the same libraries with the sanitizers.
func TestSanitizedPrograms(t *testing.T) {
	a, b := newHosts(t, sanitized)
	prefix := preload(t)
	for _, r := range rows() {
		if r.long || r.group != "rdmacm-utils" && r.group != "ibverbs-utils" {
			continue
		}
		r.server, r.client = prefix+r.server, prefix+r.client
		t.Run(r.name, func(t *testing.T) { check(t, r, a, b) })
		if r.group == "rdmacm-utils" {
			r.env = farEnv
			t.Run("far "+r.name, func(t *testing.T) { check(t, r, a, b) })
		}
	}
	program := sanitized.program(t, "memory")
	for _, mode := range []string{"kinds", "changes", "forks", "kept", "flush", "without-eperm", "guarded", "stacks"} {
		t.Run(mode, func(t *testing.T) { a.start(t, program+" "+mode).Succeed() })
	}
	for _, mode := range []string{"kinds", "changes", "forks", "many", "sparse"} {
		t.Run("far "+mode, func(t *testing.T) { a.start(t, program+" "+mode, farEnv).Succeed() })
	}
}

// Every IPv4 address and every IPv6 address are two endpoints, as of sockets.
func TestListeners(t *testing.T) {
	a, b := newHosts(t, plain)
	server := b.start(t, compile(t, "listeners"))
	testenv.Until(t, "the server listens", func() bool { return b.status(t).Listens == 1 })
	for _, host := range []struct{ addr, family string }{{b.end.Addr4.String(), "v4"}, {b.end.Addr6.String(), "v6"}} {
		client := a.start(t, "rping -c -a "+host.addr+" -p 3260")
		client.Wait(time.Minute)
		if !strings.Contains(client.String(), "REJECTED, error -111") {
			t.Errorf("a client of %s:\n%s", host.addr, client)
		}
		server.Expect("request to " + host.family)
	}
	server.Succeed()
}

// TestWithinHost checks clients and servers that are programs of one host, with one
// daemon.
func TestWithinHost(t *testing.T) {
	_, b := newHosts(t, plain)
	for _, r := range chosen(2) {
		if r.group == "rdmacm-utils" {
			t.Run(r.name, func(t *testing.T) { check(t, r, b, b) })
		}
	}
}

// TestIntruders: programs that connect a QP by ibv_modify_qp connect to each other, although others have connected to the
// port of the QP before: one with another QP number, and one with the right number from another address.
func TestIntruders(t *testing.T) {
	a, b := newHosts(t, plain)
	program := compile(t, "intruder")
	server := b.start(t, "ibv_rc_pingpong -g 0 -p 18517", roce)
	testenv.Until(t, "the server's queue pair listens", func() bool { return b.status(t).Listens == 1 })
	// The first queue pair of each daemon has the number 1. Those of the intruders are 1 to 10, and that of the client 11.
	const keeps = 8 // requests, of which the oldest one from either address makes room
	var intruders []*testenv.Process
	for i := range 10 {
		args := b.end.Addr4.String() + " 1 999"
		if i%2 == 1 {
			args = b.end.Addr6.String() + " 1 11"
		}
		intruders = append(intruders, a.start(t, program+" "+args))
		if i >= keeps {
			intruders[i-keeps].Expect("refused")
		}
		testenv.Until(t, "an intruder is there", func() bool { return b.status(t).Conns == uint32(min(i+1, keeps)) })
	}
	a.start(t, "ibv_rc_pingpong -g 0 -p 18517 "+b.end.Addr4.String(), roce).Succeed()
	server.Succeed()
	for _, p := range intruders {
		p.Expect("refused")
	}
}

// TestTypeOfService checks that the TOS that a program sets becomes the DSCP of the packets of
// its side. ucmatose sets it on the client, arrive on a listener that is bound already.
func TestTypeOfService(t *testing.T) {
	plain.libraries(t)
	testenv.RequireRoot(t)
	w := testenv.NewBridged(t, 1500)
	a, b := newHost(t, plain, &w.A), newHost(t, plain, &w.B)
	for _, tt := range []struct {
		name           string
		run            func()
		client, server int // DSCP
	}{
		{"client", func() { check(t, row{server: "ucmatose -b ADDR", client: "ucmatose -s ADDR -t 0xb8"}, a, b) }, 46, 0},
		{"listener", func() {
			program := compile(t, "arrive")
			server := b.start(t, program+" server 0 0xb8")
			a.start(t, program+" client "+b.end.Addr4.String()+" "+port(server)).Succeed()
			b.endAll(t)
		}, 0, 46},
	} {
		t.Run(tt.name, func(t *testing.T) {
			stop := testenv.Capture(t, w.Mid, w.MidA, "tcp", "tos-"+tt.name)
			tt.run()
			packets := make(map[string]int)
			for line := range strings.Lines(testenv.Tshark(t, stop(), "-T", "fields", "-e", "ip.src", "-e", "ip.dsfield.dscp", "-Y", "tcp.len > 0")) {
				packets[strings.TrimSpace(line)]++
			}
			for _, want := range []string{fmt.Sprintf("%v\t%d", a.end.Addr4, tt.client), fmt.Sprintf("%v\t%d", b.end.Addr4, tt.server)} {
				if packets[want] == 0 {
					t.Errorf("no packet with %q; there are %v", want, packets)
				}
				delete(packets, want)
			}
			if len(packets) > 0 {
				t.Errorf("packets with another DSCP: %v", packets)
			}
		})
	}
}

// port returns the port that arrive listens on.
func port(server *testenv.Process) string {
	server.Expect("port ")
	_, port, _ := strings.Cut(server.String(), "port ")
	port, _, _ = strings.Cut(port, "\n")
	return port
}

// TestInterfaces checks that a daemon of two interfaces appears as two devices with the
// addresses of their interfaces.
func TestInterfaces(t *testing.T) {
	plain.libraries(t)
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	w := v.Another(t)
	a, b := newHost(t, plain, &v.A, &w.A), newHost(t, plain, &v.B, &w.B)
	second := func(h *host, end *testenv.End) *host {
		other := *h
		other.end = end
		return &other
	}
	a2, b2 := second(a, &w.A), second(b, &w.B)
	for name, h := range map[string]*host{"iwarpd0": a, "iwarpd1": a2} {
		p := a.start(t, "ibv_devinfo -v -d "+name)
		p.Succeed()
		if want := "::ffff:" + h.end.Addr4.String(); !strings.Contains(p.String(), want) {
			t.Errorf("ibv_devinfo -d %s has no %q:\n%s", name, want, p)
		}
	}
	t.Run("by the address", func(t *testing.T) {
		r := row{server: "rping -s -a ADDR -v -C 3", client: "rping -c -a ADDR -v -C 3"}
		check(t, r, a, b)
		check(t, r, a2, b2)
		check(t, r, b, b2) // within the host
	})
	// A connection to every address is by the device at which it arrives, and one within the host by that of the address.
	t.Run("on every address", func(t *testing.T) {
		program := compile(t, "arrive")
		for _, number := range []string{"7177", "0"} {
			server := b.start(t, program+" server "+number)
			at := port(server)
			for _, c := range []struct {
				from     *host
				src, dst netip.Addr
				device   string
			}{
				{a, v.A.Addr4, v.B.Addr4, "iwarpd0"}, {a, v.A.Addr6, v.B.Addr6, "iwarpd0"}, {b, v.B.Addr4, v.B.Addr4, "iwarpd0"},
				{a, w.A.Addr4, w.B.Addr4, "iwarpd1"}, {a, w.A.Addr6, w.B.Addr6, "iwarpd1"}, {b, w.B.Addr4, w.B.Addr4, "iwarpd1"},
			} {
				c.from.start(t, program+" client "+c.dst.String()+" "+at).Succeed()
				server.Expect(fmt.Sprintf("%v to %v by %s\n", c.src, c.dst, c.device))
			}
			// Link-local addresses have the zone of the device.
			src, dst := linkLocal(t, &w.A).WithZone(w.B.Name), linkLocal(t, &w.B).WithZone(w.B.Name)
			a.start(t, program+" client "+dst.WithZone(w.A.Name).String()+" "+at).Succeed()
			server.Expect(fmt.Sprintf("%v to %v by iwarpd1\n", src, dst))
			second := b.start(t, program+" server "+at) // every device has the port
			if second.Wait(time.Minute) == 0 || !strings.Contains(second.String(), "in use") {
				t.Errorf("a second listener:\n%s", second)
			}
			b.endAll(t)
		}
	})
	// A program without librdmacm chooses the device and connects from the device's address.
	before := sent(t, &w.A)
	check(t, exchanging("ib_write_bw", "-d iwarpd1 -x 0 -n 20"), a2, b2)
	if n := sent(t, &w.A) - before; n < 20*65536 {
		t.Errorf("%d bytes left by the second interface", n)
	}
}

// linkLocal returns the link-local address of an interface.
func linkLocal(t *testing.T, e *testenv.End) netip.Addr {
	t.Helper()
	out, err := e.NS.Command("ip", "-6", "-o", "addr", "show", "dev", e.Name, "scope", "link").Output()
	if err != nil {
		t.Fatal(err)
	}
	_, addr, _ := strings.Cut(string(out), "inet6 ")
	p, err := netip.ParsePrefix(strings.SplitN(addr, " ", 2)[0])
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return p.Addr()
}

// sent returns the number of bytes that an interface has sent.
func sent(t *testing.T, e *testenv.End) (n int) {
	t.Helper()
	out, err := e.NS.Command("cat", "/sys/class/net/"+e.Name+"/statistics/tx_bytes").Output()
	if err == nil {
		n, err = strconv.Atoi(strings.TrimSpace(string(out)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestDeepQueue checks that a completion queue holds as many completions as the program has
// requested.
func TestDeepQueue(t *testing.T) {
	a, b := newHosts(t, plain)
	check(t, row{server: "@deep", client: "@deep ADDR"}, a, b)
}
