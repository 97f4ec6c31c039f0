package shm

import (
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/rdmap"
	"github.com/iwarpd/iwarpd/verbs"
)

// lostAfter is the time after which a wake-up counts as lost.
const lostAfter = 60000 // ms

var errLost = errors.New("slept through a wake-up")

// sleepOn waits until fd is readable and then calls clear, which must make it unreadable.
func sleepOn(fd int, clear func(fd int)) error {
	for {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, lostAfter)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case n == 0:
			return errLost
		default:
			clear(fd)
			return nil
		}
	}
}

// TestNoLostWake makes clients and a worker sleep and wake each other many times, at random moments.
func TestNoLostWake(t *testing.T) {
	rounds := 20000
	if testing.Short() {
		rounds = 4000
	}
	rng := testenv.Rand(t)
	sq, sp := newSQ(t, 64, 1, 0)
	cq, cc := newCQ(t, 1, 64)
	bells, ringer, alarm := newBells(t, 128)
	const bit = 77

	var workerSleeps, clientSleeps int
	var over atomic.Bool
	worker := make(chan error, 1)
	seed := rng.Uint64()
	go func() {
		rng := rand.New(rand.NewPCG(seed, 1))
		wr := newSendWR()
		turn := func() int {
			n := 0
			for w := range bells.words {
				if bells.Take(w) == 0 {
					continue
				}
				n++
				for sq.NextSend(wr) {
					wc := verbs.WC{ID: wr.ID}
					if wr.Flags&verbs.Solicited != 0 {
						wc.Flags = verbs.WCSolicited
					}
					cq.Push(0, &wc)
				}
			}
			cq.Flush(0, 0)
			return n
		}
		for !over.Load() {
			if turn() > 0 || rng.IntN(4) == 0 {
				continue
			}
			bells.SetSleeping(true)
			if rung(bells) || over.Load() {
				bells.SetSleeping(false)
				continue
			}
			workerSleeps++
			if err := sleepOn(alarm.FD(), func(int) { alarm.Clear() }); err != nil {
				worker <- fmt.Errorf("worker: %w", err)
				return
			}
			bells.SetSleeping(false)
		}
		worker <- nil
	}()

	client := func() error {
		wcs := make([]verbs.WC, 64)
		var posted, done uint64
		for done < uint64(rounds) {
			for range 1 + rng.IntN(8) {
				// The last of each batch is solicited, since a client that armed for solicited completions alone must be woken.
				wr := verbs.SendWR{ID: posted, Op: rdmap.OpSend, Flags: verbs.Solicited}
				if posted-done < 60 && sp.Post(&wr) == nil {
					posted++
				}
			}
			ringer.Ring(bit)
			for done < posted {
				n := cc.Poll(wcs)
				if n == 0 {
					if rng.IntN(3) == 0 {
						continue
					}
					cc.Arm(rng.IntN(2) == 0)
					if n = cc.Poll(wcs); n == 0 {
						clientSleeps++
						if err := sleepOn(cq.EventFD(), Drain); err != nil {
							return fmt.Errorf("client, %d of %d done: %w", done, posted, err)
						}
					}
				}
				for _, wc := range wcs[:n] {
					if wc.ID != done {
						return fmt.Errorf("completion %d; want %d", wc.ID, done)
					}
					done++
				}
				if rng.IntN(4) == 0 {
					break
				}
			}
		}
		return nil
	}
	if err := client(); err != nil {
		t.Error(err)
	}
	over.Store(true)
	ringer.Ring(0)
	if err := <-worker; err != nil {
		t.Error(err)
	}
	t.Logf("the worker slept %d times, the client %d", workerSleeps, clientSleeps)
}

