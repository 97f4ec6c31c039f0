package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// An arm is an implementation under test. Its run makes all the given tests in one session, at
// the MTU that the lab has set.
type arm struct {
	name string
	run  func(m *matrix, mtu int, tests []test) ([]result, error)
}

var arms = []arm{
	{"daemon", runDaemon},
	{"daemon-socket", runDaemonSocket},
	{"in-process", runInProcess},
	{"budget", func(m *matrix, mtu int, tests []test) ([]result, error) { return runBudget(m, "budget", mtu, tests) }},
	{"budget-super", func(m *matrix, mtu int, tests []test) ([]result, error) {
		return runBudget(m, "budget-super", mtu, tests)
	}},
	{"kernel-tcp-nogso", func(m *matrix, mtu int, tests []test) ([]result, error) { return runTCP(m, tests, false) }},
	{"kernel-tcp-gso", func(m *matrix, mtu int, tests []test) ([]result, error) { return runTCP(m, tests, true) }},
	{"libfabric-tcp", runLibfabric},
	{"pipe", runPipe},
	{rings, runPipe},
	{"within-host", runHost},
	{"memcpy", runMemcpy},
	{"unix-socket", runUnix},
	{"libfabric-shm", runShm},
	{"daemon-sctp", runDaemonSCTP},
	{"usrsctp", runUsrsctp},
	{"verbs-near", func(m *matrix, _ int, tests []test) ([]result, error) { return runVerbs(m, nearMemory, tests) }},
	{"verbs-far", func(m *matrix, _ int, tests []test) ([]result, error) { return runVerbs(m, farMemory, tests) }},
	{"iwarpctl-perf", runPerf},
	{"touch", runTouch},
	{"nfs", runNFS},
	{"nfs-tcp-nogso", func(m *matrix, mtu int, tests []test) ([]result, error) { return runNFSTCP(m, tests, false) }},
	{"nfs-tcp-gso", func(m *matrix, mtu int, tests []test) ([]result, error) { return runNFSTCP(m, tests, true) }},
}

// rings is the arm whose work requests use the rings but no protocol.
const rings = "rings"

// errSkip is wrapped by the error of an arm that cannot run on this machine.
var errSkip = errors.New("skipped")

// A workload is a test of iwarpd with the tests of peers that it is compared with. Round trips
// are compared by their median. With libfabric, which prints only the mean, they are compared
// by the mean.
type workload struct {
	name  string // in the table
	arm   string // the arm of iwarpd
	test  string // the test of that arm
	unit  string
	lower bool // less is better
	sizes []int
	peers map[string]string // test of each peer arm
}

const (
	mib = 1 << 20
	kib = 1 << 10
)

