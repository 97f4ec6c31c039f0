package system

import (
	"crypto/sha256"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// plain runs programs as a user without privileges: nobody, if the test runs as root.
type plain struct {
	t    *testing.T
	dir  string    // owned by that user
	caps []uintptr // capabilities of its programs; nil: none
}

func newPlain(t *testing.T) *plain {
	t.Helper()
	// t.TempDir is below directories that other users cannot enter.
	dir, err := os.MkdirTemp("", "iwarpd-plain")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := &plain{t, dir, nil}
	for _, name := range []string{"iwarpd", "iwarpctl"} {
		testenv.WriteFile(t, filepath.Join(dir, name), testenv.ReadFile(t, testenv.Program(t, "cmd/"+name)), 0o755)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(dir, 65534, 65534); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p *plain) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(p.dir, name), args...)
	cmd.Dir = p.dir
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, AmbientCaps: p.caps}
	}
	return cmd
}

// plainHost is a daemon over kernel sockets.
type plainHost struct {
	*plain
	socket string
	daemon *testenv.Process
}

func (p *plain) host(name string, args ...string) *plainHost {
	p.t.Helper()
	h := &plainHost{plain: p, socket: filepath.Join(p.dir, name+".sock")}
	h.daemon = testenv.Start(p.t, p.command("iwarpd", append([]string{"--transport", "socket", "--socket", h.socket}, args...)...))
	h.daemon.Expect("ready")
	return h
}

// listening is a server and its address.
type listening struct {
	*testenv.Process
	at string
}

var address = regexp.MustCompile(`listening on (\S+:[0-9]+)`)

// serve runs a server of iwarpctl.
func (h *plainHost) serve(args ...string) listening {
	h.t.Helper()
	s := testenv.Start(h.t, h.ctlCommand(args...))
	s.Expect("listening on")
	m := address.FindStringSubmatch(s.String())
	if m == nil {
		h.t.Fatalf("iwarpctl %s: %s", args[0], s.String())
	}
	return listening{s, m[1]}
}

func (h *plainHost) ctlCommand(args ...string) *exec.Cmd {
	return h.command("iwarpctl", append([]string{"--socket", h.socket}, args...)...)
}

func (h *plainHost) ctl(args ...string) (int, string) {
	h.t.Helper()
	p := testenv.Start(h.t, h.ctlCommand(args...))
	return p.Wait(2 * limit), p.String()
}

func (h *plainHost) must(args ...string) string {
	h.t.Helper()
	code, out := h.ctl(args...)
	if code != 0 {
		h.t.Fatalf("iwarpctl %s: exit code %d: %s", strings.Join(args, " "), code, out)
	}
	return out
}

// ping verifies Sends, Reads and Writes from h to a server of s at addr.
func (h *plainHost) ping(s *plainHost, addr string) {
	h.t.Helper()
	server := s.serve("ping", "-s", "-a", addr, "-p", port(h.t, addr))
	host, port, err := net.SplitHostPort(server.at)
	if err != nil {
		h.t.Fatal(err)
	}
	h.must("ping", "-c", "-a", host, "-p", port, "-C", "50", "-S", "9000", "-V")
	if code := server.Wait(limit); code != 0 {
		h.t.Errorf("the server of the ping: exit code %d: %s", code, server.String())
	}
}

// port returns a port of addr for a server of iwarpctl.
func port(t *testing.T, addr string) string { return strconv.Itoa(testenv.Port(t, addr)) }

