package isolation

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/ctrl"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// lane is one queue pair that writes.
type lane struct {
	qp   *iwarp.QP
	to   iwarp.Remote
	done atomic.Uint64
}

// party is a client whose lanes complete on one queue.
type party struct {
	cq    *iwarp.CQ
	mem   *iwarp.MR
	lanes map[uint32]*lane // by the QP's number
	all   []*lane
}

// outstanding is the number of Writes in flight per lane, so that the daemon always has work.
const outstanding = 4

// join creates a client with n lanes.
func join(ctx context.Context, d *iwarp.Device, n int, peer string) (p *party, err error) {
	pd, err := d.AllocPD(ctx)
	if err != nil {
		return nil, err
	}
	p = &party{lanes: make(map[uint32]*lane)}
	if p.cq, err = d.CreateCQ(ctx, n*(outstanding+1)); err != nil {
		return nil, err
	}
	if p.mem, err = pd.Alloc(ctx, 4096, iwarp.AccessLocalWrite); err != nil {
		return nil, err
	}
	for range n {
		l := &lane{}
		if l.qp, err = d.CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: p.cq, RecvCQ: p.cq, SendDepth: 4 * outstanding, RecvDepth: 1, MaxSGE: 1}); err != nil {
			return nil, err
		}
		if err := l.qp.PostRecv(&iwarp.RecvWR{SGEs: []iwarp.SGE{p.mem.SGE(0, 256)}}); err != nil {
			return nil, err
		}
		if _, err := l.qp.Connect(ctx, peer, &iwarp.Config{Timeout: 2 * time.Minute}); err != nil {
			return nil, err
		}
		wcs := make([]iwarp.WC, 1)
		if _, err := p.cq.Wait(ctx, wcs); err != nil {
			return nil, err
		}
		if err := json.Unmarshal(p.mem.Bytes()[:wcs[0].Len], &l.to); err != nil {
			return nil, err
		}
		p.lanes[l.qp.Num()] = l
		p.all = append(p.all, l)
	}
	return p, nil
}

func (p *party) post(l *lane) error {
	return l.qp.PostSend(&iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{p.mem.SGE(1024, 1024)}, RKey: l.to.RKey, Remote: l.to.Addr})
}

// run makes each lane write until stop, then waits for what is in flight. The client sleeps at random, so that the
// worker sleeps too and both must be woken.
func (p *party) run(ctx context.Context, rng *rand.Rand, stop *atomic.Bool) error {
	under := 0
	for _, l := range p.all {
		if err := p.post(l); err != nil {
			return err
		}
		under++
	}
	wcs := make([]iwarp.WC, 64)
	for under > 0 {
		if rng.IntN(2) == 0 {
			time.Sleep(time.Duration(rng.Int64N(int64(2 * time.Millisecond))))
		}
		n, err := p.cq.Wait(ctx, wcs)
		if err != nil {
			return fmt.Errorf("%d Writes never completed: %w", under, err)
		}
		again, err := p.account(wcs[:n], stop)
		if err != nil {
			return err
		}
		under += again - n
	}
	return nil
}

// account counts completions and posts as many Writes again until stop.
func (p *party) account(wcs []iwarp.WC, stop *atomic.Bool) (posted int, err error) {
	for _, wc := range wcs {
		if wc.Status != iwarp.WCSuccess {
			return posted, fmt.Errorf("queue pair %d: %v", wc.QP, wc.Status)
		}
		l := p.lanes[wc.QP]
		l.done.Add(1)
		if !stop.Load() {
			if err := p.post(l); err != nil {
				return posted, err
			}
			posted++
		}
	}
	return posted, nil
}