func workloads() []workload {
	bulk := func(ours string) map[string]string {
		return map[string]string{"budget": "stream", "budget-super": "stream", "kernel-tcp-nogso": "stream", "kernel-tcp-gso": "stream", "daemon-socket": ours}
	}
	lat := func(ours string) map[string]string {
		return map[string]string{"budget": "ping-pong", "kernel-tcp-nogso": "ping-pong", "kernel-tcp-gso": "ping-pong", "libfabric-tcp": "ping-pong", "daemon-socket": ours}
	}
	rate := map[string]string{"kernel-tcp-nogso": "rate", "kernel-tcp-gso": "rate"}
	return []workload{
		{"write-bw", "daemon", "write-bw", "Gb/s", false, []int{mib, 64 * kib}, bulk("write-bw")},
		{"read-bw", "daemon", "read-bw", "Gb/s", false, []int{mib, 64 * kib}, bulk("read-bw")},
		{"write-rate", "daemon", "write-rate", "M/s", false, []int{64}, rate},
		{"read-lat", "daemon", "read-lat", "us", true, []int{64}, lat("read-lat")},
		{"send-lat", "daemon", "send-lat", "us", true, []int{64}, lat("send-lat")},
		{"write-bw-inprocess", "in-process", "write-bw", "Gb/s", false, []int{mib}, bulk("write-bw")},
		{"write-rate-inprocess", "in-process", "write-rate", "M/s", false, []int{64}, rate},
		{"read-lat-inprocess", "in-process", "read-lat", "us", true, []int{64}, lat("read-lat")},
		{"send-lat-inprocess", "in-process", "send-lat", "us", true, []int{64}, lat("send-lat")},
		{"write-lat-pipe", "pipe", "write-lat", "us", true, []int{64}, map[string]string{rings: "local"}},
		// Between two programs of one daemon. The latency of a Write ends with its completion,
		// when the data is in the other program's memory.
		{"host-write-bw", "within-host", "write-bw", "Gb/s", false, []int{mib, 64 * kib}, map[string]string{"memcpy": "copy", "unix-socket": "stream", "libfabric-shm": "stream"}},
		{"host-write-rate", "within-host", "write-rate", "M/s", false, []int{64}, map[string]string{"unix-socket": "rate"}},
		{"host-write-lat", "within-host", "write-lat", "us", true, []int{64}, map[string]string{"unix-socket": "one-way", "libfabric-shm": "one-way"}},
		{"host-send-lat", "within-host", "send-lat", "us", true, []int{64}, map[string]string{"unix-socket": "ping-pong", "libfabric-shm": "ping-pong"}},
		// Over SCTP, compared with the same over TCP.
		{"sctp-write-bw", "daemon-sctp", "write-bw", "Gb/s", false, []int{mib, 64 * kib}, map[string]string{"daemon": "write-bw", "usrsctp": "stream"}},
		{"sctp-read-bw", "daemon-sctp", "read-bw", "Gb/s", false, []int{mib}, map[string]string{"daemon": "read-bw", "usrsctp": "stream"}},
		{"sctp-write-rate", "daemon-sctp", "write-rate", "M/s", false, []int{64}, map[string]string{"daemon": "write-rate"}},
		{"sctp-read-lat", "daemon-sctp", "read-lat", "us", true, []int{64}, map[string]string{"daemon": "read-lat", "usrsctp": "ping-pong"}},
		{"sctp-send-lat", "daemon-sctp", "send-lat", "us", true, []int{64}, map[string]string{"daemon": "send-lat", "usrsctp": "ping-pong"}},
		// Many queue pairs, compared with one.
		{"write-bw-64qps", "iwarpctl-perf", "write-bw-64qps", "Gb/s", false, []int{mib, 64 * kib}, map[string]string{"iwarpctl-perf": "write-bw"}},
		// Unmodified programs of libibverbs, whose memory the daemon maps (near) or copies
		// (far), compared with iwarpctl perf and with the same test in Go.
		{"verbs-near-write-bw", "verbs-near", "write-bw", "Gb/s", false, []int{mib, 64 * kib}, map[string]string{"iwarpctl-perf": "write-bw"}},
		{"verbs-far-write-bw", "verbs-far", "write-bw", "Gb/s", false, []int{mib, 64 * kib}, map[string]string{"iwarpctl-perf": "write-bw"}},
		{"verbs-near-write-lat", "verbs-near", "write-ping-pong", "us", true, []int{64}, map[string]string{"daemon": "write-ping-pong"}},
		{"verbs-near-send-lat", "verbs-near", "send-ping-pong", "us", true, []int{64}, map[string]string{"daemon": "send-ping-pong"}},
		// Registering memory for the first time, and again while another region covers it.
		{"verbs-near-reg-first", "verbs-near", "reg-first", "us", true, []int{64 * mib, mib, 64 * kib}, map[string]string{"touch": "touch"}},
		{"verbs-near-reg-last", "verbs-near", "reg-last", "us", true, []int{mib}, map[string]string{"touch": "touch"}},
		{"verbs-near-reg-again", "verbs-near", "reg-again", "us", true, []int{mib, 64 * kib}, map[string]string{"unix-socket": "ping-pong"}},
		{"verbs-far-reg", "verbs-far", "reg-any", "us", true, []int{64 * 1024 * mib, mib, 64}, map[string]string{"unix-socket": "ping-pong"}},
		// NFSv3 over RPC-over-RDMA, compared with the RDMA operations that it consists of, and
		// with NFSv3 over the kernel's TCP.
		{"nfs-read", "nfs", "nfs-read", "Gb/s", false, []int{mib}, map[string]string{"daemon": "write-spread", "nfs-tcp-nogso": "nfs-read", "nfs-tcp-gso": "nfs-read"}},
		{"nfs-write", "nfs", "nfs-write", "Gb/s", false, []int{mib}, map[string]string{"daemon": "read-spread", "nfs-tcp-nogso": "nfs-write", "nfs-tcp-gso": "nfs-write"}},
	}
}

