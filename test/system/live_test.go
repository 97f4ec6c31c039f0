package system

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestHangup checks that SIGHUP applies what can be changed in a running daemon and names what cannot, and that an
// invalid file changes nothing.
func TestHangup(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	file := filepath.Join(t.TempDir(), "iwarpd.yaml")
	write := func(text string) {
		t.Helper()
		testenv.WriteFile(t, file, []byte(text), 0o600)
	}
	write("max-qps: 7\n")
	h := newHost(t, &v.A, "--config", file)
	if out := h.must("status"); !strings.Contains(out, "0 of 7") {
		t.Fatalf("status: %s", out)
	}
	write("max-qps: 9\nspin: 1ms\nlog-level: debug\n")
	h.daemon.Signal(unix.SIGHUP)
	h.daemon.Expect("only when the daemon is restarted")
	if out := h.daemon.String(); !strings.Contains(out, `["max-qps", "log-level"]`) || !strings.Contains(out, `["spin"]`) {
		t.Errorf("the log: %s", out)
	}
	if out := h.must("status"); !strings.Contains(out, "0 of 9") {
		t.Errorf("status: %s", out)
	}
	write("max-qps: many\n")
	h.daemon.Signal(unix.SIGHUP)
	h.daemon.Expect("not reloaded")
	testenv.Until(t, "status shows why", func() bool {
		out := h.must("status")
		return strings.Contains(out, "0 of 9") && strings.Contains(out, "NOT RELOADED: ") && strings.Contains(out, "max-qps") && strings.Contains(h.must("status", "--json"), `"not_reloaded"`)
	})
	write("max-qps: 8\n")
	h.daemon.Signal(unix.SIGHUP)
	testenv.Until(t, "status shows the settings", func() bool {
		out := h.must("status")
		return strings.Contains(out, "0 of 8") && !strings.Contains(out, "NOT RELOADED")
	})
}

// TestServersSurvive checks that servers whose daemon is restarted during a copy continue with the next daemon and
// report it in one line.
func TestServersSurvive(t *testing.T) {
	a, b := pair(t)
	addr := b.end.Addr4.String()
	file := filepath.Join(t.TempDir(), "f")
	longFile(t, file)
	there := t.TempDir()
	servers := []*testenv.Process{
		b.serve(there), testenv.Start(t, b.command("ping", "-s", "-P", "-a", addr)), testenv.Start(t, b.command("perf", "write", "--server", "--listen", addr)),
	}
	for _, s := range servers {
		s.Expect("listening on")
	}
	for range 2 {
		cp := testenv.Start(t, a.command("cp", file, b.remote("long")))
		testenv.Until(t, "the copy begins", func() bool { e, _ := os.ReadDir(there); return len(e) > 0 })
		b.daemon.Signal(unix.SIGTERM)
		if code := b.daemon.Wait(limit); code != 0 {
			t.Fatalf("the daemon: exit code %d: %s", code, b.daemon.String())
		}
		if code := cp.Wait(limit); code != 4 {
			t.Errorf("cp: exit code %d: %s", code, cp.String())
		}
		oneLine(t, cp.String(), "iwarpctl", "cp: "+addr)
		before := strings.Count(servers[0].String(), "listening on")
		b.start()
		for i, s := range servers {
			testenv.Until(t, "server "+fmt.Sprint(i), func() bool { return strings.Count(s.String(), "listening on") == before+1 })
			if n := strings.Count(s.String(), "is gone: waiting for the next one"); n != before {
				t.Errorf("server %d reported %d times that its daemon is gone: %s", i, n, s.String())
			}
		}
		holds(t, there)
		a.must("ping", "-c", "-a", addr, "-C", "2")
		a.must("perf", "write", "--client", addr, "--iterations", "10", "--size", "4K")
	}
	for _, s := range servers {
		s.Signal(unix.SIGTERM)
		if code := s.Wait(limit); code != 0 && code != 130 {
			t.Errorf("exit code %d: %s", code, s.String())
		}
	}
}

