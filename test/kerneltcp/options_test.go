package kerneltcp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// talks lists the traffic patterns of a run, as seen from our TCP.
var talks = []struct {
	name         string
	ours, kernel string // what each side does
	weListen     bool
}{
	{"send", "send", "receive", false},
	{"receive", "receive", "send", true},
	{"both", "both", "both", false},
	{"request", "request", "echo", false},
	{"answer", "echo", "request", true},
	{"accept and send", "send", "receive", true},
	{"connect and receive", "receive", "send", false},
}

// amount returns the flags of a run that moves n bytes in each direction, or makes n/1000 requests.
func amount(n int, do string) []string {
	if do == "request" {
		return []string{"-bytes", fmt.Sprint(max(20, n/20000)), "-size", "1000"}
	}
	return []string{"-bytes", fmt.Sprint(n)}
}

// converse runs one pattern between our TCP in a and the kernel's in b, and checks it. ours and theirs are further
// flags of each side.
func converse(t *testing.T, a, b *testenv.End, talk int, n int, v6 bool, ours, theirs []string) (we, they *report) {
	t.Helper()
	w := talks[talk]
	here := place{end: a, stack: "ours", args: append([]string{"-timewait", "200ms"}, ours...)}
	there := place{end: b, stack: "kernel", args: theirs}
	do := w.ours
	if w.kernel == "request" {
		do = w.kernel
	}
	args := amount(n, do)
	again := clean(t, []*testenv.Namespace{b.NS}, func() uint64 {
		var err error
		if w.weListen {
			we, they, err = run(t, here, there, w.ours, w.kernel, v6, args...)
		} else {
			they, we, err = run(t, there, here, w.kernel, w.ours, v6, args...)
		}
		if err != nil {
			t.Fatal(err)
		}
		check(t, we, they)
		return we.Engine[0].TxRetransmits
	})
	if n := we.Engine[0].TxStateless; n > again {
		t.Errorf("%d RSTs sent, and only %d segments were sent again", n, again)
	}
	return we, they
}

// TestTalks runs every pattern over a clean wire, over both families and at each MTU.
func TestTalks(t *testing.T) {
	parallel(t)
	mtus := []int{1280, 1500, 3498, 9000}
	for _, mtu := range mtus {
		t.Run(fmt.Sprint("MTU ", mtu), func(t *testing.T) {
			parallel(t)
			v := testenv.NewVeth(t, mtu)
			for _, v6 := range []bool{false, true} {
				for i, w := range talks {
					if !full() && mtu != 1500 && i > 3 {
						continue
					}
					t.Run(fmt.Sprintf("%s, IPv6 %v", w.name, v6), func(t *testing.T) {
						n := 4 << 20
						if full() {
							n = 64 << 20
						}
						ours, kernel := converse(t, &v.A, &v.B, i, n, v6, nil, nil)
						t.Logf("ours %.0f MB/s in, kernel %.0f MB/s in, p50 %.0f/%.0f µs", ours.MBps, kernel.MBps, ours.P50, kernel.P50)
					})
				}
			}
		})
	}
}

// TestOptions connects to a kernel without an option, or with another congestion control, and without the option on
// our side.
func TestOptions(t *testing.T) {
	parallel(t)
	v := testenv.NewVeth(t, 1500)
	have := testenv.ReadFile(t, "/proc/sys/net/ipv4/tcp_available_congestion_control")
	kinds := []struct {
		name, sysctl, off, on string
		ours                  []string
	}{
		{"SACK", "net.ipv4.tcp_sack", "0", "1", []string{"-no-sack"}},
		{"D-SACK", "net.ipv4.tcp_dsack", "0", "1", nil},
		{"timestamps", "net.ipv4.tcp_timestamps", "0", "1", []string{"-no-timestamps"}},
		{"window scale", "net.ipv4.tcp_window_scaling", "0", "1", []string{"-no-wscale"}},
		{"kernel refuses ECN", "net.ipv4.tcp_ecn", "0", "2", []string{"-ecn"}},
		{"kernel asks for ECN", "net.ipv4.tcp_ecn", "1", "2", nil},
	}
	n := 2 << 20
	if full() {
		n = 32 << 20
	}
	each := func(t *testing.T, args ...string) {
		for i, w := range talks {
			if i == 3 || i == 4 || !full() && i > 2 {
				continue
			}
			t.Run(w.name, func(t *testing.T) { converse(t, &v.A, &v.B, i, n, i%2 == 1, args, nil) })
		}
	}
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			sysctl(t, v.B.NS, k.sysctl, k.off)
			each(t)
			if k.name == "kernel refuses ECN" || k.name == "kernel asks for ECN" {
				each(t, "-ecn")
			}
			sysctl(t, v.B.NS, k.sysctl, k.on)
			if k.ours != nil {
				each(t, k.ours...)
			}
		})
	}
	t.Run("bare", func(t *testing.T) { each(t, "-no-sack", "-no-timestamps", "-no-wscale") })
	for _, cc := range []string{"cubic", "reno", "dctcp", "bbr"} {
		for _, ours := range []string{"cubic", "newreno", "dctcp"} {
			t.Run(fmt.Sprintf("kernel %s, ours %s", cc, ours), func(t *testing.T) {
				if !strings.Contains(string(have), cc) {
					t.Skipf("the kernel has no %s, only %s", cc, strings.TrimSpace(string(have)))
				}
				sysctl(t, v.B.NS, "net.ipv4.tcp_ecn", "1")
				converse(t, &v.A, &v.B, 2, n, false, []string{"-cc", ours}, []string{"-cc", cc})
			})
		}
	}
}
