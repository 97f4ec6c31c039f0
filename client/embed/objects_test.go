package embed_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
	"github.com/iwarpd/iwarpd/internal/testenv"
)

// join connects qa to qb, which belong to the nodes of a pair.
func join(t testing.TB, ctx context.Context, nb *embed.Node, qa, qb *iwarp.QP) {
	t.Helper()
	l := listen(t, ctx, nb, ":0", nil)
	joinBy(t, ctx, nb, l, qa, qb)
}

// accepting accepts the next request of l for qp, and sends the result.
func accepting(ctx context.Context, l *iwarp.Listener, qp *iwarp.QP) <-chan error {
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Request(ctx)
		if err == nil {
			_, err = r.Accept(ctx, qp, nil)
		}
		accepted <- err
	}()
	return accepted
}

// joinBy is join with a given listener on nb.
func joinBy(t testing.TB, ctx context.Context, nb *embed.Node, l *iwarp.Listener, qa, qb *iwarp.QP) {
	t.Helper()
	accepted := accepting(ctx, l, qb)
	if _, err := qa.Connect(ctx, dialAddr(nb, l), nil); err != nil {
		t.Fatal(err)
	}
	if err := <-accepted; err != nil {
		t.Fatal(err)
	}
}

// TestSRQ checks that three queue pairs take receives from one queue in order, that the limit event is sent once per
// arming, and that a stream without receives ends.
func TestSRQ(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	b := newEnd(t, ctx, nb, 64)
	srq, err := nb.Device().CreateSRQ(ctx, iwarp.SRQConfig{PD: b.pd, Depth: 16, MaxSGE: 2, Limit: 4})
	if err != nil {
		t.Fatal(err)
	}
	post := func(id uint64) {
		t.Helper()
		if err := srq.PostRecv(&iwarp.RecvWR{ID: id, SGEs: []iwarp.SGE{b.mem.SGE(int(id)*64, 32), b.mem.SGE(int(id)*64+32, 32)}}); err != nil {
			t.Fatal(err)
		}
	}
	for id := range uint64(6) {
		post(id)
	}
	var from []*end
	var to []*iwarp.QP
	for range 3 {
		e := newEnd(t, ctx, na, 16)
		q := newQP(t, ctx, nb, iwarp.QPConfig{PD: b.pd, SendCQ: b.cq, RecvCQ: b.cq, SRQ: srq, RecvDepth: 4})
		if err := q.PostRecv(&iwarp.RecvWR{}); !errors.Is(err, iwarp.ErrWR) {
			t.Errorf("a receive of its own: %v", err)
		}
		join(t, ctx, nb, e.qp, q)
		from, to = append(from, e), append(to, q)
	}
	send := func(i int, id uint64) {
		t.Helper()
		copy(from[i].mem.Bytes(), fmt.Sprintf("message %02d", id))
		from[i].post(t, &iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{from[i].mem.SGE(0, 10)}})
		from[i].wait(t, ctx, 1)
		wc := b.wait(t, ctx, 1)[0]
		if got := string(b.mem.Bytes()[id*64:][:10]); wc.ID != id || wc.QP != to[i].Num() || got != fmt.Sprintf("message %02d", id) {
			t.Errorf("message %d: %+v, %q", id, wc, got)
		}
	}
	for id := range uint64(3) {
		send(int(id), id)
	}
	ev, err := nb.Device().AsyncEvent(ctx) // 3 of 6 are left
	if err != nil || ev.Kind != iwarp.AsyncSRQLimit || ev.SRQ != srq || ev.QP != nil {
		t.Fatalf("%+v, %v", ev, err)
	}
	send(0, 3)
	infos, err := nb.Device().Admin().SRQs(ctx)
	if err != nil || len(infos) != 1 || infos[0].Qps != 3 || infos[0].Posted != 2 || infos[0].Limit != 0 || infos[0].Counters[0].Value != 4 {
		t.Errorf("%v, %v", infos, err)
	}
	if cqs, err := nb.Device().Admin().CQs(ctx); err != nil || len(cqs) != 1 || cqs[0].Qps != 8 || cqs[0].Depth != 128 || cqs[0].Counters[0].Value != 4 {
		t.Errorf("%v, %v", cqs, err)
	}
	if err := srq.SetLimit(ctx, 2); err != nil {
		t.Fatal(err)
	}
	send(1, 4)
	if ev, err := nb.Device().AsyncEvent(ctx); err != nil || ev.Kind != iwarp.AsyncSRQLimit {
		t.Fatalf("%+v, %v", ev, err)
	}
	if err := srq.Close(); !errors.Is(err, iwarp.ErrBusy) {
		t.Errorf("in use: %v", err)
	}
	// A queue pair that ends leaves its receives to the others.
	if err := from[2].qp.Abort(ctx); err != nil {
		t.Fatal(err)
	}
	<-to[2].Done()
	send(0, 5)
	if n := b.cq.Poll(make([]iwarp.WC, 1)); n != 0 {
		t.Error("a receive was flushed")
	}
	for _, q := range to {
		if err := q.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := srq.Close(); err != nil {
		t.Error(err)
	}
	if err := srq.PostRecv(&iwarp.RecvWR{}); !errors.Is(err, iwarp.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// TestCQResize resizes a queue repeatedly while Writes complete on it and the waiter sleeps and wakes. Every
// completion must arrive in order.
func TestCQResize(t *testing.T) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 16)
	const rounds = 2000
	stop := make(chan error)
	go func() {
		for i := 0; ; i++ {
			if err := a.cq.Resize(ctx, 40+i%5*50); err != nil {
				stop <- err
				return
			}
			select {
			case stop <- nil:
				return
			default:
			}
		}
	}()
	next := uint64(0)
	for i := range uint64(rounds) {
		wr := iwarp.SendWR{ID: i, Op: iwarp.OpWrite, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 64)}, RKey: b.mem.RKey(), Remote: b.mem.Base()}
		a.post(t, &wr)
		if i%8 == 7 {
			for _, wc := range a.wait(t, ctx, 8) {
				if wc.ID != next {
					t.Fatalf("completion %d; want %d", wc.ID, next)
				}
				next++
			}
		}
	}
	if err := <-stop; err != nil {
		t.Error(err)
	}
	if err := a.cq.Resize(ctx, 1000); err != nil || a.cq.Depth() != 1024 {
		t.Errorf("%v, depth %d", err, a.cq.Depth())
	}
	if err := a.cq.Resize(ctx, 1<<30); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("too deep: %v", err)
	}
}

