package main

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestRows checks that rounds are paired, that a ratio is the median of the ratios of the
// rounds and above 1 when iwarpd is better, and that a round counts only if both arms have a
// value.
func TestRows(t *testing.T) {
	o, err := parse([]string{"-mtu", "1500", "-only", "^(write-bw/1048576/1500/budget|read-lat/64/1500/libfabric-tcp)$"})
	if err != nil {
		t.Fatal(err)
	}
	m := &matrix{opt: o, got: map[cell][]float64{}}
	for round, v := range []struct{ write, budget, lat, fi float64 }{
		{4, 5, 10, 20}, {3, 6, 20, 10}, {0, 5, 0, 5}, {2, 4, 4, 16}, {9, 9, 5, 10},
	} {
		m.put(cell{"daemon", test{"write-bw", mib}, 1500, false}, round, v.write)
		m.put(cell{"budget", test{"stream", mib}, 1500, false}, round, v.budget)
		m.put(cell{"daemon", test{"read-lat", 64}, 1500, true}, round, v.lat)
		m.put(cell{"libfabric-tcp", test{"ping-pong", 64}, 1500, true}, round, v.fi)
	}
	rows := m.rows()
	want := []row{
		{"write-bw", 1500, mib, "budget", "Gb/s", spread{2, 3.5, 9}, spread{4, 5.5, 9}, 0.65, 4},
		{"read-lat", 1500, 64, "libfabric-tcp", "us", spread{4, 7.5, 20}, spread{10, 13, 20}, 2, 4},
	}
	if !slices.Equal(rows, want) {
		t.Errorf("rows = %+v\nwant   %+v", rows, want)
	}
}

// TestMatrix checks that the matrix has every required cell, and that each pairing names an
// existing arm and existing tests.
func TestMatrix(t *testing.T) {
	o, err := parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.rounds < 5 {
		t.Errorf("%d rounds by default", o.rounds)
	}
	known := map[string]bool{}
	for _, a := range arms {
		known[a.name] = true
	}
	m := &matrix{opt: o}
	have := map[string]bool{}
	for _, mtu := range o.mtus {
		for _, p := range m.pairings(mtu) {
			have[p.w.name+"/"+sizeName(p.size)+"/"+p.peer] = true
			if !known[p.ours.arm] || !known[p.them.arm] {
				t.Errorf("pairing of unknown arms: %+v", p)
			}
		}
	}
	for _, want := range []string{
		"write-bw/1 MiB/budget", "write-bw/64 KiB/budget", "read-bw/1 MiB/budget", "read-bw/64 KiB/kernel-tcp-gso",
		"write-rate/64 B/kernel-tcp-nogso", "read-lat/64 B/kernel-tcp-nogso", "read-lat-inprocess/64 B/kernel-tcp-nogso",
		"send-lat/64 B/libfabric-tcp", "send-lat-inprocess/64 B/libfabric-tcp", "write-lat-pipe/64 B/rings",
		"verbs-near-write-bw/64 KiB/iwarpctl-perf", "verbs-far-write-bw/1 MiB/iwarpctl-perf", "verbs-near-write-lat/64 B/daemon",
		"verbs-near-reg-first/1 MiB/touch", "verbs-near-reg-again/1 MiB/unix-socket", "verbs-far-reg/65536 MiB/unix-socket",
	} {
		if !have[want] {
			t.Errorf("no cell %s", want)
		}
	}
	if !slices.Equal(o.mtus, []int{1500, 3498, 9000}) {
		t.Errorf("MTUs %v", o.mtus)
	}
}

func TestFloors(t *testing.T) {
	rows := []row{
		{Workload: "write-bw", MTU: 1500, Size: mib, Peer: "budget", Ratio: 0.6},
		{Workload: "write-bw", MTU: 1500, Size: 64 * kib, Peer: "budget", Ratio: 0.1}, // no floor
		{Workload: "write-bw", MTU: 9000, Size: mib, Peer: "budget", Ratio: 0.59},
		{Workload: "read-lat-inprocess", MTU: 1500, Size: 64, Peer: "kernel-tcp-nogso", Ratio: 1.2},
		{Workload: "write-rate", MTU: 1500, Size: 64, Peer: "kernel-tcp-nogso", Ratio: 5},
		{Workload: "write-lat-pipe", MTU: 1500, Size: 64, Peer: rings, Ours: spread{1, 4.9, 9}, Ratio: 0.1},
		{Workload: "write-lat-pipe", MTU: 9000, Size: 64, Peer: rings, Ours: spread{1, 5, 9}, Ratio: 0.1},
	}
	if n := floors(rows); n != 3 {
		t.Errorf("%d floors missed; want 3", n)
	}
}