// TestKernelSockets checks that a user without privileges can run everything over the kernel's TCP, between daemons
// and within one.
func TestKernelSockets(t *testing.T) {
	p := newPlain(t)
	a, b := p.host("a"), p.host("b", "--queues", "0-1", "--mpa-markers")
	if out := a.must("status"); !strings.Contains(out, "kernel sockets") {
		t.Errorf("status: %s", out)
	}
	for _, addr := range []string{"127.0.0.2", "::1"} {
		if l, err := net.Listen("tcp", net.JoinHostPort(addr, "0")); err != nil {
			t.Logf("this host has no %s: %v", addr, err)
			continue
		} else {
			l.Close()
		}
		a.ping(b, addr)
		b.ping(a, addr)
		a.ping(a, addr)
	}

	there := filepath.Join(p.dir, "there")
	testenv.Mkdir(t, there, 0o777)
	testenv.Chmod(t, there, 0o777)
	data := make([]byte, 48<<20+12345)
	seed := testenv.Seed(t)
	rng := rand.NewChaCha8([32]byte{0: byte(seed), 1: byte(seed >> 8)})
	_, _ = rng.Read(data)
	file := filepath.Join(p.dir, "file")
	testenv.WriteFile(t, file, data, 0o644)
	files := b.serve("serve", "--dir", there, "--listen", "127.0.0.2:"+port(t, "127.0.0.2"))
	a.must("cp", file, files.at+"/copy")
	a.must("cp", files.at+"/copy", filepath.Join(p.dir, "back"))
	for _, name := range []string{"there/copy", "back"} {
		got, err := os.ReadFile(filepath.Join(p.dir, name))
		if err != nil || sha256.Sum256(got) != sha256.Sum256(data) {
			t.Errorf("%s is not the file: %d bytes, %v", name, len(got), err)
		}
	}
	if code, out := a.ctl("capture", "-w", filepath.Join(p.dir, "c.pcapng")); code == 0 || !strings.Contains(out, "tcpdump") {
		t.Errorf("capture: exit code %d: %s", code, out)
	}

	// When the peer's daemon dies, the client is notified and our daemon continues.
	server := b.serve("ping", "-s", "-P", "-a", "127.0.0.2", "-p", port(t, "127.0.0.2"))
	host, port, _ := net.SplitHostPort(server.at)
	client := testenv.Start(t, a.ctlCommand("ping", "-c", "-a", host, "-p", port, "-v"))
	client.Expect("rdma-ping-3")
	if err := b.daemon.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if code := client.Wait(limit); code == 0 {
		t.Errorf("the client of a daemon that was killed: %s", client.String())
	}
	a.ping(a, "127.0.0.1")
	if code, out := a.ctl("ping", "-c", "-a", host, "-p", port, "-C", "1"); code == 0 || !strings.Contains(out, "refused") {
		t.Errorf("a daemon that is not there: exit code %d: %s", code, out)
	}
}

// TestUnprivilegedNamesSockets checks that the error of a missing AF_XDP privilege names the transport that does not
// need it.
func TestUnprivilegedNamesSockets(t *testing.T) {
	v := testenv.NewVeth(t, 1500)
	p := newPlain(t)
	as := func(args ...string) *testenv.Process {
		iwarpd := []string{"--reuid", "65534", "--regid", "65534", "--clear-groups", filepath.Join(p.dir, "iwarpd")}
		return testenv.Start(t, v.A.NS.Command("setpriv", append(iwarpd, args...)...))
	}
	d := as("--interface", v.A.Name, "--socket", filepath.Join(p.dir, "x.sock"))
	if code := d.Wait(limit); code != 4 || !strings.Contains(d.String(), "--transport socket") {
		t.Errorf("exit code %d: %s; want 4, and the other transport", code, d.String())
	}
	d = as("doctor", "--interface", v.A.Name)
	if code := d.Wait(limit); code != 1 || !strings.Contains(d.String(), "--transport socket") {
		t.Errorf("doctor: exit code %d: %s", code, d.String())
	}
}

// TestSocketsAgainstAFXDP connects a daemon over kernel sockets and one on AF_XDP in both roles, with and without
// markers.
func TestSocketsAgainstAFXDP(t *testing.T) {
	for _, markers := range []string{"false", "true"} {
		t.Run("markers "+markers, func(t *testing.T) {
			v := testenv.NewVeth(t, 1500)
			a := newHost(t, &v.A, "--mpa-markers="+markers)
			b := &host{t: t, end: &v.B, socket: filepath.Join(t.TempDir(), "iwarpd.sock")}
			b.daemon = testenv.Start(t, v.B.NS.Command(testenv.Program(t, "cmd/iwarpd"), "--transport", "socket", "--socket", b.socket, "--mpa-markers="+markers))
			b.daemon.Expect("ready")
			for _, from := range []*host{a, b} {
				to := map[bool]*host{true: b, false: a}[from == a]
				server := testenv.Start(t, to.command("ping", "-s", "-a", to.end.Addr4.String()))
				server.Expect("listening on")
				from.must("ping", "-c", "-a", to.end.Addr4.String(), "-C", "50", "-S", "9000", "-V")
				if code := server.Wait(limit); code != 0 {
					t.Errorf("server: exit code %d: %s", code, server.String())
				}
				there := t.TempDir()
				files := to.serve(there)
				data := make([]byte, 8<<20+77)
				_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
				file := filepath.Join(t.TempDir(), "file")
				testenv.WriteFile(t, file, data, 0o644)
				from.must("cp", file, to.remote("copy"))
				from.must("cp", to.remote("copy"), file+".back")
				for _, name := range []string{filepath.Join(there, "copy"), file + ".back"} {
					if got, err := os.ReadFile(name); err != nil || sha256.Sum256(got) != sha256.Sum256(data) {
						t.Errorf("%s is not the file: %d bytes, %v", name, len(got), err)
					}
				}
				_ = files.Cmd.Process.Kill()
				files.Wait(limit)
			}
			// Several FPDUs of one segment each are passed to the kernel as one record.
			if fpdus, records := b.counter("engine.tx_fpdus"), b.counter("engine.tx_records"); fpdus < 3*records {
				t.Errorf("%d FPDUs in %d records", fpdus, records)
			}
		})
	}
}