// readable waits up to d for a wake-up.
func readable(t testing.TB, fd int, d time.Duration) bool {
	t.Helper()
	for end := time.Now().Add(d); ; {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(max(0, time.Until(end)).Milliseconds()))
		switch {
		case err == unix.EINTR: // the runtime's signals
		case err != nil:
			t.Fatal(err)
		default:
			return n > 0
		}
	}
}

// TestModerate checks that a moderated queue wakes its waiter after the period or the count, and at once for
// solicited completions.
func TestModerate(t *testing.T) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 32)
	const period = 400 * time.Millisecond
	if err := b.cq.Moderate(ctx, 3, period); err != nil {
		t.Fatal(err)
	}
	if err := b.cq.Moderate(ctx, 3, time.Minute); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("a minute: %v", err)
	}
	// look sends messages and returns how long the wake-up took.
	look := func(n int, flags iwarp.SendFlags) time.Duration {
		t.Helper()
		for range n {
			b.recv(t, &iwarp.RecvWR{SGEs: []iwarp.SGE{b.mem.SGE(0, 64)}})
		}
		b.cq.Arm(false)
		began := time.Now()
		for range n {
			a.post(t, &iwarp.SendWR{Op: iwarp.OpSend, Flags: flags | iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 8)}})
		}
		if !readable(t, b.cq.FD(), time.Minute) {
			t.Fatal("never woken")
		}
		took := time.Since(began)
		a.wait(t, ctx, n)
		b.wait(t, ctx, n)
		return took
	}
	// A worker reads its clock once per turn, so the period may have started at a turn that began before the post.
	// One turn or wake-up may be late on a busy machine, but not all of them.
	late := false
	for range 5 {
		if late = look(1, 0) >= period*3/4; late {
			break
		}
	}
	if !late {
		t.Errorf("one completion always wakes before three quarters of the period of %v", period)
	}
	quick := func(what string, n int, flags iwarp.SendFlags) {
		t.Helper()
		var took time.Duration
		for range 20 {
			if took = look(n, flags); took < period {
				return
			}
		}
		t.Errorf("%s woke after %v", what, took)
	}
	quick("three completions", 3, 0)
	quick("a solicited completion", 1, iwarp.Solicited)
	if err := b.cq.Moderate(ctx, 0, 0); err != nil {
		t.Fatal(err)
	}
	quick("one completion, not moderated,", 1, 0)
}