// drive keeps every lane of all clients busy from one goroutine, so that the daemon and not the Go scheduler
// determines the order.
func drive(ctx context.Context, parties []*party, stop *atomic.Bool) error {
	under := 0
	for range outstanding {
		for _, p := range parties {
			for _, l := range p.all {
				if err := p.post(l); err != nil {
					return err
				}
				under++
			}
		}
	}
	wcs := make([]iwarp.WC, 64)
	for under > 0 {
		if ctx.Err() != nil {
			return fmt.Errorf("%d Writes never completed", under)
		}
		found := 0
		for _, p := range parties {
			n := p.cq.Poll(wcs)
			found += n
			again, err := p.account(wcs[:n], stop)
			if err != nil {
				return err
			}
			under += again - n
		}
		if found == 0 {
			time.Sleep(20 * time.Microsecond) // leave the CPU to the daemon, which runs in this process
		}
	}
	return nil
}

// many makes lanes write concurrently and compares their progress.
func many(t *testing.T, clients, each int, length time.Duration) {
	testenv.NoGoroutineLeaks(t)
	rng := testenv.Rand(t)
	limits := ctrl.Limits{Clients: clients + 10, QPs: 1 << 14, CQs: 1 << 15, PDs: 1 << 14, MRs: 1 << 16, Rings: 4 << 30, Registered: 4 << 30}
	a, b, err := embed.Pair(embed.PairConfig{Sockets: testenv.Sockets(), CtrlA: limitsOf(limits), CtrlB: limitsOf(limits)})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	defer a.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	w := &world{a: a, b: b}
	peer := w.service(t, ctx, ":7001", iwarp.TCP, sink)

	var parties []*party
	for range clients {
		d, err := b.NewDevice(ctx)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		p, err := join(ctx, d, each, peer)
		if err != nil {
			t.Fatalf("client %d: %v", len(parties), err)
		}
		parties = append(parties, p)
	}
	for _, sleepy := range []bool{false, true} {
		var stop atomic.Bool
		limited, end := context.WithTimeout(ctx, length+3*patience) // a lost doorbell leaves a Write without its completion
		failed := make(chan error, len(parties))
		waits := 1
		for _, p := range parties {
			for _, l := range p.all {
				l.done.Store(0)
			}
		}
		if sleepy {
			waits = len(parties)
			for _, p := range parties {
				r := rand.New(rand.NewPCG(rng.Uint64(), 1))
				go func() { failed <- p.run(limited, r, &stop) }()
			}
		} else {
			go func() { failed <- drive(limited, parties, &stop) }()
		}
		time.Sleep(length)
		var counts []uint64
		for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) { // a busy machine needs longer
			counts = counts[:0]
			for _, p := range parties {
				for _, l := range p.all {
					counts = append(counts, l.done.Load())
				}
			}
			if slices.Min(counts) > 0 || time.Now().After(end) {
				break
			}
		}
		stop.Store(true)
		for range waits {
			if err := <-failed; err != nil {
				t.Error(err)
			}
		}
		end()
		slices.Sort(counts)
		least, middle, most := counts[0], counts[len(counts)/2], counts[len(counts)-1]
		what := fmt.Sprintf("%d clients, %d queue pairs each, sleepy %v: %d to %d Writes, median %d", clients, each, sleepy, least, most, middle)
		t.Log(what)
		if least == 0 {
			t.Errorf("%s: one has starved", what)
		}
		if full() && !sleepy && most > 2*least {
			t.Errorf("%s: more than a factor of two apart", what)
		}
	}
}

func limitsOf(l ctrl.Limits) ctrl.Config { return ctrl.Config{Limits: l} }

// TestManyQPs checks that the queue pairs of one client share the wire fairly, and that no doorbell is lost while
// both sides sleep and wake at random.
func TestManyQPs(t *testing.T) {
	if full() {
		many(t, 1, 1000, 10*time.Second)
		return
	}
	many(t, 1, 100, 500*time.Millisecond)
}

// TestManyClients does the same for clients.
func TestManyClients(t *testing.T) {
	if full() {
		many(t, 200, 5, 10*time.Second)
		return
	}
	many(t, 40, 1, 500*time.Millisecond)
}
