// Package clib tests the C library, client/c, against daemons in two network namespaces, and against a hostile one.
package clib

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

const source = "../../client/c"

// variant is a way to compile the library.
type variant struct {
	name, cflags string
	once         sync.Once
	dir          string
	err          error
}

var (
	plain     = &variant{name: "plain", cflags: "-O2 -g"}
	sanitized = &variant{name: "sanitized", cflags: "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"}
	threaded  = &variant{name: "threaded", cflags: "-O0 -g1 -fsanitize=thread"}
)

func TestMain(m *testing.M) { testenv.Main(m) }

func runTool(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

func requireTools(t *testing.T) {
	t.Helper()
	for _, tool := range []string{"gcc", "make", "protoc-c", "pkg-config", "nm"} {
		testenv.RequireTool(t, tool)
	}
	if exec.Command("pkg-config", "--exists", "libprotobuf-c").Run() != nil {
		testenv.Skip(t, "needs libprotobuf-c-dev")
	}
}

// build compiles the library, the example and check.c without a warning, and returns the path of a program or library.
func (v *variant) build(t *testing.T, name string) string {
	t.Helper()
	requireTools(t)
	v.once.Do(func() {
		v.dir = filepath.Join(testenv.Dir(t), v.name)
		if v.err = runTool("make", "-s", "-j2", "-C", source, "O="+v.dir, "CFLAGS="+v.cflags, "CC=gcc"); v.err != nil {
			return
		}
		args := append([]string{"-std=c11", "-Wall", "-Wextra", "-Werror"}, strings.Fields(v.cflags)...)
		args = append(args, "-I"+source, "-o", filepath.Join(v.dir, "check"), "testdata/check.c",
			"-L"+v.dir, "-liwarpd", "-lpthread", "-Wl,-rpath,"+v.dir)
		v.err = runTool("gcc", args...)
	})
	if v.err != nil {
		t.Fatal(v.err)
	}
	return filepath.Join(v.dir, name)
}

// command runs a program of v, or one at a path. The sanitizers of gcc 12 fail now and then on kernels that randomize more than 28 bits of
// an address.
func (v *variant) command(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	if !filepath.IsAbs(name) {
		name = v.build(t, name)
	}
	args = append([]string{name}, args...)
	if v != plain {
		b, err := os.ReadFile("/proc/sys/vm/mmap_rnd_bits")
		if bits, nerr := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && nerr == nil && bits > 28 {
			args = append([]string{"setarch", "--addr-no-randomize"}, args...)
		}
	}
	return exec.Command(args[0], args[1:]...)
}

// host is one end of a wire, with a daemon.
type host struct {
	end    *testenv.End
	socket string
	daemon *testenv.Process
}

func newHosts(t *testing.T, args ...string) (a, b *host) {
	t.Helper()
	requireTools(t)
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	newHost := func(end *testenv.End) *host {
		h := &host{end: end, socket: filepath.Join(t.TempDir(), "iwarpd.sock")}
		// A namespace lasts as long as a process in it. The daemon has the address of its host, and its socket can be reached
		// from everywhere.
		h.daemon = testenv.Start(t, end.NS.Command(testenv.Program(t, "cmd/iwarpd"), append([]string{"--interface", end.Name, "--transport", "both", "--socket", h.socket}, args...)...))
		h.daemon.Expect("ready")
		return h
	}
	return newHost(&v.A), newHost(&v.B)
}

func (h *host) ctl(t *testing.T, args ...string) *testenv.Process {
	t.Helper()
	return testenv.Start(t, exec.Command(testenv.Program(t, "cmd/iwarpctl"), append([]string{"--socket", h.socket}, args...)...))
}

func (h *host) ping(t *testing.T, v *variant, args ...string) *testenv.Process {
	t.Helper()
	return testenv.Start(t, v.command(t, "ping", append([]string{"-u", h.socket}, args...)...))
}

// TestPing checks that the example pings iwarpctl ping, the other way round, and itself.
func TestPing(t *testing.T) { ping(t, plain) }

func TestSanitizedPing(t *testing.T) { ping(t, sanitized) }

func ping(t *testing.T, v *variant) {
	a, b := newHosts(t)
	addr4, addr6 := b.end.Addr4.String(), b.end.Addr6.String()
	for _, size := range []string{"26", "64", "65535"} {
		t.Run(size, func(t *testing.T) {
			server := b.ping(t, v, "-s", "-a", addr4)
			server.Expect("listening on")
			a.ctl(t, "ping", "-c", "-a", addr4, "-C", "30", "-S", size, "-V").Succeed()
			server.Succeed()
			server.Expect("30 rounds")

			server = b.ctl(t, "ping", "-s", "-a", addr4)
			server.Expect("listening on")
			client := a.ping(t, v, "-c", "-a", addr4, "-C", "30", "-S", size, "-V", "-v")
			client.Succeed()
			client.Expect("ping data: rdma-ping-29: ")
			server.Succeed()

			server = b.ping(t, v, "-s", "-a", addr6)
			server.Expect("listening on")
			a.ping(t, v, "-c", "-a", addr6, "-C", "30", "-S", size, "-V").Succeed()
			server.Succeed()
		})
	}
}

// check runs check.c in one of its modes.
func check(t *testing.T, v *variant, a, b *host, mode string) *exec.Cmd {
	t.Helper()
	return v.command(t, "check", a.socket, a.end.Addr4.String(), b.socket, b.end.Addr4.String(), mode)
}

func TestCheck(t *testing.T) {
	checks(t, plain, "memory") // the sanitizers themselves need memory
}

func TestSanitizedCheck(t *testing.T) { checks(t, sanitized) }

func TestSanitizedThreads(t *testing.T) {
	a, b := newHosts(t)
	for _, mode := range []string{"threads", "channels"} {
		t.Run(mode, func(t *testing.T) { testenv.Start(t, check(t, threaded, a, b, mode)).Succeed() })
	}
	leavesNothing(t, a)
}

// checks runs the modes of check.c that need nothing else, and more of them.
func checks(t *testing.T, v *variant, more ...string) {
	a, b := newHosts(t)
	for _, mode := range append([]string{"verbs", "cm", "streams", "transports", "shared", "channels", "threads", "files", "forked"}, more...) {
		t.Run(mode, func(t *testing.T) { testenv.Start(t, check(t, v, a, b, mode)).Succeed() })
	}
	leavesNothing(t, a)
}

// leavesNothing checks that processes that ended without freeing their objects leave nothing behind, as soon as the daemon has noticed
// their end.
func leavesNothing(t *testing.T, a *host) {
	t.Helper()
	testenv.Until(t, "the daemon has no object left", func() bool {
		status := a.ctl(t, "--json", "status")
		status.Succeed()
		return !slices.ContainsFunc([]string{`"qps": 0`, `"mrs": 0`, `"cqs": 0`, `"listens": 0`, `"registered": 0`},
			func(what string) bool { return !strings.Contains(status.String(), what) })
	})
}

// TestSanitizedScarce checks that a call that lacks memory, descriptors or anything else fails with an error and leaves nothing, neither in the
// process nor at the daemon, and that the device can be used afterwards. A call for which the kernel lacks buffers waits for them.
func TestSanitizedScarce(t *testing.T) {
	a, _ := newHosts(t)
	program := filepath.Join(testenv.Dir(t), "scarce")
	args := append([]string{"-std=c11", "-Wall", "-Wextra", "-Werror"}, strings.Fields(sanitized.cflags)...)
	args = append(args, "-I"+source, "-o", program, "testdata/scarce.c", sanitized.build(t, "libiwarpd.a"), "-lprotobuf-c", "-lpthread")
	args = append(args, testenv.Wrapping(t, "testdata/scarce.c"))
	if err := runTool("gcc", args...); err != nil {
		t.Fatal(err)
	}
	cmd := sanitized.command(t, program, a.socket, a.end.Addr4.String())
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := testenv.Start(t, cmd)
	used := func() string {
		quota := a.ctl(t, "quota", "list")
		quota.Succeed()
		return quota.String()
	}
	before := ""
	for _, lacking := range []string{"nothing", "memory", "mappings", "files", "room for descriptors", "buffers"} {
		p.Expect("made without " + lacking)
		if before == "" {
			before = used()
		}
		testenv.Until(t, "all is free that was made without "+lacking, func() bool { return used() == before })
		if _, err := io.WriteString(stdin, "\n"); err != nil {
			t.Fatal(err)
		}
	}
	p.Succeed()
}

// While the workers are awake, posting and polling make no system call: check.c forbids itself every call but read,
// write and exit.
func TestNoSystemCall(t *testing.T) {
	a, b := newHosts(t, "--poll", "busy")
	testenv.Start(t, check(t, plain, a, b, "quiet")).Succeed()
}

// The daemon is killed: every call reports it, and SIGPIPE ends no program.
func TestDaemonGone(t *testing.T) { daemonGone(t, plain) }

func TestSanitizedDaemonGone(t *testing.T) { daemonGone(t, sanitized) }

func daemonGone(t *testing.T, v *variant) {
	a, b := newHosts(t, "--spin", "0s")
	cmd := check(t, v, a, b, "gone")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p := testenv.Start(t, cmd)
	p.Expect("kill")
	for _, h := range []*host{a, b} {
		_ = h.daemon.Cmd.Process.Kill()
		<-h.daemon.Done
	}
	if _, err := io.WriteString(stdin, "\n"); err != nil {
		t.Fatal(err)
	}
	p.Succeed()
}

// The shared library exports what the header declares, and nothing else. The static library has no other global
// names.
func TestSymbols(t *testing.T) {
	plain.build(t, "")
	header := testenv.ReadFile(t, source+"/iwarpd.h")
	var want []string
	for _, m := range regexp.MustCompile(`(?m)^IWARPD_API [^(]*?(iwarpd_\w+)\(`).FindAllSubmatch(header, -1) {
		want = append(want, string(m[1]))
	}
	slices.Sort(want)
	if len(want) < 30 {
		t.Fatalf("the header declares %d functions: is it read right?", len(want))
	}
	for lib, flag := range map[string]string{"libiwarpd.so": "-D", "libiwarpd.a": "-g"} {
		out, err := exec.Command("nm", flag, "--defined-only", plain.build(t, lib)).Output()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); len(f) == 3 && f[1] == "T" {
				name, _, _ := strings.Cut(f[2], "@@IWARPD_0.1")
				got = append(got, name)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("%s has %q; the header declares %q", lib, got, want)
		}
	}
}