// TestFastRegistration checks that a region is valid only from its registration, with the rights and range given
// there, to its invalidation, and has a new key each time.
func TestFastRegistration(t *testing.T) {
	a, b, ctx := verbsPair(t, embed.PairConfig{}, 16)
	fast, err := b.pd.AllocFast(ctx, 8192, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite|iwarp.AccessRemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	defer fast.Close()
	const base = 0x7000_0000
	for key := range uint8(3) {
		reg := fast.Reg(1, key, base, 4096, 1000, iwarp.AccessLocalWrite|iwarp.AccessRemoteWrite)
		reg.Flags = iwarp.Signaled
		b.post(t, &reg)
		b.wait(t, ctx, 1)
		text := fmt.Sprintf("round %d", key)
		copy(a.mem.Bytes(), text)
		wr := iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{a.mem.SGE(0, len(text))}, RKey: reg.RKey, Remote: base + 10}
		// When the Send after the Write is received, the Write is placed.
		b.recv(t, &iwarp.RecvWR{SGEs: []iwarp.SGE{b.mem.SGE(0, 8)}})
		inv := iwarp.SendWR{Op: iwarp.OpSendInv, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(0, 1)}, Inv: reg.RKey}
		if _, err := a.qp.PostSends([]iwarp.SendWR{wr, inv}); err != nil {
			t.Fatal(err)
		}
		a.wait(t, ctx, 1)
		if wc := b.wait(t, ctx, 1)[0]; wc.InvKey != reg.RKey {
			t.Errorf("invalidated %#x; want %#x", wc.InvKey, reg.RKey)
		}
		if got := string(fast.Bytes()[4096+10:][:len(text)]); got != text {
			t.Errorf("%q; want %q", got, text)
		}
	}
	// The region is now invalid: a Write to it is a protection error.
	wr := iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{a.mem.SGE(0, 8)}, RKey: fast.RKey()&^0xff | 2, Remote: base}
	a.post(t, &wr)
	<-a.qp.Done()
	var te *iwarp.TerminateError
	if !errors.As(a.qp.Err(), &te) || !te.Remote {
		t.Errorf("%v", a.qp.Err())
	}
}

