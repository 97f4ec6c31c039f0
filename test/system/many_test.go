package system

import (
	"context"
	"encoding/json"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// TestManyConnections opens many connections at once between two daemons, moves
// a message over each, closes them, and does so again and again: nothing of them
// is left. MANY_CONNS and MANY_CYCLES say how many.
func TestManyConnections(t *testing.T) {
	testenv.RequireRoot(t)
	conns, cycles := testenv.Count(t, "MANY_CONNS", 200), testenv.Count(t, "MANY_CYCLES", 2)
	// The rings of each queue pair take two descriptors at both ends.
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	if files.Max < uint64(4*conns+1024) {
		t.Fatalf("%d connections need RLIMIT_NOFILE of %d; it is %d", conns, 4*conns+1024, files.Max)
	}
	files.Cur = files.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		t.Fatal(err)
	}
	v := testenv.NewVeth(t, 1500)
	args := []string{"--max-qps", strconv.Itoa(conns + 1), "--log-level", "warn"}
	quiet := func(end *testenv.End) *host {
		h := &host{t: t, end: end, socket: t.TempDir() + "/iwarpd.sock"}
		h.daemon = start(t, h.end.NS.Command(program(t, "iwarpd"), append(daemonArgs(h.end, h.socket), args...)...))
		for i := 0; ; i++ {
			if code, _ := h.ctl("status"); code == 0 {
				return h
			} else if i == 100 {
				t.Fatal("the daemon does not answer")
			}
		}
	}
	a, b := quiet(&v.A), quiet(&v.B)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	client, server := newParty(ctx, t, a, conns), newParty(ctx, t, b, conns)
	l, err := server.dev.Listen(ctx, b.end.Addr4.String()+":7000", &iwarp.Config{Backlog: 256})
	if err != nil {
		t.Fatal(err)
	}
	for cycle := range cycles {
		began := time.Now()
		open := make(chan *iwarp.QP, conns)
		var wg sync.WaitGroup
		for range 32 { // that many connects under way
			wg.Go(func() {
				for range conns / 32 {
					q := client.qp(ctx)
					if _, err := q.Connect(ctx, b.end.Addr4.String()+":7000", nil); err != nil {
						t.Errorf("connect: %v", err)
						return
					}
					open <- q
				}
			})
		}
		accepted := make([]*iwarp.QP, 0, conns)
		for range conns / 32 * 32 {
			r, err := l.Request(ctx)
			if err != nil {
				t.Fatal(err)
			}
			q := server.qp(ctx)
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
		client.close()
		server.close()
		t.Logf("cycle %d: %d connections open after %.1f s, closed after %.1f s", cycle, len(accepted), up.Seconds(), time.Since(began).Seconds())
	}
	for _, h := range []*host{a, b} {
		h.settles()
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
	if p.cq, err = p.dev.CreateCQ(ctx, 4*conns); err != nil {
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

// await takes n completions, which must be successes.
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

// close ends all queue pairs, and forgets what they flush.
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

// settles waits until nothing of any connection is left in the daemon.
func (h *host) settles() {
	h.t.Helper()
	var left map[string]uint64
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); {
		var counters map[string]uint64
		if err := json.Unmarshal([]byte(h.must("--json", "stats")), &counters); err != nil {
			h.t.Fatal(err)
		}
		left = map[string]uint64{
			"connections": counters["engine.conns"],
			"slots":       counters["engine.slots"] - counters["engine.free_slots"],
			"held frames": counters["engine.held_frames"],
			"timers":      counters["engine.timers"],
		}
		sum := uint64(0)
		for _, n := range left {
			sum += n
		}
		if sum == 0 {
			return
		}
	}
	h.t.Errorf("left in the daemon: %v", left)
}
