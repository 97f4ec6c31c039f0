package system

import (
	"bytes"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

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

// bond makes a bond over the ends of two veth pairs, and serves it.
func bond(t *testing.T, e, other *testenv.End) *testenv.End {
	t.Helper()
	ip(t, e, "link add bond0 type bond mode active-backup miimon 20")
	for _, port := range []*testenv.End{e, other} {
		ip(t, e, "addr flush dev "+port.Name)
		ip(t, e, "link set "+port.Name+" down")
		ip(t, e, "link set "+port.Name+" master bond0")
	}
	return stack(t, e, "bond0")
}

// exchange checks pings both ways, by IPv4 and by IPv6, and a copy, between two daemons.
func exchange(t *testing.T, a, b *host) {
	t.Helper()
	for _, way := range [][2]*host{{a, b}, {b, a}} {
		for _, addr := range []netip.Addr{way[1].end.Addr4, way[1].end.Addr6} {
			server := testenv.Start(t, way[1].command("ping", "-s", "-a", addr.String()))
			server.Expect("listening on")
			way[0].must("ping", "-c", "-a", addr.String(), "-C", "20", "-S", "65000", "-V")
			if code := server.Wait(limit); code != 0 {
				t.Errorf("ping -s: exit code %d: %s", code, server)
			}
		}
	}
	want := make([]byte, 4<<20)
	r := testenv.Rand(t)
	for i := range want {
		want[i] = byte(r.Uint32())
	}
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, want, 0o600); err != nil {
		t.Fatal(err)
	}
	server := b.serve(dir)
	a.must("cp", file, b.remote("file"))
	if got, err := os.ReadFile(filepath.Join(dir, "file")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the copy differs: %v", err)
	}
	server.Signal(unix.SIGTERM)
	server.Wait(limit)
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

// TestStacked serves interfaces that are made of others, as docs/nics.md says, and refuses the parts of a bridge or bond.
func TestStacked(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("bridge", func(t *testing.T) {
		v := testenv.NewVeth(t, 1500)
		ip(t, &v.A, "link add br0 type bridge")
		ip(t, &v.A, "link set "+v.A.Name+" master br0")
		br := stack(t, &v.A, "br0")
		exchange(t, newHost(t, br), newHost(t, &v.B))
		refused(t, &v.A, v.A.Name, "serve br0")
	})
	t.Run("bond", func(t *testing.T) {
		v := testenv.NewVeth(t, 1500)
		w := v.Another(t)
		a, b := newHost(t, bond(t, &v.A, &w.A)), newHost(t, bond(t, &v.B, &w.B))
		exchange(t, a, b)
		refused(t, &v.A, v.A.Name, "serve bond0")
		// A connection goes on when the active port of both bonds loses its link.
		testenv.Start(t, b.command("ping", "-s", "-P", "-a", b.end.Addr4.String())).Expect("listening on")
		ping := testenv.Start(t, a.command("ping", "-c", "-a", b.end.Addr4.String(), "-C", "1000000", "-v"))
		ping.Expect("rdma-ping-3")
		ip(t, &v.A, "link set "+v.A.Name+" down")
		ip(t, &v.B, "link set "+v.B.Name+" down")
		a.must("ping", "-c", "-a", b.end.Addr4.String(), "-C", "20", "-V")
		before := a.counter("engine.rx_fpdus")
		testenv.Until(t, "the first connection to go on", func() bool { return a.counter("engine.rx_fpdus") > before })
		select {
		case <-ping.Done:
			t.Errorf("the connection ended: %s", tail(ping.String(), 3))
		default:
		}
	})
	t.Run("VLAN on a bond", func(t *testing.T) {
		v := testenv.NewVeth(t, 1500)
		w := v.Another(t)
		vlan := func(e, other *testenv.End) *host {
			over := *bond(t, e, other)
			ip(t, &over, "link add link bond0 name bond0.5 type vlan id 5")
			h := *stack(t, &over, "bond0.5")
			h.Name = "bond0" // served; the addresses are those of the VLAN
			return newHost(t, &h)
		}
		exchange(t, vlan(&v.A, &w.A), vlan(&v.B, &w.B))
		refused(t, &v.A, "bond0.5", "serve bond0")
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
	t.Run("macvlan", func(t *testing.T) {
		v := testenv.NewVeth(t, 1500)
		ip(t, &v.A, "link add link "+v.A.Name+" name mv0 type macvlan mode bridge")
		exchange(t, newHost(t, stack(t, &v.A, "mv0")), newHost(t, &v.B))
	})
	t.Run("vxlan", func(t *testing.T) {
		v := testenv.NewVeth(t, 1500)
		w := v.Another(t) // its addresses are those of the tunnel
		tunnel := func(e, inner, peer *testenv.End) *host {
			ip(t, e, "link add vx0 type vxlan id 5 remote "+peer.Addr4.String()+" dstport 4789 dev "+e.Name)
			ip(t, e, "link set vx0 mtu 1450")
			return newHost(t, stack(t, inner, "vx0"))
		}
		exchange(t, tunnel(&v.A, &w.A, &v.B), tunnel(&v.B, &w.B, &v.A))
	})
}