// TestAsyncErrors checks that an overrun of a completion queue and a violation are reported with the objects
// concerned.
func TestAsyncErrors(t *testing.T) {
	na, nb, ctx := pair(t, embed.PairConfig{})
	a, b := newEnd(t, ctx, na, 64), newEnd(t, ctx, nb, 64)
	small, err := na.Device().CreateCQ(ctx, 4)
	if err != nil {
		t.Fatal(err)
	}
	q := newQP(t, ctx, na, iwarp.QPConfig{PD: a.pd, SendCQ: small, RecvCQ: a.cq, SigAll: true})
	join(t, ctx, nb, q, b.qp)
	for range 8 {
		if err := q.PostSend(&iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{a.mem.SGE(0, 8)}, RKey: b.mem.RKey(), Remote: b.mem.Base()}); err != nil {
			break // it has ended already
		}
	}
	ev, err := na.Device().AsyncEvent(ctx)
	if err != nil || ev.Kind != iwarp.AsyncCQOverrun || ev.QP != q || ev.CQ != small || ev.Err == nil {
		t.Fatalf("%+v, %v", ev, err)
	}
	<-q.Done()
	if !errors.Is(q.Err(), iwarp.ErrQuota) {
		t.Errorf("ended by %v", q.Err())
	}

	c, d := newEnd(t, ctx, na, 8), newEnd(t, ctx, nb, 8)
	join(t, ctx, nb, c.qp, d.qp)
	c.post(t, &iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{c.mem.SGE(0, 8)}, RKey: d.mem.RKey() ^ 0x5500, Remote: d.mem.Base()})
	for _, side := range []struct {
		dev *iwarp.Device
		qp  *iwarp.QP
	}{{na.Device(), c.qp}, {nb.Device(), d.qp}} {
		ev, err := side.dev.AsyncEvent(ctx)
		if err != nil || ev.Kind != iwarp.AsyncQPFatal || ev.QP != side.qp || ev.Err == nil {
			t.Fatalf("%+v, %v", ev, err)
		}
	}
}

// TestSizes checks that impossible sizes are refused, even if their low 32 bits are valid.
func TestSizes(t *testing.T) {
	n, _, ctx := pair(t, embed.PairConfig{})
	a, d := newEnd(t, ctx, n, 16), n.Device()
	for _, n := range []int{-1, 1<<32 + 16, math.MaxInt} {
		_, cq := d.CreateCQ(ctx, n)
		_, sq := d.CreateQP(ctx, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq, SendDepth: n})
		_, rq := d.CreateQP(ctx, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq, RecvDepth: n})
		_, sges := d.CreateQP(ctx, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq, MaxSGE: n})
		_, inline := d.CreateQP(ctx, iwarp.QPConfig{PD: a.pd, SendCQ: a.cq, RecvCQ: a.cq, MaxInline: n})
		_, srq := d.CreateSRQ(ctx, iwarp.SRQConfig{PD: a.pd, Depth: n})
		for name, err := range map[string]error{
			"CreateCQ": cq, "SendDepth": sq, "RecvDepth": rq, "MaxSGE": sges, "MaxInline": inline, "SRQ": srq, "Resize": a.cq.Resize(ctx, n),
		} {
			if !errors.Is(err, iwarp.ErrInvalid) {
				t.Errorf("%s %d: %v", name, n, err)
			}
		}
	}
}

// receiveWaiter returns the ends of a connection. b posts no receives, and Sends to it may wait
// for one.
func receiveWaiter(t *testing.T, wait time.Duration) (a, b *end, nb *embed.Node, ctx context.Context) {
	t.Helper()
	na, nb, ctx := pair(t, embed.PairConfig{})
	a, b = newEnd(t, ctx, na, 32), newEnd(t, ctx, nb, 32)
	var err error
	if b.qp, err = nb.Device().CreateQP(ctx, iwarp.QPConfig{PD: b.pd, SendCQ: b.cq, RecvCQ: b.cq, SendDepth: 32, RecvDepth: 32, ReceiveWait: wait}); err != nil {
		t.Fatal(err)
	}
	join(t, ctx, nb, a.qp, b.qp)
	return a, b, nb, ctx
}

// arrived waits until the connection of b has received n bytes.
func arrived(t *testing.T, ctx context.Context, nb *embed.Node, b *end, n uint64) {
	t.Helper()
	testenv.Until(t, "the data arrives", func() bool {
		info, err := nb.Device().Admin().QP(ctx, b.qp.Num())
		if err != nil {
			t.Fatal(err)
		}
		if info.Silent { // the worker has no CPU
			return false
		}
		for _, c := range info.Tcp {
			if c.Name == "bytes_in" {
				return c.Value >= n
			}
		}
		t.Fatalf("no counter of bytes: %v", info.Tcp)
		return false
	})
}

