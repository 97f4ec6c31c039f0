package system

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestManyConnections repeatedly opens many connections at once between two daemons, moves a message over each and
// closes them. Nothing may be left. MANY_CONNECTIONS and MANY_CYCLES set the numbers.
func TestManyConnections(t *testing.T) {
	testenv.RequireRoot(t)
	conns, cycles := testenv.Count(t, "MANY_CONNECTIONS", 200), testenv.Count(t, "MANY_CYCLES", 2)
	enough(t, conns)
	v := testenv.NewVeth(t, 1500)
	most := strconv.Itoa(conns + 1)
	a, b := newHost(t, &v.A, "--max-qps", most), newHost(t, &v.B, "--max-qps", most)
	ctx, cancel := context.WithTimeout(t.Context(), time.Duration(5+conns*cycles/2000)*time.Minute)
	defer cancel()
	client, server := newParty(ctx, t, a, conns), newParty(ctx, t, b, conns)
	l, err := server.dev.Listen(ctx, b.end.Addr4.String()+":7000", &iwarp.Config{Backlog: 256})
	if err != nil {
		t.Fatal(err)
	}
	hosts := []*host{a, b}
	first := []holding{a.holds(), b.holds()}
	var resident [2][]int64 // after each cycle
	for cycle := range cycles {
		began := time.Now()
		open := make(chan *iwarp.QP, conns)
		var wg sync.WaitGroup
		for i := range 32 { // that many connects in progress
			wg.Go(func() {
				for range (conns + 31 - i) / 32 {
					q := client.qp(ctx)
					if q == nil {
						cancel()
						return
					}
					if _, err := q.Connect(ctx, b.end.Addr4.String()+":7000", nil); err != nil {
						t.Errorf("connect: %v", err)
						cancel()
						return
					}
					open <- q
				}
			})
		}
		accepted := make([]*iwarp.QP, 0, conns)
		for range conns {
			r, err := l.Request(ctx)
			if err != nil {
				t.Fatal(err)
			}
			q := server.qp(ctx)
			if q == nil {
				t.FailNow()
			}
			if err := q.PostRecv(&iwarp.RecvWR{SGEs: []iwarp.SGE{server.mr.SGE(0, 64)}}); err != nil {
				t.Fatal(err)
			}
			if _, err := r.Accept(ctx, q, nil); err != nil {
				t.Fatal(err)
			}
			accepted = append(accepted, q)
		}
		wg.Wait()
		close(open)
		up := time.Since(began)
		for q := range open {
			if err := q.PostSend(&iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{client.mr.SGE(0, 64)}}); err != nil {
				t.Fatal(err)
			}
		}
		server.await(ctx, len(accepted))
		client.await(ctx, len(accepted))
		full := []holding{a.holds(), b.holds()}
		if full[0].counts["connections"] != uint64(conns) || full[0].counts["ports"] != uint64(conns) || full[1].counts["queue pairs"] != uint64(conns) {
			t.Errorf("while %d connections are open: %v, %v", conns, full[0], full[1])
		}
		client.close()
		server.close()
		t.Logf("cycle %d: %d connections open after %.1f s, closed after %.1f s", cycle, len(accepted), up.Seconds(), time.Since(began).Seconds())
		for i, h := range hosts {
			after := h.settles(first[i])
			t.Logf("%s: %d MiB resident, %d descriptors with all open; %d MiB, %d after", h.end.Name, full[i].resident>>20, full[i].files,
				after.resident>>20, after.files)
			resident[i] = append(resident[i], after.resident)
		}
	}
	// The amount of unreturned garbage on the heap varies, so the minimum of the last cycles counts; TestNothingGrows
	// in client/embed is more exact.
	for i, h := range hosts {
		if r := resident[i]; len(r) >= 6 {
			if first, last := slices.Max(r[:3]), slices.Min(r[len(r)-3:]); last > first+first/3 {
				t.Errorf("%s: at least %d MiB resident after each of the last cycles, at most %d MiB after the first", h.end.Name, last>>20, first>>20)
			}
		}
	}
}

// enough skips a test if the limits of this host are too low.
func enough(t *testing.T, conns int) {
	t.Helper()
	// The daemon that connects holds a port for each connection, and has a third of the
	// descriptors for itself and for other users.
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	if need := uint64(conns+512) * 3 / 2; files.Max < need {
		t.Fatalf("%d connections need RLIMIT_NOFILE of %d; it is %d", conns, need, files.Max)
	}
	// This process maps two rings of each queue pair, at both ends.
	b := testenv.ReadFile(t, "/proc/sys/vm/max_map_count")
	if most, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || most < 4*conns+2048 {
		t.Fatalf("%d connections need vm.max_map_count of %d; it is %s", conns, 4*conns+2048, b)
	}
}

