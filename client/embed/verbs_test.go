package embed_test

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// end is one end of a connection at the verbs level.
type end struct {
	pd  *iwarp.PD
	cq  *iwarp.CQ
	qp  *iwarp.QP
	mem *iwarp.MR
}

func newQP(t testing.TB, ctx context.Context, n *embed.Node, cfg iwarp.QPConfig) *iwarp.QP {
	t.Helper()
	qp, err := n.Device().CreateQP(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return qp
}

func newEnd(t testing.TB, ctx context.Context, n *embed.Node, depth int) *end {
	t.Helper()
	e := &end{}
	var err error
	if e.pd, err = n.Device().AllocPD(ctx); err != nil {
		t.Fatal(err)
	}
	if e.cq, err = n.Device().CreateCQ(ctx, 2*depth); err != nil {
		t.Fatal(err)
	}
	e.qp = newQP(t, ctx, n, iwarp.QPConfig{PD: e.pd, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: depth, RecvDepth: depth, MaxSGE: 4, MaxInline: 64})
	const all = iwarp.AccessLocalWrite | iwarp.AccessRemoteRead | iwarp.AccessRemoteWrite | iwarp.AccessMWBind
	if e.mem, err = e.pd.Alloc(ctx, 1<<16, all); err != nil {
		t.Fatal(err)
	}
	return e
}

// verbsPair connects two ends.
func verbsPair(t testing.TB, cfg embed.PairConfig, depth int) (a, b *end, ctx context.Context) {
	t.Helper()
	na, nb, ctx := pair(t, cfg)
	a, b = newEnd(t, ctx, na, depth), newEnd(t, ctx, nb, depth)
	l := listen(t, ctx, nb, ":0", nil)
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Request(ctx)
		if err == nil {
			_, err = r.Accept(ctx, b.qp, nil)
		}
		accepted <- err
	}()
	if _, err := a.qp.Connect(ctx, dialAddr(nb, l), nil); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
	return a, b, ctx
}

func (e *end) post(t testing.TB, wr *iwarp.SendWR) {
	t.Helper()
	if err := e.qp.PostSend(wr); err != nil {
		t.Fatal(err)
	}
}

func (e *end) recv(t testing.TB, wr *iwarp.RecvWR) {
	t.Helper()
	if err := e.qp.PostRecv(wr); err != nil {
		t.Fatal(err)
	}
}

// wait takes n completions, which must all be successful.
func (e *end) wait(t testing.TB, ctx context.Context, n int) []iwarp.WC {
	t.Helper()
	var all []iwarp.WC
	wcs := make([]iwarp.WC, 8)
	for len(all) < n {
		got, err := e.cq.Wait(ctx, wcs)
		if err != nil {
			t.Fatalf("after %d of %d completions: %v", len(all), n, err)
		}
		for _, wc := range wcs[:got] {
			if wc.Status != iwarp.WCSuccess {
				t.Fatalf("%v: %v", wc.Op, wc.Status)
			}
		}
		all = append(all, wcs[:got]...)
	}
	return all
}