// TestManyDoorbells rings bells of one page from several threads. The bells share words but belong to different
// queues, and the worker sleeps between them.
func TestManyDoorbells(t *testing.T) {
	const threads, queues = 4, 40 // queues of each thread
	rounds := 3000
	if testing.Short() {
		rounds = 500
	}
	rng := testenv.Rand(t)
	bells, ringer, alarm := newBells(t, threads*queues)
	type queue struct {
		sq *SQ
		sp *SQProducer
		cq *CQ
	}
	var qs [threads * queues]queue
	var cqs [threads]*CQ
	var ccs [threads]*CQConsumer
	for i := range threads {
		cqs[i], ccs[i] = newCQ(t, 1, 2*queues)
	}
	// Neighbouring bells belong to different threads.
	for i := range qs {
		sq, sp := newSQ(t, 2, 1, 0)
		qs[i] = queue{sq, sp, cqs[i%threads]}
	}

	var over atomic.Bool
	worker := make(chan error, 1)
	go func() {
		wr := newSendWR()
		for !over.Load() {
			n := 0
			for w := range bells.words {
				for v := bells.Take(w); v != 0; v &= v - 1 {
					q := &qs[w*64+bits.TrailingZeros64(v)]
					for q.sq.NextSend(wr) {
						q.cq.Push(0, &verbs.WC{ID: wr.ID})
						n++
					}
				}
			}
			for _, cq := range cqs {
				cq.Flush(0, 0)
			}
			if n > 0 {
				continue
			}
			bells.SetSleeping(true)
			if !rung(bells) && !over.Load() {
				if err := sleepOn(alarm.FD(), func(int) { alarm.Clear() }); err != nil {
					worker <- fmt.Errorf("worker: %w", err)
					return
				}
			}
			bells.SetSleeping(false)
		}
		worker <- nil
	}()

	clients := make(chan error, threads)
	for c := range threads {
		rng := rand.New(rand.NewPCG(rng.Uint64(), uint64(c)))
		go func() {
			wcs := make([]verbs.WC, queues)
			cc := ccs[c]
			for range rounds {
				open := map[uint64]bool{}
				for range 1 + rng.IntN(6) {
					bit := c + threads*rng.IntN(queues)
					if open[uint64(bit)] {
						continue
					}
					if err := qs[bit].sp.Post(&verbs.SendWR{ID: uint64(bit), Op: rdmap.OpSend}); err != nil {
						clients <- err
						return
					}
					open[uint64(bit)] = true
					ringer.Ring(bit)
				}
				for len(open) > 0 {
					n := cc.Poll(wcs)
					if n == 0 {
						cc.Arm(false)
						if n = cc.Poll(wcs); n == 0 {
							if err := sleepOn(cqs[c].EventFD(), Drain); err != nil {
								clients <- fmt.Errorf("thread %d, open %v: %w", c, open, err)
								return
							}
						}
					}
					for _, wc := range wcs[:n] {
						if !open[wc.ID] {
							clients <- fmt.Errorf("thread %d: completion %d was not asked for", c, wc.ID)
							return
						}
						delete(open, wc.ID)
					}
				}
			}
			clients <- nil
		}()
	}
	for range threads {
		if err := <-clients; err != nil {
			t.Error(err)
		}
	}
	over.Store(true)
	ringer.Ring(0)
	if err := <-worker; err != nil {
		t.Error(err)
	}
}

// TestWakeIsSafe checks that a client cannot make Wake block, whatever it does with its end of the channel.
func TestWakeIsSafe(t *testing.T) {
	q, c := newCQ(t, 1, 4)
	for _, flags := range []int{0, unix.O_NONBLOCK} {
		if _, err := unix.FcntlInt(uintptr(q.EventFD()), unix.F_SETFL, flags); err != nil {
			t.Fatal(err)
		}
		wcs := make([]verbs.WC, 4)
		for range 100000 / 8 * 2 { // more than a pipe holds; nothing reads it
			c.Arm(false)
			q.Push(0, &verbs.WC{})
			q.Flush(0, 0)
			c.Poll(wcs)
		}
	}
	if !readable(q.EventFD()) {
		t.Error("not readable")
	}
}

// TestWakeWhileStuck checks that a client does not stop the daemon when its threads block in the kernel while they
// read its own wake-up descriptor and write the worker's.
func TestWakeWhileStuck(t *testing.T) {
	page := stuckPage(t)
	q, c := newCQ(t, 1, 4)
	d, _, alarm := newBells(t, 64)
	other, _, _ := newBells(t, 64)
	if err := alarm.Watch(other.WakeFD()); err != nil {
		t.Fatal(err)
	}
	c.Arm(false)
	q.Push(0, &verbs.WC{})
	q.Flush(0, 0)
	stickIn(t, unix.SYS_READ, q.EventFD(), page)
	stickIn(t, unix.SYS_WRITE, d.WakeFD(), page)
	alarm.Clear()
	done := make(chan bool)
	go func() {
		defer close(done)
		for range 10 {
			c.Arm(false)
			q.Push(0, &verbs.WC{})
			q.Flush(0, 0) // wakes the blocked client
			Wake(other.WakeFD())
			ok := readable(alarm.FD())
			alarm.Clear()
			if !ok || readable(alarm.FD()) {
				t.Error("the worker was not woken once")
			}
		}
		alarm.Unwatch(d.WakeFD())
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("the daemon waits for the client")
	}
}

// TestAlarmIsBounded checks that a worker makes progress while clients wake it all the time, and that no wake-up is
// lost.
func TestAlarmIsBounded(t *testing.T) {
	_, _, alarm := newBells(t, 64)
	var fds []int
	for range 3 * len(alarm.events) {
		d, _, _ := newBells(t, 64)
		if err := alarm.Watch(d.WakeFD()); err != nil {
			t.Fatal(err)
		}
		fds = append(fds, d.WakeFD())
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			for _, fd := range fds {
				Wake(fd)
			}
		}
	})
	for range 1000 {
		alarm.Clear() // the test is that it returns
	}
	stop.Store(true)
	wg.Wait()
	for n := 0; readable(alarm.FD()); n++ {
		if alarm.Clear(); n > 4 {
			t.Fatal("readable for good")
		}
	}
	if _, err := unix.Write(fds[1], make([]byte, 8)); err != nil { // a 0 is a wake-up too
		t.Fatal(err)
	}
	if !readable(alarm.FD()) {
		t.Error("a wake-up was lost")
	}
}