// TestWrite checks the keys of bench.json, which its readers depend on.
func TestWrite(t *testing.T) {
	name := filepath.Join(t.TempDir(), "out", "bench.json")
	r := row{"write-bw", 1500, mib, "budget", "Gb/s", spread{1, 2, 3}, spread{4, 5, 6}, 0.4, 5}
	if err := write(name, []row{r}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var got []map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got) != 1 {
		t.Fatalf("%d rows", len(got))
	}
	keys := slices.Sorted(maps.Keys(got[0]))
	if want := []string{"mtu", "ours", "peer", "ratio", "size", "theirs", "unit", "workload"}; !slices.Equal(keys, want) {
		t.Errorf("keys %v; want %v", keys, want)
	}
	ours, ok := got[0]["ours"].(map[string]any)
	if !ok || ours["min"] != 1.0 || ours["median"] != 2.0 || ours["max"] != 3.0 {
		t.Errorf("ours = %v", got[0]["ours"])
	}
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		v    []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{3, 1}, 2}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 3, 2}, 2.5}} {
		if got := median(c.v); got != c.want {
			t.Errorf("median(%v) = %v; want %v", c.v, got, c.want)
		}
	}
}

// TestCompare checks that rows are compared only with rows of the same cell.
func TestCompare(t *testing.T) {
	r := row{"read-lat", 1500, 64, "kernel-tcp-gso", "us", spread{4, 5, 6}, spread{5, 10, 20}, 2, 5}
	name := filepath.Join(t.TempDir(), "bench.json")
	if err := write(name, []row{r}); err != nil {
		t.Fatal(err)
	}
	before, err := read(name)
	if err != nil {
		t.Fatal(err)
	}
	other := r
	other.MTU = 9000
	r.Ours.Median, r.Ratio = 4, 2.5
	var out strings.Builder
	compare(&out, before, []row{other, r})
	if want := "against: read-lat, 64 B, MTU 1500, kernel-tcp-gso: 5.00 -> 4.00 us; ratio 2.00 -> 2.50 (+25 %)\n"; out.String() != want {
		t.Errorf("printed %q, want %q", out.String(), want)
	}
}

// TestReadFIFO checks that a FIFO without a writer in place of an earlier run is an error.
func TestReadFIFO(t *testing.T) {
	name := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(name, 0o600); err != nil {
		t.Fatal(err)
	}
	failed := make(chan error, 1)
	go func() {
		_, err := read(name)
		failed <- err
	}()
	select {
	case err := <-failed:
		if err == nil {
			t.Error("a FIFO without a writer has rows")
		}
	case <-time.After(time.Minute):
		t.Error("read waits for a writer of the FIFO")
	}
}

// TestPlot checks that rows compared with the kernel's TCP have a bar, to the right of the
// middle line if iwarpd is faster, and that other rows have none.
func TestPlot(t *testing.T) {
	name := filepath.Join(t.TempDir(), "plot.svg")
	of := func(v float64) spread { return spread{v, v, v} }
	rows := []row{
		{"write-bw", 1500, mib, "kernel-tcp-gso", "Gb/s", of(20), of(10), 2, 5},
		{"write-bw", 1500, mib, "budget", "Gb/s", of(20), of(5), 4, 5},
		{"read-lat", 1500, 64, "kernel-tcp-gso", "us", of(20), of(10), 0.5, 5},
	}
	if err := plot(name, rows); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"write-bw 1 MiB, MTU 1500</text><rect x=\"360\" y=\"40\" width=\"55\"", "2.00: 20.0, kernel 10.0 Gb/s",
		"read-lat 64 B, MTU 1500</text><rect x=\"305\" y=\"56\" width=\"55\"", "0.50: 20.0, kernel 10.0 us",
	} {
		if !strings.Contains(string(b), want) {
			t.Errorf("the plot lacks %s:\n%s", want, b)
		}
	}
	if n := strings.Count(string(b), "</text><rect"); n != 2 {
		t.Errorf("%d bars; want 2", n)
	}
	if err := plot(name, rows[1:2]); err == nil {
		t.Error("drew a plot without bars")
	}
}

// TestHealth checks that losses and retransmissions of either end are reported, as parts of the frames received
// and of the segments sent.
func TestHealth(t *testing.T) {
	before := map[string]uint64{"link.rx_ring_full": 7, "engine.tx_frames": 5, "gauge": 9}
	after := map[string]uint64{
		"link.rx_ring_full": 10, "engine.rx_frames": 1000, "gauge": 8,
		// 1000 frames, of which 900 are super-frames of 40 segments
		"engine.tx_frames": 1005, "engine.tx_super": 900, "engine.tx_super_segments": 36000, "engine.tx_retransmits": 36,
	}
	got := changes(before, after)
	if _, ok := got["gauge"]; ok || got["link.rx_ring_full"] != 3 {
		t.Errorf("changes %v", got)
	}
	r := result{Server: got}
	if s := health(&r); s != "the server lost 3 of 1003 frames at its receiving ring" {
		t.Errorf("%q", s)
	}
	got["engine.tx_retransmits"], got["link.rx_ring_full"] = 37, 0
	r = result{Client: got, Note: "note"}
	if s := health(&r); s != "note; 37 of the client's 36100 segments were retransmissions" {
		t.Errorf("%q", s)
	}
	if s := health(&result{}); s != "" {
		t.Errorf("%q", s)
	}
}
