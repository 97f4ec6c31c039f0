package shm

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iwarpd/iwarpd/internal/clock"
	"github.com/iwarpd/iwarpd/internal/testenv"
	"github.com/iwarpd/iwarpd/verbs"
)

// TestResize checks that completions pushed before a resize stay in the old rings, flushed or not, that all later
// ones come in the new rings, and that none is lost or reordered.
func TestResize(t *testing.T) {
	q, old := newCQ(t, 2, 4)
	for id := range uint64(3) {
		q.Push(0, &verbs.WC{ID: id})
	}
	q.Flush(0, 0)
	q.Push(0, &verbs.WC{ID: 3}) // not flushed
	done, err := q.Resize(100)
	if err != nil {
		t.Fatal(err)
	}
	now, err := MapCQ(q.FD())
	if err != nil {
		t.Fatal(err)
	}
	defer now.Close()
	for id := uint64(4); id < 100; id++ {
		if !q.Push(0, &verbs.WC{ID: id}) {
			t.Fatalf("no room for %d", id)
		}
	}
	q.Flush(0, 0)
	q.Flush(1, 0)
	done()
	if q.Depth() != 128 || room(q, 1) != 128 || now.Depth() != 128 {
		t.Errorf("depth %d, room %d", q.Depth(), room(q, 1))
	}
	next := uint64(0)
	for _, c := range []*CQConsumer{old, now} {
		wcs := make([]verbs.WC, 7)
		for n := c.Poll(wcs); n > 0; n = c.Poll(wcs) {
			for _, wc := range wcs[:n] {
				if wc.ID != next {
					t.Fatalf("completion %d; want %d", wc.ID, next)
				}
				next++
			}
		}
	}
	if next != 100 {
		t.Errorf("%d completions", next)
	}
	if s := q.Stats(); s.Completions != next || s.Overruns != 0 {
		t.Errorf("%+v", s)
	}
}

func TestModeration(t *testing.T) {
	const period = 100 * time.Microsecond
	type step struct {
		push  *verbs.WC // nil: none
		at    time.Duration
		woken bool
		again time.Duration // 0: Flush asks for no other call
	}
	plain, solicited := &verbs.WC{}, &verbs.WC{Flags: verbs.WCSolicited}
	const start = clock.Time(time.Second)
	for _, tt := range []struct {
		name  string
		count uint32
		arm   bool
		steps []step
	}{
		{"no count", 0, true, []step{{plain, 0, true, 0}}},
		{"no time", 3, true, []step{{plain, -time.Second, true, 0}}},
		{"no completion", 0, true, []step{{nil, 0, false, 0}, {plain, 0, true, 0}}},
		{"count", 3, true, []step{{plain, 0, false, period}, {plain, 1000, false, period}, {plain, 2000, true, 0}, {nil, 3000, false, 0}}},
		{"period", 3, true, []step{{plain, 0, false, period}, {nil, period - 1, false, period}, {nil, period, true, 0}}},
		{"solicited", 100, true, []step{{plain, 0, false, period}, {solicited, 1000, true, 0}}},
		{"not armed", 3, false, []step{{plain, 0, false, 0}, {nil, 2 * period, false, 0}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q, c := newCQ(t, 1, 16)
			q.Moderate(tt.count, period)
			if tt.arm {
				c.Arm(false)
			}
			for i, s := range tt.steps {
				if s.push != nil && (!q.Push(0, s.push) || !q.Pending(0)) {
					t.Errorf("step %d: nothing is pending after a push", i)
				}
				again := q.Flush(0, start.Add(s.at))
				if want := start.Add(s.again); s.again == 0 && again != 0 || s.again != 0 && again != want {
					t.Errorf("step %d: again at %v; want %v", i, again, s.again)
				}
				if got := q.Pending(0); got != (again != 0) {
					t.Errorf("step %d: pending %v after Flush", i, got)
				}
				if got := readable(q.EventFD()); got != s.woken {
					t.Errorf("step %d: woken %v", i, got)
				}
				Drain(q.EventFD())
			}
		})
	}
}

// TestNoPeriod checks that each completion wakes if the period of the moderation is 0.
func TestNoPeriod(t *testing.T) {
	q, c := newCQ(t, 1, 16)
	q.Moderate(3, 0)
	c.Arm(false)
	q.Push(0, &verbs.WC{})
	if again := q.Flush(0, 1); again != 0 || !readable(q.EventFD()) {
		t.Errorf("again at %v", again)
	}
}

// TestOnFault checks that an impossible index is reported once.
func TestOnFault(t *testing.T) {
	told := 0
	sq, sp := newSQ(t, 4, 1, 0)
	sq.OnFault = func() { told++ }
	if sq.NextSend(newSendWR()); told != 0 {
		t.Error("notified of a ring that is only empty")
	}
	word32(sp.mem, HeaderSize+RingProducer).Store(1000)
	for range 3 {
		if sq.NextSend(newSendWR()) {
			t.Error("a work request out of nothing")
		}
	}
	rq, rp := newRQ(t, 4, 1)
	rq.OnFault = func() { told++ }
	word32(rp.mem, HeaderSize+RingProducer).Store(1 << 31)
	for range 3 {
		if rq.NextRecv(newRecvWR()) {
			t.Error("a receive out of nothing")
		}
	}
	cq, cc := newCQ(t, 1, 4)
	cq.OnFault = func() { told++ }
	word32(cc.mem, HeaderSize+RingConsumer).Store(77)
	for range 8 { // the index that was read before leaves room for 4
		cq.Push(0, &verbs.WC{})
	}
	if told != 3 {
		t.Errorf("notified %d times; want 3", told)
	}
}

// TestFreeWhileStuck checks a client that makes the daemon wait for the rings that a resize replaced, and then
// ends. Its other rings must be freed without that wait, and none twice: the address may be that of another
// mapping by then.
func TestFreeWhileStuck(t *testing.T) {
	q, err := CreateCQ(1, 4)
	if err != nil {
		t.Fatal(err)
	}
	old := q.TakeFD()
	t.Cleanup(func() { unix.Close(old) })
	publish, err := q.Resize(8)
	if err != nil {
		t.Fatal(err)
	}
	publish()
	freed := make(chan struct{})
	t.Cleanup(func() { <-freed }) // runs after the cleanup of stuckPage
	stickIn(t, unix.SYS_WRITE, old, stuckPage(t))
	tid := make(chan int, 1)
	go func() {
		defer close(freed)
		runtime.LockOSThread()
		tid <- unix.Gettid()
		q.FreeBefore()
	}()
	inMadvise := fmt.Sprintf("%d ", unix.SYS_MADVISE)
	name := fmt.Sprintf("/proc/self/task/%d/syscall", <-tid)
	testenv.Until(t, "the client makes FreeBefore wait", func() bool {
		call, _ := os.ReadFile(name)
		return strings.HasPrefix(string(call), inMadvise)
	})
	done := make(chan error, 1)
	go func() { done <- q.Free() }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("Free waits for the client")
	}
}