func TestVerbs(t *testing.T) {
	forms(t, func(t *testing.T, inline bool) {
		a, b, ctx := verbsPair(t, embed.PairConfig{InlineProgress: inline}, 16)
		for i := range 8 {
			b.recv(t, &iwarp.RecvWR{ID: uint64(100 + i), SGEs: []iwarp.SGE{b.mem.SGE(i*100, 50), b.mem.SGE(i*100+50, 50)}})
		}
		copy(a.mem.Bytes(), "abcdefgh")
		wrs := []iwarp.SendWR{
			{ID: 1, Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 4), a.mem.SGE(4, 4)}},
			{ID: 2, Op: iwarp.OpSend, Flags: iwarp.Inline, Inline: []byte("inline")}, // not signalled
			{ID: 3, Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 8)}, RKey: b.mem.RKey(), Remote: b.mem.Remote().Addr + 4000},
			{ID: 4, Op: iwarp.OpRead, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(100, 8)}, RKey: b.mem.RKey(), Remote: b.mem.Remote().Addr + 4000},
			{ID: 5, Op: iwarp.OpImm, Flags: iwarp.Signaled | iwarp.Fence, Imm: 0x1122334455667788},
		}
		if n, err := a.qp.PostSends(wrs); n != len(wrs) || err != nil {
			t.Fatal(n, err)
		}
		var ids []uint64
		for _, wc := range a.wait(t, ctx, 4) {
			ids = append(ids, wc.ID)
		}
		if len(ids) != 4 || ids[0] != 1 || ids[1] != 3 || ids[2] != 4 || ids[3] != 5 {
			t.Errorf("completions %v", ids)
		}
		if string(a.mem.Bytes()[100:108]) != "abcdefgh" {
			t.Errorf("read %q", a.mem.Bytes()[100:108])
		}
		rs := b.wait(t, ctx, 3)
		if rs[0].ID != 100 || rs[0].Len != 8 || rs[1].ID != 101 || rs[1].Len != 6 || rs[2].Imm != 0x1122334455667788 {
			t.Errorf("received %+v", rs)
		}
		if string(b.mem.Bytes()[:8]) != "abcdefgh" || string(b.mem.Bytes()[100:106]) != "inline" {
			t.Errorf("%q", b.mem.Bytes()[:110])
		}
		// A request that does not fit is refused at once.
		if err := a.qp.PostSend(&iwarp.SendWR{Op: iwarp.OpSend, SGEs: make([]iwarp.SGE, 5)}); !errors.Is(err, iwarp.ErrWR) {
			t.Errorf("5 pieces: %v", err)
		}
		if err := a.qp.PostSend(&iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Inline, Inline: make([]byte, 65)}); !errors.Is(err, iwarp.ErrWR) {
			t.Errorf("65 bytes inline: %v", err)
		}
		var err error
		for range 100 {
			if err = b.qp.PostRecv(&iwarp.RecvWR{}); err != nil {
				break
			}
		}
		if !errors.Is(err, iwarp.ErrQueueFull) {
			t.Errorf("full queue: %v", err)
		}
		// At the end all posted work is flushed.
		if err := a.qp.Disconnect(ctx); err != nil {
			t.Fatal(err)
		}
		<-a.qp.Done()
		<-b.qp.Done()
		if !errors.Is(a.qp.Err(), iwarp.ErrClosed) || !errors.Is(b.qp.Err(), iwarp.ErrPeerClosed) {
			t.Errorf("%v, %v", a.qp.Err(), b.qp.Err())
		}
		wcs := make([]iwarp.WC, 64)
		n, err := b.cq.Wait(ctx, wcs)
		if err != nil || n == 0 || wcs[0].Status != iwarp.WCFlushErr {
			t.Errorf("%d completions, %v: %v", n, wcs[0].Status, err)
		}
		if err := a.qp.PostSend(&iwarp.SendWR{Op: iwarp.OpSend}); !errors.Is(err, iwarp.ErrClosed) {
			t.Errorf("post after the end: %v", err)
		}
	})
}

// TestUnconnectedFlush checks that work requests that were posted to a queue pair complete if its connect is refused, or if it is
// aborted before it has a connection.
func TestUnconnectedFlush(t *testing.T) {
	n, _, ctx := wire(t, embed.PairConfig{})
	for _, tt := range []struct {
		end  func(qp *iwarp.QP) error
		want error // of the queue pair
	}{
		{func(qp *iwarp.QP) error { _, err := qp.Connect(ctx, "10.99.0.2:1", nil); return err }, iwarp.ErrRefused},
		{func(qp *iwarp.QP) error { return qp.Abort(ctx) }, iwarp.ErrClosed},
	} {
		a := newEnd(t, ctx, n, 16)
		a.recv(t, &iwarp.RecvWR{})
		a.post(t, &iwarp.SendWR{Op: iwarp.OpSend})
		if err := tt.end(a.qp); err != nil && !errors.Is(err, tt.want) {
			t.Fatal(err)
		}
		<-a.qp.Done()
		if err := a.qp.Err(); !errors.Is(err, tt.want) {
			t.Errorf("%v; want %v", err, tt.want)
		}
		wcs := make([]iwarp.WC, 1)
		for range 2 {
			if _, err := a.cq.Wait(ctx, wcs); err != nil || wcs[0].Status != iwarp.WCFlushErr {
				t.Errorf("%+v, %v", wcs[0], err)
			}
		}
		if _, err := a.qp.Connect(ctx, "10.99.0.2:1", nil); !errors.Is(err, iwarp.ErrState) {
			t.Errorf("another connect: %v", err)
		}
	}
}

// TestLateFlush checks that a work request that is posted while the connection ends still completes.
func TestLateFlush(t *testing.T) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 16)
	posted := make(chan int, 1)
	var taken atomic.Int64
	go func() { // posts until the connection has ended
		n := 0
		for {
			for n-int(taken.Load()) >= 16 { // otherwise the CQ overruns
				if a.qp.Err() != nil {
					posted <- n
					return
				}
				runtime.Gosched()
			}
			err := a.qp.PostSend(&iwarp.SendWR{ID: uint64(n), Op: iwarp.OpWrite, Flags: iwarp.Signaled, RKey: b.mem.RKey(), Remote: b.mem.Base(), SGEs: []iwarp.SGE{a.mem.SGE(0, 100)}})
			switch {
			case errors.Is(err, iwarp.ErrQueueFull):
				runtime.Gosched()
			case err != nil:
				posted <- n
				return
			default:
				n++
			}
		}
	}()
	done, last := 0, -1
	take := func() {
		wcs := make([]iwarp.WC, 16)
		n, err := a.cq.Wait(ctx, wcs)
		if err != nil {
			t.Fatalf("after %d completions: %v", done, err)
		}
		for _, wc := range wcs[:n] {
			if int(wc.ID) <= last {
				t.Fatalf("completion %d after %d", wc.ID, last)
			}
			last = int(wc.ID)
			done++
		}
		taken.Store(int64(done))
	}
	for done < 1000 {
		take()
	}
	if err := b.qp.Abort(ctx); err != nil {
		t.Fatal(err)
	}
	<-a.qp.Done()
	total := <-posted
	for done < total {
		take()
	}
	if done != total {
		t.Errorf("%d completions of %d work requests", done, total)
	}
}

