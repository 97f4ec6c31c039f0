package kerneltcp

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// wire is a bad wire; the impairment applies to each direction.
type wire struct {
	name, impair string
	conns        int
	time         time.Duration
	queue        int
	short        bool     // part of the short matrix
	light        bool     // so slow that several may run in parallel
	sysctls      []string // name=value, for both kernels
	args         []string // for our side only
	mtu          int
	v6           bool
	flags        []string // of test/impair, in place of -both impair
	request      int      // bytes of a request and of its answer; 0: bulk
}

// wires returns combinations of loss and delay, and reordering. The delay is one way. Several connections at once
// reduce the variance of the goodput of a lossy run.
func wires() []wire {
	var all []wire
	for _, delay := range []int{1, 20, 100} {
		for _, loss := range []string{"0", "0.001", "0.01", "0.05"} {
			w := wire{
				name:   fmt.Sprintf("loss %s, %d ms", percent[loss], delay),
				impair: fmt.Sprintf("loss=%s,delay=%dms", loss, delay),
				conns:  8, time: 4 * time.Second, queue: 256 << 10,
			}
			switch delay {
			case 1:
				w.time = 2 * time.Second
			case 100:
				w.time = 8 * time.Second
			}
			w.light = delay > 1 && (loss == "0.01" || loss == "0.05")
			if w.light {
				w.queue = 32 << 10
			}
			w.short = delay < 100 && loss == "0.01"
			all = append(all, w)
		}
	}
	for _, r := range []struct {
		name, impair string
		short        bool
	}{
		{"reorder 1 % by 0.1 ms, 1 ms", "reorder=0.01,delay=1ms", false},
		{"reorder 5 % by 2 ms, 1 ms", "reorder=0.05,hold=2ms,delay=1ms", false},
		{"reorder 5 % by 10 ms, 20 ms", "reorder=0.05,hold=10ms,delay=20ms", false},
		{"all: loss 0.5 %, duplicates, reorder, corrupt", "loss=0.005,duplicate=0.01,reorder=0.02,hold=1ms,corrupt=0.001,delay=2ms,jitter=1ms", true},
	} {
		all = append(all, wire{name: r.name, impair: r.impair, conns: 8, time: 3 * time.Second, queue: 256 << 10, short: r.short})
	}
	for _, o := range []struct {
		name    string
		sysctls []string
		args    []string
		mtu     int
		v6      bool
	}{
		{name: "no SACK", sysctls: []string{"net.ipv4.tcp_sack=0"}},
		{name: "no timestamps", sysctls: []string{"net.ipv4.tcp_timestamps=0"}},
		{name: "no window scale", sysctls: []string{"net.ipv4.tcp_window_scaling=0"}},
		{name: "neither of the three", sysctls: []string{"net.ipv4.tcp_sack=0", "net.ipv4.tcp_timestamps=0", "net.ipv4.tcp_window_scaling=0"}},
		{name: "ECN", sysctls: []string{"net.ipv4.tcp_ecn=1"}, args: []string{"-ecn"}},
		{name: "Reno", args: []string{"-cc", "reno"}},
		{name: "IPv6", v6: true},
		{name: "MTU 1280", mtu: 1280},
		{name: "MTU 3498", mtu: 3498},
		{name: "MTU 9000", mtu: 9000},
	} {
		all = append(all, wire{name: "loss 1 %, 5 ms, " + o.name, impair: "loss=0.01,delay=5ms", conns: 8, time: 3 * time.Second, queue: 64 << 10,
			light: true, sysctls: o.sysctls, args: o.args, mtu: o.mtu, v6: o.v6})
	}
	all = append(all, worse()...)
	for _, size := range []int{64, 5000} {
		all = append(all, wire{name: fmt.Sprintf("loss 1 %%, 5 ms, requests of %d bytes", size), impair: "loss=0.01,delay=5ms", conns: 32, time: 4 * time.Second,
			queue: 64 << 10, light: true, request: size})
	}
	return all
}