// party is one application with many queue pairs on one completion queue.
type party struct {
	t   *testing.T
	dev *iwarp.Device
	pd  *iwarp.PD
	cq  *iwarp.CQ
	mr  *iwarp.MR

	mu  sync.Mutex
	qps []*iwarp.QP
}

func newParty(ctx context.Context, t *testing.T, h *host, conns int) *party {
	t.Helper()
	p := &party{t: t}
	var err error
	if p.dev, err = iwarp.Open(ctx, h.socket); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.dev.Close() })
	if p.pd, err = p.dev.AllocPD(ctx); err != nil {
		t.Fatal(err)
	}
	if p.cq, err = p.dev.CreateCQ(ctx, conns+64); err != nil {
		t.Fatal(err)
	}
	if p.mr, err = p.pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *party) qp(ctx context.Context) *iwarp.QP {
	q, err := p.dev.CreateQP(ctx, iwarp.QPConfig{PD: p.pd, SendCQ: p.cq, RecvCQ: p.cq, SendDepth: 1, RecvDepth: 1})
	if err != nil {
		p.t.Errorf("queue pair: %v", err)
		return nil
	}
	p.mu.Lock()
	p.qps = append(p.qps, q)
	p.mu.Unlock()
	return q
}

// await takes n completions, which must be successful.
func (p *party) await(ctx context.Context, n int) {
	p.t.Helper()
	wcs := make([]iwarp.WC, 64)
	for n > 0 {
		got, err := p.cq.Wait(ctx, wcs)
		if err != nil {
			p.t.Fatal(err)
		}
		for _, wc := range wcs[:got] {
			if wc.Status != iwarp.WCSuccess {
				p.t.Fatalf("completion: %v", wc.Status)
			}
			n--
		}
	}
}

// close destroys all queue pairs and discards their flushed work.
func (p *party) close() {
	for _, q := range p.qps {
		if err := q.Close(); err != nil {
			p.t.Errorf("close: %v", err)
		}
	}
	p.qps = nil
	wcs := make([]iwarp.WC, 64)
	for p.cq.Poll(wcs) > 0 {
	}
}

// holding is the set of resources that a daemon uses.
type holding struct {
	counts   map[string]uint64
	files    int   // open descriptors
	resident int64 // bytes, of its own memory and what it shares
}

// holds returns what the daemon reports and what /proc shows of it.
func (h *host) holds() holding {
	h.t.Helper()
	var st struct {
		Pds, Mrs, Mws, Cqs, Qps, Listens, Conns, Pid uint64
	}
	if err := json.Unmarshal([]byte(h.must("--json", "status")), &st); err != nil {
		h.t.Fatal(err)
	}
	var counters map[string]uint64
	if err := json.Unmarshal([]byte(h.must("--json", "stats")), &counters); err != nil {
		h.t.Fatal(err)
	}
	for _, name := range []string{"ctrl.conns", "ctrl.ports", "engine.conns", "engine.slots", "engine.free_slots", "engine.held_frames", "engine.timers"} {
		if _, ok := counters[name]; !ok {
			h.t.Fatalf("iwarpctl stats does not show %s", name)
		}
	}
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", st.Pid))
	if err != nil {
		h.t.Fatal(err)
	}
	statm := testenv.ReadFile(h.t, fmt.Sprintf("/proc/%d/statm", st.Pid))
	var size, resident int64
	if _, err := fmt.Sscan(string(statm), &size, &resident); err != nil {
		h.t.Fatal(err)
	}
	return holding{
		counts: map[string]uint64{
			"domains": st.Pds, "regions": st.Mrs, "windows": st.Mws, "completion queues": st.Cqs, "queue pairs": st.Qps,
			"listeners": st.Listens, "connections": st.Conns, "connections of ctrl": counters["ctrl.conns"], "ports": counters["ctrl.ports"],
			"connections of the engine": counters["engine.conns"], "timers": counters["engine.timers"],
			"slots": counters["engine.slots"] - counters["engine.free_slots"], "held frames": counters["engine.held_frames"],
		},
		files: len(files), resident: resident * int64(os.Getpagesize()),
	}
}

// settles waits until the daemon holds no more than before.
func (h *host) settles(before holding) holding {
	h.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); ; {
		now := h.holds()
		if maps.Equal(now.counts, before.counts) && now.files <= before.files {
			return now
		}
		if time.Now().After(deadline) {
			h.t.Errorf("%s: %v, %d descriptors; before: %v, %d", h.end.Name, now.counts, now.files, before.counts, before.files)
			return now
		}
	}
}
