package rpcrdma

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/internal/subnet"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rpcrdma/session"
	"github.com/iwarpd/iwarpd/rpcrdma/wire"
)

// quarter is that of a smallPool, in bytes.
const quarter = 8 * pageSize

// smallPool returns a pool, and a context with which a request that would wait fails.
func smallPool(t *testing.T) (ctx context.Context, p *pool, over context.Context) {
	t.Helper()
	ctx, e := endpoint(t)
	p, err := newPool(ctx, e.pd, 4*quarter)
	if err != nil {
		t.Fatal(err)
	}
	over, end := context.WithCancel(ctx)
	end()
	return ctx, p, over
}

// TestPoolShares checks that the calls of one connection leave memory for others, enough for each to finish.
func TestPoolShares(t *testing.T) {
	ctx, p, over := smallPool(t)
	one, other := shareOf("10.0.0.1"), shareOf("10.0.0.2")
	taken := map[string]*buffer{}
	for _, step := range []struct {
		name    string // of the call
		s       *share
		n, want int
		own     int
		ok      bool
	}{
		{"first", one, quarter / 2, quarter, 0, true},
		{"second, with more to come", one, quarter / 2, quarter, 0, false},
		{"second", one, quarter / 2, quarter / 2, 0, true},
		{"third", one, 1, 1, 0, false},
		{"first, further", one, quarter, quarter, quarter / 2, true},
		{"second, further", one, pageSize, pageSize, quarter / 2, false},
		{"another's", other, quarter, quarter, 0, true},
		{"another's last", other, quarter, quarter, quarter, true}, // that there is
		{"ours", nil, 1, 1, 0, false},
	} {
		buf, err := p.take(over, step.n, step.want, step.s, step.own)
		if (err == nil) != step.ok || err != nil && !errors.Is(err, context.Canceled) {
			t.Fatalf("%s: %v", step.name, err)
		}
		taken[step.name] = buf
	}
	got := make(chan error, 1)
	go func() {
		buf, err := p.take(ctx, pageSize, pageSize, one, quarter/2)
		buf.release()
		got <- err
	}()
	for _, buf := range taken {
		buf.release()
	}
	if err := <-got; err != nil {
		t.Error("who waited:", err)
	}
	if one.Value.bytes != 0 || other.Value.bytes != 0 {
		t.Errorf("held: %d, %d", one.Value.bytes, other.Value.bytes)
	}
	if buf, err := p.take(over, 4*quarter, 4*quarter, one, 0); err != nil {
		t.Error("a call alone:", err)
	} else {
		buf.release()
	}
	if err := p.mr.Close(); err != nil {
		t.Error(err)
	}
}

// shareOf returns the share of a peer, with that of its network.
func shareOf(addr string) *share {
	return subnet.Peers[holding]{}.Find(netip.MustParseAddr(addr), func(bool) holding { return holding{} })
}

// TestPoolNetwork checks that the calls from all the addresses of an IPv6 network leave memory for others.
func TestPoolNetwork(t *testing.T) {
	_, p, over := smallPool(t)
	peers := subnet.Peers[holding]{}
	for _, step := range []struct {
		addr   string
		n, own int
		ok     bool
	}{
		{"2001:db8::1", quarter, 0, true},
		{"2001:db8::2", quarter, 0, false},
		{"2001:db8::2", quarter / 2, 0, true},
		{"2001:db8::3", pageSize, 0, false},
		{"2001:db8::1", quarter, quarter, true}, // to finish
		{"2001:db8::2", quarter / 2, quarter / 2, true},
		{"2001:db8::2", pageSize, quarter, false},
		{"2001:db8:0:1::1", quarter, 0, true},
	} {
		s := peers.Find(netip.MustParseAddr(step.addr), func(bool) holding { return holding{} })
		peers.Add(s)
		b, err := p.take(over, step.n, step.n, s, step.own)
		if (err == nil) != step.ok || err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("%d pages for %s, which has %d: %v", step.n/pageSize, step.addr, step.own/pageSize, err)
		}
		defer b.release()
	}
}

// TestPoolNetworkOrder checks that small calls from other addresses of a network do not starve a large one.
func TestPoolNetworkOrder(t *testing.T) {
	ctx, p, over := smallPool(t)
	peers := subnet.Peers[holding]{}
	var s [3]*share
	for i, addr := range []string{"2001:db8::1", "2001:db8::2", "2001:db8::3"} {
		s[i] = peers.Find(netip.MustParseAddr(addr), func(bool) holding { return holding{} })
		peers.Add(s[i])
	}
	first, err := p.take(over, quarter, quarter, s[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	large := make(chan error, 1)
	go func() {
		b, err := p.take(ctx, quarter, quarter, s[1], 0)
		b.release()
		large <- err
	}()
	testenv.Until(t, "the large call waits", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.waiting) == 1
	})
	if _, err := p.take(over, pageSize, pageSize, s[2], 0); err == nil {
		t.Error("a small call that came later had memory before")
	}
	first.release()
	if err := <-large; err != nil {
		t.Error(err)
	}
}

