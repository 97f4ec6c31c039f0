package system

import (
	"bytes"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/bpf"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// ip runs ip in the namespace of e. It skips the test if the kernel lacks that type of interface: make interop-nic runs
// TestStacked on a kernel that has all.
func ip(t *testing.T, e *testenv.End, args string) {
	t.Helper()
	out, err := e.NS.Command("ip", strings.Fields(args)...).CombinedOutput()
	if bytes.Contains(out, []byte("Unknown device type")) {
		t.Skipf("this kernel has no such interface: ip %s", args)
	}
	if err != nil {
		t.Fatalf("ip %s: %v: %s", args, err, out)
	}
}

// stack gives the addresses of e to the new interface name, and returns the end that it is.
func stack(t *testing.T, e *testenv.End, name string) *testenv.End {
	t.Helper()
	ip(t, e, "addr flush dev "+e.Name)
	over := *e
	over.Name = name
	ip(t, e, "addr add "+over.Prefix4.String()+" dev "+name)
	ip(t, e, "addr add "+netip.PrefixFrom(over.Addr6, 64).String()+" dev "+name+" nodad")
	ip(t, e, "link set "+name+" up")
	return &over
}

// bond makes a bond over the ends of two veth pairs.
func bond(t *testing.T, e, other *testenv.End, mode string) *testenv.End {
	t.Helper()
	ip(t, e, "link add bond0 type bond miimon 20 mode "+mode)
	for _, port := range []*testenv.End{e, other} {
		ip(t, e, "addr flush dev "+port.Name)
		ip(t, e, "link set "+port.Name+" down")
		ip(t, e, "link set "+port.Name+" master bond0")
	}
	return stack(t, e, "bond0")
}

// pings checks pings both ways between two daemons.
func pings(t *testing.T, a, b *host, addr func(*testenv.End) netip.Addr) {
	t.Helper()
	for _, way := range [][2]*host{{a, b}, {b, a}} {
		to := addr(way[1].end).String()
		server := testenv.Start(t, way[1].command("ping", "-s", "-a", to))
		server.Expect("listening on")
		way[0].must("ping", "-c", "-a", to, "-C", "20", "-S", "65000", "-V")
		if code := server.Wait(limit); code != 0 {
			t.Errorf("ping -s: exit code %d: %s", code, server)
		}
	}
}

func addr4(e *testenv.End) netip.Addr { return e.Addr4 }

func addr6(e *testenv.End) netip.Addr { return e.Addr6 }

// exchange checks pings by IPv4 and by IPv6, and a copy, between two daemons.
func exchange(t *testing.T, a, b *host) {
	t.Helper()
	pings(t, a, b, addr4)
	pings(t, a, b, addr6)
	want := make([]byte, 4<<20)
	r := testenv.Rand(t)
	for i := range want {
		want[i] = byte(r.Uint32())
	}
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "file")
	testenv.WriteFile(t, file, want, 0o600)
	server := b.serve(dir)
	a.must("cp", file, b.remote("file"))
	if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy differs: %v", err)
	}
	server.Signal(unix.SIGTERM)
	server.Wait(limit)
}

// reaches checks that a is served by packet sockets, and pings both ways between it and a daemon of the host of e that
// uses the kernel's TCP, which leaves checksums and segments to the interfaces.
func reaches(t *testing.T, a *host, e *testenv.End) {
	t.Helper()
	if out := a.must("status"); os.Getenv("IWARPD_LINK") == "" && !strings.Contains(out, "packet ring") {
		t.Errorf("not served by packet sockets: %s", out)
	}
	k := &host{t: t, end: e, socket: filepath.Join(t.TempDir(), "sockets.sock")}
	bin := testenv.Program(t, "cmd/iwarpd")
	k.daemon = testenv.Start(t, e.NS.Command(bin, "--transport", "socket", "--socket", k.socket))
	k.daemon.Expect("ready")
	pings(t, a, k, addr4)
}

// refused checks that neither a daemon nor doctor accepts the interface name, and that both say in one line which to
// serve instead.
func refused(t *testing.T, e *testenv.End, name, want string) {
	t.Helper()
	bin := testenv.Program(t, "cmd/iwarpd")
	for _, cmd := range []*exec.Cmd{
		e.NS.Command(bin, "--interface", name, "--socket", filepath.Join(t.TempDir(), "iwarpd.sock")),
		e.NS.Command(bin, "doctor", "--interface", name),
	} {
		p := testenv.Start(t, cmd)
		if code := p.Wait(limit); code == 0 || !strings.Contains(p.String(), want) {
			t.Errorf("%v: exit code %d: %s; want %q", cmd.Args[4:], code, p, want)
		}
	}
}

// realPair returns a veth pair with the offloads of real ones. Without programs at tc ingress, before Linux 6.6, iwarpd
// does not take the kernel's segments as they are, and the test is skipped.
func realPair(t *testing.T) *testenv.Veth {
	t.Helper()
	v := testenv.NewVethOffloads(t, 1500)
	if err := v.A.NS.Do(func() error {
		dev, err := netlink.LinkByIndex(v.A.Index)
		if err == nil && !bpf.HasIngress(dev) {
			err = bpf.ErrNoIngress
		}
		return err
	}); err != nil {
		testenv.Skip(t, "%v", err)
	}
	return v
}

