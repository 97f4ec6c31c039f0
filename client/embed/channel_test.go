package embed_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	iwarp "github.com/iwarpd/iwarpd/client"
	"github.com/iwarpd/iwarpd/client/embed"
)

// on creates an end whose CQ is on the channel.
func on(t testing.TB, ctx context.Context, n *embed.Node, pd *iwarp.PD, mem *iwarp.MR, ch *iwarp.CompChannel) *end {
	t.Helper()
	e := &end{pd: pd, mem: mem}
	var err error
	if e.cq, err = ch.CreateCQ(ctx, 32); err != nil {
		t.Fatal(err)
	}
	if e.qp, err = n.Device().CreateQP(ctx, iwarp.QPConfig{PD: pd, SendCQ: e.cq, RecvCQ: e.cq, SendDepth: 16, RecvDepth: 16}); err != nil {
		t.Fatal(err)
	}
	return e
}

// one polls until there is a completion, which must be the only one.
func one(t testing.TB, cq *iwarp.CQ) {
	t.Helper()
	wcs := make([]iwarp.WC, 2)
	for deadline := time.Now().Add(time.Minute); ; {
		if n := cq.Poll(wcs); n == 1 && wcs[0].Status == iwarp.WCSuccess {
			return
		} else if n != 0 || time.Now().After(deadline) {
			t.Fatalf("%d completions, %v", n, wcs[0].Status)
		}
		time.Sleep(10 * time.Microsecond) // the engine may want this CPU
	}
}