// TestWindow checks that a memory window gives the peer access to part of a region until it is invalidated.
func TestWindow(t *testing.T) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 16)
	mw, err := b.pd.AllocMW(ctx)
	if err != nil {
		t.Fatal(err)
	}
	key := mw.RKey()&^0xff | (mw.RKey()+1)&0xff // our byte of the key wraps
	err = b.qp.PostSend(&iwarp.SendWR{Op: iwarp.OpBindMW, Flags: iwarp.Signaled, RKey: key, SGEs: []iwarp.SGE{b.mem.SGE(1000, 100)}, Access: iwarp.AccessRemoteWrite})
	if err != nil {
		t.Fatal(err)
	}
	b.wait(t, ctx, 1)
	if err := b.mem.Close(); !errors.Is(err, iwarp.ErrBusy) {
		t.Errorf("deregister under a window: %v", err)
	}
	b.recv(t, &iwarp.RecvWR{})
	copy(a.mem.Bytes(), "window")
	for _, wr := range []iwarp.SendWR{
		{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 6)}, RKey: key, Remote: b.mem.Base() + 1000},
		{Op: iwarp.OpSendInv, Flags: iwarp.Signaled, Inv: key},
	} {
		a.post(t, &wr)
	}
	wc := b.wait(t, ctx, 1)[0]
	if wc.Flags&iwarp.WCWithInv == 0 || wc.InvKey != key || string(b.mem.Bytes()[1000:1006]) != "window" {
		t.Errorf("%+v, %q", wc, b.mem.Bytes()[1000:1006])
	}
	if err := mw.Close(); err != nil {
		t.Error(err)
	}
	if err := b.mem.Close(); err != nil {
		t.Error(err)
	}
}

// TestNoAllocs checks that posting, polling and waiting allocate nothing.
func TestNoAllocs(t *testing.T) {
	if testenv.Race {
		t.Skip("the race detector allocates")
	}
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 64)
	wcs := make([]iwarp.WC, 16)
	wr := iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 64)}, RKey: b.mem.RKey(), Remote: b.mem.Base()}
	round := func() {
		a.post(t, &wr)
		for a.cq.Poll(wcs) == 0 {
			runtime.Gosched()
		}
	}
	for range 1000 { // warms up the pools
		round()
	}
	if n := testing.AllocsPerRun(2000, round); n != 0 {
		t.Errorf("%v allocations in a post and its completion", n)
	}
	background := context.Background()
	if n := testing.AllocsPerRun(2000, func() {
		a.post(t, &wr)
		if _, err := a.cq.Wait(background, wcs); err != nil {
			t.Fatal(err)
		}
	}); n > 0.5 {
		t.Errorf("%v allocations in a post and a wait", n)
	}
	_ = ctx
}

func BenchmarkWrite64(b *testing.B) {
	for _, inline := range []bool{false, true} {
		b.Run(map[bool]string{false: "workers", true: "inline"}[inline], func(b *testing.B) {
			x, y, _ := verbsPair(b, embed.PairConfig{InlineProgress: inline}, 64)
			wcs := make([]iwarp.WC, 16)
			wr := iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{x.mem.SGE(0, 64)}, RKey: y.mem.RKey(), Remote: y.mem.Base()}
			b.ReportAllocs()
			for b.Loop() {
				x.post(b, &wr)
				for x.cq.Poll(wcs) == 0 {
				}
			}
		})
	}
}

// TestManyLocalOperations checks that a batch of local work requests completes although one bell rings for all of
// them and no frame arrives.
func TestManyLocalOperations(t *testing.T) {
	const n = 1000
	a, _, ctx := verbsPair(t, embed.PairConfig{}, 2*n)
	mw, err := a.pd.AllocMW(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var wrs []iwarp.SendWR
	for i := range n / 2 {
		key := mw.RKey()&^0xff | uint32(i%255+1)
		wrs = append(wrs,
			iwarp.SendWR{ID: uint64(2 * i), Op: iwarp.OpBindMW, Flags: iwarp.Signaled, RKey: key, SGEs: []iwarp.SGE{a.mem.SGE(0, 100)}, Access: iwarp.AccessRemoteWrite},
			iwarp.SendWR{ID: uint64(2*i + 1), Op: iwarp.OpLocalInv, Flags: iwarp.Signaled, Inv: key})
	}
	if k, err := a.qp.PostSends(wrs); err != nil {
		t.Fatal(k, err)
	}
	for i, wc := range a.wait(t, ctx, n) {
		if int(wc.ID) != i {
			t.Fatalf("completion %d is that of work request %d", i, wc.ID)
		}
	}
	if err := mw.Close(); err != nil {
		t.Error(err)
	}
}
