package kerneltcp

import (
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestFragments connects, in both directions, to a kernel without path MTU discovery, whose segments a router
// fragments.
func TestFragments(t *testing.T) {
	parallel(t)
	w := testenv.NewWire(t, 1500)
	w.Route(t, 1300, 1500)
	sysctl(t, w.B.NS, "net.ipv4.ip_no_pmtu_disc", "1")
	for i, name := range []string{"connect", "receive"} {
		t.Run(name, func(t *testing.T) {
			ours, _ := converse(t, &w.A, &w.B, []int{6, 1}[i], 1<<20, false, nil, nil)
			f := ours.Engine[0].Fragments
			if f.Packets < 500 || f.Malformed+f.Overlap+f.Lost != 0 {
				t.Errorf("%+v", f)
			}
			t.Logf("%.1f MB/s, %+v", ours.MBps, f)
		})
	}
	if n := counters(t, w.A.NS)["Ip:ReasmReqds"]; n > 0 {
		t.Errorf("the kernel has got %d fragments", n)
	}
}