// TestCompChannel checks that the channel reports, once per arming, which of its queues has a completion.
func TestCompChannel(t *testing.T) {
	na, nb, _ := pair(t, embed.PairConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ch, err := nb.Device().CreateCompChannel(ctx)
	if err != nil {
		t.Fatal(err)
	}
	own := newEnd(t, ctx, nb, 16) // with a channel of its own
	var from, to []*end
	for range 4 {
		a, b := newEnd(t, ctx, na, 16), on(t, ctx, nb, own.pd, own.mem, ch)
		join(t, ctx, nb, a.qp, b.qp)
		from, to = append(from, a), append(to, b)
	}
	send := func(i int, flags iwarp.SendFlags) {
		t.Helper()
		to[i].recv(t, &iwarp.RecvWR{SGEs: []iwarp.SGE{own.mem.SGE(0, 64)}})
		from[i].post(t, &iwarp.SendWR{Op: iwarp.OpSend, Flags: flags | iwarp.Signaled, SGEs: []iwarp.SGE{from[i].mem.SGE(0, 8)}})
		from[i].wait(t, ctx, 1)
	}
	wakes := func(want *end) {
		t.Helper()
		cq, err := ch.Wait(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if cq != want.cq {
			t.Error("another queue's wake-up")
		}
		one(t, cq)
	}
	silent := func() {
		t.Helper()
		if cq := ch.Poll(); cq != nil {
			t.Error("an unexpected wake-up")
		}
	}
	for _, e := range to {
		e.cq.Arm(false)
	}
	silent()
	send(2, 0)
	wakes(to[2])
	silent()
	send(2, 0) // not armed
	one(t, to[2].cq)
	silent()
	to[2].cq.Arm(true)
	send(2, 0)
	one(t, to[2].cq)
	silent()
	send(2, iwarp.Solicited)
	wakes(to[2])

	// The descriptor is readable, and Poll reports every queue that has completions.
	send(0, 0)
	send(3, 0)
	one(t, to[0].cq)
	one(t, to[3].cq)
	if !readable(t, ch.FD(), time.Minute) || to[0].cq.FD() != ch.FD() {
		t.Error("the descriptor is not readable")
	}
	got := map[*iwarp.CQ]bool{}
	for deadline := time.Now().Add(time.Minute); len(got) < 2 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Microsecond)
		if cq := ch.Poll(); cq != nil {
			got[cq] = true
		}
	}
	if !got[to[0].cq] || !got[to[3].cq] {
		t.Errorf("Poll returned %d queues", len(got))
	}
	silent()

	// Two waiters get one queue each.
	to[0].cq.Arm(false) // to[1] is still armed
	result := make(chan *iwarp.CQ, 2)
	for range 2 {
		go func() {
			cq, err := ch.Wait(ctx)
			if err != nil {
				t.Error(err)
			}
			result <- cq
		}()
	}
	send(0, 0)
	send(1, 0)
	if x, y := <-result, <-result; x == y || x != to[0].cq && x != to[1].cq || y != to[0].cq && y != to[1].cq {
		t.Error("two waiters, and not one queue each")
	}
	one(t, to[0].cq)
	one(t, to[1].cq)

	// Resize wakes the waiter, because completions that arrive during it would not.
	to[1].cq.Arm(false)
	if err := to[1].cq.Resize(ctx, 64); err != nil {
		t.Fatal(err)
	}
	if cq, err := ch.Wait(ctx); err != nil || cq != to[1].cq {
		t.Errorf("after Resize: %v", err)
	}
	send(1, 0) // it is still armed
	wakes(to[1])

	// Invalid uses of the channel, and closing it.
	if _, err := to[0].cq.Wait(ctx, make([]iwarp.WC, 1)); !errors.Is(err, iwarp.ErrInvalid) {
		t.Errorf("Wait of a queue with a channel: %v", err)
	}
	if err := ch.Close(); !errors.Is(err, iwarp.ErrBusy) {
		t.Errorf("in use: %v", err)
	}
	if infos, err := nb.Device().Admin().CQs(ctx); err != nil || len(infos) != 5 || infos[0].Channel != 0 || infos[1].Channel == 0 {
		t.Errorf("%v, %v", infos, err)
	}
	brief, stop := context.WithTimeout(ctx, time.Millisecond)
	defer stop()
	if _, err := ch.Wait(brief); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nothing to wait for: %v", err)
	}
	go func() {
		_, err := ch.Wait(ctx)
		if !errors.Is(err, iwarp.ErrClosed) {
			t.Errorf("closed while waiting: %v", err)
		}
		result <- nil
	}()
	for _, e := range to {
		if err := errors.Join(e.qp.Close(), e.cq.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := ch.Close(); err != nil {
		t.Error(err)
	}
	<-result
	silent()
	if _, err := ch.CreateCQ(ctx, 4); !errors.Is(err, iwarp.ErrNoObject) {
		t.Errorf("a queue on a channel that is gone: %v", err)
	}
	if _, err := own.pd.Alloc(ctx, 4096, 0); err != nil { // the Device goes on
		t.Error(err)
	}
	dev := newDevice(t, ctx, nb)
	if ch, err = dev.CreateCompChannel(ctx); err != nil {
		t.Fatal(err)
	}
	dev.Close()
	if _, err := ch.Wait(ctx); !errors.Is(err, iwarp.ErrClosed) {
		t.Errorf("with the Device closed: %v", err)
	}
}

// TestCompChannelFull checks that wake-ups for which the channel has no room are not lost.
func TestCompChannelFull(t *testing.T) {
	na, nb, _ := pair(t, embed.PairConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	ch, err := na.Device().CreateCompChannel(ctx)
	if err != nil {
		t.Fatal(err)
	}
	waiting := func() int {
		n, err := unix.IoctlGetInt(ch.FD(), unix.SIOCINQ)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	mine := newEnd(t, ctx, na, 4)
	var ends []*end
	for range 3 {
		a, b := on(t, ctx, na, mine.pd, mine.mem, ch), newEnd(t, ctx, nb, 4)
		join(t, ctx, nb, a.qp, b.qp)
		ends = append(ends, a)
		a.post(t, &iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, Remote: b.mem.Base(), RKey: b.mem.RKey()})
		one(t, a.cq)
		round := func() {
			a.cq.Arm(false)
			a.post(t, &iwarp.SendWR{Op: iwarp.OpWrite, Flags: iwarp.Signaled, Remote: b.mem.Base(), RKey: b.mem.RKey()})
			one(t, a.cq)
		}
		// The first wake-up fills the channel; none of the others fits.
		round()
		for most, same := 0, 0; len(ends) == 1 && same < 8; round() { // the last wake-up may be on its way
			if n := waiting(); n > most {
				most, same = n, 0
			} else {
				same++
			}
		}
	}
	got := map[*iwarp.CQ]bool{}
	for deadline := time.Now().Add(time.Minute); len(got) < len(ends) && time.Now().Before(deadline); {
		time.Sleep(10 * time.Microsecond)
		if cq := ch.Poll(); cq != nil {
			got[cq] = true
		}
	}
	if len(got) != len(ends) {
		t.Errorf("%d queues of %d have woken", len(got), len(ends))
	}
}