// TestDrain checks that a daemon that gets SIGTERM waits for a running copy and then exits.
func TestDrain(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B, "--drain-timeout", "10m")
	file := filepath.Join(t.TempDir(), "f")
	sum := randomFile(t, file, 64<<20)
	there := t.TempDir()
	b.serve(there)
	cp := testenv.Start(t, a.command("cp", file, b.remote("f")))
	testenv.Until(t, "the copy begins", func() bool { e, _ := os.ReadDir(there); return len(e) > 0 })
	b.daemon.Signal(unix.SIGTERM)
	if code := cp.Wait(2 * limit); code != 0 {
		t.Fatalf("cp: exit code %d: %s", code, cp.String())
	}
	if code := b.daemon.Wait(limit); code != 0 {
		t.Errorf("the daemon: exit code %d: %s", code, b.daemon.String())
	}
	if got, err := os.ReadFile(filepath.Join(there, "f")); err != nil || sha256.Sum256(got) != sum {
		t.Errorf("the copy is another: %v", err)
	}
}

// TestDrainHurried checks that a daemon that gets SIGTERM again while it drains stops as after drain-timeout: it resets
// the connections that are left, so that their peers do not wait for it.
func TestDrainHurried(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B, "--drain-timeout", "10m")
	addr := b.end.Addr4.String()
	testenv.Start(t, b.command("ping", "-s", "-a", addr)).Expect("listening on")
	client := testenv.Start(t, a.command("ping", "-c", "-a", addr, "-C", "100000000"))
	testenv.Until(t, "a connection", func() bool { return strings.Contains(a.must("qp", "list"), "RTS") })
	b.daemon.Signal(unix.SIGTERM)
	b.daemon.Expect("draining")
	testenv.Until(t, "the daemon stops", func() bool {
		_ = b.daemon.Cmd.Process.Signal(unix.SIGTERM) // those of the first second count as one
		return strings.Contains(b.daemon.String(), "stopping")
	})
	if code := b.daemon.Wait(limit); code != 0 {
		t.Errorf("the daemon: exit code %d: %s", code, b.daemon.String())
	}
	if code := client.Wait(limit); code != 4 || !strings.Contains(client.String(), "reset by peer") {
		t.Errorf("its peer: exit code %d: %s", code, client.String())
	}
}

// TestDoctorPeer checks that doctor names the step that fails.
func TestDoctorPeer(t *testing.T) {
	a, b := pair(t)
	addr := b.end.Addr4.String()
	if code, out := a.ctl("doctor", addr); code != 4 || !strings.Contains(out, "fail  tcp") || !strings.Contains(out, "fix: start a server") {
		t.Errorf("no server: exit code %d: %s", code, out)
	}
	all := b.end.Addr4.As4() // of a /24
	all[3] = 255
	if code, out := a.ctl("doctor", netip.AddrFrom4(all).String()); code != 2 || !strings.Contains(out, "a broadcast or multicast address") {
		t.Errorf("a broadcast address: exit code %d: %s", code, out)
	}
	b.serve(t.TempDir())
	if code, out := a.ctl("doctor", addr+":7176"); code != 0 || !strings.Contains(out, "warn  mpa") {
		t.Errorf("another server: exit code %d: %s", code, out)
	}
	testenv.Start(t, b.command("ping", "-s", "-P", "-a", addr)).Expect("listening on")
	if out := a.must("doctor", addr); !strings.Contains(out, "ok    large packets  65535 bytes there and back") {
		t.Errorf("all is well: %s", out)
	}
}

