package kerneltcp

import (
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/iwarpd/iwarpd/internal/testenv"
)

// tshark runs tshark on a capture without reassembling the random payload for any protocol above TCP.
func tshark(t *testing.T, file string, args ...string) string {
	t.Helper()
	return testenv.Tshark(t, file, append([]string{"-o", "tcp.desegment_tcp_streams:FALSE"}, args...)...)
}

var expertRow = regexp.MustCompile(`^\s+(\d+)\s+(\w+)\s+(\S+)\s+(.*\S)\s*$`)

// number matches the parts of a summary that differ between frames.
var number = regexp.MustCompile(`0x[0-9a-f]+|#?\d+`)

// expert counts tshark's expert messages for a capture by severity and summary. Notes and chats, which any TCP
// causes, are included.
func expert(t *testing.T, file string) map[string]int {
	t.Helper()
	found := map[string]int{}
	severity := ""
	for line := range strings.Lines(tshark(t, file, "-q", "-z", "expert")) {
		line = strings.TrimRight(line, "\n")
		if name, _, ok := strings.Cut(line, " ("); ok && !strings.HasPrefix(line, " ") {
			severity = name
			continue
		}
		// Above TCP, tshark misinterprets the random payload.
		if m := expertRow.FindStringSubmatch(line); m != nil && severity != "" && strings.Contains(" TCP IP IPv4 IPv6 Ethernet ", " "+m[3]+" ") {
			n := 0
			fmt.Sscan(m[1], &n)
			summary := number.ReplaceAllString(m[4], "N")
			switch {
			case strings.HasPrefix(m[4], "TCP Checksum 0xffff instead of 0x0000"):
				continue // Linux writes so once in 65,536 segments; allOnes counts ours
			case m[4] == "Connection reset (RST)":
				continue // closes decides which of them are wrong
			}
			if strings.Contains(summary, "captured (common at capture start)") {
				// A gap, or an ACK captured before its segment, is due to the wire or the capture.
				summary = "not captured, or only later"
			}
			found[severity+": "+summary] += n
		}
	}
	return found
}

// closes counts the streams of a capture that were reset, and those without a FIN from each side. A RST after both
// FINs does not count: it answers a late or duplicate segment of a closed connection (RFC 9293 3.10.7.1).
func closes(t *testing.T, file string) (streams, reset, unfinished int) {
	t.Helper()
	type seen struct {
		fins map[string]bool
		rst  bool
	}
	all := map[string]*seen{}
	for line := range strings.Lines(tshark(t, file, "-Y", "tcp.flags.syn==1 or tcp.flags.fin==1 or tcp.flags.reset==1", "-T", "fields",
		"-e", "tcp.stream", "-e", "tcp.srcport", "-e", "tcp.flags.fin", "-e", "tcp.flags.reset")) {
		f := strings.Fields(line)
		if len(f) != 4 {
			continue
		}
		s := all[f[0]]
		if s == nil {
			s = &seen{fins: map[string]bool{}}
			all[f[0]] = s
		}
		yes := func(v string) bool { return v == "1" || v == "True" }
		if yes(f[2]) {
			s.fins[f[1]] = true
		}
		s.rst = s.rst || yes(f[3]) && len(s.fins) < 2
	}
	for _, s := range all {
		if s.rst {
			reset++
		}
		if len(s.fins) != 2 {
			unfinished++
		}
	}
	return len(all), reset, unfinished
}

// allOnes counts the segments of a sender whose checksum is 0xffff, where RFC 1624
// Section 3 has 0.
func allOnes(t *testing.T, file string, from *testenv.End) int {
	return strings.Count(tshark(t, file, "-Y", fmt.Sprintf("tcp.checksum == 0xffff and (ip.src == %v or ipv6.src == %v)", from.Addr4, from.Addr6)), "\n")
}