// peerOrder is the order of the peers in the table.
var peerOrder = []string{"budget", "budget-super", "kernel-tcp-nogso", "kernel-tcp-gso", "libfabric-tcp", "daemon-socket", "memcpy", "unix-socket", "libfabric-shm", rings, "daemon", "usrsctp", "iwarpctl-perf", "touch", "nfs-tcp-nogso", "nfs-tcp-gso"}

// A cell is a value that each round measures once.
type cell struct {
	arm  string
	test test
	mtu  int
	mean bool
}

type matrix struct {
	opt      *options
	lab      *lab
	dir      string
	got      map[cell][]float64 // by round; 0 if the round has no value
	details  map[cell][]result  // latency and bulk results of each round
	order    []cell             // keys in the order of their arrival
	failed   []string
	notes    map[string]string // remarks on the last such round, by arm, MTU and test
	busy     int
	sessions int
}

// A pairing is the source of a row: a cell of iwarpd and one of a peer.
type pairing struct {
	w    workload
	size int
	mtu  int
	peer string
	ours cell
	them cell
}

func (m *matrix) pairings(mtu int) []pairing {
	var ps []pairing
	for _, w := range workloads() {
		for _, size := range w.sizes {
			for _, peer := range peerOrder {
				asked, ok := w.peers[peer]
				if !ok || !m.opt.only.MatchString(fmt.Sprintf("%s/%d/%d/%s", w.name, size, mtu, peer)) {
					continue
				}
				mean := (peer == "libfabric-tcp" || peer == "libfabric-shm") && w.lower
				theirs := size
				switch {
				case asked == "stream" && (peer == "budget" || peer == "budget-super" || peer == "usrsctp"):
					theirs = mib // the peer has no messages
				case asked == "ping-pong":
					theirs = 64 // registering does not depend on the size of a message
				}
				ps = append(ps, pairing{w, size, mtu, peer,
					cell{w.arm, test{w.test, size}, mtu, mean}, cell{peer, test{asked, theirs}, mtu, mean}})
			}
		}
	}
	return ps
}

// measure runs all rounds at one MTU.
func (m *matrix) measure(mtu int) {
	todo := map[string][]test{}
	for _, p := range m.pairings(mtu) {
		for _, c := range []cell{p.ours, p.them} {
			if !slices.Contains(todo[c.arm], c.test) {
				todo[c.arm] = append(todo[c.arm], c.test)
			}
		}
	}
	order := slices.Clone(arms)
	for round := range m.opt.rounds {
		for _, a := range order {
			if tests := todo[a.name]; len(tests) > 0 {
				m.session(a, mtu, round, tests)
			}
		}
		slices.Reverse(order)
	}
}