// TestStacked serves interfaces that are made of others, as docs/nics.md says, and refuses the parts of a bridge or bond.
func TestStacked(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("bridge", func(t *testing.T) {
		v := realPair(t)
		ip(t, &v.A, "link add br0 numrxqueues 16 numtxqueues 16 type bridge") // like a bond
		ip(t, &v.A, "link set "+v.A.Name+" master br0")
		a := newHost(t, stack(t, &v.A, "br0"))
		if out := a.must("status"); !strings.Contains(out, ", 1 worker\n") {
			t.Errorf("workers for queues that no port has: %s", out)
		}
		reaches(t, a, &v.B)
		exchange(t, a, newHost(t, &v.B))
		refused(t, &v.A, v.A.Name, "serve br0")
	})
	for _, mode := range []string{
		"active-backup", "balance-rr", "balance-xor xmit_hash_policy layer3+4", "802.3ad lacp_rate fast", "balance-alb",
	} {
		t.Run("bond "+mode, func(t *testing.T) {
			v := realPair(t)
			w := v.Another(t)
			a, b := newHost(t, bond(t, &v.A, &w.A, mode)), newHost(t, bond(t, &v.B, &w.B, mode))
			if mode == "active-backup" {
				exchange(t, a, b)
				refused(t, &v.A, v.A.Name, "serve bond0")
			}
			reaches(t, a, b.end)
			// A connection goes on when a port of both bonds loses its link, and when it is back and the other one does.
			testenv.Start(t, b.command("perf", "write", "--server", "--listen", b.end.Addr4.String())).Expect("listening on")
			perf := testenv.Start(t, a.command("perf", "write", "--client", b.end.Addr4.String(), "--mode", "bw",
				"--size", "16K", "--duration", "5m"))
			goesOn := func(when string) {
				before := b.counter("engine.rx_fpdus")
				testenv.Until(t, "the connection to go on "+when, func() bool { return b.counter("engine.rx_fpdus") > before+100 })
			}
			goesOn("at first")
			for _, state := range []string{"down", "up"} {
				ip(t, &v.A, "link set "+v.A.Name+" "+state)
				ip(t, &v.B, "link set "+v.B.Name+" "+state)
				goesOn("with a port " + state)
			}
			ip(t, &w.A, "link set "+w.A.Name+" down")
			goesOn("with the other port down")
			if ended(perf) {
				t.Errorf("the connection ended: %s", tail(perf.String(), 3))
			}
		})
	}
	t.Run("VLAN on a bond", func(t *testing.T) {
		v := realPair(t)
		w := v.Another(t)
		vlan := func(e, other *testenv.End) *host {
			over := *bond(t, e, other, "active-backup")
			ip(t, &over, "link add link bond0 name bond0.5 type vlan id 5")
			h := *stack(t, &over, "bond0.5")
			h.Name = "bond0" // served; the addresses are those of the VLAN
			return newHost(t, &h)
		}
		a, b := vlan(&v.A, &w.A), vlan(&v.B, &w.B)
		exchange(t, a, b)
		reaches(t, a, b.end)
		refused(t, &v.A, "bond0.5", "serve bond0")
	})
	t.Run("VLAN beside a bridge", func(t *testing.T) {
		v := realPair(t)
		ip(t, &v.A, "link add br0 type bridge")
		ip(t, &v.A, "link set "+v.A.Name+" master br0")
		vlan := func(e *testenv.End) *testenv.End {
			ip(t, e, "link add link "+e.Name+" name vlan5 type vlan id 5")
			return stack(t, e, "vlan5")
		}
		reaches(t, newHost(t, vlan(&v.A)), vlan(&v.B))
	})
	t.Run("VLAN", func(t *testing.T) {
		for _, link := range []string{"packet", "xdp"} {
			t.Run(link, func(t *testing.T) {
				v := testenv.NewVeth(t, 1500)
				vlan := func(e *testenv.End) *host {
					ip(t, e, "link add link "+e.Name+" name vlan5 type vlan id 5")
					h := *stack(t, e, "vlan5")
					h.Name = e.Name
					return newHost(t, &h, "--link", link)
				}
				exchange(t, vlan(&v.A), vlan(&v.B))
				refused(t, &v.A, "vlan5", "serve "+v.A.Name)
			})
		}
	})
	for _, kind := range []string{"macvlan mode bridge", "macvlan mode passthru", "macvtap mode bridge", "ipvlan mode l2"} {
		t.Run(kind, func(t *testing.T) {
			v := realPair(t)
			ip(t, &v.A, "link add link "+v.A.Name+" name over0 type "+kind)
			a := newHost(t, stack(t, &v.A, "over0"))
			exchange(t, a, newHost(t, &v.B))
			reaches(t, a, &v.B)
		})
	}
	for _, kind := range []string{"vxlan id 5 dstport 4789", "geneve id 5", "gretap"} {
		t.Run(kind, func(t *testing.T) {
			v := realPair(t)
			w := v.Another(t) // its addresses are those of the tunnel
			tunnel := func(e, inner, peer *testenv.End) *testenv.End {
				ip(t, e, "link add tunnel0 mtu 1400 type "+kind+" remote "+peer.Addr4.String())
				return stack(t, inner, "tunnel0")
			}
			a, far := newHost(t, tunnel(&v.A, &w.A, &v.B)), tunnel(&v.B, &w.B, &v.A)
			reaches(t, a, far)
			exchange(t, a, newHost(t, far))
		})
	}
	t.Run("VRF", func(t *testing.T) {
		v := realPair(t)
		ip(t, &v.A, "link add red type vrf table 10")
		ip(t, &v.A, "link set "+v.A.Name+" master red")
		refused(t, &v.A, v.A.Name, "in the VRF red")
	})
}