// TestDoctorPath checks that doctor finds the MTU of a path that drops larger packets without an ICMP error, which
// TCP's detection of black holes would hide from a longer trial.
func TestDoctorPath(t *testing.T) {
	t.Parallel()
	testenv.RequireRoot(t)
	w := testenv.NewWire(t, 1500)
	w.Route(t, 1430, 1430) // drops what is larger as it arrives
	a, b := newHost(t, &w.A), newHost(t, &w.B)
	addr := b.end.Addr4.String()
	testenv.Start(t, b.command("ping", "-s", "-P", "-a", addr)).Expect("listening on")
	code, out := a.ctl("doctor", addr)
	for _, want := range []string{"ok    transfer", "fail  large packets  packets of 1450 bytes get no answer within ", "packets of 1420 bytes pass: with the key mtu: 1420 on both sides"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if code != 4 {
		t.Errorf("exit code %d; want 4", code)
	}
}

// TestDoctorInterface checks that doctor tries packets of the MTU of the interface that leads to the peer.
func TestDoctorInterface(t *testing.T) {
	t.Parallel()
	testenv.RequireRoot(t)
	v0 := testenv.NewVeth(t, 1500)
	v1 := v0.Another(t)
	ip(t, &v1.A, "link set "+v1.A.Name+" mtu 3000")
	ip(t, &v1.B, "link set "+v1.B.Name+" mtu 3000")
	a := newHost(t, &v0.A, "--interface", "", "--interfaces", v0.A.Name+","+v1.A.Name)
	b := newHost(t, &v0.B, "--interface", "", "--interfaces", v0.B.Name+","+v1.B.Name)
	testenv.Start(t, b.command("ping", "-s", "-P")).Expect("listening on")
	for _, tt := range []struct {
		peer netip.Addr
		mtu  int
	}{{v0.B.Addr4, 1500}, {v1.B.Addr4, 3000}, {v1.B.Addr6, 3000}} {
		if out := a.must("doctor", tt.peer.String()); !strings.Contains(out, fmt.Sprintf("in packets of up to %d bytes", tt.mtu)) {
			t.Errorf("%v: no packets of %d bytes:\n%s", tt.peer, tt.mtu, out)
		}
	}
}

// TestCapture checks that tshark decodes the output of iwarpctl capture from the SYN on.
func TestCapture(t *testing.T) {
	a, b := pair(t)
	file := filepath.Join(t.TempDir(), "out.pcapng")
	capture := testenv.Start(t, b.command("capture", "--host", ":7174", "-w", file, "-n", "12"))
	testenv.Until(t, "the capture", func() bool { fi, err := os.Stat(file); return err == nil && fi.Size() > 0 })
	server := testenv.Start(t, b.command("ping", "-s", "-a", b.end.Addr4.String(), "-p", "7174", "-C", "2"))
	testenv.Until(t, "the server", func() bool { _, out := b.ctl("listen", "list"); return strings.Contains(out, ":7174") })
	if code, out := a.ctl("ping", "-c", "-a", b.end.Addr4.String(), "-p", "7174", "-C", "2"); code != 0 {
		t.Fatalf("ping: %d: %s", code, out)
	}
	server.Wait(limit)
	if code := capture.Wait(limit); code != 0 {
		t.Fatalf("capture: exit code %d: %s", code, capture.String())
	}
	out := testenv.Tshark(t, file)
	for _, want := range []string{"[SYN]", "[SYN, ACK]", "MPA"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
}

// steeringLink returns the ID of the bpf_link that holds the daemon's steering program.
func (h *host) steeringLink() link.ID {
	h.t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fdinfo/*", h.daemon.Cmd.Process.Pid))
	if err != nil {
		h.t.Fatal(err)
	}
	for _, f := range files {
		text, _ := os.ReadFile(f) // it may have been closed meanwhile
		if !strings.Contains(string(text), "link_type:\txdp") && !strings.Contains(string(text), "link_type:\ttcx") {
			continue
		}
		var id uint32
		if _, after, ok := strings.Cut(string(text), "link_id:"); ok {
			if _, err := fmt.Sscan(after, &id); err == nil {
				return link.ID(id)
			}
		}
	}
	h.t.Fatal("the daemon steers by no bpf_link")
	return 0
}

// TestDetached detaches the XDP program under a connection. The daemon must report it and its client
// must get the reason; after a reload that allows it, the program is attached again.
func TestDetached(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	file := filepath.Join(t.TempDir(), "iwarpd.yaml")
	write := func(policy string) {
		t.Helper()
		testenv.WriteFile(t, file, []byte("link: xdp\nxdp-detached: "+policy+"\n"), 0o600)
	}
	write("end")
	a, b := newHost(t, &v.A, "--config", file), newHost(t, &v.B)
	testenv.Start(t, b.command("ping", "-s", "-P", "-a", b.end.Addr4.String())).Expect("listening on")
	client := func() *testenv.Process {
		return testenv.Start(t, a.command("ping", "-c", "-a", b.end.Addr4.String(), "-v"))
	}
	ping := client()
	ping.Expect("rdma-ping-3")
	testenv.Start(t, b.command("perf", "write", "--server", "--listen", b.end.Addr4.String()+":7175")).Expect("listening on")
	writes := testenv.Start(t, a.command("perf", "write", "--client", b.end.Addr4.String(), "--mode", "bw", "--size", "16K", "--duration", "10m", "--interval", "100ms"))
	writes.Expect("Gbit/s")
	if out := a.must("status"); !strings.Contains(out, "attached, generic, copy") {
		t.Errorf("status: %s", out)
	}
	detach := func() {
		t.Helper()
		l, err := link.NewFromID(a.steeringLink())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if err := l.Detach(); err != nil {
			t.Fatal(err)
		}
	}
	detach()
	testenv.Until(t, "the daemon to notice", func() bool { return strings.Contains(a.must("status"), "DETACHED") })
	a.daemon.Expect("was detached from the interface")
	for _, p := range []*testenv.Process{ping, writes} {
		if code := p.Wait(limit); code == 0 || !strings.Contains(p.String(), "XDP program was detached") {
			t.Errorf("the client ended with %d: %s", code, p.String())
		}
	}
	if code, out := a.ctl("ping", "-c", "-a", b.end.Addr4.String(), "-C", "1"); code == 0 || !strings.Contains(out, "XDP program was detached") {
		t.Errorf("a new connection: %d: %s", code, out)
	}
	write("attach")
	a.daemon.Signal(unix.SIGHUP)
	a.daemon.Expect("is attached again")
	ping = client()
	ping.Expect("rdma-ping-3")
	detach()
	testenv.Until(t, "the program to be attached again", func() bool { return a.steered() && a.counter("ctrl.program_detachments") == 2 })
	if code, out := a.ctl("ping", "-c", "-a", b.end.Addr4.String(), "-C", "1"); code != 0 {
		t.Errorf("after the program was attached again: %d: %s", code, out)
	}
}

// TestInterfaceRemoved removes the only interface under a connection: the connection ends, and
// the daemon serves the interface again when it is back.
func TestInterfaceRemoved(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B)
	testenv.Start(t, b.command("ping", "-s", "-P", "-a", b.end.Addr4.String())).Expect("listening on")
	ping := testenv.Start(t, a.command("ping", "-c", "-a", b.end.Addr4.String(), "-v"))
	ping.Expect("rdma-ping-3")
	remove(t, a.end)
	if code := ping.Wait(limit); code != 4 {
		t.Errorf("ping: exit code %d; want 4", code)
	}
	oneLine(t, ping.String()[strings.LastIndex(ping.String(), "iwarpctl: "):], "iwarpctl", "the interface "+a.end.Name+" was removed")
	if code, out := a.ctl("ping", "-c", "-a", b.end.Addr4.String()); code == 0 || !strings.Contains(out, "was removed") {
		t.Errorf("ping while it is gone: exit code %d: %s", code, out)
	}
	v.Restore(t)
	for _, h := range []*host{a, b} {
		h.daemon.Expect("is served again")
	}
	a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "3", "-V") // of the same server
}

// TestInterfaceRenamed checks that an interface that is back, but still down, and then gets another name is served, and
// not a new one of the first name: the daemon has the addresses and routes of the former.
func TestInterfaceRenamed(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a, b := newHost(t, &v.A), newHost(t, &v.B)
	remove(t, a.end)
	for _, h := range []*host{a, b} {
		h.daemon.Expect("was removed, and its connections were ended")
	}
	ip(t, a.end, "link add "+a.end.Name+" type veth peer name "+b.end.Name+" netns "+b.end.NS.Name)
	ip(t, b.end, "addr add "+b.end.Prefix4.String()+" dev "+b.end.Name)
	ip(t, b.end, "link set "+b.end.Name+" up")
	a.daemon.Expect("cannot be served yet")
	ip(t, a.end, "link set "+a.end.Name+" name renamed")
	ip(t, a.end, "link add "+a.end.Name+" up type veth peer name new1")
	ip(t, a.end, "addr add "+a.end.Prefix4.String()+" dev renamed")
	ip(t, a.end, "link set renamed up")
	for _, h := range []*host{a, b} {
		h.daemon.Expect("is served again")
	}
	testenv.Start(t, b.command("ping", "-s", "-P", "-a", b.end.Addr4.String())).Expect("listening on")
	a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "3", "-V")
}

// TestSocketRemoved removes the folder of a daemon's socket: the daemon warns, its clients stay, and SIGHUP makes the
// socket again.
func TestSocketRemoved(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	a := &host{t: t, end: &v.A, socket: filepath.Join(t.TempDir(), "run", "iwarpd.sock")}
	a.start()
	server := testenv.Start(t, a.command("ping", "-s"))
	server.Expect("listening on")
	if err := os.RemoveAll(filepath.Dir(a.socket)); err != nil {
		t.Fatal(err)
	}
	a.daemon.Expect("the file of a socket is gone or is another program's")
	if code, out := a.ctl("status"); code == 0 {
		t.Errorf("status without a socket: %s", out)
	}
	a.daemon.Signal(unix.SIGHUP)
	a.daemon.Expect("sockets whose files were gone are there again")
	a.must("ping", "-c", "-a", a.end.Addr4.String(), "-C", "3", "-V")
	a.daemon.Signal(unix.SIGTERM)
	if code := a.daemon.Wait(limit); code != 0 {
		t.Errorf("the daemon ended with %d", code)
	}
	if _, err := os.Lstat(filepath.Dir(a.socket)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is left: %v", err)
	}
}

// TestAddressInUse checks that connections to a listener on all addresses outlive their address.
func TestAddressInUse(t *testing.T) {
	a, b := pair(t)
	testenv.Start(t, b.command("ping", "-s", "-P")).Expect("listening on")
	for _, addr := range []netip.Prefix{b.end.Prefix4, netip.PrefixFrom(b.end.Addr6, 64)} {
		ping := testenv.Start(t, a.command("ping", "-c", "-a", addr.Addr().String(), "-V"))
		var num string
		testenv.Until(t, "the connection", func() bool {
			m := regexp.MustCompile(`(?m)^ *(\d+) +RTS`).FindStringSubmatch(a.must("qp", "list"))
			if m != nil {
				num = m[1]
			}
			return m != nil
		})
		sent := func() int {
			m := regexp.MustCompile(`tcp\.segs_out\s+(\d+)`).FindStringSubmatch(a.must("qp", "show", num))
			if m == nil {
				t.Fatalf("queue pair %s is gone: %s", num, ping)
			}
			n, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		ip(t, b.end, "addr del "+addr.String()+" dev "+b.end.Name)
		testenv.Until(t, "no such address", func() bool { return !strings.Contains(b.must("status"), addr.Addr().String()) })
		before := sent()
		testenv.Until(t, "more rounds", func() bool { return sent() > before+100 })
		ping.Signal(unix.SIGINT)
		if code := ping.Wait(limit); code != 0 {
			t.Errorf("ping to %v: exit code %d: %s", addr, code, ping)
		}
	}
}

// TestLinkLocal uses link-local addresses of IPv6, with and without the interface name, and of IPv4.
func TestLinkLocal(t *testing.T) {
	testenv.RequireRoot(t)
	v := testenv.NewVeth(t, 1500)
	for i, end := range []*testenv.End{&v.A, &v.B} {
		err := end.NS.Do(func() error {
			l, err := netlink.LinkByName(end.Name)
			if err != nil {
				return err
			}
			for _, s := range []string{"fe80::%d/64", "169.254.7.%d/24"} {
				a, err := netlink.ParseAddr(fmt.Sprintf(s, i+1))
				if err != nil {
					return err
				}
				a.Flags = unix.IFA_F_NODAD
				if err := netlink.AddrAdd(l, a); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	a, b := newHost(t, &v.A), newHost(t, &v.B)
	for _, listen := range []string{"fe80::2%" + v.B.Name, "fe80::2", "169.254.7.2", ""} {
		p := testenv.Start(t, b.command("perf", "write", "--server", "--listen", net.JoinHostPort(listen, "7175")))
		p.Expect("listening on")
		for _, to := range []string{"fe80::2%" + v.A.Name, "fe80::2", "169.254.7.2"} {
			if listen == "" || strings.HasPrefix(to, listen[:4]) {
				a.must("perf", "write", "--client", net.JoinHostPort(to, "7175"), "--size", "8", "--iterations", "8")
			}
		}
		p.Signal(unix.SIGTERM)
		p.Wait(limit)
	}
	if code, out := a.ctl("ping", "-c", "-a", "fe80::2%lo"); code == 0 || !strings.Contains(out, "only on "+v.A.Name) {
		t.Errorf("a link-local address of another interface: exit code %d: %s", code, out)
	}

	// Under another name the interface is served as before.
	err := v.B.NS.Do(func() error {
		l, err := netlink.LinkByName(v.B.Name)
		if err != nil {
			return err
		}
		local, err := netlink.ParseAddr("fe80::2/64")
		if err != nil {
			return err
		}
		local.Flags = unix.IFA_F_NODAD
		last, err := netlink.ParseAddr("10.99.0.2/32")
		if err != nil {
			return err
		}
		return errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, "other"), netlink.LinkSetUp(l), netlink.AddrAdd(l, local), netlink.AddrAdd(l, last))
	})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "the daemon has the new address", func() bool { return strings.Contains(b.must("status"), "10.99.0.2") })
	p := testenv.Start(t, b.command("perf", "write", "--server"))
	p.Expect("listening on")
	a.must("perf", "write", "--client", "[fe80::2]:7175", "--size", "8", "--iterations", "8")
	p.Signal(unix.SIGTERM)
	p.Wait(limit)
}

// TestContainerCapabilities checks that a daemon with the capabilities that the chart and docs/containers.md give it
// starts where the folders belong to another user: that of a packaged daemon, whose folders outlive it.
func TestContainerCapabilities(t *testing.T) {
	testenv.RequireRoot(t)
	listed := func(file, list string) string {
		text := testenv.ReadFile(t, filepath.Join("../..", file))
		m := regexp.MustCompile(list).FindSubmatch(text)
		if m == nil {
			t.Fatalf("%s lists no capabilities", file)
		}
		return strings.ReplaceAll(string(m[1]), " ", "")
	}
	caps := listed("deploy/helm/iwarpd/templates/iwarpd.yaml", `add: \[(NET_ADMIN.*)\]`)
	if doc := listed("docs/containers.md", `--cap-add (NET_ADMIN\S+)`); doc != caps {
		t.Errorf("the chart gives the daemon %s, docs/containers.md %s", caps, doc)
	}
	dir := filepath.Join(t.TempDir(), "run")
	for _, f := range []struct {
		name string
		mode os.FileMode
	}{{"", 0o755}, {"slots", 0o700}, {"slots/0", 0o755}} {
		folder := filepath.Join(dir, f.name)
		if err := errors.Join(os.Mkdir(folder, f.mode), os.Chown(folder, 54321, 54321)); err != nil {
			t.Fatal(err)
		}
	}
	config := filepath.Join(t.TempDir(), "iwarpd.yaml")
	text := fmt.Appendf(nil, "slots: {count: 2, folder: %s/slots}\n", dir)
	testenv.WriteFile(t, config, text, 0o644)
	v := testenv.NewVeth(t, 1500)
	bounds := "-all,+" + strings.ToLower(strings.ReplaceAll(caps, ",", ",+"))
	testenv.Start(t, v.A.NS.Command(testenv.RequireTool(t, "setpriv"), "--bounding-set="+bounds,
		testenv.Program(t, "cmd/iwarpd"), "--config", config, "--interface", v.A.Name,
		"--socket", filepath.Join(dir, "iwarpd.sock"))).Expect("ready")
}
