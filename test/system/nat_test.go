package system

import (
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestMasquerade checks that a container, whose connections the host translates to its own address, can have the same
// port as a connection of iwarpd with another peer.
func TestMasquerade(t *testing.T) {
	testenv.RequireRoot(t)
	w := testenv.NewWire(t, 1500)
	mid := &testenv.End{NS: w.Mid, Name: w.MidB, MTU: 1500, Addr4: w.A.Addr4}
	ip(t, &w.A, "addr flush dev "+w.A.Name)
	ip(t, &w.A, "addr add 172.30.0.2/24 dev "+w.A.Name)
	ip(t, &w.A, "route add default via 172.30.0.1")
	ip(t, mid, "addr add 172.30.0.1/24 dev "+w.MidA)
	ip(t, mid, "addr add "+w.A.Prefix4.String()+" dev "+mid.Name)
	if err := w.Mid.Do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) }); err != nil {
		t.Fatal(err)
	}
	rules := "add table ip nat; add chain ip nat out { type nat hook postrouting priority 100; }; " +
		"add rule ip nat out oifname " + mid.Name + " ip saddr 172.30.0.0/24 masquerade"
	if out, err := w.Mid.Command("nft", rules).CombinedOutput(); err != nil {
		testenv.Skip(t, "nft: %v: %s", err, out)
	}
	a, b := newHost(t, mid), newHost(t, &w.B)
	testenv.Start(t, b.command("ping", "-s", "-a", w.B.Addr4.String())).Expect("listening on")
	client := testenv.Start(t, a.command("ping", "-c", "-v", "-a", w.B.Addr4.String()))
	client.Expect("rdma-ping-3")
	var qps []struct{ Local string }
	if err := json.Unmarshal([]byte(a.must("--json", "qp", "list")), &qps); err != nil || len(qps) != 1 {
		t.Fatalf("%+v, %v", qps, err)
	}
	port := int(netip.MustParseAddrPort(qps[0].Local).Port())

	l := w.B.Listen(t, w.B.Addr4)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(c.RemoteAddr().String()))
			c.Close()
		}
	}()
	if err := w.A.NS.Do(func() error {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: port}, Timeout: limit}
		c, err := d.Dial("tcp", l.Addr().String())
		if err != nil {
			return err
		}
		defer c.Close()
		seen := make([]byte, 64)
		n, err := c.Read(seen)
		if want := qps[0].Local; string(seen[:n]) != want { // else the test shows nothing
			t.Errorf("the connection came from %s; want %s", seen[:n], want)
		}
		return err
	}); err != nil {
		t.Errorf("a connection of the container: %v", err)
	}
	before := b.counter("engine.rx_fpdus")
	testenv.Until(t, "the connection of iwarpd to go on", func() bool { return b.counter("engine.rx_fpdus") > before })
	if ended(client) {
		t.Errorf("the connection of iwarpd ended: %s", client)
	}
}