// worse returns wires with impairments other than independent loss and delay.
func worse() []wire {
	var all []wire
	for _, w := range []wire{
		{name: "bursts of 10 lost, 5 ms", impair: "burst=0.0005,burstlen=10,delay=5ms"},
		{name: "bursts of 40 lost, 20 ms", impair: "burst=0.0002,burstlen=40,delay=20ms"},
		{name: "100 Mb/s, queue of 30 kB, 5 ms", impair: "rate=100000000,queue=30000,delay=5ms"},
		{name: "100 Mb/s, queue of 2 MB, 5 ms", impair: "rate=100000000,queue=2000000,delay=5ms"},
		{name: "1 ms there, 100 ms back", flags: []string{"-a-to-b", "delay=1ms", "-b-to-a", "delay=100ms"}},
		{name: "100 Mb/s there, 1 Mb/s back", flags: []string{"-a-to-b", "rate=100000000,queue=200000,delay=5ms", "-b-to-a", "rate=1000000,queue=20000,delay=5ms"}},
		{name: "duplicates 5 %, 2 ms", impair: "duplicate=0.05,delay=2ms"},
		{name: "corrupt 1 %, 2 ms", impair: "corrupt=0.01,delay=2ms"},
		{name: "jitter of 10 ms, 5 ms", impair: "delay=5ms,jitter=10ms"},
		{name: "MTU 750 after 1 s, ICMP, 2 ms", flags: []string{"-both", "delay=2ms", "-after", "1s", "-then", "delay=2ms,mtu=750", "-icmp"}},
		{name: "MTU 1300 after 1 s, no ICMP, 2 ms", flags: []string{"-both", "delay=2ms", "-after", "1s", "-then", "delay=2ms,mtu=1300"}, time: 10 * time.Second,
			sysctls: []string{"net.ipv4.tcp_mtu_probing=1"}},
		{name: "tiny tcp_wmem and tcp_rmem, 5 ms", impair: "loss=0.001,delay=5ms", sysctls: []string{"net.ipv4.tcp_wmem=4096 8192 16384", "net.ipv4.tcp_rmem=4096 8192 16384"}},
		{name: "ECN but no SACK, timestamps, scaling; 0.5 %, 5 ms", impair: "loss=0.005,delay=5ms", args: []string{"-ecn"},
			sysctls: []string{"net.ipv4.tcp_sack=0", "net.ipv4.tcp_dsack=0", "net.ipv4.tcp_timestamps=0", "net.ipv4.tcp_window_scaling=0", "net.ipv4.tcp_ecn=1"}},
	} {
		w.conns, w.queue = 8, 256<<10
		w.light = !strings.Contains(w.impair, "duplicate") && !strings.Contains(w.impair, "corrupt")
		if w.time == 0 {
			w.time = 4 * time.Second
		}
		all = append(all, w)
	}
	return all
}

var percent = map[string]string{"0": "0", "0.001": "0.1 %", "0.01": "1 %", "0.05": "5 %"}

// arms are the compared runs, as the stacks of sender and receiver.
var arms = [][2]string{{"kernel", "kernel"}, {"ours", "kernel"}, {"kernel", "ours"}}

// TestImpaired runs our TCP as sender and as receiver against a kernel over bad wires: every byte must arrive and all
// connections must close gracefully. The full run, on an otherwise idle machine, compares the goodput with that of
// kernel to kernel, round by round on the same wire.
func TestImpaired(t *testing.T) {
	parallel(t)
	var (
		mu   sync.Mutex
		rows = map[string]string{}
	)
	note := func(w *wire, row string) {
		mu.Lock()
		defer mu.Unlock()
		rows[w.name] = row
	}
	only := os.Getenv("KERNELTCP_WIRE")
	all := slices.DeleteFunc(wires(), func(w wire) bool {
		return !full() && !w.short || !strings.Contains(w.name, only)
	})
	for _, w := range all {
		if w.light {
			continue
		}
		t.Run(w.name, func(t *testing.T) { note(&w, compare(t, &w)) })
	}
	t.Run("light", func(t *testing.T) {
		for _, w := range all {
			if w.light {
				t.Run(w.name, func(t *testing.T) {
					t.Parallel()
					note(&w, compare(t, &w))
				})
			}
		}
	})
	if !full() {
		return
	}
	var b strings.Builder
	for _, w := range all {
		if row, ok := rows[w.name]; ok {
			fmt.Fprintln(&b, "|", row)
		}
	}
	t.Logf("\n| wire | kernel, MB/s | we send | we receive | send ratio | receive ratio | retransmitted: kernel, %% | we, %% | kernel to us, %% |\n|---|---|---|---|---|---|---|---|---|\n%s", b.String())
}

// least is the minimum share of the kernel's goodput that ours must reach.
const least = 0.8