// TestReceiveWait checks that Sends wait for their receives, that the data after them waits
// too, even if it exceeds the memory for it, and that a close by the peer is reported after
// them.
func TestReceiveWait(t *testing.T) {
	a, b, nb, ctx := receiveWaiter(t, 50*time.Second)
	const messages, size = 20, 30000
	for i := range messages {
		a.mem.Bytes()[i] = byte('a' + i)
		a.post(t, &iwarp.SendWR{Op: iwarp.OpSend, Flags: iwarp.Signaled, SGEs: []iwarp.SGE{a.mem.SGE(i, size)}})
	}
	copy(a.mem.Bytes()[60000:], "behind them")
	a.post(t, &iwarp.SendWR{Op: iwarp.OpWrite, SGEs: []iwarp.SGE{a.mem.SGE(60000, 11)}, RKey: b.mem.RKey(), Remote: b.mem.Remote().Addr + 60000})
	arrived(t, ctx, nb, b, size)
	for i := range messages {
		if string(b.mem.Bytes()[60000:60011]) == "behind them" {
			t.Fatal("the Write has overtaken Sends")
		}
		b.recv(t, &iwarp.RecvWR{ID: uint64(i), SGEs: []iwarp.SGE{b.mem.SGE(0, size)}})
		wc := b.wait(t, ctx, 1)[0]
		if wc.ID != uint64(i) || wc.Len != size || b.mem.Bytes()[0] != byte('a'+i) {
			t.Fatalf("message %d: %+v, begins with %q", i, wc, b.mem.Bytes()[0])
		}
	}
	testenv.Until(t, "the Write is placed", func() bool { return string(b.mem.Bytes()[60000:60011]) == "behind them" })
	// The peer's close comes after the waiting data.
	a.post(t, &iwarp.SendWR{Op: iwarp.OpSend, SGEs: []iwarp.SGE{a.mem.SGE(0, 10)}})
	arrived(t, ctx, nb, b, messages*size+10)
	go func() { _ = a.qp.Disconnect(ctx) }()
	testenv.Until(t, "the peer closes", func() bool {
		if testenv.Sockets() { // sockets are not read meanwhile, so the end is not seen either
			return true
		}
		info, err := nb.Device().Admin().QP(ctx, b.qp.Num())
		return err == nil && info.TcpState == "CLOSE-WAIT"
	})
	b.recv(t, &iwarp.RecvWR{SGEs: []iwarp.SGE{b.mem.SGE(0, size)}})
	b.wait(t, ctx, 1)
	<-b.qp.Done()
	if err := b.qp.Err(); !errors.Is(err, iwarp.ErrPeerClosed) {
		t.Errorf("the end: %v", err)
	}
}

// TestReceiveWaitOver checks that a Send whose receive does not come ends the connection.
func TestReceiveWaitOver(t *testing.T) {
	a, b, _, ctx := receiveWaiter(t, 20*time.Millisecond)
	a.post(t, &iwarp.SendWR{Op: iwarp.OpSend, SGEs: []iwarp.SGE{a.mem.SGE(0, 10)}})
	for _, e := range []*end{a, b} {
		select {
		case <-e.qp.Done():
		case <-ctx.Done():
			t.Fatal("the connection does not end")
		}
		if err := e.qp.Err(); !strings.Contains(err.Error(), "buffer") {
			t.Errorf("the end: %v", err)
		}
	}
}

// TestResizeClose checks that a queue may be closed while another goroutine resizes it.
func TestResizeClose(t *testing.T) {
	a, _, ctx := pair(t, embed.PairConfig{})
	d := a.Device()
	for range 300 {
		q, err := d.CreateCQ(ctx, 8)
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan error)
		go func() { closed <- q.Close() }()
		if err := q.Resize(ctx, 16); err != nil && !errors.Is(err, iwarp.ErrClosed) {
			t.Errorf("resize: %v", err)
		}
		if err := <-closed; err != nil {
			t.Errorf("close: %v", err)
		}
		if err := d.Err(); err != nil {
			t.Fatalf("the device: %v", err)
		}
	}
}
