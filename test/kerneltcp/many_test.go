package kerneltcp

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestManyConnections opens thousands of connections between two programs, ten times: ours to ours, and the kernel's
// to ours. Nothing may be left of them.
func TestManyConnections(t *testing.T) {
	parallel(t)
	def := 300
	if full() {
		def = 10000
	}
	conns := testenv.Count(t, "MANY_CONNECTIONS", def)
	const cycles = 10
	for _, client := range []string{"ours", "kernel"} {
		t.Run(client+" to ours", func(t *testing.T) {
			parallel(t)
			v := testenv.NewVeth(t, 1500)
			sysctl(t, v.B.NS, "net.ipv4.ip_local_port_range", "2000 65000")
			// The kernel closes first and would run out of ports in TIME-WAIT.
			sysctl(t, v.B.NS, "net.ipv4.tcp_max_tw_buckets", "4000")
			at := netip.AddrPortFrom(v.A.Addr4, 7000).String()
			args := []string{"-conns", fmt.Sprint(conns), "-cycles", fmt.Sprint(cycles), "-queue", "4096", "-rcvwindow", "65536", "-timewait", "500ms"}
			s := start(t, v.A.NS, append([]string{"-stack", "ours", "-i", v.A.Name, "-listen", at, "-do", "echo"}, args...)...)
			s.ready()
			c := start(t, v.B.NS, append([]string{"-stack", client, "-i", v.B.Name, "-connect", at, "-do", "hold"}, args...)...)
			rc, err := c.wait(5 * time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			rs, err := s.wait(5 * time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			check(t, rs, rc)
			if want := conns * cycles; rs.Done != want || rc.Done != want || rs.Received != int64(want) {
				t.Errorf("%d connections ended at the client, %d at the server with %d bytes; want %d", rc.Done, rs.Done, rs.Received, want)
			}
			for _, r := range []*report{rs, rc} {
				if r.Goroutines > 64 {
					t.Errorf("%s %s: %d goroutines at the end", r.Stack, r.Do, r.Goroutines)
				}
				for _, e := range r.Engine {
					if e.Timers != 0 {
						t.Errorf("%s: %d timers left", r.Do, e.Timers)
					}
					t.Logf("%s: %d opened, %d accepted, %d retransmitted, %d stateless, %d without a slot, %d goroutines, %.0f MiB of heap",
						r.Do, e.ActiveOpens, e.PassiveOpens, e.TxRetransmits, e.TxStateless, e.TxNoSlot, r.Goroutines, r.HeapMiB)
				}
			}
			t.Logf("%d at once, all open after %.2f s", conns, rc.OpenSeconds)
		})
	}
}