// compare runs the arms on one wire and returns the row of the table. The goodput of a lossy connection varies, so
// rounds are added while a median is too low. In the short run there is no row, and no kernel to kernel.
func compare(t *testing.T, w *wire) string {
	t.Helper()
	rounds, most := 3, 9
	if w.mtu == 0 {
		w.mtu = 1500
	}
	x := testenv.NewWire(t, w.mtu)
	for _, ns := range []*testenv.Namespace{x.A.NS, x.B.NS} {
		// A connection must not learn from an earlier one, as ours does not.
		for _, s := range append([]string{"net.ipv4.tcp_no_metrics_save=1"}, w.sysctls...) {
			name, value, _ := strings.Cut(s, "=")
			sysctl(t, ns, name, value)
		}
	}
	if strings.Contains(w.impair, "corrupt") {
		neighbours(t, &x.A, &x.B)
		neighbours(t, &x.B, &x.A)
	}
	flags := w.flags
	if flags == nil {
		flags = []string{"-both", w.impair}
	}
	flags = append(flags[:len(flags):len(flags)], "-stats", "-seed", fmt.Sprint(testenv.Seed(t)%1e9+1))
	stop := func() string { return "" }
	changes := slices.Contains(flags, "-after") // in each run
	if !changes {
		stop = x.Impair(t, flags...)
	}
	sums, again, ratio := make([][]float64, len(arms)), make([][]float64, len(arms)), make([]float64, len(arms))
	run := func(i int) {
		if changes {
			stop = x.Impair(t, flags...)
		}
		mbps, share := goodput(t, x, arms[i], w)
		if changes {
			t.Log(strings.TrimSpace(stop()))
		}
		sums[i], again[i] = append(sums[i], mbps), append(again[i], share)
	}
	if !full() { // too short, and the machine too busy, to compare
		w.time = min(w.time, time.Second)
		for i := 1; i < len(arms); i++ {
			run(i)
		}
		t.Logf("MB/s %.2f; %s", sums[1:], strings.TrimSpace(stop()))
		return ""
	}
	for round := 0; round < rounds; round++ {
		for i := range arms {
			if round%2 == 1 {
				i = len(arms) - 1 - i
			}
			run(i)
		}
		for i := range arms {
			ratio[i] = median(sums[i]) / median(sums[0])
		}
		if round == rounds-1 && slices.Min(ratio) < least && rounds < most {
			rounds += 2
		}
	}
	t.Log(strings.TrimSpace(stop()))
	row := fmt.Sprintf("%s | %.2f | %.2f | %.2f | %.2f | %.2f |", w.name,
		median(sums[0]), median(sums[1]), median(sums[2]), ratio[1], ratio[2])
	for i := range arms {
		row += fmt.Sprintf(" %.1f |", 100*median(again[i]))
	}
	t.Log(row, sums)
	for i, r := range ratio {
		if r < least {
			t.Errorf("%s to %s: goodput %.2f of the kernel's; want %.1f: MB/s %.2f, the kernel's %.2f",
				arms[i][0], arms[i][1], r, least, sums[i], sums[0])
		}
	}
	return row
}

// neighbours sets a permanent neighbor entry for peer in the kernel of e. ARP has no checksum: a flipped bit would
// misdirect all frames for a minute.
func neighbours(t *testing.T, e, peer *testenv.End) {
	t.Helper()
	e.NS.Run(t, func() error {
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: e.Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
			IP: peer.Addr4.AsSlice(), HardwareAddr: peer.MAC})
	})
}

// goodput runs one arm and returns the receiver's goodput in MB/s and the share of retransmitted segments.
func goodput(t *testing.T, x *testenv.Wire, arm [2]string, w *wire) (mbps, retransmitted float64) {
	t.Helper()
	// Use the same algorithm on both sides, whatever the machine's default is.
	cc := []string{"-cc", "cubic"}
	if slices.Contains(w.args, "reno") {
		cc = []string{"-cc", "reno"}
	}
	at := func(end *testenv.End, stack string) place {
		if stack == "ours" {
			return place{end: end, stack: stack, args: append(cc[:2:2], w.args...)}
		}
		return place{end: end, stack: stack, args: cc}
	}
	serve, call := "receive", "send"
	if w.request > 0 {
		serve, call = "echo", "request"
	}
	s, c, err := run(t, at(&x.B, arm[1]), at(&x.A, arm[0]), serve, call, w.v6,
		"-conns", fmt.Sprint(w.conns), "-for", w.time.String(), "-queue", fmt.Sprint(w.queue), "-timewait", "1s", "-size", fmt.Sprint(max(w.request, 1)))
	if err != nil {
		t.Fatal(err)
	}
	check(t, s, c)
	var out, again float64
	for _, st := range c.TCP {
		out += float64(st.SegsOut)
		again += float64(st.Retransmits)
	}
	if t.Failed() {
		t.FailNow()
	}
	if w.request > 0 {
		s = c // both directions are equal, and the requester knows the duration
	}
	return s.MBps, again / max(out, 1)
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}