// TestBothTransports checks that listeners and connections of a daemon with both transports use that for which they ask,
// at the same time, and that the two reach each other.
func TestBothTransports(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A, "--transport", "both"), newHost(t, &v.B, "--transport", "both")
	if out := a.must("status"); !strings.Contains(out, "kernel sockets") || !strings.Contains(out, v.A.Name) {
		t.Errorf("status: %s", out)
	}
	device := map[string]string{"tcp": v.A.Name, "socket": "any"} // the ends have the same name
	to := map[string]string{"tcp": "7174", "socket": "7175"}
	for listen, port := range to {
		server := testenv.Start(t, b.command("ping", "-s", "-P", "-p", port, "--transport", listen))
		server.Expect("listening on")
	}
	if code, out := b.ctl("ping", "-s", "-p", to["socket"]); code == 0 || !strings.Contains(out, "in use") {
		t.Errorf("AF_XDP on the port of a socket: exit code %d: %s", code, out)
	}
	for listen, port := range to {
		for _, connect := range []string{"tcp", "socket"} {
			for _, addr := range []string{v.B.Addr4.String(), v.B.Addr6.String()} {
				client := testenv.Start(t, a.command("ping", "-c", "-a", addr, "-p", port, "-S", "9000", "-v", "-V", "--transport", connect))
				client.Expect("rdma-ping-3")
				if got := a.devices(); len(got) != 1 || got[0] != device[connect] {
					t.Errorf("%s to %s at %s: connections by %v", connect, listen, addr, got)
				}
				if got := b.devices(); len(got) != 1 || got[0] != device[listen] {
					t.Errorf("%s to %s at %s: accepted by %v", connect, listen, addr, got)
				}
				client.Signal(os.Interrupt)
				client.Wait(limit)
				testenv.Until(t, "the connection ends", func() bool { return len(a.devices())+len(b.devices()) == 0 })
			}
		}
	}
}

// TestCopyRest checks that cp names what it cannot copy, and copies the rest.
func TestCopyRest(t *testing.T) {
	p := newPlain(t)
	a, b := p.host("a"), p.host("b")
	folder := func(path ...string) string {
		name := filepath.Join(append([]string{p.dir}, path...)...)
		testenv.Mkdir(t, name, 0o777)
		testenv.Chmod(t, name, 0o777)
		return name
	}
	tree := func(path ...string) string {
		name := folder(append(path, "tree")...)
		folder(append(path, "tree", "x")...)
		for file, mode := range map[string]os.FileMode{"a-closed": 0, "b": 0o644, "x/c-closed": 0, "x/d": 0o644, "z": 0o644} {
			testenv.WriteFile(t, filepath.Join(name, file), []byte(file), 0o644)
			testenv.Chmod(t, filepath.Join(name, file), mode)
		}
		testenv.Chmod(t, folder(append(path, "tree", "w-closed")...), 0)
		return name
	}
	here := tree("here")
	there := folder("there")
	tree("there", "served")
	files := b.serve("serve", "--dir", there, "--max-clients", "1", "--listen", "127.0.0.2:"+port(t, "127.0.0.2"))
	back := folder("back")
	for _, args := range [][]string{{"-r", here, files.at + "/"}, {"-r", files.at + "/served/tree", back}} {
		code, out := a.ctl(append([]string{"cp"}, args...)...)
		if code != 5 || !strings.Contains(out, "could not copy 3 of") || strings.Count(out, "permission denied") != 3 {
			t.Errorf("cp %v: exit code %d: %s", args, code, out)
		}
		for _, name := range []string{"a-closed", "w-closed", "c-closed"} {
			if !strings.Contains(out, name+": ") {
				t.Errorf("cp %v does not name %s: %s", args, name, out)
			}
		}
		in := filepath.Join(args[2], "tree")
		if args[1] == here {
			in = filepath.Join(there, "tree")
		}
		for _, name := range []string{"b", "x/d", "z"} {
			if got, err := os.ReadFile(filepath.Join(in, name)); err != nil || string(got) != name {
				t.Errorf("cp %v: %s holds %q, %v", args, name, got, err)
			}
		}
	}
	// Several files that are named, the first of which does not exist there.
	code, out := a.ctl("cp", files.at+"/no", files.at+"/served/tree/b", back)
	if _, err := os.Stat(filepath.Join(back, "b")); code != 5 || err != nil || !strings.Contains(out, "no: no such file") {
		t.Errorf("cp of two: exit code %d, %v: %s", code, err, out)
	}
}