// TestExpert compares tshark's expert messages for captures of our TCP with those for the kernel talking to itself on
// the same wire. Ours may show no error, and no warning of a kind that the kernel's do not show. No connection may be
// reset, and both sides must close each.
func TestExpert(t *testing.T) {
	parallel(t)
	cases := []struct {
		name, impair string
		n            int
		short        bool
	}{
		{"clean", "", 4 << 20, false},
		{"loss", "loss=0.01,delay=2ms", 2 << 20, true},
		{"heavy loss", "loss=0.05,delay=1ms", 2 << 20, false},
		{"reorder", "reorder=0.03,hold=1ms,delay=1ms", 4 << 20, false},
		{"loss, duplicates and reordering", "loss=0.005,duplicate=0.01,reorder=0.02,hold=1ms,delay=2ms,jitter=1ms", 2 << 20, false},
	}
	talk := []int{0, 1, 2, 3}
	found := map[string]map[string]int{"kernel": {}, "ours": {}}
	for _, c := range cases {
		if !full() && !c.short {
			continue
		}
		t.Run(c.name, func(t *testing.T) {
			x := testenv.NewWire(t, 1500)
			args := []string{"-seed", fmt.Sprint(testenv.Seed(t)%1e9 + 1)}
			if c.impair != "" {
				args = append(args, "-both", c.impair)
			}
			x.Impair(t, args...)
			rounds := 1
			if c.impair != "" && full() {
				rounds = 2 // which kinds occur is partly random
			}
			for _, stack := range []string{"kernel", "ours"} {
				for round := range rounds {
					near := testenv.Capture(t, x.Mid, x.MidA, "tcp", fmt.Sprintf("%s-%s-%d-near", c.name, stack, round))
					far := testenv.Capture(t, x.B.NS, x.B.Name, "tcp", fmt.Sprintf("%s-%s-%d-far", c.name, stack, round))
					streams := 0
					for _, i := range talk {
						conns := 4
						w := talks[i]
						here, there := place{end: &x.A, stack: stack, args: []string{"-cc", "cubic", "-timewait", "2s"}}, place{end: &x.B, stack: "kernel", args: []string{"-cc", "cubic"}}
						args := append(amount(c.n/conns, w.ours), "-conns", fmt.Sprint(conns))
						var a, b *report
						var err error
						if w.weListen {
							a, b, err = run(t, here, there, w.ours, w.kernel, i%2 == 1, args...)
						} else {
							b, a, err = run(t, there, here, w.kernel, w.ours, i%2 == 1, args...)
						}
						if err != nil {
							t.Fatal(err)
						}
						check(t, a, b)
						streams += conns
					}
					for _, stop := range []func() string{near, far} {
						file := stop()
						for k, n := range expert(t, file) {
							found[stack][k] += n
						}
						if n := allOnes(t, file, &x.A); n != 0 && stack == "ours" {
							t.Errorf("%s: %d segments of ours have the checksum 0xffff", filepath.Base(file), n)
						}
						n, reset, unfinished := closes(t, file)
						if n != streams || reset != 0 || unfinished != 0 {
							t.Errorf("%s: %d connections seen, %d reset, %d without both FINs; want %d, none, none", filepath.Base(file), n, reset, unfinished, streams)
						}
					}
				}
			}
		})
	}
	// On a loaded machine a good wire loses and delays frames as well, so the wires are judged together.
	for _, k := range slices.Sorted(maps.Keys(merge(found["kernel"], found["ours"]))) {
		t.Logf("%-100s kernel %6d ours %6d", k, found["kernel"][k], found["ours"][k])
		if found["kernel"][k] == 0 && (full() || !slices.Contains(usual, k)) && (strings.HasPrefix(k, "Error") || strings.HasPrefix(k, "Warn")) {
			t.Errorf("%s: %d in our traces, none in the kernel's", k, found["ours"][k])
		}
	}
}

// usual are the warnings of the kernel's own traces in a full run. In a short run it is random which of them occur on
// either side.
var usual = []string{
	"Warns: D-SACK Sequence",
	"Warns: TCP Zero Window segment",
	"Warns: TCP window specified by the receiver is now completely full",
	"Warns: This frame is a (suspected) out-of-order segment",
	"Warns: not captured, or only later",
}

func merge(a, b map[string]int) map[string]int {
	m := maps.Clone(a)
	for k, v := range b {
		m[k] += v
	}
	return m
}