// The numbers in the header are those of docs/api.md.
func TestHeaderNumbers(t *testing.T) {
	doc := testenv.ReadFile(t, "../../docs/api.md")
	header := testenv.ReadFile(t, source+"/iwarpd.h")
	prefixes := map[string]string{
		"Send WQE/opcode": "WR_", "Send WQE/flag": "", "CQE/status": "WC_", "CQE/opcode": "WC_", "CQE/flag": "WC_", "Client memory/access": "",
		"Requests and replies/code": "CODE_",
	}
	row := regexp.MustCompile(`^\| (\d+) \| ([A-Z_]+) \|`)
	heading, table, checked := "", "", map[string]int{}
	for line := range strings.Lines(string(doc)) {
		if h, ok := strings.CutPrefix(line, "### "); ok {
			heading = strings.TrimSpace(h)
		}
		if strings.HasPrefix(line, "| ") {
			if first, _, _ := strings.Cut(line[2:], " "); regexp.MustCompile(`^[a-z]+$`).MatchString(first) {
				table = heading + "/" + first
			}
		}
		m := row.FindStringSubmatch(line)
		prefix, ok := prefixes[table]
		if m == nil || !ok {
			continue
		}
		checked[table]++
		if want := fmt.Sprintf("IWARPD_%s%s = %s,", prefix, m[2], m[1]); !bytes.Contains(header, []byte(want)) {
			t.Errorf("iwarpd.h has no %q, docs/api.md has (%s)", want, table)
		}
	}
	for table := range prefixes {
		if checked[table] < 3 {
			t.Errorf("docs/api.md: %d numbers found under %s", checked[table], table)
		}
	}
}