// TestPlainExport checks that a user without privileges can export a folder by NFS, and others can copy files to and
// from it.
func TestPlainExport(t *testing.T) {
	p := newPlain(t)
	a, b := p.host("a"), p.host("b")
	there := filepath.Join(p.dir, "there")
	testenv.Mkdir(t, there, 0o777)
	testenv.Chmod(t, there, 0o777)
	data := make([]byte, 5<<20+123)
	_, _ = rand.NewChaCha8([32]byte{byte(testenv.Seed(t))}).Read(data)
	at := "127.0.0.2:" + port(t, "127.0.0.2")
	export := testenv.Start(t, b.ctlCommand("nfs", "export", there, "--listen", at, "--mount-port", "0", "--portmap-port", "0", "--key-file", filepath.Join(p.dir, "nfs.key")))
	export.Expect("all clients are user")
	if os.Geteuid() == 0 && !strings.Contains(export.String(), "file handles end with this process") {
		t.Errorf("the export prints %s", export.String())
	}
	for name, perm := range map[string]os.FileMode{"file": 0o600, "read-only": 0o444} {
		file := filepath.Join(p.dir, name)
		testenv.WriteFile(t, file, data, 0o644)
		if os.Geteuid() == 0 {
			if err := os.Chown(file, 65534, 65534); err != nil {
				t.Fatal(err)
			}
		}
		testenv.Chmod(t, file, perm)
		a.must("nfs", "put", file, at+":/"+name)
		a.must("nfs", "get", at+":/"+name, filepath.Join(p.dir, "back"))
		for _, copied := range []string{filepath.Join(there, name), filepath.Join(p.dir, "back")} {
			got, err := os.ReadFile(copied)
			if err != nil || sha256.Sum256(got) != sha256.Sum256(data) {
				t.Errorf("%s is not the file: %d bytes, %v", copied, len(got), err)
			}
		}
		if st, err := os.Stat(filepath.Join(there, name)); err != nil || st.Mode() != perm {
			t.Errorf("%v, %v", st, err)
		}
	}
	// What the user may not read stays unread.
	if os.Geteuid() == 0 {
		secret := filepath.Join(there, "secret")
		testenv.WriteFile(t, secret, data, 0o600)
		if code, out := a.ctl("nfs", "get", at+":/secret", filepath.Join(p.dir, "stolen")); code == 0 || !strings.Contains(out, "permission") {
			t.Errorf("a file of root: exit code %d: %s", code, out)
		}
	}
}

// TestFollowWithoutPrivilege checks that a daemon that may not follow nftables sets says so, with the exit code for that.
func TestFollowWithoutPrivilege(t *testing.T) {
	p := newPlain(t)
	d := testenv.Start(t, p.command("iwarpd", "--transport", "socket", "--socket", filepath.Join(p.dir, "s"),
		"--allow-set", "inet filter peers"))
	if code := d.Wait(limit); code != 4 || !strings.Contains(d.String(), "needs CAP_NET_ADMIN") {
		t.Errorf("exit code %d: %s", code, d.String())
	}
}