// session runs the tests of one arm in one round.
func (m *matrix) session(a arm, mtu, round int, tests []test) {
	m.sessions++
	if !waitIdle(m.opt.idle) {
		m.busy++
	}
	t := time.Now()
	rs, err := a.run(m, mtu, tests)
	took := time.Since(t)
	if err == nil && len(rs) != len(tests) {
		err = fmt.Errorf("%d results for %d tests", len(rs), len(tests))
	}
	fmt.Printf("MTU %d, round %d of %d, %s, %.1f s:", mtu, round+1, m.opt.rounds, a.name, took.Seconds())
	for i, t := range tests {
		var r result
		e := err
		if e == nil {
			if r = rs[i]; r.Err != "" {
				e = fmt.Errorf("%v: %s", t, r.Err)
			}
		}
		if errors.Is(e, errSkip) {
			m.notes[a.name] = e.Error()
		} else if e != nil {
			if f := fmt.Sprintf("%s, MTU %d: %v", a.name, mtu, e); !slices.Contains(m.failed, f) {
				m.failed = append(m.failed, f)
			}
		}
		if note := health(&r); note != "" {
			m.notes[fmt.Sprintf("%s, MTU %d, %v", a.name, mtu, t)] = note
		}
		fmt.Printf(" %v %s", t, short(r.Value))
		m.printCounters(&r)
		c := cell{arm: a.name, test: t, mtu: mtu}
		m.put(c, round, r.Value)
		if r.P99 > 0 || r.CPU > 0 {
			if m.details[c] == nil {
				m.order = append(m.order, c)
			}
			m.details[c] = append(m.details[c], r)
		}
		c.mean = true
		m.put(c, round, r.Mean)
	}
	fmt.Println()
}

// printCounters prints how the counters of both engines changed, those that -counters matches.
func (m *matrix) printCounters(r *result) {
	if m.opt.counters == nil {
		return
	}
	for _, end := range []struct {
		name    string
		counted map[string]uint64
	}{{"client", r.Client}, {"server", r.Server}} {
		for _, k := range slices.Sorted(maps.Keys(end.counted)) {
			if m.opt.counters.MatchString(k) {
				fmt.Printf("\n\t%s %s %d", end.name, k, end.counted[k])
			}
		}
	}
}

// put stores the value of a cell in a round. 0 means that there is none.
func (m *matrix) put(c cell, round int, v float64) {
	for len(m.got[c]) <= round {
		m.got[c] = append(m.got[c], 0)
	}
	m.got[c][round] = v
}

func (m *matrix) rows() []row {
	var rows []row
	for _, mtu := range m.opt.mtus {
		for _, p := range m.pairings(mtu) {
			if r, ok := m.row(p); ok {
				rows = append(rows, r)
			}
		}
	}
	order := map[string]int{}
	for i, w := range workloads() {
		order[w.name] = i
	}
	slices.SortStableFunc(rows, func(a, b row) int { return order[a.Workload] - order[b.Workload] })
	return rows
}

// row summarizes the rounds in which both arms have a value.
func (m *matrix) row(p pairing) (row, bool) {
	var ours, theirs, ratios []float64
	for i := range m.opt.rounds {
		a, b := at(m.got[p.ours], i), at(m.got[p.them], i)
		if a <= 0 || b <= 0 {
			continue
		}
		ours, theirs = append(ours, a), append(theirs, b)
		if p.w.lower {
			ratios = append(ratios, b/a)
		} else {
			ratios = append(ratios, a/b)
		}
	}
	if len(ratios) == 0 {
		return row{}, false
	}
	return row{p.w.name, p.mtu, p.size, p.peer, p.w.unit, spreadOf(ours), spreadOf(theirs), median(ratios), len(ratios)}, true
}

func at(v []float64, i int) float64 {
	if i < len(v) {
		return v[i]
	}
	return 0
}

// A floor is the least ratio that the rows of a workload must reach on the machine of
// docs/performance.md.
type floor struct {
	workload string
	peers    []string
	size     int
	ratio    float64 // at least
	us       float64 // if not 0: an upper bound of our median, instead of the ratio
	says     string
}

var kernel = []string{"kernel-tcp-nogso", "kernel-tcp-gso"}