// The files of the library form layers (client/c/internal.h): no file calls a file that calls it, directly or through
// others.
func TestFilesFormLayers(t *testing.T) {
	plain.build(t, "libiwarpd.so")
	objects, err := filepath.Glob(filepath.Join(source, "*.c"))
	if err != nil {
		t.Fatal(err)
	}
	definedBy, wants := map[string]string{}, map[string][]string{}
	for _, o := range objects {
		file := strings.TrimSuffix(filepath.Base(o), ".c")
		out, err := exec.Command("nm", filepath.Join(plain.dir, file+".o")).Output()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(out)) {
			f := strings.Fields(line)
			name, kind := f[len(f)-1], f[len(f)-2]
			switch {
			case kind == "U":
				wants[file] = append(wants[file], name)
			case strings.Contains("TDBR", kind):
				definedBy[name] = file
			}
		}
	}
	if len(definedBy) < 60 {
		t.Fatalf("the files define %d names: is the output of nm read right?", len(definedBy))
	}
	left := map[string]bool{} // visited files whose callees were all visited
	var visit func(file string, path []string)
	visit = func(file string, path []string) {
		path = append(path, file)
		if done, seen := left[file]; seen {
			if !done {
				t.Errorf("files that call each other in a circle: %s", strings.Join(path, " -> "))
			}
			return
		}
		left[file] = false
		for _, name := range wants[file] {
			if to := definedBy[name]; to != "" && to != file {
				visit(to, path)
			}
		}
		left[file] = true
	}
	for file := range wants {
		visit(file, nil)
	}
}