// TestPoolOrder checks that the waiting calls of a connection get memory in FIFO order, however many come later and
// however little they need.
func TestPoolOrder(t *testing.T) {
	ctx, p, _ := smallPool(t)
	s := shareOf("10.0.0.1")
	type taken struct {
		b   *buffer
		err error
	}
	// take requests memory, and returns when the request waits or is served.
	take := func(ctx context.Context, n int) <-chan taken {
		t.Helper()
		before := func() (n uint64, waiting int) {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.rounds, len(p.waiting)
		}
		had, _ := before()
		got := make(chan taken, 1)
		go func() {
			b, err := p.take(ctx, n, n, s, 0)
			got <- taken{b, err}
		}()
		testenv.Until(t, "the request is made", func() bool {
			now, _ := before()
			return now > had
		})
		return got
	}
	have := func(got <-chan taken) *buffer {
		t.Helper()
		r := <-got
		if r.err != nil {
			t.Fatal(r.err)
		}
		return r.b
	}
	first, second := have(take(ctx, quarter/2)), have(take(ctx, quarter/2))
	over, giveUp := context.WithCancel(ctx)
	large, gone := take(ctx, quarter), take(over, quarter)
	small := []<-chan taken{take(ctx, pageSize), take(ctx, pageSize)}
	first.release()
	late := take(ctx, pageSize)
	second.release()
	b := have(large)
	for _, got := range append(small, gone, late) {
		if len(got) != 0 {
			t.Error("who came later had it before")
		}
	}
	b.release()
	b = have(gone)
	again := take(over, quarter)
	b.release()
	for _, got := range append(small, late) {
		have(got).release()
	}
	have(again).release()
	b = have(take(ctx, quarter/2))
	gone, late = take(over, quarter), take(ctx, pageSize)
	giveUp()
	if r := <-gone; !errors.Is(r.err, context.Canceled) {
		t.Error("who gave up:", r.err)
	}
	have(late).release()
	b.release()
	if s.Value.bytes != 0 || len(p.waiting) != 0 {
		t.Errorf("%d bytes held, %d wait", s.Value.bytes, len(p.waiting))
	}
	if err := p.mr.Close(); err != nil {
		t.Error(err)
	}
}

// TestSilentPeer checks that a connection ends if its peer does not complete the Reads of a call or the Writes of a
// reply, and stays open while others complete.
func TestSilentPeer(t *testing.T) {
	const wait = 20 * time.Millisecond
	for _, tt := range []struct {
		name  string
		alive time.Duration // how long requests keep completing
		do    func(c *Conn, held *[]*buffer) error
	}{
		{"Reads", 0, silentReads},
		{"Reads behind others", 5 * wait, silentReads},
		{"Writes", 0, silentWrites},
		{"Writes behind others", 5 * wait, silentWrites},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ctx, e := endpoint(t)
			e.opWait = wait
			c, err := e.newConn(ctx, netip.Addr{}, session.DefaultConfig(true)) // without a peer: posted work stays outstanding
			if err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			c.doneAt = start.Add(tt.alive)
			var held []*buffer
			if err := tt.do(c, &held); err != nil {
				t.Error(err)
			}
			for _, b := range held {
				b.release()
			}
			select {
			case <-c.done:
			case <-ctx.Done():
				t.Fatal("no end")
			}
			if err := c.Err(); !errors.Is(err, errSilent) || time.Since(start) < tt.alive+wait {
				t.Errorf("%v after %v", err, time.Since(start))
			}
			if c.held.Value.bytes != 0 {
				t.Errorf("%d bytes held", c.held.Value.bytes)
			}
		})
	}
}

func silentReads(c *Conn, held *[]*buffer) error {
	in := &session.Call{XID: 7, Reads: []wire.ReadSegment{{Position: 44, Segment: wire.Segment{Length: 1000}}, {Position: 48, Segment: wire.Segment{Length: 100}}}}
	if _, _, err := c.fetch(in, func(n, want int) (*buffer, error) { return c.hold(n, want, held) }); err == nil || len(*held) != 2 {
		return fmt.Errorf("%v, %d buffers", err, len(*held))
	}
	return nil
}

func silentWrites(c *Conn, held *[]*buffer) error {
	b, err := c.hold(1000, 1000, held)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	*held = nil
	return c.post(&iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{b.sge(0, 1000)}}, &op{slot: -1, free: []*buffer{b}})
}

// TestClientShare checks that all connections of a client have one share of the memory, which leaves some for other clients, and
// that the share ends with the last of them.
func TestClientShare(t *testing.T) {
	ctx, e := endpoint(t)
	conns := make(map[string]*Conn)
	for name, addr := range map[string]string{"one": "10.0.0.1", "one again": "10.0.0.1", "other": "10.0.0.2"} {
		c := openConn(t, ctx, e, netip.MustParseAddr(addr), session.DefaultConfig(true))
		conns[name] = c
	}
	over, end := context.WithCancel(ctx) // a request that would wait fails
	end()
	quarter := len(e.pool.mr.Bytes()) / 4
	for _, step := range []struct {
		conn string
		n    int
		ok   bool
	}{{"one", quarter, true}, {"one again", pageSize, false}, {"other", quarter, true}} {
		b, err := e.pool.take(over, step.n, step.n, conns[step.conn].held, 0)
		if (err == nil) != step.ok || err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("%d bytes for %s: %v", step.n, step.conn, err)
		}
		defer b.release()
	}
	for _, step := range []struct {
		conn string
		left int // shares
	}{{"one", 2}, {"one again", 1}, {"other", 0}} {
		conns[step.conn].Close()
		if len(e.shares) != step.left {
			t.Errorf("%d shares after %s has ended, want %d", len(e.shares), step.conn, step.left)
		}
	}
}