var floorList = []floor{
	{"write-bw", []string{"budget"}, mib, 0.6, 0, "write-bw is at least 0.6 of the budget"},
	{"read-lat-inprocess", kernel, 64, 1 / 0.8, 0, "read-lat in-process is at most 0.8 of kernel TCP's spinning ping-pong"},
	{"write-rate", kernel, 64, 5, 0, "write-rate is at least 5 times the kernel's at one write a message"},
	{"write-lat-pipe", []string{rings}, 64, 0, 5, "a Write over the pipe completes within 5 us of its posting"},
	{"host-write-bw", []string{"memcpy"}, mib, 0.6, 0, "a Write of 1 MiB between two programs of the host is at least 0.6 of memcpy"},
	{"host-write-lat", []string{"unix-socket"}, 64, 0, 2, "a Write of 64 bytes between two programs of the host completes within 2 us"},
	{"verbs-near-write-bw", []string{"iwarpctl-perf"}, mib, 0.9, 0, "ib_write_bw of 1 MiB on near memory is at least 0.9 of iwarpctl perf write"},
	{"verbs-near-write-bw", []string{"iwarpctl-perf"}, 64 * kib, 0.9, 0, "ib_write_bw of 64 KiB on near memory is at least 0.9 of iwarpctl perf write"},
	{"verbs-far-write-bw", []string{"iwarpctl-perf"}, mib, 0.6, 0, "ib_write_bw of 1 MiB on far memory is at least 0.6 of iwarpctl perf write"},
	{"verbs-far-write-bw", []string{"iwarpctl-perf"}, 64 * kib, 0.6, 0, "ib_write_bw of 64 KiB on far memory is at least 0.6 of iwarpctl perf write"},
	{"verbs-near-write-lat", []string{"daemon"}, 64, 1 / 1.2, 0, "ib_write_lat takes at most 1.2 times what a program in Go takes"},
	{"verbs-near-send-lat", []string{"daemon"}, 64, 1 / 1.2, 0, "ib_send_lat takes at most 1.2 times what a program in Go takes"},
	{"verbs-near-reg-first", []string{"touch"}, 64 * mib, 0, 64 * 600, "registering memory for the first time costs at most 600 us/MiB"},
	{"verbs-near-reg-first", []string{"touch"}, mib, 0, 600, "registering 1 MiB for the first time costs at most 600 us"},
	{"verbs-near-reg-again", []string{"unix-socket"}, mib, 0, 25, "registering 1 MiB again costs at most 25 us"},
	{"verbs-far-reg", []string{"unix-socket"}, 64 * 1024 * mib, 0, 30, "registering 64 GiB of far memory costs at most 30 us"},
	{"verbs-far-reg", []string{"unix-socket"}, 64, 0, 30, "registering 64 bytes of far memory costs at most 30 us"},
	{"nfs-read", []string{"daemon"}, mib, 0.8, 0, "NFS READs of 1 MiB are at least 0.8 of RDMA Writes"},
	{"nfs-write", []string{"daemon"}, mib, 0.8, 0, "NFS WRITEs of 1 MiB are at least 0.8 of RDMA Reads"},
}

// floors prints whether each floor holds, at each MTU and against each peer that was measured.
// It returns the number of those that do not.
func floors(rows []row) (missed int) {
	for _, f := range floorList {
		for _, r := range rows {
			if r.Workload != f.workload || r.Size != f.size || !slices.Contains(f.peers, r.Peer) {
				continue
			}
			holds := r.Ratio >= f.ratio
			found := fmt.Sprintf("ratio %s, needs %s", short(r.Ratio), short(f.ratio))
			if f.us > 0 {
				holds = r.Ours.Median < f.us
				found = fmt.Sprintf("median %s us; %s: %s us", short(r.Ours.Median), r.Peer, short(r.Theirs.Median))
			}
			verdict := "holds"
			if !holds {
				verdict, missed = "MISSED", missed+1
			}
			fmt.Printf("floor: %s (%s, MTU %d): %s: %s\n", f.says, r.Peer, r.MTU, found, verdict)
		}
	}
	return missed
}
